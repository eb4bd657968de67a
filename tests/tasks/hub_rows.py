"""Rows of the hub's shape: some written for these tests, some made from local copies of public sets."""

from __future__ import annotations

from quanteval.tasks import public


def _scene(label, first, second, right, *endings, source="activitynet"):
    return {
        "activity_label": label,
        "ctx_a": first,
        "ctx_b": second,
        "endings": list(endings),
        "label": str(right),
        "source_id": f"{source}~v_{label}",
    }


HELLASWAG = [
    _scene(
        "Washing a car",
        "A man fills a bucket with soapy water next to his car.",
        "he",
        0,
        "dips a sponge in the bucket and rubs the door.",
        "drinks the bucket and goes to sleep on the roof.",
        "paints a picture of the sea on a piano.",
        "throws the car into the river and waves.",
    ),
    _scene(
        "Health",
        "[header] How to sleep better [title] Go to bed at the same time. [step] Your body likes a rhythm.",
        "",
        1,
        "[substeps] Eat a big meal right before. [title] Keep all the lights on.",
        "If you keep to it, falling asleep becomes  easier.",
        "Sharks [sic] are fish.",
        "Then sell your bed and buy a drum.",
        source="wikihow",
    ),
    _scene(
        "Baking cookies",
        "A woman mixes butter and sugar in a bowl. She adds flour and eggs.",
        "the woman",
        2,
        "puts the bowl on her head and sings.",
        "plants the dough in the garden.",
        "rolls the dough into balls and puts them on a tray.",
        "drives the oven to work.",
    ),
    _scene(
        "Garden",
        "[header] How to plant a tree [title] Dig a hole. [step] Make it twice as wide as the roots.",
        "",
        3,
        "Fill it with coffee and wait for rain.",
        "Sing to it until it closes.",
        "Put a second tree on the first [substeps] one.",
        "Loosen the soil at the sides so that the roots can spread.",
        source="wikihow",
    ),
    _scene(
        "Playing tennis",
        " Two women stand on a tennis court.",
        "one of them",
        0,
        "throws the ball up and serves.",
        "cuts the net into small pieces and eats them.",
        "",
        "reads a book about naïve café owners.",
    ),
]


def as_hub_rows(name, folder):
    """Return a public set's local copy in the fields that the hub has."""
    return [_HUB[name](row) for row in _LOCAL[name](folder)]


_LOCAL = {
    "arc_easy": lambda folder: public.arc(str(folder / "arc" / "arc_easy.jsonl")),
    "piqa": lambda folder: public.piqa(str(folder / "piqa")),
    "openbookqa": lambda folder: public.openbookqa(str(folder / "openbookqa")),
    "winogrande": lambda folder: public.winogrande(str(folder / "winogrande")),
    "lambada": lambda folder: public.lambada(str(folder / "lambada")),
}


def _lettered(row, question):
    labels = [chr(ord("A") + i) for i in range(len(row["choices"]))]
    return {
        "id": f"q{row['id']}",
        question: row["question"],
        "choices": {"text": row["choices"], "label": labels},
        "answerKey": labels[row["answer"]],
    }


def _with_blank(row):
    """Find the options: what is left of two beginnings once their common part is taken off."""
    first, second = row["choices"]
    cut = next(i for i in range(len(first) + 1) if first[: i + 1] != second[: i + 1])
    cut = first.rfind(" ", 0, cut) + 1
    return {
        "sentence": f"{first[:cut]}_ {row['continuation']}",
        "option1": first[cut:],
        "option2": second[cut:],
        "answer": str(row["answer"] + 1),
    }


_HUB = {
    "arc_easy": lambda row: _lettered(row, "question"),
    "openbookqa": lambda row: _lettered(row, "question_stem"),
    "piqa": lambda row: {
        "goal": row["question"],
        "sol1": row["choices"][0],
        "sol2": row["choices"][1],
        "label": row["answer"],
    },
    "winogrande": _with_blank,
    "lambada": lambda row: {"text": f"{row['context']} {row['target']}"},
}

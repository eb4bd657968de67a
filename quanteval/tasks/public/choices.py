"""Public sets of questions with given answers: ARC, HellaSwag, PIQA, OpenBookQA, WinoGrande.

Rows have `question` (or what stands for it), `choices` (texts) and `answer` (index from 0). Besides the hub's
own fields the loaders read the layout {query, choices, gold}, in which these sets are often passed around.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from quanteval.errors import ConfigError
from quanteval.tasks.loading import Row
from quanteval.tasks.public.reading import need, read_rows


def arc(
    path: str | None = None,
    hub: str = "allenai/ai2_arc",
    name: str = "ARC-Easy",
    split: str = "test",
    revision: str | None = None,
) -> Iterator[Row]:
    """Yield ARC's questions (Clark et al., 2018); `name` is ARC-Easy or ARC-Challenge."""
    origin = f"{name}, AI2 Reasoning Challenge, CC-BY-SA-4.0"
    for number, row in enumerate(read_rows(path, hub, name, split, revision)):
        if "query" in row:
            question, choices, answer = _plain(row, number, name)
            question = question.removeprefix("Question: ")
        else:
            question, choices, answer = _lettered(row, "question", number, name)
        yield _row(row.get("id", number), origin, question, choices, answer)


def openbookqa(
    path: str | None = None,
    hub: str = "allenai/openbookqa",
    name: str = "main",
    split: str = "test",
    revision: str | None = None,
) -> Iterator[Row]:
    """Yield OpenBookQA's questions (Mihaylov et al., 2018), without the facts of its open book."""
    for number, row in enumerate(read_rows(path, hub, name, split, revision)):
        if "query" in row:
            question, choices, answer = _plain(row, number, "OpenBookQA")
        else:
            question, choices, answer = _lettered(row, "question_stem", number, "OpenBookQA")
        yield _row(row.get("id", number), "OpenBookQA, Apache-2.0", question, choices, answer)


def piqa(
    path: str | None = None,
    hub: str = "baber/piqa",
    name: str | None = None,
    split: str = "validation",
    revision: str | None = None,
) -> Iterator[Row]:
    """Yield PIQA's goals with two ways to reach each (Bisk et al., 2020); its test answers are not published."""
    for number, row in enumerate(read_rows(path, hub, name, split, revision)):
        if "query" in row:
            goal, choices, answer = _plain(row, number, "PIQA")
            goal = goal.removeprefix("Question: ").removesuffix("\n")
        else:
            goal = str(need(row, "goal", number, "PIQA"))
            choices = [str(need(row, key, number, "PIQA")) for key in ("sol1", "sol2")]
            answer = int(need(row, "label", number, "PIQA"))
        yield _row(number, "PIQA, AFL-3.0", goal, choices, answer)


def hellaswag(
    path: str | None = None,
    hub: str = "Rowan/hellaswag",
    name: str | None = None,
    split: str = "validation",
    revision: str | None = None,
) -> Iterator[Row]:
    """Yield HellaSwag's beginnings with four endings each (Zellers et al., 2019).

    Texts are cleaned as lm-evaluation-harness cleans them; `category` is where a row comes from (wikihow or
    activitynet). The test answers are not published.
    """
    for number, row in enumerate(read_rows(path, hub, name, split, revision)):
        if "query" in row:
            question, choices, answer = _plain(row, number, "HellaSwag")
        else:
            begin = str(need(row, "ctx_a", number, "HellaSwag"))
            begin += " " + str(row.get("ctx_b") or "").capitalize()
            activity = need(row, "activity_label", number, "HellaSwag")
            question = clean_hellaswag(f"{activity}: {begin}")
            endings = need(row, "endings", number, "HellaSwag")
            choices = [clean_hellaswag(str(ending)) for ending in endings]
            label = str(need(row, "label", number, "HellaSwag"))
            answer = int(label) if label else -1
        found = _row(number, "HellaSwag, MIT", question, choices, answer)
        source = str(row.get("source_id") or "").split("~")[0]
        yield {**found, "category": source} if source else found


def clean_hellaswag(text: str) -> str:
    """Take out the bracketed marks that the WikiHow part left behind; a title's mark ends a sentence."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def winogrande(
    path: str | None = None,
    hub: str = "allenai/winogrande",
    name: str = "winogrande_xl",
    split: str = "validation",
    revision: str | None = None,
) -> Iterator[Row]:
    """Yield WinoGrande's sentences (Sakaguchi et al., 2019) as two beginnings and what follows the blank.

    `choices` are the beginnings, `continuation` is scored after each (partial evaluation, Trinh and Le, 2018).
    """
    origin = "WinoGrande, CC-BY"
    for number, row in enumerate(read_rows(path, hub, name, split, revision)):
        if "context_options" in row:
            choices = [str(text) for text in row["context_options"]]
            rest = str(need(row, "continuation", number, "WinoGrande"))
            answer = int(need(row, "gold", number, "WinoGrande"))
        else:
            sentence = str(need(row, "sentence", number, "WinoGrande"))
            before, blank, rest = sentence.partition("_")
            if not blank:
                raise ConfigError(f'row {number} of WinoGrande has no "_": "{sentence[:60]}"')
            choices = [
                before + str(need(row, key, number, "WinoGrande")) for key in ("option1", "option2")
            ]
            label = str(need(row, "answer", number, "WinoGrande"))
            answer = int(label) - 1 if label else -1
        yield {**_row(number, origin, "", choices, answer), "continuation": rest.strip()}


def _row(key: object, origin: str, question: str, choices: Sequence[str], answer: int) -> Row:
    return {
        "id": str(key),
        "question": question,
        "choices": list(choices),
        "answer": answer,
        "origin": origin,
    }


def _plain(row: Row, number: int, what: str) -> tuple[str, list[str], int]:
    """Read {query, choices, gold}."""
    query = str(need(row, "query", number, what))
    choices = [str(choice) for choice in need(row, "choices", number, what)]
    return query, choices, int(need(row, "gold", number, what))


def _lettered(row: Row, field: str, number: int, what: str) -> tuple[str, list[str], int]:
    """Read {choices: {text, label}, answerKey}; labels are A.. or 1.., whichever the row uses."""
    choices, key = need(row, "choices", number, what), str(row.get("answerKey") or "").strip()
    if isinstance(choices, list):  # a list of {text, label}, as in ARC's own files
        choices = {key: [each[key] for each in choices] for key in ("text", "label")}
    labels = [str(label) for label in choices["label"]]
    answer = labels.index(key) if key in labels else -1
    return str(need(row, field, number, what)), [str(text) for text in choices["text"]], answer

"""Public suites without their data: rows written here in the shapes in which the sets are passed around."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import json
import sys
import types

import pytest

from quanteval.config import load_task_node
from quanteval.engines.fake import FakeEngine
from quanteval.errors import ConfigError, QuantevalError, UnsupportedError
from quanteval.records import Artifact, Precision
from quanteval.resources import task_folders
from quanteval.targets import build
from quanteval.tasks import public
from quanteval.tasks.public import instructions
from quanteval.tasks.public.choices import clean_hellaswag
from quanteval.tasks.public.reading import find_files, read_rows
from quanteval.tasks.public.text import articles, undo_spacing
from tests.tasks.hub_rows import HELLASWAG
from tests.tasks.shipped import shipped_task, write_rows

HAS_LM_EVAL = importlib.util.find_spec("lm_eval") is not None
needs_lm_eval = pytest.mark.skipif(not HAS_LM_EVAL, reason="lm_eval is not installed")
ARTIFACT = Artifact(
    scheme="fp32", scheme_config={}, model_id="m", model_revision=None, model_provenance="",
    weights_digest="", path="", format="transformers", bytes_on_disk=0, build_s=0.0,
    precision=Precision(
        weight_bits=32, activation_bits=32, weight_format="float32", compute="float", quantized=False
    ),
)  # fmt: skip

LEAVES = {
    "id": "Mercury_1",
    "question": "Why are leaves green?",
    "choices": {"text": ["chlorophyll", "paint", "copper", "naïveté"], "label": list("ABCD")},
    "answerKey": "A",
}
NUMBERED = {**LEAVES, "id": "NYSEDREGENTS_2", "answerKey": "3",
            "choices": {"text": ["ice", "fog", "steam"], "label": ["1", "2", "3"]}}  # fmt: skip
GOLD = {"id": "astro/0"}


def exam(number, subject="high_school_physics", answer=2):
    return {
        "question": f" What is {number} + 1? ",
        "subject": subject,
        "choices": [str(number), str(number - 1), str(number + 1), "none"],
        "answer": answer,
    }


PAGE = (
    ' \n = A Film ( 1999 ) = \n \n It cost 1 @,@ 000 dollars , a well @-@ known one : " good " . \n'
    " = = Plot = = \n \n He asked ; she said ' no ' . \n"
)
PROBLEM = {
    "question": "Ann has 2 bags of 600 nuts. How many nuts?",
    "answer": "She has 2*600=<<2*600=1200>>1200 nuts.\n#### 1,200",
}
ROWS = {
    "arc_easy": [LEAVES, NUMBERED],
    "arc_challenge": [NUMBERED, LEAVES],
    "hellaswag": HELLASWAG,
    "piqa": [{"goal": "Dry a wet shoe.", "sol1": "Use a towel", "sol2": "Use a hose", "label": 0}],
    "openbookqa": [
        {
            "id": "7-1",
            "question_stem": "Frogs begin as",
            "choices": {"text": ["tadpoles", "birds"], "label": ["A", "B"]},
            "answerKey": " A",
        }
    ],
    "winogrande": [
        {
            "sentence": "The cup did not fit the box because the _ was too big.",
            "option1": "cup",
            "option2": "box",
            "answer": "1",
        }
    ],
    "lambada": [{"text": 'He looked at her and said, "Go home,  Ann"'}],
    "mmlu": [exam(n) for n in range(10, 13)],
    "wikitext2": [
        {"page": PAGE},
        {"page": " = Another = \n \n It 's [ a ] ' text ' ; 20 @.@ 5 N ° . \n"},
    ],
    "wikitext2_llamacpp": [{"page": PAGE}],
    "gsm8k": [PROBLEM, {"question": "One?", "answer": "#### 1"}],
    "mbpp": [
        {
            "task_id": number,
            "text": "Write a function to add two numbers.",
            "code": "def add(a, b):\r\n    return a + b",
            "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
            "test_setup_code": "",
            "challenge_test_list": [],
        }
        for number in (11, 510)
    ],
    "ifeval": [
        {
            "key": 1000,
            "prompt": "Write one line.\nNo commas. ",
            "instruction_id_list": ["punctuation:no_comma"],
            "kwargs": [{"num_words": None, "relation": None}],
        }
    ],
}
EXAMPLES = {
    "mmlu": [exam(n, answer=n % 4) for n in range(5)] + [exam(7, "other")],
    "gsm8k": [{"question": f"{n}?", "answer": f"It is.\n#### {n}"} for n in range(6)],
}
EXAM = "What is {0} + 1?\nA. {0}\nB. {1}\nC. {2}\nD. none\nAnswer:"
SHOTS = "".join(EXAM.format(n, n - 1, n + 1) + f" {'ABCD'[n % 4]}\n\n" for n in range(5))
# What is scored first: the context and the answer, or the prompt alone where the answer is generated.
FIRST = {
    "arc_easy": ("Question: Why are leaves green?\nAnswer:", " chlorophyll"),
    "arc_challenge": ("Question: Why are leaves green?\nAnswer:", " ice"),
    "hellaswag": (
        "Washing a car: A man fills a bucket with soapy water next to his car. He",
        " dips a sponge in the bucket and rubs the door.",
    ),
    "piqa": ("Question: Dry a wet shoe.\nAnswer:", " Use a towel"),
    "openbookqa": ("Frogs begin as", " tadpoles"),
    "winogrande": ("The cup did not fit the box because the cup", " was too big."),
    "lambada": ('He looked at her and said, "Go home, ', ' Ann"'),
    "mmlu": (
        "The following are multiple choice questions (with answers) about high school physics.\n\n"
        + SHOTS
        + EXAM.format(10, 9, 11),
        " A",
    ),
    "gsm8k": "".join(f"Question: {n}?\nAnswer: It is.\n#### {n}\n\n" for n in range(5))
    + f"Question: {PROBLEM['question']}\nAnswer:",
    "mbpp": "<user>Write a function to add two numbers.\n\nYour code should pass these tests:\n\n"
    "assert add(1, 2) == 3\nassert add(0, 0) == 0\n\nReply with the whole function in a code block.\n"
    "<assistant>",
    "ifeval": "<user>Write one line.\nNo commas. \n<assistant>",
}
CHOICES = ("arc_easy", "arc_challenge", "hellaswag", "piqa", "openbookqa", "winogrande", "mmlu")


def suite_on(folder, name, **arguments):
    """Build a public suite that reads its rows, written in the hub's shape, from `folder`."""
    rows, examples = ROWS[name], EXAMPLES.get(name, [])
    write_rows(folder, test=rows, validation=rows, train=examples or rows, dev=examples or rows)
    node = load_task_node(task_folders()[name])
    node["source"]["arguments"] |= {"path": str(folder), **arguments}
    if name == "gsm8k":
        node["shots"]["source"]["arguments"] |= {"path": str(folder)}
    if name == "ifeval":
        node["source"]["arguments"] |= {"path": str(folder / "train.jsonl")}
    return build(node, where=name)


@pytest.fixture
def session():
    with FakeEngine().serve(ARTIFACT) as served:
        yield served


def first_prompt(suite, session):
    sample = suite.samples()[0]
    if suite.kind == "generate":
        return suite.render(session, sample).text
    rendered = suite.render(session, sample)
    return rendered.text if suite.kind == "code" else rendered


# --------------------------------------------------------------------------- suites


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_public_suite_loads_from_a_path_and_says_what_it_is(name, tmp_path):
    suite = suite_on(tmp_path, name)
    samples = suite.samples()
    assert len({sample.sample_id for sample in samples}) == len(samples) > 0
    assert all(sample.data["origin"] for sample in samples)
    assert suite.name == name
    assert suite.licence
    if name != "ifeval":  # whose checks may not be installed
        inputs = suite.fingerprint(samples)
        assert inputs == suite.fingerprint(samples)
        assert str(tmp_path) not in str(inputs)


@pytest.mark.parametrize("name", sorted(FIRST))
def test_the_first_prompt_is_this_text(name, tmp_path, session):
    assert first_prompt(suite_on(tmp_path, name), session) == FIRST[name]


def test_right_answers_are_found_by_label_letter_and_number(tmp_path):
    expected = {
        "arc_easy": [0, 2],
        "hellaswag": [0, 1, 2, 3, 0],
        "piqa": [0],
        "openbookqa": [0],
        "winogrande": [0],
        "mmlu": [2, 2, 2],
    }
    for name, answers in expected.items():
        (tmp_path / name).mkdir()
        samples = suite_on(tmp_path / name, name).samples()
        assert [sample.data["answer"] for sample in samples] == answers


@needs_lm_eval
@pytest.mark.parametrize("name", sorted({*CHOICES, "lambada"}))
def test_prompts_are_those_of_the_shipped_task(name, tmp_path, session, monkeypatch):
    suite = suite_on(tmp_path, name)
    shots = suite.shots.count
    subject = "high_school_physics"
    if name == "mmlu":
        write_rows(tmp_path, dev=EXAMPLES["mmlu"][:5])
    task_name, manager = shipped_task(tmp_path, name, shots=shots, subject=subject)
    task = manager.load([task_name])["tasks"][task_name]
    samples = suite.samples()
    docs = list(task.eval_docs)
    assert len(docs) == len(samples)
    for doc, sample in zip(docs, samples, strict=True):
        context = task.fewshot_context(doc, num_fewshot=shots)
        asked = task.construct_requests(doc, context)
        asked = asked if isinstance(asked, list) else [asked]
        if name == "lambada":
            ours = [suite.render(session, sample)]
        else:
            ours = [suite.render(session, sample, i) for i in range(len(asked))]
            gold = task.doc_to_text(doc) if name == "winogrande" else task.doc_to_target(doc)
            assert sample.data["answer"] == int(gold)
        assert ours == [each.args for each in asked]


@needs_lm_eval
def test_questions_and_documents_are_those_of_the_shipped_tasks(tmp_path, session):
    for name in ("gsm8k", "wikitext2"):
        folder = tmp_path / name
        folder.mkdir()
        suite = suite_on(folder, name)
        if name == "gsm8k":
            suite = dataclasses.replace(suite, shots=dataclasses.replace(suite.shots, count=0))
        task_name, manager = shipped_task(folder, name)
        task = manager.load([task_name])["tasks"][task_name]
        for doc, sample in zip(list(task.eval_docs), suite.samples(), strict=True):
            if name == "wikitext2":
                assert sample.data["text"] == task.doc_to_target(doc)
                assert sample.data["page"] == doc["page"]
            else:
                assert suite.render(session, sample).text == task.doc_to_text(doc)


# --------------------------------------------------------------------------- where rows come from


@pytest.mark.parametrize("name", sorted(ROWS))
def test_without_a_path_and_without_the_hub_the_way_out_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    suite = build(load_task_node(task_folders()[name]), where=name)
    with pytest.raises(QuantevalError, match="cannot load data set") as caught:
        suite.samples()
    assert "source.arguments.path=FILE" in str(caught.value)
    assert "\n" not in str(caught.value)


def in_layout(folder, layout, rows):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if layout == "jsonl":
        (folder / "any.jsonl").write_text(lines)
    elif layout == "gz":
        (folder / "test.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    elif layout == "json":
        (folder / "test.json").write_text(json.dumps(rows, indent=1))
    elif layout == "lines in .json":
        (folder / "test.json").write_text(lines)
    else:
        import datasets

        table = datasets.Dataset.from_list(rows)
        if layout == "parquet":
            (folder / "data").mkdir()
            table.to_parquet(folder / "data" / "test-00000-of-00001.parquet")
            (folder / "data" / "train-00000-of-00001.parquet").write_bytes(b"not read")
        elif layout == "saved":
            table.save_to_disk(folder)
        else:
            datasets.DatasetDict({"test": table, "train": table}).save_to_disk(folder)


@pytest.mark.parametrize(
    "layout", ["jsonl", "gz", "json", "lines in .json", "parquet", "saved", "saved splits"]
)
def test_the_same_rows_come_out_of_every_layout(layout, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    in_layout(folder, layout, [LEAVES, NUMBERED])
    found = list(public.arc(str(folder)))
    assert [row["id"] for row in found] == ["Mercury_1", "NYSEDREGENTS_2"]
    assert found[0]["choices"] == ["chlorophyll", "paint", "copper", "naïveté"]
    assert [row["answer"] for row in found] == [0, 2]


def test_flattened_rows_give_the_same_questions(tmp_path):
    flat = {
        "arc": ("Question: Why?", "Why?", {}),
        "openbookqa": ("Why", "Why", {}),
        "piqa": ("Question: Why\n", "Why", {}),
        "hellaswag": ("Cooking: He", "Cooking: He", {}),
    }
    for name, (query, question, arguments) in flat.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"query": query, "choices": ["a", "b"], "gold": 1}))
        (row,) = getattr(public, name)(str(path), **arguments)
        assert (row["question"], row["choices"], row["answer"]) == (question, ["a", "b"], 1)
    path = tmp_path / "w.jsonl"
    path.write_text(
        json.dumps({"context_options": ["so Al", "so Bo"], "continuation": "ran.", "gold": 1})
    )
    (row,) = public.winogrande(str(path))
    assert (row["choices"], row["continuation"], row["answer"]) == (["so Al", "so Bo"], "ran.", 1)
    path.write_text(json.dumps({"context": "He saw the", "continuation": "sea"}))
    (row,) = public.lambada(str(path))
    assert (row["context"], row["target"]) == ("He saw the", "sea")


def test_a_split_is_found_by_name_and_never_mistaken_for_another(tmp_path):
    for name in ("train.jsonl", "dev.jsonl", "README.md", "notes.txt"):
        (tmp_path / name).write_text("{}")
    assert [f.name for f in find_files(tmp_path, None, "validation")] == ["dev.jsonl"]
    with pytest.raises(ConfigError, match='0 files for the split "test"'):
        find_files(tmp_path, None, "test")
    (tmp_path / "validation.jsonl").write_text("{}")
    assert [f.name for f in find_files(tmp_path, None, "validation")] == ["validation.jsonl"]
    (tmp_path / "ARC-Easy").mkdir()
    (tmp_path / "ARC-Easy" / "test.jsonl").write_text("{}")
    (tmp_path / "ARC-Challenge-test.jsonl").write_text("{}")
    easy = find_files(tmp_path, "ARC-Easy", "test")
    assert [f.parent.name for f in easy] == ["ARC-Easy"]
    hard = find_files(tmp_path, "ARC-Challenge", "test")
    assert [f.name for f in hard] == ["ARC-Challenge-test.jsonl"]
    with pytest.raises(ConfigError, match="2 files"):
        find_files(tmp_path, None, "test")
    (tmp_path / "parts").mkdir()
    for number in range(2):
        (tmp_path / "parts" / f"test-0000{number}-of-00002.jsonl").write_text(f'{{"n": {number}}}')
    assert read_rows(str(tmp_path / "parts"), "", None, "test", None) == [{"n": 0}, {"n": 1}]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("none", None, "does not exist"),
        ("a.xyz", "x", "is none of"),
        ("a.jsonl", "", "has no rows"),
        ("a.jsonl", "[1]\n", "line 1 is no JSON object"),
        ("a.jsonl", "{\n", "line 1 is not JSON"),
        ("a.json", "[1]", "no list of JSON objects"),
        ("a.csv", "question,answer\n", "has no rows"),
        ("a.parquet", "PAR?", "cannot be read"),
        ("a.jsonl.gz", "x", "cannot be read"),
        ("a.jsonl", '{"prompt": "?"}', 'no "choices" \\(it has prompt\\)'),
    ],
)
def test_what_cannot_be_read_is_one_line(name, text, says, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        list(public.arc(str(tmp_path / name)))
    assert "\n" not in str(caught.value)


def test_line_separators_inside_json_are_no_line_ends(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one\u2028two three"}\r\n', encoding="utf-8-sig")
    (row,) = public.lambada(str(tmp_path / "a.jsonl"))
    assert (row["context"], row["target"]) == ("one\u2028two", "three")


def test_a_split_without_published_answers_is_refused(tmp_path):
    write_rows(tmp_path, validation=[{**ROWS["hellaswag"][0], "label": ""}])
    node = load_task_node(task_folders()["hellaswag"])
    node["source"]["arguments"] |= {"path": str(tmp_path)}
    with pytest.raises(ConfigError, match="without published answers"):
        build(node, where="hellaswag").samples()


# --------------------------------------------------------------------------- single sets


def test_hellaswag_s_marks_are_taken_out():
    assert clean_hellaswag(" [header] How to [title] Rest. [step] Sit [sic].  Now ") == (
        " How to. Rest. Sit . Now"
    )


TABLE = 'How many?,"1, 2",two,"say ""three""",None,C\n question ,a,b,c,d,0\n'


@pytest.mark.parametrize("header", ["", "question,choice0,choice1,choice2,choice3,answer\n"])
def test_mmlu_s_own_tables(header, tmp_path):
    for split in ("test", "dev"):
        (tmp_path / split).mkdir()
        for subject in ("high_school_physics", "astronomy"):
            path = tmp_path / split / f"{subject}_{split}.csv"
            path.write_text(header + TABLE)
    rows = list(public.mmlu(str(tmp_path)))
    assert [row["id"] for row in rows] == [
        "astronomy/0",
        "astronomy/1",
        "high_school_physics/0",
        "high_school_physics/1",
    ]
    assert rows[0]["choices"] == ["1, 2", "two", 'say "three"', "None"]
    assert [row["answer"] for row in rows[:2]] == [2, 0]
    assert rows[2]["category"] == "high_school_physics"
    some = list(public.mmlu(str(tmp_path), split="dev", subjects=["high_school_physics"]))
    assert [row["id"] for row in some] == ["high_school_physics/0", "high_school_physics/1"]
    one = list(public.mmlu(str(tmp_path / "test" / "astronomy_test.csv")))
    assert [row["subject"] for row in one] == ["astronomy"] * 2
    with pytest.raises(ConfigError, match='no subject "astrology"'):
        list(public.mmlu(str(tmp_path), subjects=["astrology"]))
    with pytest.raises(ConfigError, match=r"no tables \*_val"):
        list(public.mmlu(str(tmp_path), split="validation"))
    (tmp_path / "test" / "astronomy_test.csv").write_text(f"{'long ' * 40_000},a,b,c,d,A\n")
    assert len(next(public.mmlu(str(tmp_path)))["question"]) == 200_000
    (tmp_path / "test" / "astronomy_test.csv").write_text("a,b\n")
    with pytest.raises(ConfigError, match="2 columns instead of 6"):
        list(public.mmlu(str(tmp_path)))


RAW = " \n = One = \n \n Text of one , here . \n = = Part = = \n More . \n = Two = \n \n Text . \n"


def test_wikitext_is_split_at_headings_and_counted_as_published(tmp_path):
    assert list(articles(RAW)) == [
        " = One = \n \n Text of one , here . \n = = Part = = \n More . ",
        " = Two = \n \n Text . \n",
    ]
    (tmp_path / "wiki.test.raw").write_bytes(RAW.replace("\n", "\r\n").encode())
    (tmp_path / "wiki.train.raw").write_text("= Not read = \n")
    one, two = public.wikitext2(str(tmp_path))
    assert (one["title"], two["title"]) == ("One", "Two")
    assert one["text"] == " = One =\n\nText of one, here.\n== Part ==\nMore. "
    assert one["page"] == next(articles(RAW))
    (whole,) = public.wikitext2(str(tmp_path / "wiki.test.raw"), whole=True)
    assert whole["text"] == RAW[:-1]
    # Out of the articles the same text is put together again.
    write_rows(tmp_path, test=[{"page": page} for page in articles(" \n".join(["", RAW[3:]]))])
    (joined,) = public.wikitext2(str(tmp_path / "test.jsonl"), whole=True)
    assert joined["text"] in RAW
    with pytest.raises(ConfigError, match='0 files for the split "validation"'):
        list(public.wikitext2(str(tmp_path), split="validation"))


def test_spaced_punctuation_is_undone():
    assert undo_spacing(PAGE) == (
        '\n= A Film (1999) =\n\nIt cost 1,000 dollars, a well-known one: "good".\n'
        "== Plot ==\n\nHe asked; she said 'no'.\n"
    )


def test_gsm8k_s_target_is_the_final_number(tmp_path):
    write_rows(tmp_path, test=[PROBLEM, {"question": "?", "answer": "so\n#### -3 "}])
    assert [row["target"] for row in public.gsm8k(str(tmp_path))] == ["1200", "-3"]
    write_rows(tmp_path, test=[{"question": "?", "answer": "42"}])
    with pytest.raises(ConfigError, match='row 0 of GSM8K has no "#### "'):
        list(public.gsm8k(str(tmp_path)))


def test_mbpp_s_splits_are_ranges_of_task_ids(tmp_path):
    full = [
        {"task_id": n, "text": f"Task {n}", "code": "x", "test_list": ["assert f() == 1"],
         "test_setup_code": "import math" if n == 11 else "", "challenge_test_list": ["assert 1"]}
        for n in (1, 10, 11, 510, 511, 600, 601, 974)
    ]  # fmt: skip
    write_rows(tmp_path, mbpp=full)
    path = str(tmp_path / "mbpp.jsonl")
    found = {split: [row["task_id"] for row in public.mbpp(path, split=split)]
             for split in ("prompt", "test", "validation", "train", "all")}  # fmt: skip
    assert found == {
        "prompt": [1, 10],
        "test": [11, 510],
        "validation": [511, 600],
        "train": [601, 974],
        "all": [1, 10, 11, 510, 511, 600, 601, 974],
    }
    first = next(public.mbpp(path))
    assert first["id"] == "mbpp/11"
    assert (first["test_setup_code"], first["challenge_test_list"]) == ("import math", ["assert 1"])
    with pytest.raises(ConfigError, match='split "val"'):
        list(public.mbpp(path, split="val"))
    sanitized = {"task_id": 12, "prompt": "Do it", "code": "y", "test_list": ["assert 2"],
                 "test_imports": ["import re", "import math"]}  # fmt: skip
    (tmp_path / "s.json").write_text(json.dumps([sanitized]))
    (row,) = public.mbpp(str(tmp_path / "s.json"), name="sanitized")
    assert (row["text"], row["test_imports"]) == ("Do it", ["import re", "import math"])
    assert row["test_setup_code"] == ""


def test_ifeval_s_empty_fields_are_left_out(tmp_path):
    other = {**ROWS["ifeval"][0], "kwargs": '[{"num_words": 3}]'}
    write_rows(tmp_path, train=[*ROWS["ifeval"], other])
    rows = list(public.ifeval(str(tmp_path)))
    assert [row["kwargs"] for row in rows] == [[{}], [{"num_words": 3}]]
    assert rows[0]["id"] == "1000"
    write_rows(tmp_path, train=[{**other, "kwargs": []}])
    with pytest.raises(ConfigError, match="0 kwargs for 1"):
        list(public.ifeval(str(tmp_path)))


# --------------------------------------------------------------------------- IFEval's checks


@pytest.fixture
def fake_checks(monkeypatch):
    """Stand in for lm-evaluation-harness's module: an instruction names what an answer must contain."""
    seen = []

    @dataclasses.dataclass
    class InputExample:
        key: int
        instruction_id_list: list
        prompt: str
        kwargs: list

    def check(asked, output):
        seen.append(asked)
        if "boom" in output:
            raise RuntimeError("no\nway")
        followed = [each in output for each in asked.instruction_id_list]
        return types.SimpleNamespace(follow_instruction_list=followed)

    module = types.SimpleNamespace(
        InputExample=InputExample,
        test_instruction_following_strict=check,
        test_instruction_following_loose=lambda asked, output: check(asked, output.lower()),
    )
    monkeypatch.setattr(instructions, "checker", lambda: module)
    return seen


def test_an_answer_is_right_when_all_instructions_are_followed(fake_checks):
    row = {"id": "7", "prompt": "?", "instruction_id_list": ["a", "b"], "kwargs": [{}, {"n": 1}]}
    judge = instructions.Instructions()
    right = judge.judge("a b", row, [])
    assert (right.value, right.outcome) == (1.0, "right")
    assert right.numbers == {"instructions": 2.0, "followed": 2.0}
    wrong = judge.judge("A b", row, [])
    assert (wrong.value, wrong.outcome, wrong.detail) == (0.0, "wrong", "not followed: a")
    assert instructions.Instructions("loose").judge("A b", row, []).value == 1.0
    failed = judge.judge("boom", row, [])
    assert (failed.outcome, failed.detail) == ("error", "RuntimeError: no way")
    assert instructions.follows_all("a b", row) == 1.0
    assert instructions.follows_all("A b", row) == 0.0
    assert fake_checks[0].kwargs == [{}, {"n": 1}]


@pytest.mark.parametrize("gone", ["lm_eval", "langdetect", "nltk"])
def test_missing_packages_are_named_before_anything_is_generated(gone, monkeypatch, tmp_path):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == gone else real("json")
    )
    instructions.checker.cache_clear()
    suite = suite_on(tmp_path, "ifeval")
    with pytest.raises(UnsupportedError, match=f'need the package "{gone}"'):
        suite.fingerprint(suite.samples())


def test_missing_tables_are_named_and_nothing_is_downloaded(monkeypatch):
    def find(name):
        raise LookupError(name)

    monkeypatch.setattr(instructions, "PACKAGES", ())
    nltk = types.SimpleNamespace(data=types.SimpleNamespace(find=find))
    monkeypatch.setitem(sys.modules, "nltk", nltk)
    monkeypatch.setitem(sys.modules, "langdetect", types.SimpleNamespace())
    instructions.checker.cache_clear()
    with pytest.raises(UnsupportedError, match="punkt_tab"):
        instructions.checker()


# --------------------------------------------------------------------------- local copies


def test_local_copies_have_their_sizes(shared_data):
    sizes = {
        "arc_easy": ("arc/arc_easy.jsonl", 2376),
        "arc_challenge": ("arc/arc_challenge.jsonl", 1172),
        "piqa": ("piqa", 1838),
        "openbookqa": ("openbookqa", 500),
        "winogrande": ("winogrande", 1267),
        "lambada": ("lambada", 5153),
        "mmlu": ("mmlu", 14042),
        "wikitext2": ("wikitext2_raw", 62),
        "wikitext2_llamacpp": ("wikitext2_raw", 1),
        "gsm8k": ("gsm8k", 1319),
        "ifeval": ("ifeval", 540),
        "mbpp": ("mbpp/mbpp.jsonl", 499),
    }
    for name, (place, size) in sizes.items():
        node = load_task_node(task_folders()[name])
        if name == "gsm8k":
            # The copy has no examples to draw.
            node["shots"]["count"] = 0
        node["source"]["arguments"] |= {"path": str(shared_data / place)}
        assert len(build(node, where=name).samples()) == size, name
    sanitized = str(shared_data / "mbpp" / "sanitized-mbpp.json")
    assert len(list(public.mbpp(sanitized, name="sanitized"))) == 257

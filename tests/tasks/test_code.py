"""The code kind: several samples of a problem, MBPP's format, answers cut in a fence, one seam for languages."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import Counter
from contextlib import contextmanager

import pytest

from quanteval.engines.fake import FakeEngine
from quanteval.errors import ConfigError
from quanteval.interfaces import Completion, TaskContext
from quanteval.records import Artifact, Precision
from quanteval.sandbox import Limits, Outcome, Problem, Sandbox
from quanteval.targets import build
from quanteval.tasks.code import CodeTask, PromptForm
from quanteval.tasks.extract import Extraction
from quanteval.tasks.loading import Source
from quanteval.tasks.programs import Python, inside_fence, read_exercise

ARTIFACT = Artifact(
    scheme="fp32", scheme_config={}, model_id="m", model_revision=None, model_provenance="",
    weights_digest="", path="", format="transformers", bytes_on_disk=0, build_s=0.0,
    precision=Precision(
        weight_bits=32, activation_bits=32, weight_format="float32", compute="float", quantized=False
    ),
)  # fmt: skip
ROWS = [
    {
        "task_id": f"p/{name}",
        "prompt": f'def {name}(x):\n    """Return {n} times x."""\n',
        "entry_point": name,
        "test": f"def check(candidate):\n    assert candidate(2) == {2 * n}\n",
    }
    for name, n in (("double", 2), ("triple", 3))
]
MBPP = {
    "task_id": 9,
    "text": "Write a function to add two numbers.",
    "code": "import math\r\ndef helper(a):\r\n  return a\r\ndef add(a, b):\r\n  return helper(a) + b",
    "test_setup_code": "",
    "test_list": ["assert add(1, 2) == 3", "assert set([add(1, 1)]) == {2}", "assert add('a', 'b\\n') == 'ab\\n'"],
    "challenge_test_list": [],
}  # fmt: skip


def task(tmp_path, rows=ROWS, **fields):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(text)
    return CodeTask(
        name="t", version="1", source=Source(jsonl="rows.jsonl"), folder=str(tmp_path), **fields
    )


class Session:
    """Answers by request id, and keeps the requests."""

    def __init__(self, answer):
        with FakeEngine().serve(ARTIFACT) as fake:
            self.tokenizer = fake.tokenizer
        self.answer = answer
        self.asked = []

    def generate(self, requests):
        for request in requests:
            self.asked.append(request)
            yield Completion(request.request_id, self.answer(request), (1,), "stop")


def evaluate(suite, session, seed=0):
    samples = suite.samples()
    scores = list(suite.evaluate(session, samples, TaskContext(None, None, True, seed)))
    assert sorted(s.sample_id for s in scores) == sorted(s.sample_id for s in samples)
    return {score.sample_id: score for score in scores}


# --------------------------------------------------------------------------- several samples


def test_each_sample_of_a_problem_has_its_id_its_seed_and_its_score(tmp_path):
    suite = task(tmp_path, samples_per_problem=3, temperature=0.8, top_p=0.9, top_k=5)
    right = lambda r: f"    return {2 if 'double' in r.request_id else 3} * x"  # noqa: E731
    session = Session(lambda r: "```\n" + (right(r) if r.request_id[-1] != "1" else "?") + "\n```")
    scores = evaluate(suite, session)
    assert [r.request_id for r in session.asked] == [
        f"p/{name}#{k}" for name in ("double", "triple") for k in range(3)
    ]
    assert {i: s.value for i, s in scores.items()} == {i: float(i[-1] != "1") for i in scores}
    assert Counter(s.problem_id for s in scores.values()) == {"p/double": 3, "p/triple": 3}
    seeds = [request.sampling.seed for request in session.asked]
    assert len(set(seeds)) == 6
    assert all(0 <= seed < 2**31 for seed in seeds)
    sampling = session.asked[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.8, 0.9, 5)
    again = Session(session.answer)
    evaluate(suite, again)
    assert [r.sampling.seed for r in again.asked] == seeds
    other = Session(session.answer)
    evaluate(suite, other, seed=1)
    assert not {r.sampling.seed for r in other.asked} & set(seeds)


def test_the_limit_counts_problems_and_one_sample_keeps_the_problems_id(tmp_path):
    several = task(tmp_path, samples_per_problem=4, temperature=1.0, limit=1)
    assert [s.sample_id for s in several.samples()] == [f"p/double#{k}" for k in range(4)]
    one = task(tmp_path, limit=1)
    assert [s.sample_id for s in one.samples()] == ["p/double"]
    session = Session(lambda r: "")
    (score,) = evaluate(one, session, seed=7).values()
    assert score.problem_id == ""
    # Greedy answers do not depend on the seed.
    assert session.asked[0].sampling.seed == 0


def test_an_id_may_hold_a_number_sign_itself(tmp_path):
    suite = task(tmp_path, [{**ROWS[0], "task_id": "a#1"}], samples_per_problem=2, temperature=1.0)
    scores = evaluate(suite, Session(lambda r: ""))
    assert {i: s.problem_id for i, s in scores.items()} == {"a#1#0": "a#1", "a#1#1": "a#1"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"samples_per_problem": 2}, 'samples_per_problem "2" at temperature 0'),
        ({"samples_per_problem": 0}, 'samples_per_problem "0"'),
        ({"temperature": -1.0}, 'temperature "-1.0"'),
        ({"temperature": float("nan")}, 'temperature "nan"'),
        ({"top_p": 0.0}, 'top_p "0.0"'),
        ({"top_k": -1}, 'top_k "-1"'),
    ],
)
def test_draws_that_make_no_sense_are_refused(tmp_path, fields, says):
    with pytest.raises(ValueError, match=says) as caught:
        task(tmp_path, **fields)
    assert "\n" not in str(caught.value)


def test_what_decides_the_answers_is_in_the_fingerprint(tmp_path):
    base = task(tmp_path, samples_per_problem=2, temperature=0.5)
    samples = base.samples()
    before = base.fingerprint(samples)
    for field, value in {
        "samples_per_problem": 3, "temperature": 0.6, "top_p": 0.5, "top_k": 3, "format": "mbpp",
        "prompt": PromptForm(instruction="Write {prompt}"),
    }.items():  # fmt: skip
        changed = dataclasses.replace(base, **{field: value})
        assert changed.fingerprint(samples) != before, field
    # How much these give way to the model is none of its business.
    assert dataclasses.replace(base, language=Python(nice=0)).fingerprint(samples) == before


def test_the_machines_speed_is_recorded_and_not_in_the_fingerprint(tmp_path, monkeypatch):
    suite = task(tmp_path)
    before = suite.fingerprint(suite.samples())
    monkeypatch.setattr(Python, "checker", lambda self, limits, workers: Sandbox(
        limits, workers=workers, measure_factor=lambda: 2.5
    ))  # fmt: skip
    scores = evaluate(suite, Session(lambda r: "```\n    return 2 * x\n```"))
    assert {s.numbers["limits_factor"] for s in scores.values()} == {2.5}
    assert all(0 < s.numbers["check_cpu_s"] < 5 for s in scores.values())
    assert suite.fingerprint(suite.samples()) == before


# --------------------------------------------------------------------------- MBPP


def test_an_mbpp_row_becomes_an_exercise_with_its_tests_shown():
    exercise = read_exercise("mbpp", MBPP, "9")
    assert exercise.entry_point == "add"
    asserts = "\n".join(MBPP["test_list"])
    assert exercise.prompt == f"{MBPP['text']}\n\nYour code should pass these tests:\n\n{asserts}"
    assert exercise.completed == f'"""\n{MBPP["text"]}\n{asserts}\n"""\n'
    assert exercise.context == ""


@pytest.mark.parametrize("form", ["chat", "raw"])
def test_mbpp_answers_are_judged_by_all_asserts(tmp_path, form):
    suite = task(tmp_path, [MBPP], format="mbpp", prompt=PromptForm(form))
    for body, outcome in (("a + b", "passed"), ("a * b", "wrong"), ("3", "wrong")):
        program = f"def add(a, b):\n    return {body}\n"
        answer = f"```python\n{program}```" if form == "chat" else f"\n{program}"
        (score,) = evaluate(suite, Session(lambda r, answer=answer: answer)).values()
        assert score.outcome == outcome, (body, score.detail)


def test_the_sanitized_sets_fields_are_read_and_its_imports_serve_tests_and_answers(tmp_path):
    row = {
        "task_id": 1, "prompt": "Write check.", "code": "def check(x):\n    return math.floor(x)",
        "test_imports": ["import math"], "test_list": ["assert math.isclose(check(2.5), 2)"],
    }  # fmt: skip
    suite = task(tmp_path, [row], format="mbpp")
    answer = f"```\n{row['code']}\n```"
    (score,) = evaluate(suite, Session(lambda r: answer)).values()
    assert score.outcome == "passed", score.detail


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"text": ""}, 'problem "9" has no "text"'),
        ({"test_list": []}, 'problem "9" has no "test_list"'),
        ({"code": "def other(a):\n    pass"}, "no test calls a function that its code defines"),
        ({"code": "def add(:"}, "do not parse"),
        ({"test_list": ["assert ("]}, "do not parse"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path, change, says):
    with pytest.raises(ConfigError, match=says) as caught:
        task(tmp_path, [{**MBPP, **change}], format="mbpp").samples()
    assert "\n" not in str(caught.value)


# Their tests make objects of a class that the answer should define, or hand over a type.
CANNOT_CROSS = {"367": "error", "533": "error", "601": "error", "927": "error"}
# Their reference solutions return a match for true.
RETURN_A_MATCH = {"737": "wrong", "787": "wrong", "794": "wrong"}


@pytest.mark.parametrize(
    ("file", "count", "fail"),
    [("mbpp.jsonl", 974, CANNOT_CROSS), ("sanitized-mbpp.json", 427, RETURN_A_MATCH)],
)
def test_reference_solutions_of_mbpp_pass_but_for_these(shared_data, file, count, fail):
    text = (shared_data / "mbpp" / file).read_text(encoding="utf-8")
    rows = json.loads(text) if file.endswith(".json") else map(json.loads, text.splitlines())
    problems = []
    for row in rows:
        exercise = read_exercise("mbpp", row, str(row["task_id"]))
        code = exercise.context + row["code"].replace("\r\n", "\n")
        problems.append(
            Problem(
                str(row["task_id"]), code, exercise.entry_point, exercise.test, exercise.context
            )
        )
    with Sandbox(workers=2) as sandbox:
        outcomes = [outcome for _, outcome in sandbox.check_all(problems)]
    assert len(outcomes) == count
    assert {o.problem_id: o.status for o in outcomes if o.status != "passed"} == fail


# --------------------------------------------------------------------------- stop strings


def test_an_answer_that_a_stop_string_cut_in_a_fence_is_asked_for_whole(tmp_path):
    whole = "\n```python\nimport math\n\ndef double(x):\n    return 2 * x\n```\n"

    def answer(request):
        return whole.split("\ndef ", maxsplit=1)[0] if "\ndef " in request.sampling.stop else whole

    suite = task(tmp_path, ROWS[:1], prompt=PromptForm("raw"))
    session = Session(answer)
    (score,) = evaluate(suite, session).values()
    assert score.sample_id == "p/double"
    assert score.output == whole
    assert [r.sampling.stop == () for r in session.asked] == [False, True]
    assert len({r.request_id for r in session.asked}) == 2
    plain = Session(lambda r: "\n    return 2 * x\n")
    (score,) = evaluate(suite, plain).values()
    assert score.outcome == "passed"
    assert len(plain.asked) == 1


@pytest.mark.parametrize(
    ("text", "inside"),
    [("", False), ("```", True), ("```\n```", False), ("~~~\n```", True), ("~~~\n```\n~~~", False),
     ("a ``` b", False), ("  ```py\nx", True), ("````\n```", True), ("```\n````", False)],
)  # fmt: skip
def test_fences_open_and_close(text, inside):
    assert inside_fence(text) is inside


# --------------------------------------------------------------------------- languages


@dataclasses.dataclass(frozen=True)
class Echo:
    """A language whose programs are right when they say so."""

    word: str = "right"

    def fingerprint(self):
        return {"language": "echo", "word": self.word}

    def extract(self, answer, shown, exercise, form):
        return Extraction("ok", answer) if answer else Extraction("empty")

    @contextmanager
    def checker(self, limits, workers):
        yield self

    factor = 1.0

    def check(self, problem):
        passed = problem.code == self.word
        return Outcome(problem.problem_id, "passed" if passed else "wrong")


def test_another_language_is_a_target_in_the_suites_file(tmp_path):
    task(tmp_path)
    node = {
        "_target_": "quanteval.tasks.code.CodeTask", "name": "t", "version": "1",
        "source": {"jsonl": "rows.jsonl"}, "folder": str(tmp_path),
        "language": {"_target_": f"{__name__}.Echo", "word": "yes"},
    }  # fmt: skip
    suite = build(node, prefixes=("quanteval.", f"{__name__}."))
    assert suite.fingerprint([])["language"] == {"language": "echo", "word": "yes"}
    says = {"p/double": "yes", "p/triple": "no"}
    scores = evaluate(suite, Session(lambda r: says[r.request_id]))
    assert {i: s.outcome for i, s in scores.items()} == {"p/double": "passed", "p/triple": "wrong"}
    with pytest.raises(ConfigError, match="language"):
        build({**node, "language": 5})


def test_checks_go_on_at_once_while_answers_are_being_written(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    meet = threading.Barrier(3, timeout=30)

    class Slow(Echo):
        def check(self, problem):
            meet.wait()
            return Outcome(problem.problem_id, "passed")

    rows = [{**ROWS[0], "task_id": str(i)} for i in range(6)]
    scores = evaluate(task(tmp_path, rows, language=Slow()), Session(lambda r: "x"))
    assert {s.outcome for s in scores.values()} == {"passed"}


def test_a_sample_of_python_is_extracted_and_checked_through_the_seam():
    exercise = read_exercise("humaneval", ROWS[0], "p")
    found = Python().extract("```\ndef double(x):\n    return x + x\n```", "", exercise, "chat")
    with Python().checker(Limits(), 1) as checker:
        problem = Problem("p", found.code, "double", exercise.test)
        assert checker.check(problem).status == "passed"

"""The kind `generate` on scripted sessions: prompts are as written, known answers score exactly."""

from __future__ import annotations

import dataclasses
import json

import pytest

from quanteval.config import load_task_node
from quanteval.engines.fake import FakeEngine
from quanteval.errors import ConfigError, EngineError
from quanteval.interfaces import Completion, TaskContext
from quanteval.records import Artifact, Precision
from quanteval.resources import task_folders
from quanteval.targets import build
from quanteval.tasks.answers import Callable, Judged, Match, NumericMatch, RegexMatch
from quanteval.tasks.generate import GenerateTask
from quanteval.tasks.loading import Source
from quanteval.tasks.prompting import FewShot

ARTIFACT = Artifact(
    scheme="fp32", scheme_config={}, model_id="m", model_revision=None, model_provenance="",
    weights_digest="", path="", format="transformers", bytes_on_disk=0, build_s=0.0,
    precision=Precision(
        weight_bits=32, activation_bits=32, weight_format="float32", compute="float", quantized=False
    ),
)  # fmt: skip
CONTEXT = TaskContext(None, None, is_baseline=True)
ROWS = [
    {"id": "fr", "country": "France", "capital": "Paris", "also": ["Paris", "Lutetia"]},
    {"id": "it", "country": "Italy", "capital": "Rome", "also": ["Rome", "Roma"]},
    {"id": "pe", "country": "Perú\n", "capital": "Lima", "also": "Lima"},
    {"id": "jp", "country": "Japan", "capital": "Tokyo", "also": ["Tokyo", 13]},
]
SOURCE = Source(jsonl="rows.jsonl")


@pytest.fixture
def make(tmp_path):
    """Return a maker of tasks over `ROWS`."""
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")

    def task(**fields):
        fields = {
            "source": SOURCE,
            "prompt": "Capital of {{ country }}",
            "target": "{{ capital }}",
            **fields,
        }
        if fields.get("targets_field"):
            fields.pop("target")
        return GenerateTask(**{"name": "t", "version": "1", "folder": str(tmp_path), **fields})

    return task


def evaluate(task, samples=None, **engine):
    with FakeEngine(**engine).serve(ARTIFACT) as session:
        samples = task.samples() if samples is None else samples
        return {score.sample_id: score for score in task.evaluate(session, samples, CONTEXT)}


def prompts(task, **engine):
    with FakeEngine(**engine).serve(ARTIFACT) as session:
        return [task.render(session, sample) for sample in task.samples()]


# --------------------------------------------------------------------------- prompts


def test_a_chat_prompt_is_one_user_turn(make):
    first, *_, last = prompts(make(), add_bos=True)
    assert first.text == "<user>Capital of France\n<assistant>"
    assert last.text == "<user>Capital of Japan\n<assistant>"
    assert first.token_ids == (257, *first.text.encode())


def test_the_prompt_s_bytes_are_kept_unless_stripped(make):
    peru = prompts(make(form="raw", strip=False))[2]
    assert peru.text == "Capital of Perú\n"
    assert peru.token_ids == tuple("Capital of Perú\n".encode())
    assert prompts(make(form="raw"))[2].text == "Capital of Perú"


def shots(count, **fields):
    return FewShot(count, SOURCE, **fields)


def test_examples_are_text_in_the_raw_form(make):
    task = make(
        form="raw",
        prompt="Q: {{ country }}\nA:",
        shots=shots(2, separator="\n--\n", description="Capitals of {{ id }}.\n"),
    )
    assert [p.text for p in prompts(task)][1] == (
        "Capitals of it.\nQ: France\nA: Paris\n--\nQ: Perú\n\nA: Lima\n--\nQ: Italy\nA:"
    )
    task = dataclasses.replace(task, target_separator="=", example_target="<{{ capital }}>")
    assert "A:=<Paris>\n--" in prompts(task)[1].text


def test_examples_are_turns_in_the_chat_form(make):
    task = make(shots=shots(1, description="Be brief. "), system="Answer about {{ country }}.")
    assert prompts(task)[1].text == (
        "<system>Answer about Italy.\n<user>Be brief. Capital of France\n<assistant>Paris\n"
        "<user>Capital of Italy\n<assistant>"
    )
    several = make(shots=shots(1), targets_field="also")
    assert "<assistant>Paris\n" in prompts(several)[1].text


@pytest.mark.parametrize("name", ["arithmetic", "copying"])
def test_the_first_prompt_of_each_generated_suite(name):
    node = load_task_node(task_folders()[name])
    assert (
        prompts(build(node, where=name))[0].text
        == {
            "arithmetic": (
                "7 + 6 = 13\n9 - 7 = 2\n6 * 2 = 12\n78 + 28 = 106\n78 - 66 = 12\n32 * 52 = 1664\n7 + 8 ="
            ),
            "copying": (
                "Input: basket window\nOutput: basket window\n\n"
                "Input: purple night clock star\nOutput: purple night clock star\n\n"
                "Input: crown storm month cloud\nOutput:"
            ),
        }[name]
    )


# --------------------------------------------------------------------------- scores


def test_known_answers_score_exactly(make):
    task = make(answer=Match(mode="contains"))
    says = {"France": "It is Paris.", "Italy": "Milan", "Japan": " \n", "Perú": "Lima"}
    scores = evaluate(task, answers=says, failing=("jp",))
    assert {i: (s.value, s.outcome, s.status) for i, s in scores.items()} == {
        "fr": (1.0, "right", "ok"),
        "it": (0.0, "wrong", "ok"),
        "pe": (1.0, "right", "ok"),
        "jp": (0.0, "error", "error"),
    }
    assert scores["fr"].output == "It is Paris."
    assert scores["jp"].detail == "scripted failure"
    assert {s.weight for s in scores.values()} == {1.0}
    assert [s.prompt_sha256 for s in scores.values()] == [p.sha256 for p in prompts(task)]


@pytest.mark.parametrize(
    ("answer", "text", "outcome"),
    [
        (Match(), "", "empty"),
        (Match(), " \n ", "empty"),
        (NumericMatch(), "", "empty"),
        (NumericMatch(), "none", "no_answer"),
        (RegexMatch("is (.*)"), "Paris", "no_answer"),
        (RegexMatch("is (.*)"), "is Rome", "wrong"),
        (Match(ignore_punctuation=True), "?", "error"),
    ],
)
def test_each_way_to_fail_is_told_apart(make, answer, text, outcome):
    target = "7" if isinstance(answer, NumericMatch) else "Paris" if outcome != "error" else "!"
    (score,) = evaluate(make(answer=answer, target=target, limit=1), default_answer=text).values()
    assert (score.value, score.outcome) == (0.0, outcome)
    assert score.status == ("error" if outcome == "error" else "ok")
    if outcome == "wrong":
        assert score.detail == 'extracted "Rome"'


def test_an_answer_cut_short_counts_when_it_is_right(make):
    says = {"France": "Paris, of course", "Italy": "Milan, of course"}
    task = make(max_tokens=6, limit=2, answer=Match(mode="starts_with"))
    right, wrong = evaluate(task, answers=says).values()
    assert (right.finish_reason, right.status, right.value) == ("length", "ok", 1.0)
    assert (wrong.finish_reason, wrong.status, wrong.value) == ("length", "truncated", 0.0)
    assert wrong.outcome == "wrong"
    assert wrong.output_tokens == 6


def test_any_of_a_field_s_targets_counts(make):
    task = make(targets_field="also")
    says = {"France": "Lutetia", "Italy": "Roma", "Perú": "Lima", "Japan": "13"}
    assert all(s.value == 1.0 for s in evaluate(task, answers=says).values())


def test_a_stop_string_ends_the_answer(make):
    task = make(stop=("\n",), limit=1)
    (score,) = evaluate(task, default_answer="Paris\nand more").values()
    assert (score.output, score.value) == ("Paris", 1.0)


def partly(output, row):
    return {"value": 0.5, "words": len(output.split()), "id": row["id"]}


def test_a_function_s_value_and_numbers_are_kept(make, monkeypatch):
    monkeypatch.setattr("quanteval.tasks.answers._partly", partly, raising=False)
    task = make(target="", answer=Callable("quanteval.tasks.answers._partly"), limit=1)
    (score,) = evaluate(task, default_answer="two words").values()
    assert (score.value, score.outcome, score.numbers) == (0.5, "wrong", {"words": 2.0})


def test_only_the_samples_asked_for_are_scored_and_lazily(make):
    task = make()
    samples = task.samples()
    assert list(evaluate(task, samples[2:])) == ["pe", "jp"]
    with FakeEngine().serve(ARTIFACT) as session:
        complete, taken = session.generate, []

        def generate(requests):
            for request in requests:
                taken.append(request.request_id)
                yield from complete([request])

        session.generate = generate
        scores = task.evaluate(session, samples, CONTEXT)
        next(scores)
        assert taken == ["fr"]


def test_an_answer_too_many_or_too_few_ends_the_task(make):
    task = make()
    with FakeEngine().serve(ARTIFACT) as session:
        complete = session.generate
        session.generate = lambda requests: (c for c in [*complete(requests)] * 2)
        with pytest.raises(EngineError, match="answered twice or never asked"):
            list(task.evaluate(session, task.samples(), CONTEXT))
        session.generate = lambda requests: iter([*complete(requests)][1:])
        with pytest.raises(EngineError, match="1 requests got no answer, the first: fr"):
            list(task.evaluate(session, task.samples(), CONTEXT))
        session.generate = lambda requests: iter([Completion("x", "", (), "stop")])
        with pytest.raises(EngineError, match='"x" was answered twice or never asked'):
            list(task.evaluate(session, task.samples(), CONTEXT))


@pytest.mark.parametrize(
    ("reason", "error"), [("stop", "server overloaded"), ("cancelled", None), ("none", None)]
)
def test_an_unfinished_generation_is_an_error_even_with_a_right_text(make, reason, error):
    with FakeEngine().serve(ARTIFACT) as session:
        session.generate = lambda requests: (
            Completion(r.request_id, "Paris", (1,), reason, error) for r in requests
        )
        task = make(limit=1)
        (score,) = task.evaluate(session, task.samples(), CONTEXT)
    assert (score.status, score.outcome, score.value) == ("error", "error", 0.0)
    assert score.detail == (error or reason)


# --------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": "{{ nothing }}"}, 'sample "fr": template'),
        ({"target": "{{ nothing }}"}, 'sample "fr": template'),
        ({"targets_field": "nothing"}, 'sample "fr": "nothing" has no list of targets'),
        ({"targets_field": "country", "id_field": "nothing"}, 'row 0 has no "nothing"'),
    ],
)
def test_rows_that_cannot_be_asked_are_named_before_anything_runs(make, fields, says):
    with pytest.raises(ConfigError, match=says):
        make(**fields).samples()


NODE = {
    "_target_": "quanteval.tasks.generate.GenerateTask",
    "name": "t",
    "version": "1",
    "source": {"jsonl": "x"},
    "prompt": "{{ q }}",
    "target": "{{ a }}",
}
MATCH = {"_target_": "quanteval.tasks.answers.Match"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": "{{ q"}, "prompt: template"),
        ({"max_tokens": 0}, 'max_tokens "0"'),
        ({"stop": [""]}, 'stop ""'),
        ({"targets_field": "x"}, 'targets_field "x"'),
        ({"form": "raw", "system": "Be kind"}, 'system "Be kind"'),
        ({"target": ""}, 'answer "Match" needs target'),
        ({"answer": {"strip": True}}, "Answer"),
        ({"answer": {**MATCH, "strp": True}}, 'unknown key "strp"; did you mean "strip"'),
        ({"answer": {"_target_": "os.path.join"}}, "is not allowed"),
        ({"shots": {"count": 1}}, "source"),
        ({"limit": 0}, 'limit "0"'),
    ],
)
def test_fields_without_sense_are_refused(change, says):
    with pytest.raises(ConfigError, match=says) as caught:
        build({**NODE, **change}, where="task.t")
    assert "\n" not in str(caught.value)


def test_a_judge_is_built_from_its_node():
    answer = {
        "_target_": "quanteval.tasks.answers.RegexMatch",
        "pattern": "a",
        "match": {"strip": False},
    }
    task = build({**NODE, "answer": answer}, where="task.t")
    assert task.answer == RegexMatch("a", match=Match(strip=False))
    assert build(NODE, where="task.t").answer == Match()


@dataclasses.dataclass(frozen=True)
class Longest:
    """A judge from outside the package: right is an answer of at least `least` characters."""

    least: int = 3

    def fingerprint(self):
        return {"answer": "longest", "least": self.least}

    def judge(self, output, row, targets):
        return Judged(min(1.0, len(output) / self.least), "right", output)


def test_a_judge_of_one_s_own_needs_no_change_here(make):
    node = {**NODE, "answer": {"_target_": f"{__name__}.Longest", "least": 4}, "target": ""}
    with pytest.raises(ConfigError, match="is not allowed"):
        build(node, where="task.t")
    built = build(node, where="task.t", prefixes=("quanteval.", __name__))
    task = make(target="", answer=built.answer, limit=1)
    assert task.fingerprint(task.samples())["answer"]["least"] == 4
    assert evaluate(task, default_answer="abc")["fr"].value == 0.75


# --------------------------------------------------------------------------- fingerprint


@pytest.mark.parametrize(
    ("change", "matters"),
    [
        ({"version": "2"}, True),
        ({"prompt": "Chief city of {{ country }}"}, True),
        ({"target": "{{ id }}"}, True),
        ({"form": "raw"}, True),
        ({"system": "Be brief"}, True),
        ({"strip": False}, True),
        ({"shots": shots(1)}, True),
        ({"shots": shots(1), "example_target": "x"}, True),
        ({"answer": Match(strip=False)}, True),
        ({"max_tokens": 5}, True),
        ({"stop": ("\n",)}, True),
        ({"limit": 2}, True),
        ({"description": "other", "licence": "MIT"}, False),
    ],
)
def test_what_matters_is_fingerprinted(make, change, matters):
    task, other = make(), make(**change)
    one, two = task.fingerprint(task.samples()), other.fingerprint(other.samples())
    assert (one != two) is matters
    assert task.folder not in json.dumps(two)


def test_the_examples_contents_are_fingerprinted(make, tmp_path):
    found = []
    for capital in ("Bern", "Zurich"):
        row = {"country": "Switzerland", "capital": capital}
        (tmp_path / "examples.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
        task = make(shots=FewShot(1, Source(jsonl="examples.jsonl")))
        found.append(task.fingerprint(task.samples()))
    assert found[0] != found[1]

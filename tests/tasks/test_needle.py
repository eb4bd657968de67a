"""The kind `needle` on scripted sessions: lengths and depths are as stated, known answers score exactly."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quanteval.config import load_task_node
from quanteval.engines.fake import FakeEngine
from quanteval.errors import ConfigError, UnsupportedError
from quanteval.interfaces import ScoreRequest, TaskContext
from quanteval.records import Artifact, Precision
from quanteval.resources import task_folders
from quanteval.targets import build
from quanteval.tasks.loading import Source
from quanteval.tasks.needle import KEYS, Filler, NeedleTask, split_sentences

ARTIFACT = Artifact(
    scheme="fp32", scheme_config={}, model_id="m", model_revision=None, model_provenance="",
    weights_digest="", path="", format="transformers", bytes_on_disk=0, build_s=0.0,
    precision=Precision(
        weight_bits=32, activation_bits=32, weight_format="float32", compute="float", quantized=False
    ),
)  # fmt: skip
CONTEXT = TaskContext(None, None, is_baseline=True)
SENTENCE = "Sentence number {} of the filler is here."
FACT = re.compile(r"The magic number of (\w+) is (\d+)\.")


@pytest.fixture
def make(tmp_path):
    """Return a maker of tasks over a filler of 40 sentences of about 40 bytes."""
    lines = [SENTENCE.format(number) for number in range(10, 50)]
    rows = [{"text": " ".join(lines[:25])}, {"text": "\n".join(lines[25:])}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "filler.jsonl").write_text(text, encoding="utf-8")

    def task(**fields):
        fields = {"lengths": (400, 900), "depths": (0.0, 0.5, 1.0), "per_cell": 2, **fields}
        return NeedleTask(
            **{
                "name": "t",
                "version": "1",
                "folder": str(tmp_path),
                "filler": Source(jsonl="filler.jsonl"),
                **fields,
            }
        )

    return task


def prompts(task, **engine):
    with FakeEngine(**engine).serve(ARTIFACT) as session:
        filler = Filler(session, task.sentences())
        return {
            s.sample_id: task.render(session, s.data, filler).text for s in task.samples()
        }, session


def evaluate(task, **engine):
    samples = task.samples()
    with FakeEngine(**engine).serve(ARTIFACT) as session:
        return {score.sample_id: score for score in task.evaluate(session, samples, CONTEXT)}


def question(key):
    return f"What is the magic number of {key}?"


# --------------------------------------------------------------------------- samples


def test_samples_are_a_grid_of_lengths_and_depths(make):
    samples = make().samples()
    assert len(samples) == 12
    cells = [(s.data["length"], s.data["depth"]) for s in samples]
    assert cells[:6] == cells[6:] == [(n, d) for n in (400, 900) for d in (0.0, 0.5, 1.0)]
    assert {s.data["category"] for s in samples} == {"400", "900"}
    assert all(re.fullmatch(r"[1-9]\d{4}", s.data["value"]) for s in samples)
    assert len({(s.data["key"], s.data["value"], s.data["offset"]) for s in samples}) == 12


def test_more_samples_a_cell_or_lengths_keep_the_others(make):
    few = {s.sample_id: s.data for s in make().samples()}
    more = {s.sample_id: s.data for s in make(per_cell=4, lengths=(400, 900, 950)).samples()}
    assert few.items() <= more.items()
    assert make(seed=1).samples() != make().samples()
    assert [s.sample_id for s in make(limit=4).samples()] == [
        s.sample_id for s in make().samples()
    ][:4]


def test_distractors_have_keys_and_values_of_their_own(make):
    for sample in make(distractors=len(KEYS) - 1).samples():
        facts = [sample.data, *sample.data["distractors"]]
        assert sorted(fact["key"] for fact in facts) == sorted(KEYS)
        assert len({fact["value"] for fact in facts}) == len(KEYS)
        assert all(0 <= fact["depth"] <= 1 for fact in facts)


def test_no_value_stands_in_the_filler(make):
    values = {s.data["value"] for s in make(digits=2, per_cell=30).samples()}
    assert values
    assert not values & {str(number) for number in range(10, 50)}
    with pytest.raises(ConfigError, match='digits "1"'):
        make(digits=1, distractors=9, per_cell=9).samples()


# --------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("form", ["chat", "raw"])
@pytest.mark.parametrize("distractors", [0, 2])
def test_prompts_are_as_long_and_facts_as_deep_as_stated(make, form, distractors):
    task = make(form=form, distractors=distractors, lengths=(500, 900, 5000))
    found, session = prompts(task, add_bos=True)
    for sample in task.samples():
        row, text = sample.data, found[sample.sample_id]
        length = len(session.tokenizer.raw(text).token_ids)
        assert row["length"] - len(SENTENCE) - 1 < length <= row["length"]
        assert text.startswith("<user>") is (form == "chat")
        assert text.count(f"The magic number of {row['key']} is {row['value']}.") == 1
        assert len(FACT.findall(text)) == distractors + 1
        assert text.count(question(row["key"])) == 1
        body = text.removeprefix("<user>").split("\n\n")[0]
        rest = FACT.sub("", body)
        before = FACT.sub("", body[: body.index(f"of {row['key']} is") - len("The magic number ")])
        assert abs(len(before) - row["depth"] * len(rest)) < len(SENTENCE)
        # Whole sentences, in the filler's order, round and round.
        numbers = [int(n) for n in re.findall(r"number (\d+) of the filler is here\.", body)]
        assert all((b - a) % 40 == 1 for a, b in itertools.pairwise(numbers))


def test_a_prompt_of_the_shortest_length_holds_the_fact_alone(make):
    task = make(lengths=(120,), depths=(0.5,), per_cell=1)
    (text,) = prompts(task)[0].values()
    row = task.samples()[0].data
    fact = f"The magic number of {row['key']} is {row['value']}."
    assert text == f"<user>{fact}\n\n{question(row['key'])}\n<assistant>"
    with pytest.raises(ConfigError, match='lengths "60": the question alone has'):
        evaluate(make(lengths=(60,)))


def test_the_first_prompt_of_the_suite():
    task = build(load_task_node(task_folders()["needle"]), where="needle")
    sample = task.samples()[0]
    row = sample.data
    with FakeEngine().serve(ARTIFACT) as session:
        text = task.render(session, {**row, "length": 700}, Filler(session, task.sentences())).text
    # The filler differs between Python versions.
    assert text.startswith(f"<user>The magic number of {row['key']} is {row['value']}. ")
    assert text.endswith(f"\n\n{question(row['key'])}\n<assistant>")
    assert len(FACT.findall(text)) == 1 + task.distractors


@pytest.mark.model
def test_prompts_fit_in_the_tokens_of_a_real_model(embedded_model):
    from quanteval.engines.tokenizer import HFTokenizer

    class Session:
        tokenizer = HFTokenizer(embedded_model.path)

    task = build(load_task_node(task_folders()["needle"]), where="needle")
    filler = Filler(Session, task.sentences())
    short_by = []
    for sample in task.samples():
        prompt = task.render(Session, sample.data, filler)
        assert prompt.token_ids == Session.tokenizer.encode(prompt.text)
        assert prompt.text.count("<|im_start|>assistant") == 1
        short_by.append(sample.data["length"] - len(prompt.token_ids))
    assert min(short_by) >= 0
    assert max(short_by) < 80


# --------------------------------------------------------------------------- scores


def test_known_answers_score_exactly(make):
    task = make(distractors=1)
    rows = {s.sample_id: s.data for s in task.samples()}
    assert len({row["key"] for row in rows.values()}) > 6
    a, b, c, d, e = list(rows)[:5]
    says = {
        a: f"It is {rows[a]['value']}.",
        b: f"The number: **{int(rows[b]['value']):,}**",
        c: rows[c]["value"] + "1",
        d: f"{rows[d]['value']} or {rows[d]['distractors'][0]['value']}",
        e: "",
    }
    texts, _ = prompts(task)
    answers = {texts[i]: answer for i, answer in says.items()}
    scores = evaluate(task, answers=answers, default_answer="unknown", failing=())
    other = rows[d]["distractors"][0]["key"]
    assert [(scores[i].value, scores[i].outcome, scores[i].detail) for i in says] == [
        (1.0, "right", ""),
        (1.0, "right", ""),
        (0.0, "wrong", ""),
        (0.0, "wrong", f'gave the value of "{other}"'),
        (0.0, "empty", ""),
    ]
    assert sum(s.value for s in scores.values()) == 2
    assert {s.status for s in scores.values()} == {"ok"}
    for i, score in scores.items():
        assert score.numbers["length"] == rows[i]["length"]
        assert score.numbers["depth"] == rows[i]["depth"]
        assert score.numbers["prompt_tokens"] == len(texts[i].encode())


def test_failures_and_cut_answers_are_told_apart(make):
    task = make(lengths=(400,), per_cell=1, max_tokens=4, score_value=False)
    scores = evaluate(task, default_answer="none that I know", failing=("400-1-0",))
    assert {i: (s.status, s.outcome) for i, s in scores.items()} == {
        "400-0-0": ("truncated", "wrong"),
        "400-0.5-0": ("truncated", "wrong"),
        "400-1-0": ("error", "error"),
    }


def test_the_value_s_log_probability_is_that_of_its_tokens_after_the_prompt(make):
    task = make(answer_lead="{{ key }}=")
    texts, session = prompts(task)
    scores = evaluate(task)
    for sample in task.samples():
        text = f"{texts[sample.sample_id]}{sample.data['key']}={sample.data['value']}"
        ids = session.tokenizer.raw(text).token_ids
        (found,) = session.loglikelihood([ScoreRequest("x", ids, len(ids) - 5)])
        expected = float(found.logprobs.sum())
        assert scores[sample.sample_id].numbers["value_logprob"] == pytest.approx(expected)
    assert "value_logprob" not in evaluate(make(score_value=False))["400-0-0"].numbers


def test_an_engine_without_log_probabilities_is_asked_for_answers_alone(make):
    task = make()
    with FakeEngine().serve(ARTIFACT) as session:

        def refuse(requests):
            raise UnsupportedError("no log-probabilities here")

        session.loglikelihood = refuse
        scores = list(task.evaluate(session, task.samples(), CONTEXT))
    assert len(scores) == 12
    assert all("value_logprob" not in score.numbers for score in scores)


def test_lengths_that_cannot_be_served_are_refused_before_anything_runs(make):
    task = make(max_tokens=24)
    with FakeEngine(max_context=923).serve(ARTIFACT) as session:
        session.generate = session.loglikelihood = None
        with pytest.raises(
            ConfigError, match=r'lengths "900".* task\.t\.lengths=\[400\]'
        ) as caught:
            next(task.evaluate(session, task.samples(), CONTEXT))
    assert "\n" not in str(caught.value)
    assert len(evaluate(task, max_context=924)) == 12
    short = make(lengths=(400,))
    assert len(evaluate(short, max_context=500)) == 6


def test_many_samples_are_each_scored_once(make):
    task = make(per_cell=9, lengths=(400,))
    assert list(evaluate(task)) == [s.sample_id for s in task.samples()]
    with FakeEngine().serve(ARTIFACT) as session:
        assert list(task.evaluate(session, [], CONTEXT)) == []


# --------------------------------------------------------------------------- filler


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("One sentence that is\n   long enough. Short. Another one of that kind!",
         ["One sentence that is long enough.", "Another one of that kind!"]),
        ("A heading that is long enough\n\nAnd then a sentence of the text.",
         ["And then a sentence of the text."]),
        ("これは十分に長い最初の文でございますから使われます。二つ目の文も同じように長いので使われるはずです。",
         ["これは十分に長い最初の文でございますから使われます。", "二つ目の文も同じように長いので使われるはずです。"]),
        ("x = call(a, b)\ny = call(c, d)", []),
        ("", []),
    ],
)  # fmt: skip
def test_filler_is_sentences(text, found):
    assert list(split_sentences(text)) == found


@given(st.text(alphabet="ab .!?\n"))
def test_sentences_are_single_lines_of_moderate_length(text):
    for sentence in split_sentences(text):
        assert 20 <= len(sentence) <= 240
        assert "\n" not in sentence
        assert sentence[-1] in ".!?"


def test_a_filler_that_cannot_be_used_is_named(make, tmp_path):
    (tmp_path / "filler.jsonl").write_text('{"text": "no end"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="the filler has no sentence"):
        make().samples()
    (tmp_path / "filler.jsonl").write_text('{"words": "no text"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match='no text under "text"'):
        make().samples()


# --------------------------------------------------------------------------- fields


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lengths": []}, 'lengths "\\[\\]"'),
        ({"lengths": [256, 256]}, "lengths"),
        ({"depths": [1.5]}, "depths"),
        ({"per_cell": 0}, 'per_cell "0"'),
        ({"distractors": 500}, 'distractors "500"'),
        ({"needle": "{{ key"}, "needle: template"),
        ({"max_tokens": 0}, 'max_tokens "0"'),
        ({"stop": [""]}, 'stop ""'),
        ({"depth": 1}, 'unknown key "depth"; did you mean "depths"'),
    ],
)
def test_fields_without_sense_are_refused(change, says):
    node = {"_target_": "quanteval.tasks.needle.NeedleTask", "name": "t", "version": "1", **change}
    with pytest.raises(ConfigError, match=says):
        build(node, where="task.t")


@pytest.mark.parametrize(
    ("change", "matters"),
    [
        ({"version": "2"}, True),
        ({"lengths": (400,)}, True),
        ({"depths": (0.0, 1.0)}, True),
        ({"per_cell": 1}, True),
        ({"distractors": 1}, True),
        ({"digits": 6}, True),
        ({"seed": 1}, True),
        ({"needle": "{{ key }}: {{ value }}."}, True),
        ({"prompt": "{{ text }} {{ key }}?"}, True),
        ({"form": "raw"}, True),
        ({"answer_lead": " "}, True),
        ({"score_value": False}, True),
        ({"max_tokens": 9}, True),
        ({"stop": ("\n",)}, True),
        ({"limit": 3}, True),
        ({"description": "other", "licence": "MIT"}, False),
    ],
)
def test_what_matters_is_fingerprinted(make, change, matters):
    task, other = make(), make(**change)
    one, two = task.fingerprint(task.samples()), other.fingerprint(other.samples())
    assert (one != two) is matters
    assert task.folder not in json.dumps(two)


def test_the_filler_is_fingerprinted(make, tmp_path):
    task = make()
    samples, before = task.samples(), task.fingerprint(task.samples())
    path = tmp_path / "filler.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace("here", "there"), encoding="utf-8")
    assert task.fingerprint(samples) != before


@pytest.mark.parametrize("change", [{"needle": "It is {{ value }}."}, {"needle": "{{ key }}."},
                                    {"prompt": "{{ text }}"}, {"prompt": "{{ key }}?"}])  # fmt: skip
def test_templates_must_use_what_makes_the_question(make, change):
    with pytest.raises(ValueError, match="must use"):
        make(**change)
    with pytest.raises(ValueError, match="prompt: template"):
        make(prompt="{{ text }} {{ key }} {{ value }}")

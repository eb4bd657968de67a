"""Task kinds on scripted sessions: known answers score exactly, and nothing leaves the denominator."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quanteval.config import load_task_node
from quanteval.engines.fake import FakeEngine
from quanteval.errors import ConfigError, EngineError, QuantevalError, RecordError
from quanteval.interfaces import (
    Completion,
    HiddenStates,
    OutputHead,
    Sample,
    TaskContext,
)
from quanteval.records import Score
from quanteval.resources import task_folders
from quanteval.targets import build
from quanteval.tasks.distributions import compare
from quanteval.tasks.divergence import DivergenceTask
from quanteval.tasks.loading import Source, load_rows, make_samples
from quanteval.tasks.perplexity import PerplexityTask, count_words, rolling_windows


def task(name, **fields):
    node = load_task_node(task_folders()[name])
    return build({**node, **fields}, where=name)


def evaluate(suite, artifact, samples, tmp_path, **engine) -> dict[str, Score]:
    context = TaskContext(tmp_path, tmp_path, is_baseline=True)
    with FakeEngine(**engine).serve(artifact) as session:
        return {score.sample_id: score for score in suite.evaluate(session, samples, context)}


# --------------------------------------------------------------------------- suites


# Their data is fetched, or read from a path: tests/tasks/test_public.py loads them.
PUBLIC = {
    name
    for name, folder in task_folders().items()
    if "quanteval.tasks.public." in (folder / "task.yaml").read_text(encoding="utf-8")
}


@pytest.mark.parametrize("name", sorted(set(task_folders()) - PUBLIC))
def test_every_suite_loads_with_unique_ids_and_a_licence(name):
    suite = task(name)
    assert suite.name == name
    samples = suite.samples()
    assert samples
    assert len({sample.sample_id for sample in samples}) == len(samples)
    assert suite.licence
    assert suite.version
    inputs = suite.fingerprint(samples)
    assert inputs == suite.fingerprint(samples)
    assert str(Path(suite.folder)) not in str(inputs)
    assert suite.fingerprint(samples[1:]) != inputs


def test_humaneval_and_pyeasy_have_their_sizes():
    assert len(task("humaneval").samples()) == 164
    assert len(task("pyeasy").samples()) == 164


# --------------------------------------------------------------------------- code


def answers(samples, wrong=()):
    return {
        str(s.data["prompt"]).rstrip(): "```python\n"
        + s.data["prompt"]
        + ("    return None\n" if s.sample_id in wrong else s.data["canonical_solution"])
        + "\n```"
        for s in samples
    }


def test_known_answers_score_exactly(fake_artifact, tmp_path):
    suite = task("pyeasy", limit=10, max_tokens=4000)
    samples = suite.samples()
    scores = evaluate(
        suite, fake_artifact, samples, tmp_path, answers=answers(samples, {"pyeasy/3"})
    )
    assert {i: s.value for i, s in scores.items()} == {
        s.sample_id: float(s.sample_id != "pyeasy/3") for s in samples
    }
    assert scores["pyeasy/3"].outcome == "wrong"
    assert {s.status for s in scores.values()} == {"ok"}
    assert len({s.prompt_sha256 for s in scores.values()}) == 10


def test_each_way_to_fail_is_told_apart_and_counted(fake_artifact, tmp_path):
    suite = task("pyeasy", limit=6, max_tokens=200)
    samples = suite.samples()
    names = [str(s.data["entry_point"]) for s in samples]
    says = {
        str(samples[0].data["prompt"]).rstrip(): " ",
        str(samples[1].data["prompt"]).rstrip(): "I would rather not.",
        str(
            samples[2].data["prompt"]
        ).rstrip(): f"```python\ndef {names[2]}(*a):\n    while True: pass\n```",
        str(samples[3].data["prompt"]).rstrip(): "```python\n" + "x = 1\n" * 200,
        str(
            samples[4].data["prompt"]
        ).rstrip(): f"```python\ndef {names[4]}(*a):\n    import os; os._exit(0)\n```",
    }
    suite = dataclasses.replace(
        suite, sandbox=dataclasses.replace(suite.sandbox, cpu_s=1, wall_s=4)
    )
    scores = evaluate(suite, fake_artifact, samples, tmp_path, answers=says, failing=("pyeasy/5",))
    found = [(s.status, s.outcome, s.value) for s in (scores[x.sample_id] for x in samples)]
    assert found == [
        ("ok", "empty", 0.0),
        ("ok", "unparsable", 0.0),
        ("timeout", "timeout", 0.0),
        ("truncated", "unparsable", 0.0),
        ("ok", "crashed", 0.0),
        ("error", "error", 0.0),
    ]
    assert scores["pyeasy/5"].output == ""
    assert scores["pyeasy/5"].detail == "scripted failure"


def test_only_the_samples_asked_for_are_scored(fake_artifact, tmp_path):
    suite = task("pyeasy", limit=6)
    scores = evaluate(suite, fake_artifact, suite.samples()[4:], tmp_path)
    assert sorted(scores) == ["pyeasy/4", "pyeasy/5"]


def test_an_answer_that_was_not_asked_for_is_an_error(fake_artifact, tmp_path):
    suite = task("pyeasy", limit=2)
    with FakeEngine().serve(fake_artifact) as session:
        complete = session.generate
        session.generate = lambda requests: (c for c in [*complete(requests)] * 2)
        with pytest.raises(EngineError, match="answered twice"):
            list(suite.evaluate(session, suite.samples(), TaskContext(tmp_path, tmp_path, True)))
        session.generate = lambda requests: iter([*complete(requests)][:1])
        with pytest.raises(EngineError, match="1 problems got no answer"):
            list(suite.evaluate(session, suite.samples(), TaskContext(tmp_path, tmp_path, True)))


@pytest.mark.parametrize(
    ("reason", "error"),
    [("stop", "server overloaded"), ("cancelled", None), ("none", None)],
)
def test_an_unfinished_generation_is_an_error_even_with_a_right_text(
    fake_artifact, tmp_path, reason, error
):
    suite = task("pyeasy", limit=1)
    (sample,) = suite.samples()
    right = next(iter(answers([sample]).values()))
    with FakeEngine().serve(fake_artifact) as session:
        session.generate = lambda requests: (
            Completion(r.request_id, right, (1,), reason, error) for r in requests
        )
        context = TaskContext(tmp_path, tmp_path, is_baseline=True)
        (score,) = suite.evaluate(session, [sample], context)
    assert (score.status, score.outcome, score.value) == ("error", "error", 0.0)
    assert score.detail == (error or reason)


def test_prompts_are_as_written(fake_artifact):
    suite = task("humaneval")
    sample = suite.samples()[0]
    with FakeEngine(add_bos=True).serve(fake_artifact) as session:
        chat = suite.render(session, sample)
        assert chat.text.startswith(
            "<user>Complete the following Python function. Reply with the whole function in a "
            "code block.\n\n```python\nfrom typing import List\n\n\ndef has_close_elements("
        )
        assert chat.text.endswith('True\n    """\n```\n<assistant>')
        assert chat.token_ids[0] == session.tokenizer.bos_token_id
        assert session.tokenizer.bos_token_id not in chat.token_ids[1:]
        raw = task("humaneval", prompt={"form": "raw"})
        assert raw.render(session, sample).text == sample.data["prompt"].rstrip()
        kept = task("humaneval", prompt={"form": "raw", "strip": False})
        assert kept.render(session, sample).text == sample.data["prompt"]
    assert suite.sampling().stop == ()
    assert "\ndef " in raw.sampling().stop
    samples = suite.samples()
    assert suite.fingerprint(samples) != raw.fingerprint(samples) != kept.fingerprint(samples)


# --------------------------------------------------------------------------- perplexity


@given(length=st.integers(0, 200), window=st.integers(2, 50), data=st.data())
def test_every_token_is_scored_once_with_enough_before_it(length, window, data):
    stride = data.draw(st.integers(1, window - 1))
    windows = rolling_windows(length, window, stride)
    scored = [i for _, end, first in windows for i in range(first, end)]
    assert scored == list(range(1, length))
    for number, (start, end, first) in enumerate(windows):
        assert end - start <= window
        assert first > start
        if number:
            assert first - start >= window - stride


def document_task(**fields):
    return PerplexityTask(name="t", version="1", source=Source(jsonl="x"), **fields)


def documents(*texts):
    return [Sample(f"d{i}", {"id": f"d{i}", "text": text}) for i, text in enumerate(texts)]


@pytest.mark.parametrize("bos", [True, False])
def test_the_value_is_the_summed_negative_log_likelihood(bos, fake_artifact, tmp_path):
    text = "naïve words, twice\nover"
    whole = document_task(keep_logprobs=True)
    score = evaluate(whole, fake_artifact, documents(text), tmp_path, add_bos=bos)["d0"]
    octets = len(text.encode())
    assert score.weight == octets - (not bos)
    assert score.value == pytest.approx(-sum(score.series["logprobs"]))
    assert score.numbers == {"words": 4.0, "bytes": float(octets)}
    # The fake's log-probabilities look one token back, so windows change nothing.
    windowed = document_task(window=7, stride=3)
    again = evaluate(windowed, fake_artifact, documents(text), tmp_path, add_bos=bos)["d0"]
    assert again.value == pytest.approx(score.value)
    assert again.weight == score.weight
    never = document_task(bos="never")
    assert (
        evaluate(never, fake_artifact, documents(text), tmp_path, add_bos=True)["d0"].weight
        == octets - 1
    )


def test_a_cut_document_counts_what_was_scored(fake_artifact, tmp_path):
    score = evaluate(
        document_task(max_tokens_per_document=10),
        fake_artifact,
        documents("one two three four"),
        tmp_path,
    )
    assert score["d0"].numbers == {"words": 3.0, "bytes": 10.0}
    assert score["d0"].weight == 9


def test_what_cannot_be_scored_is_an_error_not_a_gap(fake_artifact, tmp_path, monkeypatch):
    scores = evaluate(document_task(), fake_artifact, documents("", "x", "fine text"), tmp_path)
    assert [s.status for s in scores.values()] == ["error", "error", "ok"]
    assert math.isnan(scores["d0"].value)
    monkeypatch.setattr("quanteval.engines.fake._fraction", lambda *_: math.nan)
    broken = evaluate(document_task(), fake_artifact, documents("text"), tmp_path)["d0"]
    assert broken.status == "error"
    assert "scored token 0" in broken.detail


def test_words_are_split_at_white_space():
    assert count_words("a b\n\nc\t d") == 4


# --------------------------------------------------------------------------- divergence


def heads_and_states(seed=0, tokens=300, width=8, vocab=50):
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    return OutputHead(make(vocab, width), make(vocab)), make(tokens, width)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_kl_is_that_of_double_precision(softcap):
    head, states = heads_and_states()
    head = dataclasses.replace(head, softcap=softcap)
    other = states + 0.1 * heads_and_states(1)[1]
    kl, agree = compare(head, states, head, other)

    def logprobs(hidden):
        out = hidden.double() @ head.weight.double().T + head.bias.double()
        out = out if softcap is None else (out / softcap).tanh() * softcap
        return out.log_softmax(-1).numpy()

    p, q = logprobs(states), logprobs(other)
    np.testing.assert_allclose(kl, (np.exp(p) * (p - q)).sum(-1), rtol=1e-3, atol=1e-6)
    assert agree == int((p.argmax(-1) == q.argmax(-1)).sum())


def test_the_same_distribution_has_no_divergence():
    head, states = heads_and_states()
    assert compare(head, states, head, states) == ([0.0] * 300, 300)


def test_tokens_that_the_baseline_excludes_add_nothing():
    head, states = heads_and_states()
    bias = head.bias.clone()
    bias[:10] = -math.inf
    kl, _ = compare(dataclasses.replace(head, bias=bias), states, head, states)
    assert all(math.isfinite(value) and value > 0 for value in kl)


class Hidden:
    """A session that has hidden states and a head, and the fake's tokenizer."""

    max_context = 1000

    def __init__(self, session, noise):
        self.tokenizer, self.generate = session.tokenizer, session.generate
        self.head, self.table = heads_and_states(tokens=300)
        self.noise = noise

    def output_head(self):
        return self.head

    def hidden_states(self, requests):
        for request in requests:
            values = self.table[list(request.token_ids[:-1])]
            yield HiddenStates(request.request_id, values + self.noise)


def test_the_baseline_is_stored_and_compared_with(fake_artifact, tmp_path):
    suite = DivergenceTask(name="t", version="1", source=Source(jsonl="x"), max_tokens=20)
    samples = documents("some text that is longer than twenty tokens", "é/..", "x")
    base, cand = tmp_path / "base", tmp_path / "cand"
    with FakeEngine().serve(fake_artifact) as session:
        with pytest.raises(ConfigError, match="run the baseline with this task first"):
            list(suite.evaluate(Hidden(session, 0.0), samples, TaskContext(cand, base, False)))
        own = list(suite.evaluate(Hidden(session, 0.0), samples, TaskContext(base, base, True)))
        assert [s.value for s in own][:2] == [0.0, 0.0]
        assert [s.status for s in own] == ["ok", "ok", "error"]
        assert [s.weight for s in own][:2] == [19.0, 4.0]
        scores = list(suite.evaluate(Hidden(session, 0.2), samples, TaskContext(cand, base, False)))
        assert all(s.value > 0 for s in scores[:2])
        assert scores[0].value == pytest.approx(sum(scores[0].series["kl"]))
        changed = documents("other text")
        with pytest.raises(EngineError, match="different token ids"):
            list(suite.evaluate(Hidden(session, 0.0), changed, TaskContext(cand, base, False)))
        damaged = next(base.rglob("*.safetensors"))
        for path in base.rglob("*.safetensors"):
            path.write_bytes(damaged.read_bytes()[:20])
        with pytest.raises(RecordError, match="is damaged"):
            list(suite.evaluate(Hidden(session, 0.0), samples, TaskContext(cand, base, False)))
    assert not list(base.rglob(".*"))


# --------------------------------------------------------------------------- loading


def test_rows_of_a_local_file(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "x": 1}\n{"id": "b", "x": 2}\n')
    rows = load_rows(Source(jsonl="rows.jsonl"), str(tmp_path))
    assert [row["id"] for row in rows] == ["a", "b"]
    assert [s.sample_id for s in make_samples(rows, "id", 1)] == ["a"]
    with pytest.raises(ConfigError, match="the suite says"):
        load_rows(Source(jsonl="rows.jsonl", sha256="0"), str(tmp_path))
    with pytest.raises(ConfigError, match="does not exist"):
        load_rows(Source(jsonl="none.jsonl"), str(tmp_path))
    with pytest.raises(ConfigError, match='two rows have the id "a"'):
        make_samples([rows[0], rows[0]], "id", None)
    with pytest.raises(ConfigError, match='row 0 has no "key"'):
        make_samples(rows, "key", None)
    (tmp_path / "bad.jsonl").write_text("{not json\n")
    with pytest.raises(ConfigError, match="line 1 is not JSON") as caught:
        load_rows(Source(jsonl="bad.jsonl"), str(tmp_path))
    assert "\n" not in str(caught.value)


def test_sources_are_checked(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="not allowed"):
        load_rows(Source(loader="os.listdir"), "")
    with pytest.raises(ValueError, match="exactly one"):
        Source(loader="a.b", jsonl="c")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    with pytest.raises(QuantevalError, match='cannot load data set "nobody/nothing"') as caught:
        load_rows(Source(hub="nobody/nothing"), "")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [{"limit": 0}, {"window": 1}, {"stride": 0}, {"stride": 1024}, {"max_tokens_per_document": 1}],
)
def test_wrong_fields_are_refused(fields):
    with pytest.raises(ValueError, match="must be at least"):
        document_task(**fields)

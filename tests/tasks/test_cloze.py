"""Cloze on a session that scores by a table: a row is right when every token of its target is the likeliest."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from quanteval.errors import ConfigError
from quanteval.interfaces import Sample, TaskContext, TokenLogprobs
from quanteval.tasks.cloze import ClozeTask
from quanteval.tasks.loading import Source
from quanteval.tasks.prompting import FewShot
from tests.tasks.scripted import Scripted

SOURCE = Source(jsonl="rows.jsonl")


def cloze_task(**fields):
    return ClozeTask(name="t", version="1", source=SOURCE, **fields)


def row(key, context, target):
    return Sample(key, {"id": key, "context": context, "target": target})


def evaluate(suite, session, samples):
    scores = list(suite.evaluate(session, samples, TaskContext(None, None, True)))
    assert [s.sample_id for s in scores] == [s.sample_id for s in samples]
    return scores


def test_right_means_every_token_is_the_likeliest():
    session = Scripted({" sea": -0.5, " sky": -3.0}, top1={" sea"})
    right, wrong = evaluate(
        cloze_task(), session, [row("a", "I see the", "sea"), row("b", "I see the", "sky")]
    )
    assert (right.value, right.outcome, right.status) == (1.0, "right", "ok")
    assert right.numbers == {"logprob": pytest.approx(-0.5), "tokens": 4.0}
    assert (wrong.value, wrong.outcome, wrong.weight) == (0.0, "wrong", 1.0)
    assert wrong.numbers["logprob"] == pytest.approx(-3.0)
    assert right.prompt_sha256 != wrong.prompt_sha256
    assert [bytes(r.token_ids) for r in session.calls[0]] == [b"I see the sea", b"I see the sky"]


def test_one_token_that_is_not_the_likeliest_is_enough():
    class Almost(Scripted):
        def loglikelihood(self, requests):
            for request in requests:
                count = len(request.token_ids) - request.first_scored
                hits = np.arange(count) < count - 1
                yield TokenLogprobs(request.request_id, np.full(count, -0.1), hits)

    (score,) = evaluate(cloze_task(), Almost({}), [row("a", "x", "yz")])
    assert score.value == 0.0


def test_what_cannot_be_scored_is_an_error_in_its_turn():
    session = Scripted({" bad": math.nan, " ok": -1.0}, top1={" ok", " bad"}, max_context=20)
    scores = evaluate(
        cloze_task(),
        session,
        [
            row("a", "w" * 30, "ok"),
            row("b", "w", "ok"),
            row("c", "w", "bad"),
            row("d", "w" * 20, "ok"),
        ],
    )
    assert [s.status for s in scores] == ["error", "ok", "error", "error"]
    assert [s.value for s in scores] == [0.0, 1.0, 0.0, 0.0]
    assert scores[2].detail == "log-likelihood nan of the target"
    assert scores[2].numbers == {}
    assert "33 tokens are more than the 20" in scores[0].detail
    cut = cloze_task(on_overlong="truncate")
    (score,) = evaluate(cut, session, [row("a", "w" * 30, "ok")])
    assert (score.status, score.value, score.numbers["cut_tokens"]) == ("ok", 1.0, 13.0)
    (empty,) = evaluate(cloze_task(target="{{ target }}"), session, [row("a", "w", "")])
    assert (empty.status, "no token of its own" in empty.detail) == ("error", True)
    assert list(cloze_task().evaluate(session, [], TaskContext(None, None, True))) == []


def test_examples_and_chat(monkeypatch):
    rows = [{"id": "e", "context": "One two", "target": "three"}]
    monkeypatch.setattr("quanteval.tasks.prompting.load_rows", lambda source, folder: rows)
    shots = FewShot(count=1, source=SOURCE, separator="\n", description="Go on. ")
    suite, session = cloze_task(shots=shots), Scripted({})
    sample = row("a", "Four five", "six")
    assert suite.render(session, sample) == ("Go on. One two three\nFour five", " six")
    chat = dataclasses.replace(suite, form="chat")
    assert chat.render(session, sample) == (
        "<user>Go on. One two\n<assistant>three\n<user>Four five\n<assistant>",
        "six",
    )
    evaluate(chat, session, [sample])
    assert bytes(session.calls[0][0].token_ids).decode() == "".join(chat.render(session, sample))


CHANGES = {
    "version": "2",
    "prompt": "{{ context }}!",
    "target": "{{ target }}",
    "form": "chat",
    "shots": FewShot(description="Hello. "),
    "on_overlong": "truncate",
}
LEFT_OUT = {
    "name": "u",
    "folder": "/elsewhere",
    "source": Source(hub="a/b"),
    "id_field": "k",
    "limit": 3,
    "description": "x",
    "licence": "x",
}


def test_the_fingerprint_has_every_field_that_matters_and_no_other():
    base, samples = cloze_task(), [row("a", "x", "y")]
    assert {f.name for f in dataclasses.fields(base)} == {*CHANGES, *LEFT_OUT}
    before = base.fingerprint(samples)
    for field, value in CHANGES.items():
        assert dataclasses.replace(base, **{field: value}).fingerprint(samples) != before, field
    for field, value in LEFT_OUT.items():
        assert dataclasses.replace(base, **{field: value}).fingerprint(samples) == before, field


def test_a_row_without_a_field_is_refused_before_anything_is_scored(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "r", "context": "x"}))
    with pytest.raises(ConfigError, match="'target' is undefined") as caught:
        cloze_task(folder=str(tmp_path)).samples()
    assert 'sample "r"' in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="target: template"):
        cloze_task(target="{{")

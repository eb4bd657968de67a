"""Windows of each mode score the right tokens, and agree with the tools whose names they carry."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quanteval.engines.fake import BEGIN, FakeEngine
from quanteval.errors import EngineError
from quanteval.interfaces import Calibration, Sample, TaskContext
from quanteval.schemes.none import Unquantized
from quanteval.tasks.grouped import score_grouped
from quanteval.tasks.loading import Source
from quanteval.tasks.perplexity import PerplexityTask, harness_windows, llama_cpp_windows


@pytest.fixture(scope="module")
def artifact(tiny_source, tmp_path_factory):
    out = tmp_path_factory.mktemp("a")
    return Unquantized("float32").quantize(tiny_source, out, Calibration(), "cpu")


def task(**fields):
    return PerplexityTask(name="t", version="1", source=Source(jsonl="x"), **fields)


def evaluate(suite, artifact, texts, **engine):
    samples = [Sample(str(i), {"text": text}) for i, text in enumerate(texts)]
    from pathlib import Path

    with FakeEngine(**engine).serve(artifact) as session:
        asked = []
        real = session.loglikelihood

        def spy(requests):
            for request in requests:
                asked.append(request)
                yield from real([request])

        session.loglikelihood = spy
        scores = list(suite.evaluate(session, samples, TaskContext(Path(), Path(), True)))
    return scores, asked


@given(length=st.integers(1, 120), window=st.integers(2, 40))
def test_harness_windows_are_the_harnesss(length, window):
    lm_eval = pytest.importorskip("lm_eval.utils")
    ids = list(range(1, length + 1))
    ours = [
        ([0, *ids][start:first], [0, *ids][first:end], end - start)
        for start, end, first in harness_windows(length + 1, window)
    ]
    theirs = lm_eval.get_rolling_token_windows(ids, 0, window - 1, 1)
    expected = []
    for overlapping in theirs:
        context, scored = lm_eval.make_disjoint_window(overlapping)
        expected.append((context, scored, len(context) + len(scored)))
    assert ours == expected


@given(length=st.integers(0, 200), half=st.integers(2, 20))
def test_llama_cpp_scores_the_second_half_of_each_whole_chunk(length, half):
    window = 2 * half
    windows = llama_cpp_windows(length, window)
    assert len(windows) == length // window
    for number, (start, end, first) in enumerate(windows):
        assert (start, end) == (number * window, (number + 1) * window)
        # n_ctx - 1 - n_ctx / 2 tokens of each chunk.
        assert end - first == window - 1 - half


def test_a_llama_cpp_chunk_begins_with_the_begin_token(artifact):
    text = "abcdefghijklmnopqrstuvwxyz"
    suite = task(mode="llama.cpp", window=8)
    (score,), asked = evaluate(suite, artifact, [text], add_bos=True)
    ids = (BEGIN, *text.encode())
    assert [r.token_ids for r in asked] == [
        (BEGIN, *ids[start + 1 : start + 8]) for start in (0, 8, 16)
    ]
    assert {r.first_scored for r in asked} == {5}
    assert score.weight == 3 * 3
    assert score.numbers == {"bytes": 9.0}
    assert score.series["window_tokens"] == [3.0] * 3
    assert math.fsum(score.series["window_nll"]) == pytest.approx(score.value)
    without, asked = evaluate(suite, artifact, [text])
    assert asked[0].token_ids == tuple(text[:8].encode())
    assert without[0].weight == 9


def test_a_text_shorter_than_a_chunk_is_an_error_with_its_length(artifact):
    (score,), _ = evaluate(task(mode="llama.cpp", window=64), artifact, ["short"])
    assert (score.status, score.detail) == ("error", "5 tokens: nothing to score below 64")


def test_a_chunk_longer_than_the_context_is_refused_not_shortened(tiny_source, artifact, tmp_path):
    from quanteval.engines.transformers import TransformersEngine

    suite = task(mode="llama.cpp", window=64)
    served = Unquantized("float32").quantize(tiny_source, tmp_path, Calibration(), "cpu")
    context = TaskContext(tmp_path, tmp_path, True)
    with TransformersEngine(max_context=32).serve(served) as session:
        sample = Sample("a", {"text": "x" * 200})
        with pytest.raises(EngineError, match="64 tokens, more than the 33"):
            list(suite.evaluate(session, [sample], context))


def test_always_puts_what_the_tokenizer_does_not(artifact):
    (always,), asked = evaluate(task(bos="always"), artifact, ["abc"])
    assert asked[0].token_ids == (BEGIN, *b"abc")
    assert always.weight == 3
    _, asked = evaluate(task(bos="always"), artifact, ["abc"], add_bos=True)
    assert asked[0].token_ids == (BEGIN, *b"abc")
    (plain,), asked = evaluate(task(), artifact, ["abc"])
    assert asked[0].token_ids == tuple(b"abc")
    assert plain.weight == 2


def test_words_and_bytes_are_those_of_the_counted_text(artifact):
    suite = task(counted_field="page")
    sample = Sample("a", {"text": "one two", "page": "one  two three"})
    with FakeEngine().serve(artifact) as session:
        (score,) = suite.evaluate(session, [sample], None)
    assert score.numbers == {"words": 3.0, "bytes": 14.0}
    assert score.weight == 6


def test_all_documents_are_asked_for_in_one_call(artifact):
    calls = []
    with FakeEngine().serve(artifact) as session:
        real = session.loglikelihood

        def counted(requests):
            calls.append(1)
            yield from real(requests)

        session.loglikelihood = counted
        samples = [Sample(str(i), {"text": "word " * 30}) for i in range(4)]
        scores = list(task(window=16, stride=8).evaluate(session, samples, None))
    assert len(calls) == 1
    assert [score.sample_id for score in scores] == ["0", "1", "2", "3"]


def test_empty_documents_between_others_keep_their_place(artifact):
    scores, _ = evaluate(task(), artifact, ["", "abc", "", "x", "de", ""])
    assert [(s.sample_id, s.status) for s in scores] == [
        ("0", "error"), ("1", "ok"), ("2", "error"), ("3", "error"), ("4", "ok"), ("5", "error"),
    ]  # fmt: skip


def test_results_out_of_turn_or_missing_are_errors(artifact):
    from quanteval.interfaces import ScoreRequest

    groups = [("a", [ScoreRequest("1", (1, 2))]), ("b", [ScoreRequest("2", (1, 2))])]
    with FakeEngine().serve(artifact) as session:
        real = session.loglikelihood
        session.loglikelihood = lambda requests: iter(list(real(requests))[::-1])
        with pytest.raises(EngineError, match='"2" was scored out of turn'):
            list(score_grouped(session, groups))
        session.loglikelihood = lambda requests: iter(list(real(requests))[:1])
        with pytest.raises(EngineError, match='"2" was not scored'):
            list(score_grouped(session, groups))


def test_windows_are_in_the_fingerprint():
    prints = [
        str(task(**fields).fingerprint([]))
        for fields in (
            {}, {"mode": "harness"}, {"mode": "llama.cpp"}, {"bos": "always"}, {"bos": "never"},
            {"window": 64, "stride": 8}, {"counted_field": "page"},
        )
    ]  # fmt: skip
    assert len(set(prints)) == len(prints)
    assert np.all([task(mode="harness", stride=s).fingerprint([]) for s in (1, 2)])

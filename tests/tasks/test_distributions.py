"""Distributions as servers tell them: the divergence is a lower bound, exact where the lists are whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from quanteval.engines.fake import FakeEngine, FakeSession
from quanteval.errors import ConfigError, UnsupportedError
from quanteval.interfaces import Sample, TaskContext, TopLogprobs
from quanteval.tasks.distributions import Store, kl_of_tops, open_form
from quanteval.tasks.divergence import DivergenceTask
from quanteval.tasks.loading import Source

LOGITS = arrays(np.float64, (3, 12), elements=st.floats(-8, 8, width=32))


def top(logits, k):
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-logprobs, axis=-1, kind="stable")[:, :k]
    return ids, np.take_along_axis(logprobs, ids, -1)


def exact_kl(p, q):
    p = p - np.log(np.exp(p).sum(-1, keepdims=True))
    q = q - np.log(np.exp(q).sum(-1, keepdims=True))
    return (np.exp(p) * (p - q)).sum(-1)


@given(LOGITS, LOGITS, st.integers(1, 12))
def test_top_tokens_give_a_lower_bound_that_is_exact_for_whole_lists(p, q, k):
    found = kl_of_tops(*top(p, k), *top(q, k)).kl
    truth = exact_kl(p, q)
    assert all(value <= wanted + 1e-5 for value, wanted in zip(found, truth, strict=True))
    assert all(value >= 0 for value in found)
    if k == 12:
        np.testing.assert_allclose(found, truth, atol=2e-5)


@given(LOGITS, st.integers(1, 12))
def test_equal_distributions_do_not_diverge(p, k):
    found = kl_of_tops(*top(p, k), *top(p, k))
    assert found.kl == pytest.approx([0, 0, 0], abs=1e-9)
    assert found.agree == 3


def test_disjoint_lists_still_count_what_they_must():
    ids, logprobs = np.array([[0]]), np.log([[0.9]])
    found = kl_of_tops(ids, logprobs, np.array([[1]]), np.log([[0.9]]))
    assert found.agree == 0
    assert found.kl == [0.0]  # nothing is shared: all tokens together are one outcome


class TopSession(FakeSession):
    """A fake server that tells its most probable tokens; `shift` is the damage of a scheme."""

    shift = 0.0

    def top_logprobs(self, requests, k):
        for request in requests:
            count = len(request.token_ids) - request.first_scored
            base = np.log(np.linspace(0.3, 0.001, k))
            base[0] -= self.shift
            yield TopLogprobs(
                request.request_id, np.tile(np.arange(k), (count, 1)), np.tile(base, (count, 1))
            )


@pytest.fixture
def session(fake_artifact):
    def make(kind=TopSession, shift=0.0):
        made = kind(FakeEngine(), fake_artifact, 0.0)
        made.shift = shift
        return made

    return make


def scores(tmp_path, made, *, is_baseline):
    task = DivergenceTask("d", "1", Source(jsonl="x"), greedy_tokens=0)
    samples = [Sample("a", {"text": "abcdef"}), Sample("b", {"text": "xyz"})]
    context = TaskContext(tmp_path / "v", tmp_path / "base", is_baseline)
    return list(task.evaluate(made, samples, context))


def test_the_task_compares_most_probable_tokens_where_there_are_no_hidden_states(tmp_path, session):
    base = scores(tmp_path, session(), is_baseline=True)
    assert [s.value for s in base] == [0, 0]
    same = scores(tmp_path, session(), is_baseline=False)
    assert [s.value for s in same] == pytest.approx([0, 0], abs=1e-12)
    worse = scores(tmp_path, session(shift=0.5), is_baseline=False)
    assert all(s.status == "ok" and s.value > 0.01 for s in worse)
    assert worse[0].detail == "lower bound: from the 20 most probable tokens, the rest as one"


def test_forms_are_never_mixed(tmp_path, session):
    store = Store(tmp_path)
    open_form(session(), store, True)
    store.write("form", {"k": np.array([5])}, {"form": "5 most probable tokens"})
    with pytest.raises(
        ConfigError, match=r'baseline stored "5 most .*measure both through the same'
    ):
        open_form(session(), store, False)


def test_an_engine_that_gives_neither_is_named(tmp_path, session):
    with pytest.raises(UnsupportedError, match="no output head"):
        open_form(session(FakeSession), Store(tmp_path), True)

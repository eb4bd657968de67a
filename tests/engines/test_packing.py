"""Packing: each sequence's tokens are computed once for all that share them, and see exactly their own path."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quanteval.engines import packing
from quanteval.engines.packing import build_tree, plan, plan_alone

token_lists = st.lists(
    st.lists(st.integers(0, 2), min_size=2, max_size=14), min_size=1, max_size=12
)


def asked(lists, data):
    sequences = [np.array(ids) for ids in lists]
    firsts = [data.draw(st.integers(1, len(ids) - 1)) for ids in sequences]
    return sequences, firsts


def follow(forwards):
    """Return for each scored (sequence, position) the tokens that its row sees, in order of depth."""
    seen, cached = {}, {}
    for number, forward in enumerate(forwards):
        tokens, positions = forward.tokens(), forward.positions()
        before = cached[forward.past] if forward.past is not None else []
        assert len(before) == forward.past_length
        visible = forward.visible()
        assert visible.shape == (forward.size, forward.past_length + forward.size)
        if forward.kept:
            assert forward.chain
            cached[number] = before + [
                (int(p), int(t)) for p, t in zip(positions, tokens, strict=True)
            ]
        own = before + [(int(p), int(t)) for p, t in zip(positions, tokens, strict=True)]
        for span, row in forward.spans():
            for offset in range(span.high - span.low):
                path = sorted(own[i] for i in np.flatnonzero(visible[row + offset]))
                assert [p for p, _ in path] == list(range(len(path)))
                key = (span.sequence, span.slot + offset)
                assert key not in seen
                seen[key] = [t for _, t in path]
    return seen


@settings(deadline=None)
@given(lists=token_lists, budget=st.integers(1, 40), trunk=st.integers(1, 6), data=st.data())
def test_every_scored_token_sees_its_own_prefix_and_nothing_else(lists, budget, trunk, data):
    sequences, firsts = asked(lists, data)
    before, packing.MIN_TRUNK_TOKENS = packing.MIN_TRUNK_TOKENS, trunk
    try:
        forwards = plan(build_tree(sequences, firsts), budget)
    finally:
        packing.MIN_TRUNK_TOKENS = before
    expected = {
        (i, k): list(ids[: first + k])
        for i, (ids, first) in enumerate(zip(sequences, firsts, strict=True))
        for k in range(len(ids) - first)
    }
    assert follow(forwards) == expected
    for number, forward in enumerate(forwards):
        assert forward.past is None or (forward.past < number and forwards[forward.past].kept)
        assert forward.size <= budget or forward.chain


@given(lists=token_lists, data=st.data())
def test_one_forward_a_sequence(lists, data):
    sequences, firsts = asked(lists, data)
    forwards = plan_alone(sequences, firsts)
    assert len(forwards) == len(sequences)
    assert all(forward.chain and not forward.kept for forward in forwards)
    assert len(follow(forwards)) == sum(len(i) - f for i, f in zip(sequences, firsts, strict=True))


def test_a_shared_prefix_is_computed_once():
    question = np.arange(100)
    choices = [np.concatenate([question, [200 + i, 300, 301]]) for i in range(4)]
    (forward,) = plan(build_tree(choices, [100] * 4), 512)
    # The last token of each is only a target.
    assert forward.size == 100 + 4 * 2


def test_choices_of_one_token_cost_nothing_beyond_the_question():
    choices = [np.array([5, 6, 7, 90 + i]) for i in range(4)]
    (forward,) = plan(build_tree(choices, [3] * 4), 512)
    assert forward.size == 3
    assert forward.chain
    assert [(span.sequence, row) for span, row in forward.spans()] == [(i, 2) for i in range(4)]


def test_few_shot_examples_are_kept_for_all_their_questions():
    rng = np.random.default_rng(0)
    shots = rng.integers(1000, 2000, 300)
    asked = [np.concatenate([shots, [k], rng.integers(0, 1000, 59)]) for k in range(40)]
    forwards = plan(build_tree(asked, [300] * 40), 512)
    assert forwards[0].kept
    assert forwards[0].size == 300
    assert all(f.past == 0 and f.past_length == 300 for f in forwards[1:])
    assert sum(f.size for f in forwards) == 300 + 40 * 59


def test_a_short_shared_prefix_is_not_worth_keeping():
    rng = np.random.default_rng(0)
    begin = np.array([1])
    texts = [np.concatenate([begin, rng.integers(2, 10_000, 400)]) for _ in range(5)]
    forwards = plan(build_tree(texts, [1] * 5), 512)
    assert len(forwards) == 5
    assert all(f.past is None and f.chain for f in forwards)


def test_a_thousand_nested_prefixes_do_not_exhaust_the_stack():
    ids = np.arange(3000)
    sequences = [np.concatenate([ids[:i], [9999, 1]]) for i in range(1, 3000)]
    forwards = plan(build_tree(sequences, [len(s) - 1 for s in sequences]), 64)
    assert sum(len(list(f.spans())) for f in forwards) == len(sequences)


def test_a_small_tree_is_cut_evenly_for_several_workers():
    rng = np.random.default_rng(0)
    texts = [np.concatenate([[k], rng.integers(100, 9000, 60)]) for k in range(20)]
    sizes = [f.size for f in plan(build_tree(texts, [1] * 20), 512, workers=2)]
    assert len(sizes) == 4
    assert max(sizes) <= 1.3 * min(sizes)
    assert len(plan(build_tree(texts, [1] * 20), 512)) == 3
    (one,) = plan(build_tree(texts[:2], [1] * 2), 512, workers=4)
    assert one.size == 120

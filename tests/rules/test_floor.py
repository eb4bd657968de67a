"""The floor under a candidate's own score: exact bounds, fractions, errors, and what is missing."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quanteval.evidence import RuleContext
from quanteval.records import SequentialLook
from quanteval.rules.floor import Floor
from quanteval.stats import clopper_pearson_bound, score_bound
from tests.gate import evidence as make

FLOOR = Floor(min=0.5, kind="code")


def one(rule, *scores, base=(), **context):
    (finding,) = rule.check(
        "floor", make.variant("base", *base), make.variant("cand", *scores), RuleContext(**context)
    )
    return finding


def solved(k, n=100, **more):
    return make.scores(values=np.r_[np.ones(k), np.zeros(n - k)], **more)


@pytest.mark.parametrize(
    ("k", "outcome"), [(59, "accept"), (58, "inconclusive"), (42, "inconclusive"), (41, "reject")]
)
def test_a_score_is_judged_by_exact_bounds(k, outcome):
    finding = one(FLOOR, solved(k))
    assert finding.outcome == outcome
    assert finding.lower == pytest.approx(clopper_pearson_bound(k, 100, 0.05, "lower"))
    assert finding.upper == pytest.approx(clopper_pearson_bound(k, 100, 0.05, "upper"))
    assert (finding.estimate, finding.n, finding.margin) == (pytest.approx(k / 100), 100, 0.5)
    assert finding.required
    assert not FLOOR.is_quality


def test_the_sentences_of_a_floor():
    assert one(FLOOR, solved(70)).sentence == (
        "code: scores 70.0 % (n=100), at least 61.6 % with 95 % confidence: above the floor of 50 %"
    )
    assert one(FLOOR, solved(30)).sentence == (
        "code: scores 30.0 % (n=100), at most 38.4 % with 95 % confidence: below the floor of 50 %"
    )
    assert "undecided at the floor of 50 %" in one(FLOOR, solved(50)).sentence


def test_the_level_is_kept_at_the_floor():
    """Of candidates exactly at the floor no more than alpha are accepted: sums over all counts, no simulation."""
    for n in (20, 50, 164):
        for floor in (0.3, 0.5, 0.9):
            counts = np.arange(n + 1)
            chance = np.array([math.comb(n, k) * floor**k * (1 - floor) ** (n - k) for k in counts])
            rule = Floor(min=floor, kind="code")
            accepted = [one(rule, solved(k, n)).outcome == "accept" for k in range(n + 1)]
            rejected = [one(rule, solved(k, n)).outcome == "reject" for k in range(n + 1)]
            assert chance[accepted].sum() <= 0.05
            assert chance[rejected].sum() <= 0.05


def test_fractions_and_problems_are_judged_by_the_score_test():
    values = np.r_[np.full(60, 0.75), np.full(40, 0.5)]
    finding = one(FLOOR, make.scores(values=values))
    assert finding.lower == pytest.approx(score_bound(values, 0.05, "lower", 0, 1), abs=1e-9)
    assert finding.outcome == "accept"
    problems = tuple(f"p{i // 4}" for i in range(80))
    grouped = make.scores(values=np.tile([1, 1, 1, 0], 20), problem_ids=problems)
    finding = one(FLOOR, grouped)
    assert (finding.n, finding.estimate) == (20, 0.75)
    assert "(n=20 problems, 80 samples)" in finding.sentence


def test_an_errored_sample_counts_zero():
    finding = one(FLOOR, solved(100, status=("error",) * 45 + ("ok",) * 55))
    assert (finding.outcome, finding.estimate) == ("inconclusive", pytest.approx(0.55))


def test_what_has_no_score_is_invalid():
    whole = solved(90)
    running = dataclasses.replace(
        whole, record=whole.record.model_copy(update={"status": "running"})
    )
    for scores, says in (
        (running, "not finished"),
        (solved(0, 0), "no samples"),
        (solved(90, expected=101), "1 of 101 samples were not scored"),
        (make.scores(values=[1, np.nan]), '"s1" has no finite score'),
        (make.scores(values=[1, 1.5]), "outside 0 to 1"),
        (solved(90, status=("error",) * 100), "every sample errored"),
        (solved(90, sample_ids=("s0",) * 100), "a sample twice"),
    ):
        finding = one(FLOOR, scores)
        assert finding.outcome == "invalid"
        assert says in finding.sentence
    assert one(FLOOR).outcome == "skipped"
    assert one(FLOOR, base=[whole]).outcome == "invalid"
    assert one(Floor(min=0.5, task="code")).outcome == "invalid"
    assert one(FLOOR, running, max_missing=0.1).outcome == "invalid"


def test_one_sample_shows_little():
    assert one(FLOOR, solved(1, 1)).outcome == "inconclusive"
    assert one(Floor(min=0.04, task="code"), solved(1, 1)).outcome == "accept"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 1), min_size=20, max_size=60),
    st.sets(st.integers(0, 19), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.sampled_from([0.2, 0.5, 0.8]),
)
def test_losing_a_sample_never_helps(values, rows, group, removed, floor):
    values = np.array(values, dtype=float)
    n = len(values)
    problems = tuple(f"p{i // group}" for i in range(n)) if group > 1 else ()
    whole = make.scores(values=values, problem_ids=problems)
    if removed:
        keep = [i for i in range(n) if i not in rows]
        less = make.scores(
            values=values[keep], expected=n,
            problem_ids=tuple(problems[i] for i in keep) if problems else (),
        )  # fmt: skip
    else:
        status = tuple("error" if i in rows else "ok" for i in range(n))
        less = make.scores(values=values, problem_ids=problems, status=status)
    rule = Floor(min=floor, kind="code")
    before, after = one(rule, whole, max_missing=0.5), one(rule, less, max_missing=0.5)
    assert not (after.outcome == "accept" and before.outcome != "accept")
    assert after.outcome == "invalid" or after.lower <= before.lower + 1e-9


def test_a_task_that_stops_when_it_likes_is_judged_by_bets():
    look = SequentialLook(
        method="betting", fractions=[0.5, 1.0], look=2, order_seed=1, samples_planned=100
    )
    scores = solved(99)
    record = scores.record.model_copy(update={"sequential": look})
    finding = one(FLOOR, dataclasses.replace(scores, record=record))
    assert finding.outcome == "accept"
    assert finding.method == "betting e-process, valid at every look"
    assert finding.lower < one(FLOOR, scores).lower


@pytest.mark.parametrize("bad", [0, 1, -0.1, 1.1, math.nan])
def test_a_floor_lies_between_0_and_1(bad):
    with pytest.raises(ValueError, match="min"):
        Floor(min=bad, kind="code")


def test_other_wrong_parameters_are_refused():
    with pytest.raises(ValueError, match="exactly one"):
        Floor(min=0.5)
    with pytest.raises(ValueError, match="alpha"):
        Floor(min=0.5, kind="code", alpha=0.0)

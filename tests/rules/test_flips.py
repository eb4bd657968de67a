"""Flips and agreement of outputs: their bounds, the repeated baseline, and what lost samples can and cannot do."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quanteval.evidence import RuleContext
from quanteval.records import SequentialLook
from quanteval.rules.flips import Flips, GreedyAgreement
from quanteval.stats import absolute_loss, clopper_pearson_bound, score_bound
from tests.gate import evidence as make

FLIPS = Flips(max=0.1, kind="code")
AGREE = GreedyAgreement(min=0.8, kind="code")
N = 164


def flipped(n=N, broken=0, fixed=0):
    base, cand = np.ones(n), np.ones(n)
    cand[:broken] = 0
    base[broken : broken + fixed] = 0
    return base, cand


def texts(n=N, changed=0, lost=0):
    """Return hashes of outputs: the first `changed` differ from 't0', 't1', ..., the next `lost` are none."""
    out = [f"t{i}" for i in range(n)]
    out[:changed] = [f"other {i}" for i in range(changed)]
    out[changed : changed + lost] = [""] * lost
    return tuple(out)


def one(rule, base, cand, again=None, **context):
    repeated = None if again is None else make.variant("base_again", again)
    (finding,) = rule.check(
        "rule", make.variant("base", base), make.variant("cand", cand),
        RuleContext(again=repeated, **context),
    )  # fmt: skip
    return finding


def sides(broken=0, fixed=0, n=N, **more):
    base, cand = flipped(n, broken, fixed)
    return make.scores(values=base), make.scores(values=cand, **more)


def without(scores, *rows, planned=True):
    """Return a score set that lacks some samples."""
    keep = [i for i in range(len(scores.sample_ids)) if i not in rows]
    columns = {
        name: tuple(getattr(scores, name)[i] for i in keep)
        for name in ("sample_ids", "prompt_sha256", "status", "finish_reason", "outcome",
                     "problem_ids", "output_sha256")
        if getattr(scores, name)
    }  # fmt: skip
    arrays = {name: getattr(scores, name)[keep] for name in ("value", "weight", "output_tokens")}
    record = scores.record
    if not planned:
        record = record.model_copy(update={"samples_expected": len(keep)})
    return dataclasses.replace(scores, record=record, **columns, **arrays)


# --------------------------------------------------------------------------- flips


@pytest.mark.parametrize(
    ("broken", "fixed", "outcome"),
    [(4, 4, "accept"), (0, 0, "accept"), (8, 8, "inconclusive"), (20, 15, "reject")],
)
def test_both_kinds_of_flips_are_counted(broken, fixed, outcome):
    finding = one(FLIPS, *sides(broken, fixed))
    assert finding.outcome == outcome
    assert (finding.broken, finding.fixed, finding.n) == (broken, fixed, N)
    total = broken + fixed
    assert finding.estimate == pytest.approx(total / N)
    assert finding.lower == pytest.approx(clopper_pearson_bound(total, N, 0.05, "lower"))
    assert finding.upper == pytest.approx(clopper_pearson_bound(total, N, 0.05, "upper"))
    assert (finding.confidence, finding.margin, finding.unit) == (0.95, 0.1, "share")


def test_the_sentences_of_flips():
    assert one(FLIPS, *sides(5, 3)).sentence == (
        "code: 8 of 164 flipped (4.9 %, 5 worse, 3 better), at most 8.6 % with 95 % confidence: "
        "within the limit of 10 %"
    )
    assert one(FLIPS, *sides(8, 8)).sentence == (
        "code: 16 of 164 flipped (9.8 %, 8 worse, 8 better), between 6.2 % and 14.4 % with 95 % confidence each: "
        "undecided at the limit of 10 %"
    )
    told = one(FLIPS, *sides(20, 15), again=sides(2, 1)[1]).sentence
    assert "at least 16.2 % with 95 % confidence: beyond the limit of 10 %" in told


def test_no_flip_on_a_small_suite_shows_nothing():
    """28 pairs are too few for 10 % and 29 are enough: 0.9^29 < 0.05."""
    assert one(FLIPS, *sides(n=28)).outcome == "inconclusive"
    assert one(FLIPS, *sides(n=29)).outcome == "accept"
    assert one(FLIPS, *sides(n=1)).outcome == "inconclusive"


def test_a_problem_with_several_samples_counts_once():
    problems = tuple(f"p{i // 2}" for i in range(80))
    base = make.scores(values=np.ones(80), problem_ids=problems)
    cand = make.scores(values=np.r_[0, 0, 0, np.ones(77)], problem_ids=problems)
    finding = one(FLIPS, base, cand)
    assert (finding.n, finding.broken) == (40, 2)
    swapped = make.scores(values=np.r_[np.ones(78), 0, 1], problem_ids=problems)
    other = make.scores(values=np.r_[np.ones(78), 1, 0], problem_ids=problems)
    assert one(FLIPS, swapped, other).broken == 0


def test_what_flips_cannot_use():
    good = make.scores(values=np.ones(3))
    for bad, says in (
        (make.scores(values=[1, np.nan, 1]), '"s1" has no finite score'),
        (make.scores(values=[1, 2, 1]), "outside 0 to 1"),
        (make.scores(values=np.ones(3), status=("error",) * 3), "every sample errored"),
        (make.scores(values=[]), "no sample was scored"),
        (without(good, 1), "more than the 0.0% that may be missing"),
    ):
        for base, cand in ((good, bad), (bad, good)):
            finding = one(FLIPS, base, cand)
            assert finding.outcome == "invalid"
        assert says in finding.sentence
    assert one(Flips(max=0.1, kind="maths"), good, good).outcome == "skipped"
    assert one(Flips(max=0.1, task="maths"), good, good).outcome == "invalid"


def test_an_error_is_a_flip_for_acceptance_and_none_for_rejection():
    status = ("error",) * 10 + ("ok",) * (N - 10)
    base, cand = sides(10, 0, status=status)
    finding = one(FLIPS, base, cand)
    assert finding.outcome == "inconclusive"
    assert (finding.estimate, finding.lower) == (0, 0)
    assert finding.upper == pytest.approx(clopper_pearson_bound(10, N, 0.05, "upper"))
    assert finding.sentence.endswith("; 10 problems that errored count as flips for acceptance")
    # An error of the baseline, which counts as right elsewhere, does not hide a flip either.
    broken = make.scores(values=np.zeros(N), status=status)
    assert one(FLIPS, broken, make.scores(values=np.r_[np.ones(10), np.zeros(N - 10)])).upper == (
        finding.upper
    )


@pytest.mark.parametrize("excess", [False, True])
def test_missing_samples_count_as_flips(excess):
    rule = dataclasses.replace(FLIPS, excess=excess)
    base, cand = sides(4, 0)
    again = sides()[1]
    whole = one(rule, base, cand, again)
    part = one(rule, base, without(cand, 0, 1, 2, 3), again, max_missing=0.05)
    assert whole.outcome == part.outcome == "accept"
    assert part.upper >= whole.upper
    assert part.lower <= whole.lower
    assert "4 missing samples count as flips" in part.sentence
    assert one(rule, base, without(cand, *range(100, 112)), again, max_missing=0.1).outcome == (
        "inconclusive"
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(30, 60),
    st.integers(0, 6),
    st.integers(0, 6),
    st.lists(st.integers(0, 59), min_size=1, max_size=4, unique=True),
    st.sampled_from(["cand", "base", "both", "error_cand", "error_base"]),
    st.sampled_from([0.1, 0.2, 0.3]),
)
def test_losing_a_sample_never_helps(n, broken, fixed, rows, how, limit):
    base, cand = sides(broken, fixed, n)
    base = dataclasses.replace(base, output_sha256=texts(n))
    cand = dataclasses.replace(cand, output_sha256=texts(n, changed=broken))
    rows = [row % n for row in rows]
    less_base, less_cand = base, cand
    if how in ("base", "both"):
        less_base = without(base, *rows)
    if how in ("cand", "both"):
        less_cand = without(cand, *rows)
    if how.startswith("error"):
        status = tuple("error" if i in rows else "ok" for i in range(n))
        value = np.where([s == "error" for s in status], 0.0, 1.0)
        if how == "error_base":
            less_base = dataclasses.replace(base, status=status, value=base.value * value)
        else:
            less_cand = dataclasses.replace(cand, status=status, value=cand.value * value)
    for rule in (Flips(max=limit, kind="code"), GreedyAgreement(min=1 - limit, kind="code")):
        before = one(rule, base, cand, max_missing=0.5)
        after = one(rule, less_base, less_cand, max_missing=0.5)
        assert not (after.outcome == "accept" and before.outcome != "accept")


# --------------------------------------------------------------------------- beyond the repeated baseline

EXCESS = Flips(max=0.1, kind="code", excess=True)


def test_flips_beyond_the_repeated_baselines_are_judged_as_pairs():
    base, cand = sides(20, 10)
    _, again = sides(18, 10)
    finding = one(EXCESS, base, cand, again)
    assert finding.outcome == "accept"
    assert one(FLIPS, base, cand, again).outcome == "reject"
    both = (again.value != base.value, cand.value != base.value)
    more, fewer = int((both[1] & ~both[0]).sum()), int((both[0] & ~both[1]).sum())
    assert finding.estimate == pytest.approx((more - fewer) / N)
    assert (more, fewer) == (2, 0)
    expected = absolute_loss(both[1].astype(float), both[0].astype(float), 0.1)
    assert (finding.lower, finding.upper) == (expected.lower, expected.upper)
    assert finding.method == "exact unconditional test, Tango's ordering"
    assert finding.metric == "flips beyond the repeated baseline's"


@pytest.mark.parametrize(
    ("broken", "outcome"), [(2, "accept"), (16, "inconclusive"), (40, "reject")]
)
def test_excess_flips_accept_reject_and_leave_open(broken, outcome):
    base, cand = sides(broken)
    again = make.scores(values=np.r_[np.ones(N - 2), 0, 0])
    finding = one(EXCESS, base, cand, again)
    assert finding.outcome == outcome
    points = f"{100 * (broken - 2) / N:.1f}"
    assert f"the repeated baseline 2: {points} points more, " in finding.sentence


def test_without_a_repetition_there_is_no_excess():
    base, cand = sides(1)
    needed = dataclasses.replace(EXCESS, required=True)
    unlike = dataclasses.replace(
        base, record=base.record.model_copy(update={"fingerprint": "other"})
    )
    for again in (None, unlike, without(base, 0), make.scores(values=np.full(N, np.nan))):
        assert one(EXCESS, base, cand, again).outcome == "skipped"
        finding = one(needed, base, cand, again)
        assert finding.outcome == "invalid"
        assert "no flips beyond the noise can be told" in finding.sentence
    mean = dataclasses.replace(cand, samples=200)
    told = one(needed, dataclasses.replace(base, samples=200), mean, base).sentence
    assert told.endswith("(the same task, one run each): run with aa=true")


def test_errors_of_the_repetition_excuse_nothing():
    base, cand = sides(40)
    again = make.scores(values=np.r_[np.zeros(40), np.ones(N - 40)])
    assert one(EXCESS, base, cand, again).outcome == "accept"
    errored = dataclasses.replace(again, status=("error",) * 40 + ("ok",) * (N - 40))
    assert one(EXCESS, base, cand, errored).outcome == "inconclusive"


def test_a_task_that_stops_when_it_likes_is_judged_by_bets():
    look = SequentialLook(
        method="betting", fractions=[0.5, 1.0], look=2, order_seed=1, samples_planned=N
    )
    base, cand = sides(30, 30)
    record = cand.record.model_copy(update={"sequential": look})
    cand = dataclasses.replace(cand, record=record, output_sha256=texts(changed=100))
    base = dataclasses.replace(base, output_sha256=texts())
    again = sides()[1]
    for rule in (FLIPS, EXCESS, AGREE):
        finding = one(rule, base, cand, again)
        assert finding.outcome == "reject"
        assert finding.method == "betting e-process, valid at every look"


# --------------------------------------------------------------------------- the same text


@pytest.mark.parametrize(
    ("changed", "outcome"), [(10, "accept"), (30, "inconclusive"), (60, "reject")]
)
def test_the_same_text_is_counted(changed, outcome):
    base, cand = sides()
    base = dataclasses.replace(base, output_sha256=texts())
    cand = dataclasses.replace(cand, output_sha256=texts(changed=changed))
    finding = one(
        AGREE, base, cand, again=dataclasses.replace(base, output_sha256=texts(changed=3))
    )
    assert finding.outcome == outcome
    assert finding.estimate == pytest.approx(1 - changed / N)
    assert finding.lower == pytest.approx(clopper_pearson_bound(N - changed, N, 0.05, "lower"))
    assert finding.upper == pytest.approx(clopper_pearson_bound(N - changed, N, 0.05, "upper"))
    assert finding.baseline_value == pytest.approx(1 - 3 / N)
    assert finding.sentence.endswith("; the repeated baseline agrees with itself in 98.2 %")
    assert not finding.required


def test_the_sentence_of_an_agreement():
    base, cand = sides()
    base = dataclasses.replace(base, output_sha256=texts())
    cand = dataclasses.replace(cand, output_sha256=texts(changed=10, lost=2))
    assert one(AGREE, base, cand).sentence == (
        "code: 152 of 164 outputs are the same text (92.7 %), at least 88.4 % with 95 % confidence: within the limit "
        "of 80 %; 2 samples without an output count as changed ones for acceptance"
    )


def test_without_outputs_nothing_agrees():
    base, cand = sides()
    told = dataclasses.replace(base, output_sha256=texts())
    silent = dataclasses.replace(base, output_sha256=("",) * N)
    for first, second in ((base, cand), (told, cand), (base, told), (told, silent)):
        assert one(AGREE, first, second).outcome == "skipped"
        needed = dataclasses.replace(AGREE, required=True)
        assert one(needed, first, second).outcome == "invalid"


def test_two_empty_texts_of_errors_are_no_agreement():
    status = ("error",) * 30 + ("ok",) * (N - 30)
    base = make.scores(values=np.ones(N), output_sha256=texts(), status=status)
    finding = one(AGREE, base, base)
    assert finding.outcome == "inconclusive"
    assert finding.upper == 1
    assert finding.estimate == pytest.approx(134 / N)


def test_samples_of_one_problem_are_averaged():
    problems = tuple(f"p{i // 4}" for i in range(80))
    base = make.scores(values=np.ones(80), problem_ids=problems, output_sha256=texts(80))
    cand = dataclasses.replace(base, output_sha256=texts(80, changed=8))
    finding = one(AGREE, base, cand)
    shares = np.r_[1, 1, np.zeros(18)]
    assert finding.n == 20
    assert finding.lower == pytest.approx(1 - score_bound(shares, 0.05, "upper", 0, 1))
    assert "72 of 80 outputs of 20 problems" in finding.sentence


# --------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("bad", [0, 1, -0.1, 1.1, math.nan])
@pytest.mark.parametrize(("kind", "field"), [(Flips, "max"), (GreedyAgreement, "min")])
def test_a_limit_that_nothing_or_everything_meets_is_refused(kind, field, bad):
    with pytest.raises(ValueError, match=field):
        kind(kind="code", **{field: bad})


@pytest.mark.parametrize(("kind", "field"), [(Flips, "max"), (GreedyAgreement, "min")])
def test_other_wrong_parameters_are_refused(kind, field):
    with pytest.raises(ValueError, match="exactly one"):
        kind(**{field: 0.5})
    with pytest.raises(ValueError, match="alpha"):
        kind(kind="code", alpha=0.5, **{field: 0.5})
    assert not kind(kind="code", **{field: 0.5}).is_quality

"""Alarms about candidates that are too good, and lengths of outputs with their bounds."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from quanteval.evidence import RuleContext
from quanteval.records import SequentialLook
from quanteval.rules.guards import OutputLength
from quanteval.rules.plausibility import Plausibility
from quanteval.stats import absolute_loss, clustered_ratio, log_perplexity_ratio
from tests.gate import evidence as make

RULE = Plausibility()
NLL = np.random.default_rng(5).normal(250, 20, 40)
NOISE = np.random.default_rng(6).normal(0, 1, 40)


def one(rule, base, cand, artifact=None, **context):
    candidate = make.variant("cand", cand)
    if artifact is not None:
        candidate = dataclasses.replace(candidate, artifact=artifact)
    (finding,) = rule.check("rule", make.variant("base", base), candidate, RuleContext(**context))
    return finding


def gained(better, worse=0, n=200):
    base, cand = np.r_[np.zeros(100), np.ones(n - 100)], np.r_[np.zeros(100), np.ones(n - 100)]
    cand[:better] = 1
    cand[100 : 100 + worse] = 0
    return base, cand


def shorter(scores, keep):
    columns = ("sample_ids", "prompt_sha256", "value", "weight", "status", "finish_reason",
               "output_tokens", "outcome")  # fmt: skip
    return dataclasses.replace(scores, **{c: getattr(scores, c)[:keep] for c in columns})


# --------------------------------------------------------------------------- gains


@pytest.mark.parametrize(
    ("better", "worse", "outcome"),
    [(0, 0, "accept"), (8, 4, "accept"), (0, 60, "accept"), (15, 3, "accept"), (40, 5, "reject")],
)
def test_a_gain_beyond_chance_is_an_alarm(better, worse, outcome):
    base, cand = gained(better, worse)
    finding = one(RULE, make.scores(values=base), make.scores(values=cand))
    assert finding.outcome == outcome
    test = absolute_loss(cand, base, 0.02, alpha=0.001, reject_alpha=0.001, method="score")
    assert (finding.estimate, finding.lower, finding.upper) == (test.loss, test.lower, test.upper)
    assert finding.confidence == pytest.approx(0.999)
    assert not finding.required
    assert not RULE.is_quality


def test_the_sentences_of_a_gain():
    told = one(RULE, *(make.scores(values=v) for v in gained(40, 5))).sentence
    assert told.startswith("code: 50.0 % -> 67.5 % (n=200), gain 17.5 points, at least ")
    assert (
        "with 99.9 % confidence: more than the 2 that are plausible; look at the baseline" in told
    )
    assert one(RULE, *(make.scores(values=v) for v in gained(8, 4))).sentence.endswith(
        "not shown to exceed the 2 that are plausible"
    )


def test_fractions_are_compared_too():
    base = make.scores(values=np.full(100, 0.5))
    finding = one(RULE, base, make.scores(values=np.full(100, 0.9)))
    assert (finding.outcome, finding.method) == ("reject", "score test")


def test_what_is_lost_could_have_been_the_alarm():
    base, cand = (make.scores(values=v) for v in gained(40, 5))
    assert one(RULE, base, cand).outcome == "reject"
    status = ("error",) * 30 + ("ok",) * 170
    errored = dataclasses.replace(
        cand, status=status, value=np.where(np.arange(200) < 30, 0, cand.value)
    )
    for first, second in ((base, errored), (dataclasses.replace(base, status=status), cand)):
        finding = one(RULE, first, second)
        assert finding.outcome == "inconclusive"
        assert "with what errored or is missing it could be more than the 2" in finding.sentence
    few = shorter(make.scores(values=gained(0)[1]), 199)
    assert one(RULE, base, few, max_missing=0.01).outcome == "accept"
    many = shorter(make.scores(values=gained(8)[1]), 170)
    assert one(RULE, base, many, max_missing=0.2).outcome == "inconclusive"
    assert one(RULE, base, many).outcome == "invalid"


def test_a_task_that_stops_when_it_likes_is_judged_by_bets():
    look = SequentialLook(
        method="betting", fractions=[0.5, 1.0], look=2, order_seed=1, samples_planned=200
    )
    base, cand = (make.scores(values=v) for v in gained(100))
    record = cand.record.model_copy(update={"sequential": look})
    rule = Plausibility(max_gain=0.2)
    finding = one(rule, base, dataclasses.replace(cand, record=record))
    assert (finding.outcome, finding.method) == ("reject", "betting e-process")


def test_what_no_gain_can_be_told_of():
    good = make.scores(values=[1, 0, 1])
    for bad in (
        make.scores(values=[1, np.nan, 1]),
        make.scores(values=[1, 2, 1]),
        make.scores(values=[1, 0, 1], status=("error",) * 3),
        make.scores(values=[]),
    ):
        assert one(RULE, good, bad).outcome == "invalid"
        assert one(RULE, bad, good).outcome == "invalid"
    single = make.scores(values=[0])
    assert one(RULE, single, make.scores(values=[1])).outcome == "accept"
    (finding,) = RULE.check("rule", make.variant("base"), make.variant("cand"), RuleContext())
    assert finding.outcome == "skipped"
    (finding,) = RULE.check("rule", make.variant("base"), make.variant("cand", good), RuleContext())
    assert finding.outcome == "invalid"


# --------------------------------------------------------------------------- perplexity and divergence


@pytest.mark.parametrize(
    ("shift", "outcome"), [(0.0, "accept"), (10.0, "accept"), (-2.0, "accept"), (-12.0, "reject")]
)
def test_a_perplexity_that_falls_is_an_alarm(shift, outcome):
    base, cand = make.perplexity(NLL), make.perplexity(NLL + shift + NOISE)
    finding = one(RULE, base, cand)
    assert finding.outcome == outcome
    found = log_perplexity_ratio(NLL, NLL + shift + NOISE, base.weight, 0.001)
    assert finding.upper == pytest.approx(math.exp(found.upper))
    assert finding.margin == 0.98
    assert ("below the 0.98 that is plausible; look at" in finding.sentence) == (
        outcome == "reject"
    )


def test_the_baselines_own_likelihoods_are_an_alarm():
    same = make.perplexity(NLL)
    finding = one(RULE, same, same)
    assert finding.outcome == "reject"
    assert "all 40 documents have exactly the baseline's likelihood" in finding.sentence
    assert one(RULE, same, same, make.artifact(16)).outcome == "accept"


def test_what_perplexity_cannot_be_judged():
    base, cand = make.perplexity(NLL), make.perplexity(NLL + NOISE)
    assert (
        one(RULE, make.perplexity(NLL[:9]), make.perplexity(NLL[:9] - 50)).outcome == "inconclusive"
    )
    part = shorter(cand, 39)
    assert one(RULE, base, part, max_missing=0.1).outcome == "inconclusive"
    assert one(RULE, base, part).outcome == "invalid"
    assert one(RULE, base, make.perplexity(NLL * np.nan)).outcome == "invalid"
    assert one(RULE, base, dataclasses.replace(cand, weight=cand.weight + 1)).outcome == "invalid"


def test_no_distance_at_all_is_an_alarm():
    base = make.divergence(np.zeros(12), np.full(12, 100))
    finding = one(RULE, base, base)
    assert finding.outcome == "reject"
    assert finding.sentence.startswith(
        "distance: the KL of all 12 documents is exactly 0; the baseline"
    )
    moved = make.divergence(np.r_[1e-9, np.zeros(11)], np.full(12, 100))
    assert one(RULE, base, moved).outcome == "accept"
    assert one(RULE, base, base, make.artifact(16)).outcome == "accept"
    nan = make.divergence(np.full(12, np.nan), np.full(12, 100))
    assert one(RULE, base, nan).outcome == "invalid"
    bare = dataclasses.replace(make.variant("cand", base), artifact=None)
    for required, outcome in ((False, "skipped"), (True, "invalid")):
        (found,) = Plausibility(required=required).check(
            "rule", make.variant("base", base), bare, RuleContext()
        )
        assert found.outcome == outcome


@pytest.mark.parametrize("bad", [0, 1, -0.1, math.nan])
def test_a_plausible_gain_is_a_share(bad):
    with pytest.raises(ValueError, match="max_gain"):
        Plausibility(max_gain=bad)
    with pytest.raises(ValueError, match="alpha"):
        Plausibility(alpha=0.5)


# --------------------------------------------------------------------------- lengths of outputs


def lengths(tokens, **more):
    tokens = np.asarray(tokens)
    return make.scores(values=np.ones(len(tokens)), output_tokens=tokens, **more)


def test_a_ratio_of_lengths_has_bounds():
    before, after = np.arange(40, 60), np.arange(40, 60) + np.tile([-4, 8], 10)
    finding = one(OutputLength(), lengths(before), lengths(after))
    found = clustered_ratio(after, before)
    assert finding.outcome == "accept"
    assert (finding.lower, finding.upper) == (
        pytest.approx(found.lower),
        pytest.approx(found.upper),
    )
    assert (finding.n, finding.unit, finding.margin, finding.confidence) == (
        20,
        "ratio",
        1.25,
        0.95,
    )
    assert finding.sentence == (
        "code: 49.5 -> 51.5 output tokens a sample (n=20), ratio 1.04 "
        f"(between {found.lower:.2f} and {found.upper:.2f} with 95 % confidence each), within 0.8 to 1.25"
    )
    assert one(OutputLength(), lengths(before), lengths(before // 2)).margin == 0.8
    assert one(OutputLength(), lengths(before), lengths(before // 2)).outcome == "reject"


@pytest.mark.parametrize("empty", [[0], [0, 1], [3, 4], [19], [0, 5, 19]])
def test_a_baseline_that_wrote_nothing_in_places_is_no_obstacle(empty):
    before, after = np.full(20, 50), np.full(20, 50) + np.tile([-5, 5], 10)
    before[empty] = 0
    finding = one(OutputLength(max_ratio=2), lengths(before), lengths(after))
    assert finding.outcome == "accept"
    assert finding.estimate == pytest.approx(after.sum() / before.sum())
    assert finding.lower < finding.estimate < finding.upper


def test_too_few_lengths_have_no_bounds():
    finding = one(OutputLength(), lengths([40]), lengths([42]))
    assert (finding.outcome, finding.lower, finding.upper) == ("accept", None, None)
    assert "ratio 1.05, within" in finding.sentence
    assert one(OutputLength(), lengths([0, 40]), lengths([0, 42])).lower is None
    assert one(OutputLength(), lengths([0, 0]), lengths([5, 5])).outcome == "skipped"
    assert one(OutputLength(), lengths([4, 4]), lengths([0, 0])).outcome == "reject"


def test_lengths_that_are_lost_do_not_help():
    before, after = np.full(20, 50), np.r_[np.full(19, 50), 400]
    assert one(OutputLength(), lengths(before), lengths(after)).outcome == "reject"
    part = shorter(lengths(after), 19)
    assert one(OutputLength(), lengths(before), part).outcome == "invalid"
    finding = one(OutputLength(), lengths(before), part, max_missing=0.1)
    assert finding.outcome == "inconclusive"
    assert finding.sentence.endswith("; 1 samples are missing or errored, so nothing is accepted")
    status = ("ok",) * 19 + ("error",)
    errored = lengths(np.r_[np.full(19, 50), 0], status=status)
    assert one(OutputLength(), lengths(before), errored).outcome == "inconclusive"
    assert one(OutputLength(), lengths(before), lengths([])).outcome == "invalid"

"""Several tasks together: one margin for their weighted mean loss, and the noise of a repeated baseline."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from quanteval.evidence import RuleContext, SuiteFacts
from quanteval.rules.margin import Margin
from quanteval.rules.noise_floor import NoiseFloor
from quanteval.rules.non_inferiority import NonInferiority
from quanteval.rules.pooled import Pooled
from quanteval.stats import score_bound
from tests.gate import evidence as make

TWO = Margin(absolute=0.02)


def flips(n, broken=0, fixed=0):
    base, cand = np.ones(n), np.ones(n)
    cand[:broken] = 0
    base[broken : broken + fixed] = 0
    return base, cand


def variants(**tasks):
    """Return a baseline and a candidate with a task of each name."""
    base = [make.scores(name, values=b) for name, (b, _) in tasks.items()]
    cand = [make.scores(name, values=c) for name, (_, c) in tasks.items()]
    return make.variant("base", *base), make.variant("cand", *cand)


def one(rule, pair, **context):
    (finding,) = rule.check("together", *pair, RuleContext(**context))
    return finding


def test_small_tasks_decide_together_what_none_decides_alone():
    pair = variants(a=flips(164, 2, 2), b=flips(164, 2, 2), c=flips(500, 20, 20))
    alone = NonInferiority(margin=TWO, kind="code").check("alone", *pair, RuleContext())
    assert [f.outcome for f in alone] == ["inconclusive"] * 3
    finding = one(Pooled(margin=TWO, kind="code"), pair)
    assert finding.outcome == "accept"
    assert (finding.n, finding.broken, finding.fixed) == (828, 24, 24)
    assert finding.sentence.startswith(
        "3 tasks, weights by problem: 97.1 % -> 97.1 % (n=828, 24 worse, 24 better; losses in points: a 0.0"
    )


def test_one_task_pooled_is_the_score_test():
    base, cand = flips(164, 8, 5)
    finding = one(Pooled(margin=TWO, tasks=("a",)), variants(a=(base, cand)))
    assert finding.upper == pytest.approx(score_bound(base - cand, 0.05), abs=1e-6)
    assert finding.outcome == "inconclusive"
    assert finding.n_needed > 164


def test_weights_say_how_much_a_task_counts():
    pair = variants(small=flips(50, 5), big=flips(1000))
    by_item = one(Pooled(margin=TWO, kind="code"), pair)
    by_task = one(Pooled(margin=TWO, kind="code", weights="equal"), pair)
    stated = one(Pooled(margin=TWO, kind="code", weights={"small": 1, "big": 3}), pair)
    assert by_item.estimate == pytest.approx(5 / 1050)
    assert by_task.estimate == pytest.approx(0.05)
    assert stated.estimate == pytest.approx(0.025)
    assert by_item.outcome == "accept"
    assert by_task.outcome == "reject"
    assert "weights by small 1, big 3" in stated.sentence


def test_a_loss_beyond_the_margin_is_rejected():
    assert (
        one(Pooled(margin=TWO, kind="code"), variants(a=flips(500, 40), b=flips(500, 40))).outcome
        == "reject"
    )


def test_what_cannot_be_pooled_is_invalid():
    rule = Pooled(margin=TWO, tasks=("a", "b"))
    missing = one(rule, variants(a=flips(50)))
    assert (missing.outcome, missing.sentence) == ("invalid", "b: the baseline base has no scores")
    base, cand = variants(a=flips(50), b=flips(50))
    odd = dataclasses.replace(cand.scores["b"], value=np.full(50, np.nan))
    broken = dataclasses.replace(cand, scores={**cand.scores, "b": odd})
    assert "no finite score" in one(rule, (base, broken)).sentence
    unequal = one(Pooled(margin=TWO, kind="code", weights={"a": 1, "c": 1}), (base, cand))
    assert unequal.outcome == "invalid"
    assert "weights are given for ['a', 'c']" in unequal.sentence
    assert one(Pooled(margin=TWO, kind="generate"), (base, cand)).outcome == "skipped"
    slip = one(Pooled(margin=TWO, kind="cod"), (base, cand))
    assert (slip.outcome, slip.sentence) == (
        "invalid", 'no task of kind cod was run; did you mean "code"?'
    )  # fmt: skip


def test_missing_samples_count_as_lost_for_acceptance():
    base, cand = variants(a=flips(300), b=flips(300))
    short = make.scores("b", values=np.ones(299), expected=300)
    lacking = dataclasses.replace(cand, scores={**cand.scores, "b": short})
    rule = Pooled(margin=TWO, kind="code")
    assert one(rule, (base, lacking)).outcome == "invalid"
    allowed = one(rule, (base, lacking), max_missing=0.01)
    whole = one(rule, (base, cand))
    assert allowed.upper > whole.upper
    assert allowed.estimate == 0
    assert "count as lost" in allowed.notes[0]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "exactly one"),
        ({"tasks": ("a",), "kind": "code"}, "exactly one"),
        ({"tasks": ("a", "a")}, "names one twice"),
        ({"kind": "code", "weights": {"a": 0}}, "must be positive"),
        ({"tasks": ("a",), "weights": {"b": 1}}, "must name the same"),
        ({"kind": "code", "margin": Margin(relative=0.01)}, "is relative"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        Pooled(**{"margin": TWO, **fields})


def test_the_forecast_says_what_pooling_buys():
    suites = {name: SuiteFacts(name, "code", n) for name, n in (("a", 164), ("b", 164), ("c", 500))}
    (found,) = Pooled(margin=TWO, kind="code").forecast("together", suites, RuleContext())
    assert found.n == 828
    assert 0.75 < found.accept_harmless < 0.9
    assert "the best of these tasks alone (c) accepts in 60" in found.remarks[0]
    (equal,) = Pooled(margin=TWO, kind="code", weights="equal").forecast("x", suites, RuleContext())
    assert equal.accept_harmless < found.accept_harmless
    assert Pooled(margin=TWO, tasks=("a", "z")).forecast("x", suites, RuleContext()) == []


# --------------------------------------------------------------------------- the noise floor


def again(broken, fixed, n=100):
    base, repeat = flips(n, broken, fixed)
    baseline = make.variant("base", make.scores("a", values=base))
    return baseline, make.variant("cand", make.scores("a", values=base)), make.variant(
        "base_again", make.scores("a", values=repeat)
    )  # fmt: skip


def test_the_repeated_baseline_sets_the_noise_floor():
    baseline, candidate, repeat = again(2, 1)
    finding = one(NoiseFloor(), (baseline, candidate), again=repeat)
    assert finding.outcome == "accept"
    assert finding.estimate == pytest.approx(0.03)
    assert "flipped 3 of 100 (3.0 %, 2 worse, 1 better)" in finding.sentence
    assert "differ by up to 3.4 points" in finding.sentence
    assert (
        one(NoiseFloor(max_flip_rate=0.02), (baseline, candidate), again=repeat).outcome
        == "inconclusive"
    )


def test_a_baseline_that_drifts_against_itself_is_a_fault_of_the_harness():
    baseline, candidate, repeat = again(14, 0)
    finding = one(NoiseFloor(max_flip_rate=0.5), (baseline, candidate), again=repeat)
    assert finding.outcome == "invalid"
    assert "lean to one side" in finding.sentence


def test_without_a_repetition_the_rule_is_skipped_or_where_required_invalid():
    baseline, candidate, _ = again(0, 0)
    assert one(NoiseFloor(), (baseline, candidate)).outcome == "skipped"
    assert one(NoiseFloor(required=True), (baseline, candidate)).outcome == "invalid"


def test_a_loss_or_a_margin_inside_the_noise_is_said_to_be_so():
    baseline, _, repeat = again(4, 4)
    candidate = make.variant("cand", make.scores("a", values=flips(100, 6, 4)[1]))
    rule = NonInferiority(margin=Margin(absolute=0.02), kind="code")
    finding = one(rule, (baseline, candidate), again=repeat)
    assert "the difference is inside the noise floor of 5.5 points" in finding.sentence
    assert "the margin is below it" in finding.sentence
    wide = one(
        NonInferiority(margin=Margin(absolute=0.5), kind="code"), (baseline, baseline), again=repeat
    )
    assert "noise" not in wide.sentence

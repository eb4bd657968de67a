"""Forecasts against the sums of quanteval.stats, against the gate's own decisions, and against simulated runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtri

from quanteval.evidence import RuleContext, SuiteFacts
from quanteval.rules._forecast import COMPLETIONS, POWER, _Test, _warnings, forecast_loss
from quanteval.rules.margin import Margin
from quanteval.rules.non_inferiority import NonInferiority
from quanteval.stats import (
    absolute_loss,
    accept_probability,
    bounded_score,
    certifiable_margin,
    detectable_drop,
    exact_accept,
    operating_characteristics,
    pairs_needed,
    recovery_score,
)
from quanteval.stats import power as power_module

ALPHA = 0.05


def suite(n, flips=0.05, score=None, **more):
    return SuiteFacts("t", "code", n, score, flips, **more)


def points(value):
    return Margin(absolute=value / 100)


def forecast(n, margin, flips=0.05, score=None, alpha=ALPHA, method="auto"):
    return forecast_loss("rule", margin, suite(n, flips, score), alpha, method)


def test_the_figures_are_those_of_the_exact_test():
    found = forecast(164, points(5))
    assert found.accept_harmless == pytest.approx(accept_probability(164, 0.05, 0, 0.05))
    assert found.certifiable == certifiable_margin(164, 0.05, rule="exact")
    assert found.detectable == detectable_drop(164, 0.05)
    assert found.n_needed == pairs_needed(0.05, 0.05, rule="exact")
    both = operating_characteristics(164, 0.15, 0.10, 0.05)
    assert found.reject_double == pytest.approx(both.reject)
    assert found.remarks == found.warnings == ()
    assert found.assumed == "5.0 % flips (assumed)"


def test_figures_agree_with_each_other():
    for n, flips in ((80, 0.05), (3000, 0.05)):
        found = forecast(n, points(5), flips)
        at = forecast(n, Margin(absolute=found.certifiable + 2e-5), flips)
        assert at.accept_harmless >= POWER - 0.003
        enough = forecast(found.n_needed, points(5), flips)
        assert enough.accept_harmless >= POWER - 0.02


def test_what_is_accepted_and_rejected_in_runs_drawn_at_random():
    """A harmless variant flips in both directions; a loss comes on top of these flips."""
    n, flips, margin, runs = 120, 0.08, 0.06, 4000
    found = forecast(n, points(6), flips)
    rng = np.random.default_rng(5)
    decided: dict[tuple[int, int], tuple[bool, bool]] = {}

    def decide(broken, fixed):
        if (broken, fixed) not in decided:
            x, y = np.ones(n), np.ones(n)
            y[:broken] = 0
            x[broken : broken + fixed] = 0
            test = absolute_loss(x, y, margin, method="exact")
            decided[broken, fixed] = (test.accepted, test.rejected)
        return decided[broken, fixed]

    def share(drop, which):
        rates = [flips / 2 + drop, flips / 2, 1 - flips - drop]
        tables, counts = np.unique(rng.multinomial(n, rates, runs), axis=0, return_counts=True)
        drawn = sum(
            k * decide(int(b), int(c))[which] for (b, c, _), k in zip(tables, counts, strict=True)
        )
        return drawn / runs

    assert found.accept_harmless == pytest.approx(share(0.0, 0), abs=0.03)
    assert found.reject_double == pytest.approx(share(2 * margin, 1), abs=0.03)


def ratio_runs(rng, n, score, flips, loss, runs):
    """Yield the scores of both variants of runs drawn at random."""
    rates = [score - flips / 2 - loss, flips / 2 + loss, flips / 2, 1 - score - flips / 2]
    for cells in rng.multinomial(n, rates, runs):
        yield np.repeat([1.0, 1, 0, 0], cells), np.repeat([1.0, 0, 1, 0], cells)


@pytest.mark.parametrize(("n", "score", "margin"), [(164, 0.5, 0.1), (300, 0.8, 0.05)])
def test_a_relative_margin_is_worth_its_points(n, score, margin):
    found = forecast(n, Margin(relative=margin), 0.05, score)
    rng, z = np.random.default_rng(6), float(ndtri(ALPHA))
    kept = 1 - margin
    harmless = [recovery_score(x, y, kept) <= z for x, y in ratio_runs(rng, n, score, 0.05, 0, 600)]
    loss = 2 * margin * score
    lost = [recovery_score(x, y, kept) >= -z for x, y in ratio_runs(rng, n, score, 0.05, loss, 600)]
    assert found.accept_harmless == pytest.approx(np.mean(harmless), abs=0.07)
    assert found.reject_double == pytest.approx(np.mean(lost), abs=0.07)
    assert f"worth {100 * margin * score:.2g} points" in found.assumed
    absolute = forecast(n, Margin(absolute=margin * score), 0.05, score, method="score")
    assert found.certifiable == pytest.approx(absolute.certifiable / score)
    assert found.detectable == pytest.approx(absolute.detectable / score)


def test_several_completions_are_not_promised_too_much():
    """The share told is of the right size, and rather too low: means are finer than single scores."""
    n, flips, margin = 164, 0.1, 0.05
    told = accept_probability(n, flips / COMPLETIONS, 0, margin)
    (remark,) = [r for r in forecast(n, points(5), flips).remarks if "completions" in r]
    assert f"{100 * told:.1f} %" in remark
    rng, z = np.random.default_rng(7), float(ndtri(ALPHA))
    accepted = 0
    for _ in range(300):
        # A fifth of the problems is solved half of the time: a tenth of single answers flips.
        unsure = rng.random(n) < 2 * flips
        x, y = (np.where(unsure, rng.binomial(4, 0.5, n) / 4, 1.0) for _ in range(2))
        accepted += bounded_score(x - y, margin) <= z
    assert told - 0.03 <= accepted / 300 <= told + 0.1


# --------------------------------------------------------------------------- warnings


def warned(n, margin, alpha, solved, method):
    return " / ".join(_warnings(_Test(n, margin, alpha, method, score=solved / n), 1.0))


def said_and_done(text, n, margin, alpha, solved, method):
    """Put the best, the same and the worst variant to the gate's own test."""
    x = (np.arange(n) < solved).astype(float)

    def test_of(y):
        return absolute_loss(x, y, margin, alpha=alpha, reject_alpha=alpha, method=method)

    best, same, worst = test_of(np.ones(n)), test_of(x), test_of(np.zeros(n))
    assert ("can never accept" in text) == (not best.accepted)
    assert ("cannot accept a variant" in text) == (best.accepted and not same.accepted)
    assert ("can never reject" in text) == (not worst.rejected)
    assert ("solves nothing" in text) == worst.accepted


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(1, 150),
    margin=st.sampled_from([0.01, 0.05, 0.2, 0.5]),
    alpha=st.sampled_from([0.01, 0.05, 0.2]),
    solved=st.integers(0, 150),
)
def test_never_means_that_the_gate_itself_never_does(n, margin, alpha, solved):
    solved = min(solved, n)
    text = warned(n, margin, alpha, solved, "tango")
    said_and_done(text, n, margin, alpha, solved, "score")


@pytest.mark.parametrize(
    ("n", "solved"), [(1, 1), (4, 4), (20, 1), (20, 10), (58, 30), (59, 30), (80, 2), (80, 9)]
)
def test_never_of_the_exact_test(n, solved):
    said_and_done(warned(n, 0.05, ALPHA, solved, "exact"), n, 0.05, ALPHA, solved, "exact")


def test_the_problems_that_a_variant_without_flips_takes_hold_at_every_level():
    """Below 0.05 the exact test takes more than ln(alpha)/ln(1 - margin)."""
    for alpha, margin in ((0.001, 0.05), (0.01, 0.05), (0.05, 0.1), (0.2, 0.05)):
        n = _Test(10, margin, alpha, "exact").without_flips
        assert exact_accept(0, 0, n, margin, alpha)
        assert not exact_accept(0, 0, n - 1, margin, alpha)
    relative = _Test(100, 0.025, ALPHA, "tango", relative=0.05, score=0.5)
    for n, accepted in ((relative.without_flips, True), (relative.without_flips - 4, False)):
        x = (np.arange(n) < n // 2).astype(float)
        assert (recovery_score(x, x, 0.95) <= float(ndtri(ALPHA))) == accepted


def test_without_a_flip_so_many_problems_are_needed():
    for margin, n in ((5, 59), (2, 149)):
        few, enough = forecast(n - 1, points(margin), 0.0), forecast(n, points(margin), 0.0)
        assert few.warnings[0].endswith(f"that takes {n} problems")
        assert few.accept_harmless == 0
        assert enough.warnings == ()
        assert enough.accept_harmless == 1
        assert few.n_needed == enough.n_needed == n


def test_an_underpowered_rule_says_so_and_what_more_would_buy():
    found = forecast(80, points(5))
    assert found.warnings == ("a harmless variant is accepted in 46.6 % of runs only",)
    twice = accept_probability(160, 0.05, 0, 0.05)
    assert f"{100 * twice:.1f} %" in found.remarks[0]
    assert "4 sampled completions" in found.remarks[1]


def test_a_baseline_that_solves_little():
    found = forecast(164, points(15), score=0.02)
    assert found.reject_double is None
    assert any("baseline scores 2.0 %" in remark for remark in found.remarks)
    assert any("accepts even a variant that solves nothing" in text for text in found.warnings)
    refused = forecast(164, Margin(relative=0.01), score=0.1)
    assert refused.accept_harmless == 0
    assert refused.certifiable is None
    assert refused.warnings == (
        "can never decide: the baseline scores 10.0 %, a relative margin needs 20.0 %",
    )
    assert "can never decide" in forecast(6000, points(5), method="exact").warnings[0]


def test_a_point_comparison_is_called_what_it_is():
    found = forecast(164, points(1), method="point")
    assert found.certifiable is found.n_needed is None
    assert 0.6 < found.accept_harmless < 0.8
    assert 0.6 < found.reject_double < 0.8
    assert "not a statistical test" in found.remarks[0]


# --------------------------------------------------------------------------- edges


@pytest.mark.parametrize("n", [1, 2, 20, 5000, 5001, 20_001, 100_000])
@pytest.mark.parametrize("flips", [0.0, 1.0, 0.0001])
def test_extremes_give_figures_in_range(n, flips):
    for margin in (points(60), Margin(relative=0.5)):
        found = forecast(n, margin, flips)
        for value in (found.accept_harmless, found.reject_double):
            assert value is None or 0 <= value <= 1 + 1e-12
        for value in (found.certifiable, found.detectable):
            assert value is None or 0 < value < 2
        assert found.n_needed >= 1


@pytest.mark.parametrize("flips", [0.05, 0.0008, 0.0])
def test_figures_go_on_smoothly_where_the_way_of_counting_changes(flips):
    below, above = (forecast(n, points(1), flips) for n in (20_000, 20_001))
    assert above.certifiable == pytest.approx(below.certifiable, rel=0.03)
    assert above.detectable == pytest.approx(below.detectable, rel=0.04)


@pytest.mark.parametrize(("margin", "flips"), [(0.01, 0.02), (0.015, 0.05), (0.01, 0.005)])
def test_the_problems_needed_of_small_margins_are_right_to_some_per_cent(margin, flips):
    found = forecast(100, Margin(absolute=margin), flips, method="score")
    assert found.n_needed == pytest.approx(pairs_needed(margin, flips), rel=0.03)


@pytest.mark.parametrize(
    ("n", "margin", "flips"),
    [(20_000, 0.01, 0.05), (164, 0.001, 0.0), (164, 0.005, 0.05), (20_000, 0.0005, 0.001)],
)
def test_a_forecast_asks_for_few_sums(n, margin, flips, monkeypatch):
    """Cost is counted in sums over tables, each of which is of the order of n."""
    work = []
    real = power_module.accept_region

    def counted(pairs, *rest):
        work.append(pairs)
        return real(pairs, *rest)

    monkeypatch.setattr(power_module, "accept_region", counted)
    forecast(n, Margin(absolute=margin), flips)
    assert sum(work) < 2_000_000


def test_a_rule_forecasts_the_tasks_it_concerns_at_its_own_level():
    suites = {
        "a": suite(164),
        "b": SuiteFacts("b", "code", 500),
        "p": SuiteFacts("p", "perplexity", 60),
    }
    of_kind = NonInferiority(margin=points(5), kind="code").forecast("r", suites, RuleContext())
    assert [f.n for f in of_kind] == [164, 500]
    strict = NonInferiority(margin=points(5), task="b", alpha=0.01)
    (found,) = strict.forecast("r", suites | {"b": suites["b"]}, RuleContext(0.2))
    assert found.accept_harmless == pytest.approx(
        accept_probability(500, 0.05, 0, 0.05, alpha=0.01)
    )
    assert math.isfinite(found.certifiable)

"""The stratified score test: against one stratum, an independent optimiser, symmetry, and its level in ugly corners."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import binom

from quanteval import stats

Z95 = 1.6448536269514722

sample = st.lists(st.sampled_from([-1.0, -0.5, -0.2, 0.0, 0.25, 0.9, 1.0]), min_size=1, max_size=30)
suite = st.lists(st.tuples(sample, st.floats(0.05, 5.0)), min_size=1, max_size=4)
margins = st.floats(-0.9, 0.9)


def flips(b, c, n):
    return np.repeat([1.0, -1.0, 0.0], [b, c, n - b - c])


class TestOneStratum:
    @given(sample, margins, st.sampled_from(["lower", "upper"]))
    def test_is_the_bounded_score(self, d, margin, side):
        wanted = stats.bounded_score(d, margin)
        assert stats.stratified_score([d], [3.0], margin) == pytest.approx(wanted, abs=1e-9)
        bound = stats.stratified_bound([d], [3.0], 0.05, side)
        assert bound == pytest.approx(stats.score_bound(d, 0.05, side), abs=1e-9)

    @pytest.mark.parametrize(("b", "c", "n"), [(8, 5, 164), (0, 0, 50), (0, 3, 80), (7, 0, 80)])
    @pytest.mark.parametrize("margin", [-0.05, 0.02, 0.1])
    def test_is_tango_for_flips(self, b, c, n, margin):
        z = stats.stratified_score([flips(b, c, n)], [1.0], margin)
        assert z == pytest.approx(stats.tango_z(b, c, n, margin), abs=1e-9)

    @given(st.floats(0.01, 0.9))
    def test_other_limits(self, margin):
        d = [0.1, 0.9, 1.5, 0.4]
        z = stats.stratified_score([d], [1.0], margin, 0.0, 2.0)
        assert z == pytest.approx(stats.bounded_score(d, margin, 0.0, 2.0), abs=1e-9)


class TestSeveralStrata:
    @given(sample, st.integers(1, 4), margins)
    def test_proportional_copies_change_nothing(self, d, times, margin):
        # equal distributions with weights proportional to the sizes get the same tilt, so the split is not seen
        whole = stats.bounded_score(d * (times + 1), margin)
        split = stats.stratified_score([d, d * times], [1.0, times], margin)
        assert split == pytest.approx(whole, abs=1e-6)

    def test_differences_between_strata_are_no_noise(self):
        strata = [flips(30, 0, 100), flips(0, 30, 100)]
        pooled = stats.bounded_score(np.concatenate(strata), 0.05)
        assert stats.stratified_score(strata, [1, 1], 0.05) < 1.1 * pooled < 0.0

    @given(suite, margins)
    def test_mirror_and_scale_of_weights(self, strata, margin):
        samples, weights = zip(*strata, strict=True)
        z = stats.stratified_score(samples, weights, margin)
        mirrored = stats.stratified_score([[-x for x in d] for d in samples], weights, -margin)
        assert mirrored == pytest.approx(-z, abs=1e-8)
        doubled = stats.stratified_score(samples, [2.0 * w for w in weights], margin)
        assert doubled == pytest.approx(z, abs=1e-8)

    @given(suite, margins, margins)
    def test_monotone_in_the_margin(self, strata, first, second):
        samples, weights = zip(*strata, strict=True)
        low, high = sorted((first, second))
        z_low = stats.stratified_score(samples, weights, low)
        assert stats.stratified_score(samples, weights, high) <= z_low + 1e-9

    @given(suite)
    def test_bounds_invert_the_score_and_hold_the_estimate(self, strata):
        samples, weights = zip(*strata, strict=True)
        point = np.average([np.mean(d) for d in samples], weights=weights)
        for side, wanted in (("upper", -Z95), ("lower", Z95)):
            bound = stats.stratified_bound(samples, weights, 0.05, side)
            assert (bound - point) * -wanted >= -1e-12
            if abs(bound) < 1.0 - 1e-6:
                z = stats.stratified_score(samples, weights, bound)
                assert z == pytest.approx(wanted, abs=1e-7)

    def test_small_gaps_are_not_lost_to_rounding(self):
        strata = [flips(9, 4, 100), flips(20, 31, 300)]
        point = (5 / 100 - 11 / 300) / 2
        slopes = [stats.stratified_score(strata, [1, 1], point + g) / g for g in (1e-4, 1e-6, 1e-8)]
        assert slopes == pytest.approx([slopes[1]] * 3, rel=1e-3)

    @pytest.mark.parametrize(
        ("strata", "weights", "margin"),
        [
            ([[0.0, 0.5, 1.0, 0.0], [0.0, -1.0, 0.25]], [1, 2], 0.4),
            ([[0.0, 0.0, 0.0], [0.5, 0.0, -0.5, 0.0, 0.1]], [1, 1], 0.3),
            ([[0.2, 0.1], [0.3], [-0.4, 0.4, 0.0]], [3, 1, 2], 0.6),
            ([[0.0, 1.0, -1.0], [-0.3, 0.3]], [1, 1], -0.5),
        ],
    )
    def test_against_a_general_optimiser(self, strata, weights, margin):
        z = stats.stratified_score(strata, weights, margin)
        assert z == pytest.approx(optimised(strata, weights, margin), rel=2e-4)


def optimised(strata, weights, margin):
    """z from the likelihood maximised numerically over all masses, limits included, and sum W^2 V/n."""
    share = np.array(weights) / sum(weights)
    support = [np.array([*d, -1.0, 1.0]) for d in strata]
    cuts = np.cumsum([s.size for s in support])[:-1]

    def loss(w):
        return -sum(np.log(np.maximum(p[:-2], 1e-12)).sum() for p in np.split(w, cuts))

    def mean(w):
        return sum(h * (p @ s) for h, p, s in zip(share, np.split(w, cuts), support, strict=True))

    start = np.concatenate([np.full(s.size, 1 / s.size) for s in support])
    constraints = [{"type": "eq", "fun": lambda w: mean(w) - margin}]
    for t in range(len(strata)):
        constraints.append({"type": "eq", "fun": lambda w, t=t: np.split(w, cuts)[t].sum() - 1.0})
    found = minimize(
        loss,
        start,
        method="SLSQP",
        bounds=[(0.0, 1.0)] * start.size,
        constraints=constraints,
        options={"maxiter": 1000, "ftol": 1e-14},
    )
    assert abs(mean(found.x) - margin) < 1e-8
    variance = 0.0
    for h, p, s, d in zip(share, np.split(found.x, cuts), support, strata, strict=True):
        variance += h**2 * (p @ (s - p @ s) ** 2) / len(d)
    point = sum(h * np.mean(d) for h, d in zip(share, strata, strict=True))
    return (point - margin) / math.sqrt(variance)


class TestDegenerate:
    def test_nothing_changed(self):
        strata = [np.zeros(50), np.zeros(1000)]
        # the small stratum alone carries the doubt: Tango's z at twice the margin
        z = stats.stratified_score(strata, [1, 1], 0.02)
        assert z == pytest.approx(stats.tango_z(0, 0, 50, 0.04))
        upper = stats.stratified_bound(strata, [1, 1], 0.05)
        assert upper == pytest.approx(Z95**2 / (50 + Z95**2) / 2)
        assert stats.stratified_bound(strata, [1, 1], 0.05, "lower") == pytest.approx(-upper)

    def test_everything_at_the_limit(self):
        strata = [np.ones(4), np.ones(9)]
        assert stats.stratified_bound(strata, [1, 3], 0.05) == 1.0
        assert 0.0 < stats.stratified_bound(strata, [1, 3], 0.05, "lower") < 1.0
        assert stats.stratified_score(strata, [1, 3], 0.99) > 0.0

    def test_strata_of_one_item(self):
        assert stats.stratified_score([[0.0], [1.0]], [1, 1], 0.5) == 0.0
        assert stats.stratified_score([[0.0], [0.0], [0.0]], [1, 1, 1], 0.5) == pytest.approx(
            -math.sqrt(3)
        )
        lower = stats.stratified_bound([[-1.0], [0.0]], [1, 1], 0.05, "lower")
        assert -1.0 < lower < -0.8

    @pytest.mark.parametrize(
        ("strata", "weights", "margin", "message"),
        [
            ([], [], 0.1, "'strata' holds 0 samples"),
            ([[0.0], []], [1, 1], 0.1, r"'strata\[1\]' holds 0 values"),
            ([[0.0], [0.0, math.nan]], [1, 1], 0.1, r"'strata\[1\]' is 'nan' at index 1"),
            ([[0.0], [1.5]], [1, 1], 0.1, r"'strata\[1\]' is '1.5' at index 0"),
            ([[0.0], [1.0]], [1], 0.1, "one weight a stratum"),
            ([[0.0], [1.0]], [1, 0], 0.1, "'weights' is '0.0' at index 1"),
            ([[0.0], [1.0]], [1, math.inf], 0.1, "'weights' is 'inf'"),
            ([[0.0]], [1], 1.0, "margin is '1.0'"),
        ],
    )
    def test_bad_input_is_named(self, strata, weights, margin, message):
        with pytest.raises(ValueError, match=message):
            stats.stratified_score(strata, weights, margin)

    def test_other_bad_input(self):
        with pytest.raises(ValueError, match="must increase"):
            stats.stratified_score([[0.0]], [1], 0.0, 1.0, 1.0)
        with pytest.raises(ValueError, match="'alpha'"):
            stats.stratified_bound([[0.0]], [1], 0.7)
        with pytest.raises(ValueError, match="side is 'up'"):
            stats.stratified_bound([[0.0]], [1], 0.05, "up")


class TestLoss:
    def test_result(self):
        base = [[1.0, 1.0, 0.0, 1.0], [0.0, 1.0]]
        var = [[1.0, 0.0, 0.0, 1.0], [1.0, 1.0]]
        result = stats.stratified_loss(base, var, [4, 2], 0.3)
        assert result.loss == pytest.approx(0.0)
        assert (result.method, result.n) == ("stratified_score", 6)
        assert (result.broken, result.fixed) == (1, 1)
        assert result.lower < 0.0 < result.upper
        assert result.p_accept == pytest.approx(1.0 - result.p_reject)

    def test_fractions_have_no_flips(self):
        result = stats.stratified_loss([[0.5, 1.0], [1.0]], [[0.5, 0.0], [0.0]], [1, 1], 0.1)
        assert (result.broken, result.fixed) == (None, None)

    def test_no_change_in_large_strata_is_accepted_and_a_broken_task_rejected(self):
        ones = [np.ones(400), np.ones(600)]
        assert stats.stratified_loss(ones, ones, [1, 1], 0.02).accepted
        assert stats.stratified_loss(ones, [np.zeros(400), np.ones(600)], [1, 1], 0.02).rejected

    @given(st.lists(st.tuples(sample, st.floats(0.1, 3)), min_size=1, max_size=3), margins)
    def test_bounds_and_decisions_agree(self, strata, margin):
        samples, weights = zip(*strata, strict=True)
        base = [(1.0 + np.array(d)) / 2.0 for d in samples]
        result = stats.stratified_loss(base, [1.0 - b for b in base], weights, margin)
        if abs(result.upper - margin) > 1e-9:
            assert result.accepted == (result.upper < margin)
        if abs(result.lower - margin) > 1e-9:
            assert result.rejected == (result.lower > margin)

    def test_unpaired(self):
        with pytest.raises(ValueError, match="'baseline' has 1 strata"):
            stats.stratified_loss([[1.0]], [[1.0], [0.0]], [1, 1], 0.1)
        with pytest.raises(ValueError, match=r"'baseline\[1\]' has 2 values"):
            stats.stratified_loss([[1.0], [1.0, 0.0]], [[1.0], [1.0]], [1, 1], 0.1)


class TestLevel:
    """Wrong acceptances on the margin, nominal 5%."""

    @pytest.mark.parametrize("margin", [0.005, 0.01, 0.02, 0.03, 0.05, 0.1])
    def test_a_small_stratum_carries_the_loss(self, margin):
        # exact: the big stratum is fixed, only the breaks of the small one vary
        error = 0.0
        for b in range(30):
            if stats.stratified_score([flips(b, 0, 50), np.zeros(1000)], [1, 1], margin) > -Z95:
                break
            error += binom.pmf(b, 50, 2 * margin)
        assert error <= 0.065

    @pytest.mark.parametrize("where", ["both", "first", "second"])
    def test_two_tasks_weighted_by_items(self, where):
        sizes, margin, flip = (80, 164), 0.02, 0.05
        drop = {
            "both": (margin, margin),
            "first": (margin * 244 / 80, 0.0),
            "second": (0.0, margin * 244 / 164),
        }[where]
        rng, wrong, runs = np.random.default_rng(31), 0, 4000
        seen = {}
        for _ in range(runs):
            table = tuple(
                tuple(rng.multinomial(n, [f + d, f - d, 2 - 2 * f] / np.float64(2))[:2].tolist())
                for n, d in zip(sizes, drop, strict=True)
                for f in (max(flip, d),)
            )
            if table not in seen:
                strata = [flips(b, c, n) for (b, c), n in zip(table, sizes, strict=True)]
                seen[table] = stats.stratified_score(strata, sizes, margin) <= -Z95
            wrong += seen[table]
        assert wrong / runs <= 0.065

    def test_three_tasks_of_pass_rates(self):
        rng, sizes, loss, runs, wrong = np.random.default_rng(32), (50, 120, 200), 0.06, 1500, 0
        margin = loss * 0.5 / 0.85  # mean of Beta(0.5, 0.35)
        for _ in range(runs):
            strata = []
            for n in sizes:
                p = rng.beta(0.5, 0.35, n)
                strata.append((rng.binomial(5, p) - rng.binomial(5, p * (1 - loss))) / 5)
            wrong += stats.stratified_score(strata, [1, 1, 1], margin) <= -Z95
        assert 0.03 <= wrong / runs <= 0.065

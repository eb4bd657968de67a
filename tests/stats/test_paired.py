"""The score tests against published figures, an independent optimiser and the properties they must have."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize, minimize_scalar

from quanteval import stats
from quanteval.stats.paired import PairCounts

Z95 = 1.6448536269514722


def drops(b, c, n):
    return [1.0] * b + [-1.0] * c + [0.0] * (n - b - c)


def outcomes(both, broken, fixed, neither):
    base = [1.0] * (both + broken) + [0.0] * (fixed + neither)
    var = [1.0] * both + [0.0] * broken + [1.0] * fixed + [0.0] * neither
    return base, var


@st.composite
def tables(draw, largest=300):
    n = draw(st.integers(1, largest))
    b = draw(st.integers(0, n))
    return b, draw(st.integers(0, n - b)), n


margins = st.floats(-0.95, 0.95, allow_nan=False)
fractions = st.lists(st.integers(-10, 10).map(lambda k: k / 10), min_size=1, max_size=40)


class TestTango:
    @pytest.mark.parametrize(
        ("b", "c", "n", "level", "published", "digits"),
        [
            (9, 3, 32, 0.95, (-0.027, 0.390), 3),  # Tango 1998
            (0, 1, 44, 0.90, (-0.096, 0.037), 3),  # Tango 1998
            (16, 8, 86, 0.95, (-0.020, 0.207), 3),  # Agresti and Min 2005
            (1, 7, 21, 0.95, (-0.517, -0.026), 3),  # Fagerland, Lydersen and Laake 2014
        ],
    )
    def test_published_intervals(self, b, c, n, level, published, digits):
        interval = stats.tango_interval(b, c, n, level)
        assert (round(interval.lower, digits), round(interval.upper, digits)) == published

    @pytest.mark.parametrize(
        ("b", "c", "n", "level", "lower", "upper"),
        [
            (9, 3, 32, 0.95, -0.0270905, 0.3896975),
            (1, 7, 21, 0.95, -0.5172323, -0.0260030),
            (25, 2, 102, 0.95, 0.1391825, 0.3213298),
            (8, 5, 164, 0.90, -0.0195185, 0.0583901),
            (40, 20, 1319, 0.90, 0.0056306, 0.0252622),
        ],
    )
    def test_intervals_by_independent_bisection(self, b, c, n, level, lower, upper):
        interval = stats.tango_interval(b, c, n, level)
        assert interval.lower == pytest.approx(lower, abs=6e-8)
        assert interval.upper == pytest.approx(upper, abs=6e-8)

    @pytest.mark.parametrize(
        ("b", "c", "n", "margin"),
        [(8, 5, 164, 0.05), (3, 0, 50, 0.02), (0, 3, 50, 0.1), (20, 4, 60, -0.1), (5, 9, 40, -0.3)],
    )
    def test_variance_by_numeric_maximum_likelihood(self, b, c, n, margin):
        def negative_log_likelihood(q):
            parts = ((b, q + margin), (c, q), (n - b - c, 1 - 2 * q - margin))
            return -sum(k * math.log(p) if k else 0.0 for k, p in parts)

        low, high = max(0.0, -margin), (1 - margin) / 2
        q = minimize_scalar(
            negative_log_likelihood,
            bounds=(low + 1e-12, high - 1e-12),
            method="bounded",
            options={"xatol": 1e-12},
        ).x
        z = (b - c - n * margin) / math.sqrt(n * (2 * q + margin - margin**2))
        assert stats.tango_z(b, c, n, margin) == pytest.approx(z, abs=2e-5)

    @pytest.mark.parametrize("n", [1, 20, 164, 5000])
    def test_without_flips_the_bound_keeps_a_width(self, n):
        assert stats.tango_bound(0, 0, n, 0.05, "upper") == pytest.approx(
            Z95**2 / (n + Z95**2), rel=1e-10
        )

    def test_all_broken_and_all_fixed(self):
        assert stats.tango_bound(20, 0, 20, 0.05, "upper") == 1.0
        assert stats.tango_bound(0, 20, 20, 0.05, "lower") == -1.0
        assert stats.tango_bound(20, 0, 20, 0.05, "lower") < 1.0

    def test_p_values(self):
        assert stats.tango_p(8, 5, 164, 0.05) == pytest.approx(0.0907033, abs=6e-8)
        assert stats.tango_p(8, 5, 164, 0.02) == pytest.approx(0.4690494, abs=6e-8)

    @given(tables(), margins)
    def test_swapping_the_variants_mirrors(self, table, margin):
        b, c, n = table
        assert stats.tango_z(b, c, n, margin) == -stats.tango_z(c, b, n, -margin)
        upper = stats.tango_bound(b, c, n, 0.05, "upper")
        assert stats.tango_bound(c, b, n, 0.05, "lower") == -upper

    @given(tables(), margins, margins)
    def test_z_falls_as_the_margin_grows(self, table, first, second):
        b, c, n = table
        low, high = sorted((first, second))
        assert stats.tango_z(b, c, n, low) >= stats.tango_z(b, c, n, high) - 1e-9

    @given(tables())
    def test_a_concordant_pair_lowers_the_bound_of_a_loss(self, table):
        b, c, n = max(table[:2]), min(table[:2]), table[2]
        assert stats.tango_bound(b, c, n + 1, 0.05, "upper") < stats.tango_bound(
            b, c, n, 0.05, "upper"
        )

    @given(tables())
    def test_a_concordant_pair_narrows_the_interval(self, table):
        # not so where nearly every pair flips: there it moves the estimate away from the limit
        b, c, n = table[0] // 2, table[1] // 2, table[2]
        before, after = stats.tango_interval(b, c, n, 0.9), stats.tango_interval(b, c, n + 1, 0.9)
        assert after.upper - after.lower < before.upper - before.lower

    @given(tables(), st.sampled_from([0.01, 0.05, 0.2]))
    def test_bound_and_p_value_agree(self, table, alpha):
        b, c, n = table
        upper = stats.tango_bound(b, c, n, alpha, "upper")
        assert upper >= (b - c) / n
        if upper < 1.0 - 1e-9:
            assert stats.tango_p(b, c, n, upper) == pytest.approx(alpha, rel=1e-6)


class TestBoundedScore:
    @given(tables(120), margins)
    def test_equals_tango_for_whole_differences(self, table, margin):
        b, c, n = table
        ours, closed = stats.bounded_score(drops(b, c, n), margin), stats.tango_z(b, c, n, margin)
        assert ours == pytest.approx(closed, rel=1e-6, abs=1e-7)

    @given(tables(120), st.sampled_from(["lower", "upper"]))
    def test_bounds_equal_tango_bounds(self, table, side):
        b, c, n = table
        ours = stats.score_bound(drops(b, c, n), 0.05, side)
        assert ours == pytest.approx(stats.tango_bound(b, c, n, 0.05, side), abs=1e-8)

    @given(fractions, margins)
    def test_mirror(self, d, margin):
        mirrored = stats.bounded_score([-x for x in d], -margin)
        assert stats.bounded_score(d, margin) == pytest.approx(-mirrored, rel=1e-9, abs=1e-9)

    @given(fractions, margins, margins)
    def test_z_falls_as_the_margin_grows(self, d, first, second):
        low, high = sorted((first, second))
        assert stats.bounded_score(d, low) >= stats.bounded_score(d, high) - 1e-6

    @given(fractions)
    def test_one_more_unchanged_problem_narrows_around_zero_loss(self, d):
        balanced = d + [-x for x in d]
        before = stats.score_bound(balanced, 0.05)
        assert stats.score_bound([*balanced, 0.0], 0.05) <= before + 1e-9

    @given(fractions, st.sampled_from([0.01, 0.05, 0.3]))
    def test_bound_inverts_the_test(self, d, alpha):
        upper = stats.score_bound(d, alpha)
        assert np.mean(d) - 1e-12 <= upper <= 1.0
        if upper < 0.999:
            z = {0.01: 2.3263478740, 0.05: 1.6448536270, 0.3: 0.5244005127}[alpha]
            assert stats.bounded_score(d, upper) == pytest.approx(-z, abs=1e-5)

    @pytest.mark.parametrize(
        ("d", "margin", "z"),
        [
            ([0.0, 0.1, -0.1, 0.2, 0.0, 0.0, 0.3, -0.2, 0.1, 0.0], 0.3, -1.927248),
            ([0, 0, 0.2, 0, 0, -0.1, 0, 0.1, 0, 0, 0, 0.4], 0.25, -1.788854),
        ],
    )
    def test_fractions_by_constrained_optimiser(self, d, margin, z):
        assert stats.bounded_score(d, margin) == pytest.approx(z, abs=1e-6)
        assert stats.bounded_score(d, margin) == pytest.approx(optimiser_z(d, margin), abs=2e-4)

    def test_limits_matter(self):
        d = [0.0] * 30
        narrow = stats.score_bound(d, 0.05, "upper", -0.2, 0.2)
        assert narrow == pytest.approx(0.2 * stats.score_bound(d, 0.05), rel=1e-9)

    def test_order_and_repetition_of_values_do_not_matter(self):
        d = np.random.default_rng(3).choice(
            [-1, -0.4, 0, 0.2, 1], size=200, p=[0.05, 0.1, 0.7, 0.1, 0.05]
        )
        assert stats.bounded_score(d, 0.05) == stats.bounded_score(np.sort(d)[::-1], 0.05)

    def test_differences_a_rounding_error_beyond_the_limit_are_taken(self):
        assert stats.bounded_score([1.0 + 1e-12, 0.0], 0.7) == pytest.approx(
            stats.bounded_score([1.0, 0.0], 0.7)
        )


def optimiser_z(d, margin):
    """The same statistic from a general optimiser over the weights of the values and of the limit 1."""
    values = np.array([*d, 1.0])
    n = len(d)
    start = np.full(n + 1, 1 / (n + 1))
    result = minimize(
        lambda w: -np.log(np.maximum(w[:n], 1e-300)).sum(),
        start,
        jac=lambda w: np.append(-1 / np.maximum(w[:n], 1e-300), 0.0),
        bounds=[(1e-9, 1)] * n + [(0, 1)],
        constraints=[
            {"type": "eq", "fun": lambda w: w.sum() - 1},
            {"type": "eq", "fun": lambda w: w @ values - margin},
        ],
        method="SLSQP",
        options={"maxiter": 1000, "ftol": 1e-14},
    )
    variance = result.x @ (values - margin) ** 2
    return (np.mean(d) - margin) / math.sqrt(variance / n)


def multinomial_ratio_z(both, broken, fixed, neither, rho):
    """The ratio's score statistic with the four cell probabilities from a general optimiser."""
    counts = np.array([both, broken, fixed, neither], dtype=float)
    n = counts.sum()
    result = minimize(
        lambda p: -(counts * np.log(np.maximum(p, 1e-300))).sum(),
        (counts + 0.5) / (n + 2),
        bounds=[(1e-12, 1)] * 4,
        constraints=[
            {"type": "eq", "fun": lambda p: p.sum() - 1},
            {"type": "eq", "fun": lambda p: rho * (p[0] + p[1]) - p[0] - p[2]},
        ],
        method="SLSQP",
        options={"maxiter": 1000, "ftol": 1e-14},
    )
    d = np.array([rho - 1, rho, -1.0, 0.0])
    return (counts @ d / n) / math.sqrt(result.x @ d**2 / n)


class TestRecovery:
    @pytest.mark.parametrize(
        ("cells", "level", "published", "digits"),
        [
            ((446, 16, 5, 690), 0.90, (0.958, 0.992), 3),  # published
            ((1, 7, 1, 12), 0.95, (0.0653, 0.9069), 4),  # published
        ],
    )
    def test_published_intervals(self, cells, level, published, digits):
        base, var = outcomes(*cells)
        alpha = (1 - level) / 2
        got = [stats.recovery_bound(base, var, alpha, side) for side in ("lower", "upper")]
        assert tuple(round(x, digits) for x in got) == published

    def test_closed_form_figure(self):
        assert stats.recovery_score(*outcomes(100, 3, 2, 59), 0.95) == pytest.approx(
            -1.5301055, abs=6e-8
        )

    @pytest.mark.parametrize(
        "cells", [(100, 3, 2, 59), (40, 8, 5, 20), (30, 0, 4, 10), (12, 6, 0, 9)]
    )
    @pytest.mark.parametrize("rho", [0.8, 0.95, 1.1])
    def test_score_by_multinomial_optimiser(self, cells, rho):
        got = stats.recovery_score(*outcomes(*cells), rho)
        assert got == pytest.approx(multinomial_ratio_z(*cells, rho), abs=3e-3)

    @settings(max_examples=60)
    @given(st.integers(1, 30), st.integers(0, 9), st.integers(0, 9), st.integers(0, 30))
    def test_bounds_enclose_and_invert(self, both, broken, fixed, neither):
        base, var = outcomes(both, broken, fixed, neither)
        lower = stats.recovery_bound(base, var, 0.05, "lower")
        upper = stats.recovery_bound(base, var, 0.05, "upper")
        assert lower <= sum(var) / sum(base) <= upper
        assert stats.recovery_score(base, var, lower) == pytest.approx(-Z95, abs=1e-5)
        assert stats.recovery_score(base, var, upper) == pytest.approx(Z95, abs=1e-5)

    def test_variant_that_solved_nothing(self):
        assert stats.recovery_bound([1, 1, 1, 0], [0, 0, 0, 0], 0.05, "lower") == 0.0

    def test_baseline_that_solved_nothing(self):
        with pytest.raises(ValueError, match="absolute margin"):
            stats.recovery_bound([0, 0], [1, 0], 0.05)


class TestForReports:
    def test_newcombe_published(self):
        counts = PairCounts(20, 12, 2, 16)
        ten, eight = stats.newcombe_interval(counts), stats.newcombe_interval(counts, method=8)
        assert (round(ten.lower, 4), round(ten.upper, 4)) == (0.0562, 0.3292)  # Newcombe 1998
        assert (round(eight.lower, 4), round(eight.upper, 4)) == (0.0618, 0.3242)

    def test_newcombe_with_an_empty_margin(self):
        interval = stats.newcombe_interval(PairCounts(10, 0, 0, 0))
        assert -1.0 < interval.lower < 0.0 < interval.upper < 1.0

    @pytest.mark.parametrize(
        ("b", "c", "exact", "mid"),
        [
            (12, 2, 0.0129395, 0.0073853),
            (1, 7, 0.0703125, 0.0390625),
            (5, 5, 1.0, 1.0),
            (0, 0, 1.0, 1.0),
        ],
    )
    def test_mcnemar(self, b, c, exact, mid):
        assert stats.mcnemar_exact(b, c) == pytest.approx(exact, abs=6e-8)
        assert stats.mcnemar_midp(b, c) == pytest.approx(mid, abs=6e-8)

    def test_mcnemar_one_sided_adds_up(self):
        assert stats.mcnemar_exact(12, 2, "greater") == pytest.approx((1 + 14 + 91) / 2**14)
        assert stats.mcnemar_exact(0, 3, "greater") == 1.0

    def test_mcnemar_chi2(self):
        assert stats.mcnemar_chi2(16, 8) == pytest.approx((8 / 3, 0.1024704349), abs=1e-9)
        assert stats.mcnemar_chi2(0, 0) == (0.0, 1.0)

    def test_wald_has_no_width_without_flips(self):
        assert stats.wald_interval(0, 0, 20).upper == 0.0
        published = stats.wald_interval(1, 7, 21)
        assert (round(published.lower, 3), round(published.upper, 3)) == (-0.520, -0.052)


class TestInput:
    def test_pair_counts(self):
        counts = stats.pair_counts([1, 1, 0, 0, 1], [1, 0, 1, 0, 0])
        assert counts == PairCounts(both_right=1, broken=2, fixed=1, both_wrong=1)
        assert (counts.n, counts.drop, counts.flip_rate) == (5, 0.2, 0.6)

    def test_counts_of_differences(self):
        assert stats.as_counts([1, 0, -1, 1]) == (2, 1, 4)
        assert stats.as_counts([1, 0.5]) is None

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: stats.bounded_score([], 0.1), "'d' holds 0 values"),
            (lambda: stats.bounded_score([0.0, math.nan], 0.1), "'nan' at index 1"),
            (lambda: stats.bounded_score([0.0, math.inf], 0.1), "'inf' at index 1"),
            (lambda: stats.bounded_score([0.0, 1.5], 0.1), "'1.5' at index 1"),
            (lambda: stats.bounded_score([0.0], 1.0), "margin is '1.0'"),
            (lambda: stats.bounded_score([0.0], math.nan), "margin is 'nan'"),
            (lambda: stats.bounded_score([[0.0]], 0.1), "one-dimensional"),
            (lambda: stats.score_bound([0.0], 0.05, "up"), "side is 'up'"),
            (lambda: stats.score_bound([0.0], 0.7), "alpha"),
            (lambda: stats.tango_z(0, 0, 0, 0.1), "n is '0'"),
            (lambda: stats.tango_z(3, 3, 5, 0.1), "b=3 and c=3"),
            (lambda: stats.tango_z(-1, 3, 5, 0.1), "b=-1"),
            (lambda: stats.tango_z(1, 0, 5, -1.0), "margin is '-1.0'"),
            (lambda: stats.tango_interval(1, 0, 5, 95), "level"),
            (lambda: stats.pair_counts([1, 0], [1]), "must be paired"),
            (lambda: stats.pair_counts([1, 0.5], [1, 1]), "'0.5' at index 1"),
            (lambda: stats.recovery_score([1, 2], [1, 1], 0.9), "'2.0' at index 1"),
            (lambda: stats.recovery_score([1], [1], 0.0), "rho"),
            (lambda: stats.newcombe_interval(PairCounts(1, 1, 1, 1), method=9), "method is '9'"),
        ],
    )
    def test_bad_input_is_named(self, call, message):
        with pytest.raises(ValueError, match=message):
            call()

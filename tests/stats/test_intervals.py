"""Shares and quantiles against scipy, closed forms and published figures."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest

from quanteval import stats
from quanteval.stats.intervals import binomial_cdf, quantile_ranks


class TestShares:
    @pytest.mark.parametrize(("x", "n"), [(0, 10), (8, 10), (10, 10), (3, 164), (700, 1319)])
    def test_against_scipy(self, x, n):
        test = binomtest(x, n)
        for ours, method in (
            (stats.wilson_interval(x, n), "wilson"),
            (stats.clopper_pearson_interval(x, n), "exact"),
        ):
            theirs = test.proportion_ci(0.95, method=method)
            assert (ours.lower, ours.upper) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
            assert ours.point == x / n

    def test_zero_events(self):
        assert stats.clopper_pearson_bound(0, 164, 0.05, "upper") == pytest.approx(
            1 - 0.05 ** (1 / 164)
        )
        z = 1.6448536269514722
        assert stats.wilson_bound(0, 164, 0.05, "upper") == pytest.approx(z * z / (164 + z * z))
        assert stats.wilson_bound(0, 164, 0.05, "lower") == 0.0
        assert stats.wilson_bound(164, 164, 0.05, "upper") == 1.0

    @given(st.integers(1, 400), st.data())
    def test_failures_mirror_successes(self, n, data):
        x = data.draw(st.integers(0, n))
        for bound in (stats.wilson_bound, stats.clopper_pearson_bound):
            upper = bound(x, n, 0.05, "upper")
            assert bound(n - x, n, 0.05, "lower") == pytest.approx(1 - upper, abs=1e-9)
            assert upper >= x / n

    @given(st.integers(-1, 30), st.integers(1, 30), st.floats(0.001, 0.999))
    def test_cdf(self, k, n, p):
        assert binomial_cdf(k, n, p) == pytest.approx(binom.cdf(k, n, p), abs=1e-12)

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: stats.wilson_bound(0, 0, 0.05, "upper"), "n is '0'"),
            (lambda: stats.wilson_interval(0, 0), "n is '0'"),
            (lambda: stats.clopper_pearson_bound(5, 4, 0.05, "upper"), "x is '5'"),
            (lambda: stats.wilson_bound(1, 4, 0.05, "left"), "'left'"),
            (lambda: stats.wilson_bound(1, 4, 1.5, "upper"), "'1.5'"),
        ],
    )
    def test_bad_input_is_named(self, call, message):
        with pytest.raises(ValueError, match=message):
            call()


class TestQuantiles:
    @given(
        st.integers(1, 500),
        st.sampled_from([0.1, 0.5, 0.9, 0.95, 0.99]),
        st.sampled_from([0.01, 0.05]),
    )
    def test_ranks_have_the_stated_coverage_and_no_more(self, n, q, alpha):
        lower, upper = quantile_ranks(n, q, alpha)
        if upper <= n:
            assert binom.cdf(upper - 1, n, q) >= 1 - alpha - 1e-9
        assert upper == 1 or binom.cdf(upper - 2, n, q) < 1 - alpha
        if lower > 0:
            assert binom.cdf(lower - 1, n, q) <= alpha + 1e-9
        assert lower == n or binom.cdf(lower, n, q) > alpha

    @pytest.mark.parametrize(
        ("q", "alpha", "n"),
        [
            (0.9, 0.05, 29),
            (0.95, 0.05, 59),
            (0.99, 0.05, 299),
            (0.99, 0.025, 368),
            (0.999, 0.05, 2995),
        ],
    )
    def test_smallest_sample_with_a_bound(self, q, alpha, n):
        assert stats.min_n_quantile_bound(q, alpha) == n
        assert stats.min_n_quantile_bound(1 - q, alpha, "lower") == n
        values = np.arange(n, dtype=float)
        assert stats.quantile_bounds(values, q, alpha).upper == n - 1
        assert stats.quantile_bounds(values[1:], q, alpha).upper == math.inf

    def test_bounds_enclose_the_quantile(self):
        values = np.random.default_rng(0).exponential(size=400)
        bounds = stats.quantile_bounds(values, 0.95)
        assert bounds.lower < bounds.point < bounds.upper
        assert bounds.point == np.quantile(values, 0.95)
        assert {bounds.lower, bounds.upper} <= set(values)

    def test_one_value(self):
        bounds = stats.quantile_bounds([3.0], 0.5)
        assert (bounds.lower, bounds.point, bounds.upper) == (-math.inf, 3.0, math.inf)

    @pytest.mark.parametrize(
        ("values", "q", "message"),
        [([], 0.5, "holds 0"), ([1.0, math.nan], 0.5, "index 1"), ([1.0], 1.0, "'q' is '1.0'")],
    )
    def test_bad_input_is_named(self, values, q, message):
        with pytest.raises(ValueError, match=message):
            stats.quantile_bounds(values, q)

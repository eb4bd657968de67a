"""Speed ratios against scipy and the published counts of the MLPerf rules."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, ttest_ind

from quanteval import stats

positive = st.lists(st.floats(0.1, 100.0), min_size=2, max_size=8)


class TestThroughput:
    def test_against_scipy(self):
        base, var = [1010.0, 1000.0, 990.0, 1005.0], [1290.0, 1310.0, 1300.0, 1285.0]
        result = stats.throughput_ratio(base, var)
        wanted = ttest_ind(np.log(var), np.log(base), equal_var=False).confidence_interval(0.90)
        assert (result.lower, result.upper) == pytest.approx(
            (math.exp(wanted.low), math.exp(wanted.high))
        )
        assert result.ratio == pytest.approx(1.29463163)
        assert result.lower == pytest.approx(1.27952279)

    @given(positive, positive)
    def test_swapping_inverts(self, base, var):
        there, back = stats.throughput_ratio(base, var), stats.throughput_ratio(var, base)
        assert there.lower == pytest.approx(1 / back.upper, rel=1e-9)
        assert there.lower <= there.ratio * (1 + 1e-12)

    def test_unit_does_not_matter(self):
        base, var = np.array([10.0, 11.0, 9.5]), np.array([12.0, 12.5, 13.0])
        scaled = stats.throughput_ratio(base * 1000, var * 1000)
        assert scaled.lower == pytest.approx(stats.throughput_ratio(base, var).lower)

    def test_one_arm_without_spread(self):
        result = stats.throughput_ratio([10.0, 10.0], [11.0, 12.0])
        assert result.lower < result.ratio < result.upper

    def test_no_spread_at_all(self):
        result = stats.throughput_ratio([10.0, 10.0], [12.0, 12.0])
        assert result.lower == result.upper == pytest.approx(1.2)

    @pytest.mark.parametrize(
        ("base", "var", "message"),
        [
            ([1.0], [1.0, 2.0], "'baseline' holds 1 values; at least 2"),
            ([1.0, 0.0], [1.0, 2.0], "'baseline' is '0.0' at index 1"),
            ([1.0, 2.0], [1.0, math.nan], "'variant' is 'nan' at index 1"),
        ],
    )
    def test_bad_input_is_named(self, base, var, message):
        with pytest.raises(ValueError, match=message):
            stats.throughput_ratio(base, var)


class TestQuantileRatio:
    def test_by_hand(self):
        # 5 values: the median's one-sided 95% bounds are the extremes (1 - 0.5^5 = 0.969)
        base, var = [1.0, 2.0, 4.0, 8.0, 16.0], [2.0, 4.0, 8.0, 32.0, 64.0]
        result = stats.quantile_ratio(base, var, 0.5)
        log2 = math.log(2)
        assert result.ratio == pytest.approx(2.0)
        assert math.log(result.upper) == pytest.approx(log2 + math.hypot(3 * log2, 2 * log2))
        assert math.log(result.lower) == pytest.approx(log2 - math.hypot(2 * log2, 2 * log2))

    def test_too_few_requests_leave_no_upper_bound(self):
        rng = np.random.default_rng(0)
        few = stats.quantile_ratio(rng.exponential(size=500), rng.exponential(size=298), 0.99)
        assert few.upper == math.inf
        enough = stats.quantile_ratio(rng.exponential(size=500), rng.exponential(size=299), 0.99)
        assert math.isfinite(enough.upper)

    def test_swapping_inverts(self):
        rng = np.random.default_rng(1)
        base, var = rng.lognormal(size=400), rng.lognormal(0.1, size=300)
        there, back = stats.quantile_ratio(base, var, 0.9), stats.quantile_ratio(var, base, 0.9)
        assert there.upper == pytest.approx(1 / back.lower)

    @pytest.mark.slow
    @pytest.mark.parametrize("q", [0.5, 0.95])
    def test_level_in_simulation(self, q):
        rng = np.random.default_rng(3)
        wrong = 0
        for _ in range(2000):
            base, var = rng.lognormal(size=300), 1.1 * rng.lognormal(size=300)
            wrong += stats.quantile_ratio(base, var, q).upper < 1.1
        assert wrong / 2000 <= 0.06

    def test_latency_of_zero(self):
        with pytest.raises(ValueError, match=r"'variant' is '0\.0' at index 0"):
            stats.quantile_ratio([1.0], [0.0], 0.5)


class TestCounts:
    @pytest.mark.parametrize(
        ("percentile", "misses", "total"),
        [(0.99, 0, 459), (0.99, 1, 662), (0.99, 5, 1307), (0.9, 0, 44), (0.9, 3, 97)],
    )
    def test_early_stopping(self, percentile, misses, total):
        assert stats.early_stopping_queries(misses, percentile) == total
        assert (
            binom.cdf(misses, total, 1 - percentile)
            <= 0.01
            < binom.cdf(misses, total - 1, 1 - percentile)
        )

    def test_early_stopping_with_many_misses(self):
        total = stats.early_stopping_queries(300, 0.99, 0.95)
        assert binom.cdf(300, total, 0.01) <= 0.05 < binom.cdf(300, total - 1, 0.01)

    @pytest.mark.parametrize(
        ("percentile", "published"), [(0.9, 23886), (0.95, 50425), (0.97, 85811), (0.99, 262742)]
    )
    def test_query_count(self, percentile, published):
        # the published table rounds to the nearest whole number, ours never below what is needed
        assert stats.query_count(percentile, (1 - percentile) / 20) - published in (0, 1)

    def test_bad_input_is_named(self):
        with pytest.raises(ValueError, match="misses is '-1'"):
            stats.early_stopping_queries(-1, 0.99)
        with pytest.raises(ValueError, match="'percentile' is '99'"):
            stats.early_stopping_queries(0, 99)
        with pytest.raises(ValueError, match=r"margin is '0\.0'"):
            stats.query_count(0.99, 0.0)

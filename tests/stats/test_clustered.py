"""Ratio and mean over clusters: by hand, against scipy, against the jackknife, and in simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from quanteval import stats


class TestRatio:
    def test_by_hand(self):
        result = stats.clustered_ratio([2, 4, 9], [1, 2, 3])
        assert result.estimate == 2.5
        # without each cluster: 13/5, 11/4 and 6/3, their mean 2.45
        assert result.se == pytest.approx(math.sqrt(2 / 3 * (0.15**2 + 0.3**2 + 0.45**2)))
        assert result.df == pytest.approx(36 / 14 - 1)
        assert result.clusters == 3
        reach = student.ppf(0.95, 36 / 14 - 1) * result.se
        assert (result.lower, result.upper) == pytest.approx((2.5 - reach, 2.5 + reach))
        # without the last cluster: 6/3 = 2
        assert (result.most_influential, result.influence) == (2, 0.5)

    def test_equal_weights_are_the_one_sample_t_test(self):
        d = np.array([0.0, 0.1, -0.1, 0.2, 0.0, 0.0, 0.3, -0.2, 0.1, 0.0])
        result = stats.cluster_mean(d)
        wanted = ttest_1samp(d, 0.1, alternative="less")
        assert result.p_at_least(0.1) == pytest.approx(wanted.pvalue, abs=1e-12)
        assert result.upper == pytest.approx(wanted.confidence_interval(0.95).high)
        assert (result.estimate, result.se) == pytest.approx((0.04, 0.0452155332208))

    def test_close_to_the_linearised_standard_error_with_many_clusters(self):
        rng = np.random.default_rng(5)
        weights = rng.integers(200, 2000, size=150).astype(float)
        totals = weights * 0.01 + rng.normal(0, 4, size=150)
        residual = totals - totals.sum() / weights.sum() * weights
        linearised = math.sqrt(150 / 149 * np.sum(residual**2)) / weights.sum()
        found = stats.clustered_ratio(totals, weights)
        assert found.se == pytest.approx(linearised, rel=0.02)
        assert 100 < found.df < 149

    def test_one_cluster_that_weighs_all_leaves_nothing_certain(self):
        found = stats.clustered_ratio([1000.0, 0.5, 0.2], [100_000.0, 1.0, 1.0])
        assert found.df < 1e-4
        assert found.lower == -math.inf or found.lower < -1e6
        assert found.upper == math.inf or found.upper > 1e6

    def test_log_perplexity_ratio(self):
        base, tokens = np.array([250.0, 400.0, 90.0]), np.array([100, 160, 40])
        result = stats.log_perplexity_ratio(base, base + np.array([1.0, 2.0, 0.2]), tokens)
        assert result.estimate == pytest.approx(3.2 / 300)
        ppl = np.exp((base.sum() + 3.2) / 300) / np.exp(base.sum() / 300)
        assert math.exp(result.estimate) == pytest.approx(ppl)

    @given(st.lists(st.tuples(st.floats(-50, 50), st.integers(1, 999)), min_size=2, max_size=30))
    def test_units_and_order_of_documents_do_not_matter(self, documents):
        totals, weights = (np.array(x, dtype=float) for x in zip(*documents, strict=True))
        result = stats.clustered_ratio(totals, weights)
        scaled = stats.clustered_ratio(totals[::-1] * 8, weights[::-1] * 2)
        assert scaled.estimate == pytest.approx(4 * result.estimate, abs=1e-9)
        assert scaled.se == pytest.approx(4 * result.se, rel=1e-6, abs=1e-9)
        assert result.lower <= result.estimate <= result.upper

    def test_equal_documents_leave_no_spread(self):
        result = stats.clustered_ratio([0.1, 0.2, 0.3], [1, 2, 3])
        assert result.se == 0.0
        assert result.lower == result.upper == result.estimate
        assert [result.p_at_least(m) for m in (0.05, result.estimate, 0.2)] == [1.0, 0.5, 0.0]

    def test_token_errors_would_be_too_small(self):
        rng = np.random.default_rng(2)
        tokens = [rng.normal(rng.normal(0.01, 0.02), 0.25, size=1000) for _ in range(60)]
        per_token = np.concatenate(tokens)
        naive = per_token.std() / math.sqrt(per_token.size)
        clustered = stats.clustered_ratio([t.sum() for t in tokens], [t.size for t in tokens]).se
        assert clustered > 1.8 * naive

    def test_cluster_sums(self):
        sums, sizes = stats.cluster_sums([1.0, 2.0, 4.0, 8.0], ["b", "a", "b", "c"])
        assert sums.tolist() == [5.0, 2.0, 8.0]
        assert sizes.tolist() == [2.0, 1.0, 1.0]

    @pytest.mark.parametrize(
        ("totals", "weights", "message"),
        [
            ([], [], "holds 0 values; at least 2"),
            ([1.0], [1.0], "at least 2"),
            ([1.0, math.nan], [1, 1], "'totals' is 'nan' at index 1"),
            ([1.0, 2.0], [1, 0], "'weights' is '0.0' at index 1"),
            ([1.0, 2.0], [1, 2, 3], "must be paired"),
        ],
    )
    def test_bad_input_is_named(self, totals, weights, message):
        for function in (stats.clustered_ratio, stats.bootstrap_ratio):
            with pytest.raises(ValueError, match=message):
                function(totals, weights)

    def test_labels_must_match(self):
        with pytest.raises(ValueError, match="one label a value"):
            stats.cluster_sums([1.0, 2.0], ["a"])


class TestQuantile:
    def test_by_hand(self):
        # the median of 1..20 is 10; the shares up to it are 8/10 and 2/10: r = 3 and -3
        series = [[1, 2, 3, 4, 5, 6, 7, 8, 11, 12], [9, 10, 13, 14, 15, 16, 17, 18, 19, 20]]
        result = stats.clustered_quantile(series, 0.5, alpha=0.4)
        reach = student.ppf(0.6, 1) * math.sqrt(2 * (9 + 9)) / 20  # 0.0975
        assert 0.09 < reach < 0.1
        assert (result.estimate, result.lower, result.upper) == (10.0, 9.0, 12.0)
        assert (result.clusters, result.n, result.q, result.alpha) == (2, 20, 0.5, 0.4)
        wide = stats.clustered_quantile(series, 0.5)
        assert (wide.lower, wide.upper) == (-math.inf, math.inf)

    @given(
        st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=30), min_size=2, max_size=12),
        st.sampled_from([0.1, 0.5, 0.9, 0.99]),
    )
    def test_order_mirror_and_scale(self, series, q):
        result = stats.clustered_quantile(series, q)
        assert result.lower <= result.estimate <= result.upper
        pooled = np.concatenate(series)
        assert result.estimate == np.quantile(pooled, q, method="inverted_cdf")
        scaled = stats.clustered_quantile([np.array(x) * 4.0 for x in series[::-1]], q)
        assert (scaled.lower, scaled.upper) == (4.0 * result.lower, 4.0 * result.upper)
        tighter = stats.clustered_quantile(series, q, alpha=0.2)
        assert result.lower <= tighter.lower <= tighter.upper <= result.upper

    def test_agreeing_clusters_are_no_certainty(self):
        equal = [np.arange(100)] * 20
        result = stats.clustered_quantile(equal, 0.5)
        reach = student.ppf(0.95, 19) * 0.5 / math.sqrt(2000)
        assert result.upper == math.ceil(100 * (0.5 + reach)) - 1
        assert result.lower == math.ceil(100 * (0.5 - reach)) - 1
        constant = stats.clustered_quantile([np.zeros(400)] * 5, 0.99)
        assert (constant.lower, constant.estimate, constant.upper) == (0.0, 0.0, 0.0)
        assert stats.clustered_quantile([[0.0]] * 5, 0.99).upper == math.inf

    def test_clustering_widens(self):
        rng = np.random.default_rng(6)
        series = [rng.normal(rng.normal(), 1, size=200) for _ in range(30)]
        clustered = stats.clustered_quantile(series, 0.5)
        independent = stats.quantile_bounds(np.concatenate(series), 0.5)
        assert clustered.upper - clustered.lower > 4 * (independent.upper - independent.lower)

    @pytest.mark.parametrize(
        ("series", "options", "message"),
        [
            ([], {}, "holds 0 clusters; at least 2"),
            ([[1.0]], {}, "holds 1 clusters"),
            ([[1.0], []], {}, r"'series\[1\]' holds 0 values"),
            ([[1.0], [2.0, math.nan]], {}, r"'series\[1\]' is 'nan' at index 1"),
            ([[1.0], [2.0]], {"q": 1.0}, "'q' is '1.0'"),
            ([[1.0], [2.0]], {"alpha": 0.5}, "'alpha' is '0.5'"),
        ],
    )
    def test_bad_input_is_named(self, series, options, message):
        with pytest.raises(ValueError, match=message):
            stats.clustered_quantile(series, **{"q": 0.5, **options})

    @pytest.mark.parametrize(("q", "spread", "limit"), [(0.5, 0.8, 0.075), (0.99, 0.3, 0.09)])
    def test_coverage_with_documents_of_unlike_scale(self, q, spread, limit):
        rng, low, high, runs = np.random.default_rng(23), 0, 0, 1000

        def document(size):
            return np.exp(spread * rng.normal()) * rng.gamma(0.5, 1.0, size=size)

        scale = np.exp(spread * rng.normal(size=400_000))
        truth = np.quantile(scale * rng.gamma(0.5, 1.0, size=400_000), q)
        for _ in range(runs):
            result = stats.clustered_quantile(
                [document(t) for t in rng.integers(100, 300, size=20)], q
            )
            low, high = low + (result.lower > truth), high + (result.upper < truth)
        assert low / runs <= limit
        assert high / runs <= limit


class TestBootstrap:
    def test_all_resamples_of_two_clusters(self):
        result = stats.bootstrap_ratio([0.0, 1.0], [1.0, 1.0], alpha=0.2)
        # a quarter of the resamples gives 0, half 1/2, a quarter 1
        assert (result.lower, result.upper) == (0.0, 1.0)
        inner = stats.bootstrap_ratio([0.0, 1.0], [1.0, 1.0], alpha=0.3)
        assert (inner.lower, inner.upper) == (0.5, 0.5)

    def test_agrees_with_the_t_bounds_on_many_clusters(self):
        rng = np.random.default_rng(9)
        weights = rng.integers(100, 400, size=300)
        totals = rng.normal(0.02, 0.3, size=300) * weights
        boot, t = stats.bootstrap_ratio(totals, weights), stats.clustered_ratio(totals, weights)
        assert boot.estimate == pytest.approx(t.estimate)
        assert boot.upper - boot.estimate == pytest.approx(t.upper - t.estimate, rel=0.06)

    def test_seed_decides(self):
        rng = np.random.default_rng(1)
        data = rng.normal(size=40), np.ones(40)
        assert stats.bootstrap_ratio(*data, seed=4) == stats.bootstrap_ratio(*data, seed=4)
        assert stats.bootstrap_ratio(*data, seed=4) != stats.bootstrap_ratio(*data, seed=5)

    def test_blocks_cover_every_resample(self):
        data = np.random.default_rng(1).normal(size=3000)
        result = stats.bootstrap_ratio(data, np.ones(3000), resamples=3000)
        assert result.upper - result.estimate == pytest.approx(1.645 / math.sqrt(3000), rel=0.1)

    def test_too_few_resamples(self):
        with pytest.raises(ValueError, match="resamples is '10'"):
            stats.bootstrap_ratio([1.0, 2.0], [1, 1], resamples=10)


@pytest.mark.slow
def test_level_of_the_perplexity_bound_in_simulation():
    rng = np.random.default_rng(21)
    wrong = 0
    for _ in range(3000):
        weights = rng.integers(300, 3000, size=40).astype(float)
        totals = weights * rng.normal(0.01, 0.01, size=40) + rng.normal(0, 0.25 * np.sqrt(weights))
        wrong += stats.clustered_ratio(totals, weights).upper < 0.01
    assert 0.035 <= wrong / 3000 <= 0.07

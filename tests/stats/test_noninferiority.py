"""Which test is chosen, and that p-values, bounds and properties tell one story."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_1samp

from quanteval import stats


def outcomes(both, broken, fixed, neither):
    base = [1.0] * (both + broken) + [0.0] * (fixed + neither)
    var = [1.0] * both + [0.0] * broken + [1.0] * fixed + [0.0] * neither
    return base, var


class TestAbsolute:
    def test_worked_example(self):
        result = stats.absolute_loss(*outcomes(100, 8, 5, 51), 0.05, method="score")
        assert (result.broken, result.fixed, result.n) == (8, 5, 164)
        assert result.loss == pytest.approx(3 / 164)
        assert result.upper == pytest.approx(0.0583901, abs=6e-8)
        assert result.lower == pytest.approx(-0.0195185, abs=6e-8)
        assert result.p_accept == pytest.approx(0.0907033, abs=6e-8)
        assert not (result.accepted or result.rejected or result.regression_detected)

    def test_binary_scores_take_the_exact_test(self):
        result = stats.absolute_loss(*outcomes(100, 0, 0, 64), 0.02)
        assert result.method == "exact"
        assert result.accepted
        assert result.p_accept == pytest.approx(0.98**164)
        critical = stats.exact_critical_z(164, 0.02)
        assert result.upper == pytest.approx(critical**2 / (164 + critical**2), abs=1e-9)

    def test_identical_scores_on_a_small_suite_prove_nothing(self):
        result = stats.absolute_loss([1.0] * 20, [1.0] * 20, 0.05)
        assert not result.accepted
        assert result.upper > 0.05

    def test_broken_variant_is_rejected_and_the_regression_is_seen(self):
        result = stats.absolute_loss(*outcomes(80, 40, 2, 42), 0.05)
        assert result.rejected
        assert result.regression_detected
        assert result.lower > 0.05

    def test_tolerable_regression(self):
        result = stats.absolute_loss(*outcomes(700, 20, 4, 276), 0.05)
        assert result.accepted
        assert result.regression_detected

    def test_large_suites_take_the_score_test(self):
        result = stats.absolute_loss(*outcomes(5000, 30, 20, 1), 0.02)
        assert (result.method, result.broken, result.fixed) == ("score", 30, 20)
        assert result.upper == pytest.approx(stats.tango_bound(30, 20, 5051, 0.05, "upper"))

    def test_fractions_take_the_score_test(self):
        result = stats.absolute_loss([0.5, 1.0, 0.25], [0.5, 0.75, 0.5], 0.1)
        assert (result.method, result.broken) == ("score_exact", None)
        assert stats.absolute_loss([0.5, 1.0], [0.5, 0.75], 0.1, method="score").method == "score"

    def test_fractions_that_are_nearly_0_and_1_keep_the_exact_level(self):
        # 52 unchanged pairs: Tango's p at 5 points is below 0.05, the exact one 0.95^52 = 0.069.
        base = np.ones(52)
        base[0] = 0.5
        score = stats.absolute_loss(base, base, 0.05, method="score")
        auto = stats.absolute_loss(base, base, 0.05)
        assert score.accepted
        assert not auto.accepted
        assert auto.p_accept == pytest.approx(stats.exact_p(0, 0, 52, 0.05), rel=1e-9)
        assert auto.upper >= 0.05

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.sampled_from([-0.4, -0.2, 0.0, 0.0, 0.0, 0.2, 0.4]), min_size=20, max_size=60)
    )
    def test_bounds_of_fractions_agree_with_the_decision(self, d):
        base = np.full(len(d), 0.5)
        result = stats.absolute_loss(base, base - np.array(d), 0.05)
        assert (result.upper < 0.05) == result.accepted
        assert (result.lower > 0.05) == result.rejected
        assert result.lower <= result.loss <= result.upper

    def test_whole_differences_of_fractions_are_not_flips(self):
        assert stats.absolute_loss([0.5, 0.5], [0.5, 0.5], 0.1).method == "score_exact"

    def test_t_test(self):
        base, var = np.array([3.0, 5.0, 9.0, 4.0]), np.array([2.5, 5.5, 8.0, 4.0])
        result = stats.absolute_loss(base, var, 0.8, method="t")
        wanted = ttest_1samp(base - var, 0.8, alternative="less")
        assert result.p_accept == pytest.approx(wanted.pvalue)
        assert result.p_reject == pytest.approx(1 - wanted.pvalue)
        assert result.upper == pytest.approx(wanted.confidence_interval(0.95).high)

    @settings(max_examples=50, deadline=None)
    @given(
        st.integers(0, 12),
        st.integers(0, 12),
        st.integers(0, 60),
        st.sampled_from(["exact", "score"]),
    )
    def test_bounds_and_decisions_agree(self, broken, fixed, rest, method):
        if broken + fixed + rest == 0:
            return
        result = stats.absolute_loss(*outcomes(rest, broken, fixed, 0), 0.1, method=method)
        assert result.lower <= result.loss <= result.upper
        assert not (result.accepted and result.rejected)
        assert result.accepted == (result.upper < 0.1)
        assert result.rejected == (result.lower > 0.1)

    @pytest.mark.parametrize(("n", "margin", "alpha"), [(60, 0.05, 0.05), (40, 0.1, 0.01)])
    def test_exact_bounds_agree_with_every_decision(self, n, margin, alpha):
        verdicts = set()
        for broken in range(n // 2):
            for fixed in (0, 1, 3, 8):
                scores = outcomes(n - broken - fixed, broken, fixed, 0)
                result = stats.absolute_loss(*scores, margin, alpha=alpha)
                assert result.lower <= result.loss <= result.upper
                assert result.accepted == (result.upper < margin)
                assert result.rejected == (result.lower > margin)
                verdicts.add((result.accepted, result.rejected))
        assert len(verdicts) == 3

    def test_too_few_items_for_any_acceptance(self):
        result = stats.absolute_loss([0.0, 0.0], [1.0, 1.0], 0.02)
        assert not result.accepted
        assert result.upper >= 0.02
        assert stats.exact_critical_z(2, 0.02) == -math.inf

    @pytest.mark.parametrize(
        ("base", "var", "options", "message"),
        [
            ([], [], {}, "'baseline' holds 0 values"),
            ([1.0, math.nan], [1.0, 1.0], {}, "'baseline' is 'nan' at index 1"),
            ([1.0, 1.0], [1.0, math.nan], {}, "'variant' is 'nan' at index 1"),
            ([1.0], [1.0, 0.0], {}, "must be paired"),
            ([1.0], [1.0], {"margin": 1.0}, "margin is '1.0'"),
            ([0.5], [1.0], {"method": "exact"}, "scores of 0 and 1"),
            ([1.0], [1.0], {"method": "bayes"}, "'bayes'"),
            ([1.0], [1.0], {"alpha": 0.0}, "alpha"),
            ([1.0, 2.0], [1.0, 2.0], {"method": "t", "margin": math.nan}, "margin is 'nan'"),
        ],
    )
    def test_bad_input_is_named(self, base, var, options, message):
        with pytest.raises(ValueError, match=message):
            stats.absolute_loss(base, var, **{"margin": 0.05, **options})


class TestRelative:
    def test_published_interval(self):
        result = stats.relative_loss(*outcomes(446, 16, 5, 690), 0.05)
        assert 1 - result.upper == pytest.approx(0.958, abs=5e-4)
        assert 1 - result.lower == pytest.approx(0.992, abs=5e-4)
        assert result.accepted
        assert result.regression_detected
        assert (result.broken, result.fixed, result.n) == (16, 5, 1157)

    def test_p_value(self):
        assert stats.relative_loss(*outcomes(100, 3, 2, 59), 0.05).p_accept == pytest.approx(
            0.0629953, abs=6e-8
        )

    def test_a_gain_is_a_negative_loss(self):
        result = stats.relative_loss([0.5, 0.5, 1.0], [1.0, 0.5, 1.0], 0.02)
        assert result.loss == pytest.approx(-0.25)

    def test_baseline_without_any_score(self):
        with pytest.raises(ValueError, match="absolute margin"):
            stats.relative_loss([0.0, 0.0], [0.0, 1.0], 0.05)

    def test_margin_outside(self):
        with pytest.raises(ValueError, match=r"'1\.5'"):
            stats.relative_loss([1.0], [1.0], 1.5)


def simulated_error(draw, judge, runs, seed):
    rng = np.random.default_rng(seed)
    return sum(judge(draw(rng)) for _ in range(runs)) / runs


@pytest.mark.slow
class TestCalibration:
    """Wrong acceptances of a variant sitting on the margin, nominal 5%, by seeded simulation."""

    def test_binary(self):
        def draw(rng):
            u = rng.random(500)
            return np.where(u < 0.035, 1.0, np.where(u < 0.05, -1.0, 0.0))

        error = simulated_error(draw, lambda d: stats.score_bound(d, 0.05) < 0.02, 4000, 11)
        assert 0.035 <= error <= 0.06

    def test_fractions_of_ten_samples_a_problem(self):
        def draw(rng):
            p = rng.beta(0.5, 0.35, size=164)
            lower = np.clip(p - 0.04 * p / p.mean(), 0, 1)
            return rng.binomial(10, p) / 10 - rng.binomial(10, lower) / 10

        rng = np.random.default_rng(0)
        p = rng.beta(0.5, 0.35, size=400_000)
        margin = float(np.mean(0.04 * p / p.mean()))
        error = simulated_error(draw, lambda d: stats.score_bound(d, 0.05) < margin, 2000, 12)
        assert 0.02 <= error <= 0.07

    def test_sparse_fractions_never_release_too_often(self):
        def draw(rng):
            return np.where(rng.random(164) < 0.04, 0.5, 0.0)

        error = simulated_error(draw, lambda d: stats.score_bound(d, 0.05) < 0.02, 3000, 13)
        assert error <= 0.05

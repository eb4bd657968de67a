"""Group-sequential bounds against published tables and a multivariate normal; the betting test by enumeration."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import multivariate_normal, norm

from quanteval import stats


def crossing_probability(fractions, bounds):
    """P(the standardised Brownian motion exceeds a bound at some look), by scipy's multivariate normal."""
    t = np.array(fractions)
    covariance = np.sqrt(np.minimum.outer(t, t) / np.maximum.outer(t, t))
    return 1 - multivariate_normal(cov=covariance, seed=1, abseps=1e-7, maxpts=400_000).cdf(
        np.array(bounds)
    )


class TestDesign:
    @pytest.mark.parametrize(
        ("looks", "alpha", "published"),
        [
            (5, 0.025, (4.8769, 3.3570, 2.6803, 2.2898, 2.0310)),  # published
            (5, 0.05, (4.2292, 2.8881, 2.2981, 1.9618, 1.7397)),
            (3, 0.05, (3.2001, 2.1408, 1.6948)),
        ],
    )
    def test_bounds(self, looks, alpha, published):
        design = stats.sequential_design(looks, alpha)
        assert tuple(round(z, 4) for z in design.z_bounds) == published

    def test_single_look_is_the_fixed_test(self):
        assert stats.sequential_design(1).z_bounds[0] == pytest.approx(norm.ppf(0.95), abs=1e-7)

    @pytest.mark.parametrize("fractions", [(0.5, 1.0), (0.2, 0.5, 1.0), (0.3, 0.35, 0.9, 1.0)])
    def test_spends_all_of_alpha_and_no_more(self, fractions):
        design = stats.sequential_design(fractions)
        assert crossing_probability(fractions, design.z_bounds) == pytest.approx(0.05, abs=2e-5)
        for k in range(1, len(fractions)):
            spent = crossing_probability(fractions[:k], design.z_bounds[:k])
            assert spent == pytest.approx(
                stats.obrien_fleming_spent(fractions[k - 1], 0.05), abs=2e-5
            )

    def test_nominal_levels_belong_to_the_bounds(self):
        design = stats.sequential_design(4)
        assert design.nominal_alpha == pytest.approx([norm.sf(z) for z in design.z_bounds])
        assert design.nominal_alpha[-1] < design.alpha

    def test_a_look_too_early_to_spend_anything(self):
        design = stats.sequential_design((1e-4, 1.0))
        assert design.z_bounds[0] == 37.0
        assert design.z_bounds[1] == pytest.approx(norm.ppf(0.95), abs=1e-6)
        assert min(design.nominal_alpha) > 0.0

    def test_many_looks(self):
        bounds = stats.sequential_design(50).z_bounds
        assert list(bounds) == sorted(bounds, reverse=True)
        assert bounds[-1] == pytest.approx(1.8813, abs=1e-4)

    @pytest.mark.parametrize(
        ("fractions", "message"),
        [
            (0, "looks is '0'"),
            ([], "holds 0"),
            ([0.5, 0.4, 1.0], "must rise"),
            ([0.0, 1.0], "must rise"),
            ([0.5, 0.9], "'0.9'"),
            ([0.5, math.nan], "index 1"),
        ],
    )
    def test_bad_input_is_named(self, fractions, message):
        with pytest.raises(ValueError, match=message):
            stats.sequential_design(fractions)


class TestBetting:
    @pytest.mark.parametrize(("margin", "flip_rate"), [(0.02, 0.05), (0.1, 0.3), (0.3, 0.3)])
    def test_wealth_is_a_fair_game_on_the_margin(self, margin, flip_rate):
        chance = {1.0: (flip_rate + margin) / 2, -1.0: (flip_rate - margin) / 2, 0.0: 1 - flip_rate}
        accept = reject = 0.0
        for d in itertools.product(chance, repeat=6):
            weight = math.prod(chance[x] for x in d)
            result = stats.betting_test(d, margin)
            accept += weight * result.wealth_accept
            reject += weight * result.wealth_reject
        assert (accept, reject) == pytest.approx((1.0, 1.0), abs=1e-12)

    def test_clean_variant_is_accepted_and_broken_one_rejected(self):
        clean = stats.betting_test([0.0] * 500, 0.05)
        assert clean.accepted_at is not None
        assert clean.rejected_at is None
        assert clean.p_accept <= 0.05
        broken = stats.betting_test([1.0, 0.0] * 30, 0.05)
        assert broken.rejected_at is not None
        assert broken.accepted_at is None

    def test_decision_is_made_on_the_first_items_alone(self):
        d = np.random.default_rng(0).choice([0.0, 1.0, -1.0], size=900, p=[0.96, 0.02, 0.02])
        full = stats.betting_test(d, 0.05)
        at = full.accepted_at
        assert stats.betting_test(d[:at], 0.05).accepted_at == at
        assert stats.betting_test(d[: at - 1], 0.05).accepted_at is None

    @given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0]), min_size=1, max_size=60))
    def test_never_bankrupt_and_never_both(self, d):
        result = stats.betting_test(d, 0.1)
        assert result.wealth_accept > 0.0
        assert result.wealth_reject > 0.0
        assert result.accepted_at is None or result.rejected_at is None
        assert 0.0 < min(result.p_accept, result.p_reject) <= 1.0

    def test_no_evidence_from_one_item(self):
        assert stats.betting_test([0.0], 0.05).accepted_at is None

    @pytest.mark.slow
    def test_wrong_acceptances_under_stopping_at_any_time(self):
        rng = np.random.default_rng(7)
        wrong = 0
        for _ in range(2000):
            u = rng.random(1319)
            wrong += (
                stats.betting_test(
                    np.where(u < 0.035, 1.0, np.where(u < 0.05, -1.0, 0.0)), 0.02
                ).accepted_at
                is not None
            )
        assert wrong / 2000 <= 0.06

    @pytest.mark.parametrize(
        ("d", "margin", "message"),
        [
            ([], 0.1, "holds 0"),
            ([0.0, math.nan], 0.1, "index 1"),
            ([2.0], 0.1, "'2.0' at index 0"),
            ([0.0], 0.0, "margin is '0.0'"),
            ([0.0], 1.0, "margin is '1.0'"),
        ],
    )
    def test_bad_input_is_named(self, d, margin, message):
        with pytest.raises(ValueError, match=message):
            stats.betting_test(d, margin)

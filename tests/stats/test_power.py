"""Planning figures against published and independently enumerated ones, pass@k against combinatorics, Holm by hand."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quanteval import stats


def percent(outcome):
    return tuple(round(100 * x) for x in (outcome.accept, outcome.inconclusive, outcome.reject))


class TestOperatingCharacteristics:
    @pytest.mark.parametrize(
        ("n", "margin", "flips", "drop", "wanted"),
        [
            (164, 0.02, 0.05, 0.00, (27, 73, 0)),
            (164, 0.02, 0.05, 0.02, (4, 89, 7)),
            (164, 0.02, 0.05, 0.04, (0, 59, 40)),
            (164, 0.05, 0.05, 0.00, (81, 19, 0)),
            (500, 0.02, 0.05, 0.02, (5, 90, 5)),
            (500, 0.05, 0.10, 0.04, (17, 82, 1)),
            (1319, 0.02, 0.05, 0.00, (94, 6, 0)),
            (1319, 0.02, 0.10, 0.04, (0, 24, 76)),
        ],
    )
    def test_tango(self, n, margin, flips, drop, wanted):
        assert (
            percent(stats.operating_characteristics(n, flips, drop, margin, rule="tango")) == wanted
        )

    def test_by_full_enumeration(self):
        n, flips, drop, margin = 40, 0.2, 0.05, 0.1
        broken, fixed = (flips + drop) / 2, (flips - drop) / 2
        accept = reject = 0.0
        for b, c in itertools.product(range(n + 1), repeat=2):
            if b + c > n:
                continue
            ways = math.comb(n, b) * math.comb(n - b, c)
            weight = ways * broken**b * fixed**c * (1 - flips) ** (n - b - c)
            accept += weight * (stats.tango_bound(b, c, n, 0.05, "upper") < margin)
            reject += weight * (stats.tango_bound(b, c, n, 0.05, "lower") > margin)
        got = stats.operating_characteristics(n, flips, drop, margin, rule="tango")
        assert (got.accept, got.reject) == pytest.approx((accept, reject), abs=1e-10)

    @pytest.mark.parametrize(("n", "drop"), [(20, 0.0), (50, 0.05), (164, 0.1)])
    def test_exact_rule_never_releases_more_often(self, n, drop):
        exact = stats.operating_characteristics(n, 0.12, drop, 0.05)
        tango = stats.operating_characteristics(n, 0.12, drop, 0.05, rule="tango")
        assert exact.accept <= tango.accept + 1e-12
        assert exact.accept + exact.inconclusive + exact.reject == pytest.approx(1.0)

    @pytest.mark.parametrize(("n", "flips"), [(20, 0.05), (50, 0.1), (164, 0.05), (164, 0.3)])
    def test_exact_rule_errs_at_most_alpha_on_both_sides(self, n, flips):
        on_margin = stats.operating_characteristics(n, flips, 0.05, 0.05)
        assert on_margin.accept <= 0.05
        assert on_margin.reject <= 0.05

    def test_point_rule_is_a_coin_toss_on_the_margin(self):
        assert stats.point_rule_error(164, 0.05, 0.02) == pytest.approx(0.5397022, abs=6e-8)
        assert (
            stats.operating_characteristics(164, 0.05, 0.02, 0.02, rule="point").inconclusive == 0.0
        )

    def test_beyond_the_exact_range_tango_decides(self):
        exact = stats.accept_probability(6000, 0.05, 0.0, 0.01)
        assert exact == stats.accept_probability(6000, 0.05, 0.0, 0.01, rule="tango")


class TestPlanning:
    @pytest.mark.parametrize(
        ("flips", "points"),
        [
            (0.01, (11.9, 6.8, 2.7, 1.3, 0.9)),
            (0.05, (19.6, 9.7, 4.8, 2.6, 1.8)),
            (0.20, (27.3, 16.7, 8.8, 5.0, 3.5)),
        ],
    )
    def test_certifiable_margin(self, flips, points):
        got = tuple(
            round(100 * stats.certifiable_margin(n, flips), 1) for n in (20, 50, 164, 500, 1000)
        )
        assert got == points

    def test_certifiable_margin_has_just_the_power_asked_for(self):
        for rule in ("tango", "exact"):
            margin = stats.certifiable_margin(164, 0.05, rule=rule)
            assert stats.accept_probability(164, 0.05, 0.0, margin, rule=rule) >= 0.8
            assert stats.accept_probability(164, 0.05, 0.0, margin - 2e-5, rule=rule) < 0.8

    def test_exact_margin_is_no_smaller(self):
        assert stats.certifiable_margin(50, 0.1, rule="exact") >= stats.certifiable_margin(50, 0.1)

    def test_nothing_can_be_certified_by_one_pair(self):
        assert stats.certifiable_margin(1, 0.5) == 1.0

    def test_approximation(self):
        assert stats.certifiable_margin_approx(164, 0.05) == pytest.approx(0.0434157, abs=6e-8)

    def test_pairs_needed_approximation(self):
        assert stats.pairs_needed_approx(0.02, 0.05) == 773
        assert stats.pairs_needed_approx(0.05, 13 / 164, 3 / 164) in (485, 486)

    @pytest.mark.parametrize(
        ("margin", "flips", "drop"), [(0.05, 0.08, 0.0), (0.1, 0.1, 0.03), (0.05, 0.01, 0.0)]
    )
    def test_pairs_needed_is_where_the_power_settles(self, margin, flips, drop):
        n = stats.pairs_needed(margin, flips, drop)
        powers = [
            stats.accept_probability(k, flips, drop, margin, rule="tango")
            for k in range(n - 1, n + 60)
        ]
        assert powers[0] < 0.8
        assert min(powers[1:]) >= 0.8

    def test_pairs_needed_by_the_exact_rule(self):
        tango, exact = (stats.pairs_needed(0.1, 0.1, rule=rule) for rule in ("tango", "exact"))
        assert tango <= exact <= 1.3 * tango

    def test_pairs_needed_beyond_enumeration(self):
        assert stats.pairs_needed(0.001, 0.05) == stats.pairs_needed_approx(0.001, 0.05) > 300_000

    def test_no_suite_certifies_a_drop_on_the_margin(self):
        with pytest.raises(ValueError, match="no number of pairs"):
            stats.pairs_needed(0.02, 0.05, 0.02)

    @pytest.mark.parametrize(
        ("rho", "score", "flips", "n"),
        [
            (0.99, 0.7, 0.05, 6309),
            (0.99, 0.9, 0.03, 2290),
            (0.98, 0.7, 0.05, 1578),
            (0.95, 0.7, 0.05, 253),
        ],
    )
    def test_pairs_needed_for_a_recovery(self, rho, score, flips, n):
        assert stats.pairs_needed_recovery_approx(rho, score, flips) == n

    @pytest.mark.parametrize(
        ("n", "points"),
        [(164, (4.9, 5.6, 7.0, 8.7)), (500, (2.0, 2.4, 3.3, 4.4)), (1319, (1.0, 1.3, 1.9, 2.5))],
    )
    def test_detectable_drop(self, n, points):
        got = tuple(round(100 * stats.detectable_drop(n, f), 1) for f in (0.01, 0.02, 0.05, 0.10))
        assert got == points

    def test_no_drop_is_detectable_with_four_pairs(self):
        assert stats.detectable_drop(4, 0.0) == 1.0  # 1/16 is above 0.05
        assert stats.detectable_drop(5, 0.0) < 1.0

    def test_flip_rate_from_sd(self):
        assert stats.flip_rate_from_sd(200, 0.009) == pytest.approx(0.0324)

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: stats.accept_probability(0, 0.05, 0.0, 0.02), "n is '0'"),
            (lambda: stats.accept_probability(50, 0.01, 0.02, 0.02), "flip rate is '0.01'"),
            (lambda: stats.accept_probability(50, math.nan, 0.0, 0.02), "flip rate is 'nan'"),
            (lambda: stats.accept_probability(50, 0.05, 0.0, 0.02, rule="wald"), "rule is 'wald'"),
            (lambda: stats.certifiable_margin(50, 0.05, power=80), "'power' is '80'"),
            (lambda: stats.detectable_drop(50, 1.0), "aa_flip_rate is '1.0'"),
            (lambda: stats.flip_rate_from_sd(50, -1.0), "sd is '-1.0'"),
        ],
    )
    def test_bad_input_is_named(self, call, message):
        with pytest.raises(ValueError, match=message):
            call()


class TestPassAtK:
    @given(st.integers(1, 40), st.data())
    def test_is_the_share_of_subsets_with_a_pass(self, n, data):
        c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
        any_pass = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
        all_pass = Fraction(math.comb(c, k), math.comb(n, k))
        assert stats.pass_at_k(n, c, k) == pytest.approx(float(any_pass), abs=1e-12)
        assert stats.pass_hat_k(n, c, k) == pytest.approx(float(all_pass), abs=1e-12)

    def test_known_values(self):
        assert stats.pass_at_k(200, 13, 10) == pytest.approx(0.4975511, abs=6e-8)
        assert stats.pass_at_k(5, 3, 3) == 1.0

    @pytest.mark.parametrize(
        ("n", "c", "k"), [(0, 0, 1), (5, 6, 1), (5, -1, 1), (5, 2, 6), (5, 2, 0)]
    )
    def test_impossible_counts(self, n, c, k):
        for function in (stats.pass_at_k, stats.pass_hat_k):
            with pytest.raises(ValueError):
                function(n, c, k)


class TestMultiplicity:
    def test_holm_by_hand(self):
        assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
        assert stats.holm([0.5, 0.9]) == (1.0, 1.0)
        assert stats.holm([0.04]) == (0.04,)

    @given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
    def test_holm_is_between_the_raw_value_and_bonferroni(self, p):
        adjusted = stats.holm(p)
        assert all(a >= q - 1e-15 for a, q in zip(adjusted, p, strict=True))
        assert min(adjusted) == pytest.approx(min(1.0, len(p) * min(p)))
        assert np.all(np.diff(np.array(adjusted)[np.argsort(p, kind="stable")]) >= 0)

    def test_holm_refuses_what_is_no_p_value(self):
        with pytest.raises(ValueError, match=r"'1\.2' at index 1"):
            stats.holm([0.1, 1.2])

    def test_retries(self):
        assert stats.retry_probability(0.05, 3) == pytest.approx(0.142625)
        assert stats.retry_probability(1.0, 2) == 1.0
        assert stats.retry_probability(0.0, 2) == 0.0
        with pytest.raises(ValueError, match="attempts is '0'"):
            stats.retry_probability(0.5, 0)

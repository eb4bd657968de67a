"""The exact test against brute enumeration, closed forms, and its own promise: never above the level."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quanteval import stats
from quanteval.stats.exact import (
    accept_region,
    decision_bound,
    region_probability,
    region_size,
)
from quanteval.stats.paired import tango_z_table

Z95 = 1.6448536269514722


def all_tables(n, margin):
    """Every table of n pairs with its statistic, in plain Python order."""
    b, c = np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij")
    possible = b + c <= n
    b, c = b[possible], c[possible]
    return b, c, tango_z_table(b, c, n, margin)


def enumerated_probability(inside, b, c, n, broken, fixed):
    """Sum of the multinomial probabilities of the tables, cell by cell."""
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, n + 1)))))
    rest = max(0.0, 1.0 - broken - fixed)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = [
            np.where(k == 0, 0.0, k * np.log(p))
            for k, p in ((b, broken), (c, fixed), (n - b - c, rest))
        ]
    log_choose = log_factorial[n] - log_factorial[b] - log_factorial[c] - log_factorial[n - b - c]
    return float(np.exp(log_choose + sum(terms))[inside].sum())


class TestEnumeration:
    @pytest.mark.parametrize("n", [1, 7, 50])
    @pytest.mark.parametrize("margin", [-0.3, -0.02, 0.02, 0.3])
    def test_region_holds_exactly_the_tables_up_to_z(self, n, margin):
        b, c, z = all_tables(n, margin)
        region = accept_region(n, margin, -1.2)
        assert np.array_equal(z <= -1.2, b <= region[c])

    @pytest.mark.parametrize(
        ("broken", "fixed"), [(0.05, 0.0), (0.04, 0.02), (0.3, 0.69), (0.0, 0.4)]
    )
    def test_probability_is_the_sum_over_tables(self, broken, fixed):
        n, margin = 60, 0.05
        b, c, z = all_tables(n, margin)
        region = accept_region(n, margin, -0.8)
        wanted = enumerated_probability(z <= -0.8, b, c, n, broken, fixed)
        assert region_probability(region, n, broken, fixed) == pytest.approx(wanted, abs=1e-12)

    def test_probability_of_everything_and_nothing(self):
        n = 40
        assert region_probability(n - np.arange(n + 1), n, 0.2, 0.3) == pytest.approx(
            1.0, abs=1e-12
        )
        assert region_probability(np.full(n + 1, -1), n, 0.2, 0.3) == 0.0
        assert region_probability(np.zeros(n + 1, dtype=int), n, 0.0, 1.0) == pytest.approx(1.0)

    def test_probability_refuses_more_than_a_whole(self):
        with pytest.raises(ValueError, match="not shares"):
            region_probability(np.zeros(5, dtype=int), 4, 0.7, 0.7)


class TestPValue:
    @pytest.mark.parametrize(
        ("b", "c", "n", "margin"),
        [(2, 1, 50, 0.10), (0, 1, 20, 0.1), (8, 5, 60, 0.2), (3, 4, 30, -0.2)],
    )
    def test_by_brute_force(self, b, c, n, margin):
        every_b, every_c, z = all_tables(n, margin)
        inside = z <= stats.tango_z(b, c, n, margin) + 1e-9
        low, high = max(0.0, -margin), (1 - margin) / 2
        wanted = max(
            enumerated_probability(inside, every_b, every_c, n, q + margin, q)
            for q in np.linspace(low, high, 2001)
        )
        got = stats.exact_p(b, c, n, margin)
        assert wanted - 1e-9 <= got <= wanted + 5e-6

    @pytest.mark.parametrize(("n", "p"), [(164, 0.0363979), (149, 0.0492817), (148, 0.0502874)])
    def test_without_flips(self, n, p):
        assert stats.exact_p(0, 0, n, 0.02) == pytest.approx(p, abs=6e-8)

    @given(st.integers(1, 400), st.floats(0.002, 0.2))
    def test_zero_flip_rule(self, n, margin):
        p, simple = stats.exact_p(0, 0, n, margin), (1 - margin) ** n
        assert p >= simple * (1 - 1e-9)
        if simple > 0.08:  # at lower values the worst flip rate can be another one, and p larger
            assert p == pytest.approx(simple, rel=1e-9)

    def test_zero_flip_rule_does_not_hold_everywhere(self):
        assert stats.exact_p(0, 0, 24, 0.12) > 0.05 > 0.88**24

    @pytest.mark.parametrize(("margin", "smallest"), [(0.01, 299), (0.02, 149), (0.05, 59)])
    def test_smallest_suite_that_zero_flips_certify(self, margin, smallest):
        assert stats.exact_accept(0, 0, smallest, margin)
        assert not stats.exact_accept(0, 0, smallest - 1, margin)

    @settings(max_examples=40, deadline=None)
    @given(st.integers(1, 60), st.data())
    def test_one_more_break_never_helps(self, n, data):
        b = data.draw(st.integers(0, n - 1))
        c = data.draw(st.integers(0, n - 1 - b))
        margin = data.draw(st.sampled_from([0.02, 0.05, 0.1]))
        assert stats.exact_p(b + 1, c, n, margin) >= stats.exact_p(b, c, n, margin) - 1e-8

    def test_too_many_pairs(self):
        with pytest.raises(ValueError, match="'5001'"):
            stats.exact_p(0, 0, 5001, 0.02)


class TestCriticalValue:
    @pytest.mark.parametrize("n", [20, 50, 164])
    @pytest.mark.parametrize("margin", [0.01, 0.02, 0.05])
    def test_level_is_kept_on_a_finer_grid_and_not_wasted(self, n, margin):
        assert_level(n, margin, np.linspace(margin, 1.0, 4001))

    @pytest.mark.slow
    @pytest.mark.parametrize("n", [300, 500, 541, 1000, 1319, 2000])
    @pytest.mark.parametrize("margin", [0.01, 0.02, 0.03, 0.05, 0.10])
    def test_level_is_kept_on_a_finer_grid_for_whole_suites(self, n, margin):
        assert_level(n, margin, np.linspace(margin, 1.0, 8001))

    @pytest.mark.parametrize(("n", "margin"), [(20, 0.05), (50, 0.02), (50, 0.1)])
    def test_by_brute_force(self, n, margin):
        b, c, z = all_tables(n, margin)
        limit = stats.exact_critical_z(n, margin)
        grid = np.linspace(0.0, (1 - margin) / 2, 1001)

        def size(inside):
            return max(enumerated_probability(inside, b, c, n, q + margin, q) for q in grid)

        assert size(z <= limit) <= 0.05 < size(z <= z[z > limit].min() + 1e-9)

    @pytest.mark.parametrize(("n", "margin"), [(30, 0.05), (60, 0.02), (60, 0.1), (40, -0.1)])
    def test_accepts_the_same_tables_as_the_p_value(self, n, margin):
        b, c, z = all_tables(n, margin)
        near = np.abs(z + Z95) < 0.5
        assert near.any()
        limit = stats.exact_critical_z(n, margin)
        for table in zip(b[near].tolist(), c[near].tolist(), z[near].tolist(), strict=True):
            assert stats.exact_accept(*table[:2], n, margin) == (table[2] <= limit), table

    @pytest.mark.parametrize(("n", "margin"), [(35, 0.05), (47, -0.02), (90, 0.013)])
    def test_is_a_value_that_a_table_attains(self, n, margin):
        _, _, z = all_tables(n, margin)
        assert np.abs(z - stats.exact_critical_z(n, margin)).min() < 1e-8

    @pytest.mark.parametrize(("n", "margin", "alpha"), [(61, 0.02, 0.01), (45, 0.07, 0.2)])
    def test_other_levels(self, n, margin, alpha):
        limit = stats.exact_critical_z(n, margin, alpha)
        _, _, z = all_tables(n, margin)
        beyond = z[z > limit].min()
        assert region_size(accept_region(n, margin, limit), n, margin) <= alpha
        assert region_size(accept_region(n, margin, beyond + 1e-9), n, margin) > alpha

    def test_nothing_can_be_accepted(self):
        assert stats.exact_critical_z(1, 0.02, 1e-9) == -math.inf


def assert_level(n, margin, flip_rates):
    region = accept_region(n, margin, stats.exact_critical_z(n, margin))
    sizes = [region_probability(region, n, (f + margin) / 2, (f - margin) / 2) for f in flip_rates]
    assert max(sizes) <= 0.05
    assert region_size(region, n, margin) >= max(sizes) - 1e-6
    assert max(sizes) > 0.03 or n < 60


class TestSize:
    @pytest.mark.parametrize(("n", "margin"), [(90, 0.02), (250, 0.05), (250, -0.01), (700, 0.01)])
    @pytest.mark.parametrize("z", [-1.9, -1.65, -0.3])
    def test_scan_finds_the_peak(self, n, margin, z):
        region = accept_region(n, margin, z)
        rates = np.concatenate(
            (np.linspace(abs(margin), 1.0, 801), abs(margin) + np.geomspace(1e-4, 0.2, 200))
        )
        found = [
            region_probability(region, n, max(0.0, f + margin) / 2, max(0.0, f - margin) / 2)
            for f in rates[rates <= 1.0]
        ]
        assert max(found) <= region_size(region, n, margin) + 1e-6


class TestTangoSize:
    @pytest.mark.parametrize(
        ("n", "margin", "percent"),
        [(52, 0.05, 6.9), (133, 0.02, 6.8), (268, 0.01, 6.8), (300, 0.02, 6.0)],
    )
    def test_worst_cells(self, n, margin, percent):
        size = region_size(accept_region(n, margin, -Z95), n, margin)
        assert round(100 * size, 1) == percent

    @pytest.mark.slow
    @pytest.mark.parametrize("margin", [0.03, 0.05])
    def test_never_far_above_the_level(self, margin):
        sizes = {n: region_size(accept_region(n, margin, -Z95), n, margin) for n in range(40, 400)}
        assert max(sizes.values()) < 0.0695


class TestBound:
    @pytest.mark.parametrize("n", [20, 50, 164])
    def test_without_flips(self, n):
        assert stats.exact_bound(0, 0, n) == pytest.approx(1 - 0.05 ** (1 / n), abs=2e-6)
        assert stats.exact_bound(0, 0, n, side="lower") == -stats.exact_bound(0, 0, n)

    def test_extremes(self):
        assert stats.exact_bound(12, 0, 12) == 1.0
        assert stats.exact_bound(0, 12, 12, side="lower") == -1.0
        assert -1.0 < stats.exact_bound(0, 12, 12) < 0.0

    @settings(max_examples=40, deadline=None)
    @given(st.integers(5, 80), st.data())
    def test_agrees_with_the_decision_and_contains_the_estimate(self, n, data):
        b = data.draw(st.integers(0, n // 2))
        c = data.draw(st.integers(0, n // 2))
        margin = data.draw(st.sampled_from([0.02, 0.05, 0.1, 0.2]))
        upper = stats.exact_bound(b, c, n)
        assert upper >= (b - c) / n
        if abs(upper - margin) > 1e-3:  # p may wobble where it crosses alpha
            assert stats.exact_accept(b, c, n, margin) == (upper < margin)


class TestDecisionBound:
    @settings(max_examples=60, deadline=None)
    @given(st.integers(1, 60), st.sampled_from([-0.1, 0.02, 0.05, 0.1, 0.3]), st.data())
    def test_lies_below_the_margin_exactly_when_accepted(self, n, margin, data):
        b = data.draw(st.integers(0, n))
        c = data.draw(st.integers(0, n - b))
        upper = decision_bound(b, c, n, margin)
        assert stats.exact_accept(b, c, n, margin) == (upper < margin)
        assert (b - c) / n <= upper <= 1.0
        lower = decision_bound(b, c, n, margin, side="lower")
        assert stats.exact_accept(c, b, n, -margin) == (lower > margin)
        assert lower == -decision_bound(c, b, n, -margin)

    @pytest.mark.parametrize(("b", "c"), [(0, 0), (3, 1), (9, 2), (20, 14)])
    def test_is_where_the_score_meets_the_critical_value(self, b, c):
        upper = decision_bound(b, c, 164, 0.02)
        assert stats.tango_z(b, c, 164, upper) == pytest.approx(
            stats.exact_critical_z(164, 0.02), abs=1e-8
        )
        assert upper > stats.tango_bound(b, c, 164, 0.05, "upper")
        assert upper == pytest.approx(stats.exact_bound(b, c, 164), abs=3e-3)

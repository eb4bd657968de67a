"""Arrival times: their rates and spreads, the same trace for the same seed, recorded ones replayed."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quanteval.bench.arrivals import Arrivals, constant, gamma, poisson, replay
from quanteval.errors import ConfigError


def gaps(times, count):
    taken = [0.0, *itertools.islice(times, count)]
    return [after - before for before, after in itertools.pairwise(taken)]


def test_constant_arrivals_are_equally_far_apart():
    assert list(itertools.islice(constant(4.0), 4)) == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_gaps_have_the_rate_and_the_spread_asked_for(cv):
    for times in [gamma(5.0, cv, 3)] + ([poisson(5.0, 3)] if cv == 1.0 else []):
        found = gaps(times, 20_000)
        mean = statistics.fmean(found)
        assert mean == pytest.approx(0.2, rel=0.06)
        assert statistics.pstdev(found) / mean == pytest.approx(cv, rel=0.08)


@given(st.floats(0.01, 1e4), st.floats(0.01, 1e4), st.integers(0, 99), st.floats(0.2, 4))
def test_two_rates_of_one_seed_have_the_same_bursts(one, other, seed, cv):
    for make in (poisson, lambda rate, seed: gamma(rate, cv, seed)):
        first = list(itertools.islice(make(one, seed), 20))
        assert first == list(itertools.islice(make(one, seed), 20))
        assert first == sorted(first)
        second = list(itertools.islice(make(other, seed), 20))
        assert [t * one for t in first] == pytest.approx([t * other for t in second], rel=1e-9)
    assert next(poisson(one, seed)) != next(poisson(one, seed + 1))


def test_recorded_times_are_replayed_from_zero_over_and_over():
    assert list(itertools.islice(replay([12.0, 10.0, 11.0]), 5)) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert list(itertools.islice(replay([10.0, 11.0, 14.0], rate=1.0), 4)) == [0.0, 0.5, 2.0, 3.0]


@pytest.mark.parametrize("times", [[], [1.0], [2.0, 2.0]])
def test_times_without_a_span_are_refused(times):
    with pytest.raises(ConfigError, match="at least two times apart"):
        next(replay(times))


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_that_mean_nothing_are_refused(rate):
    for make in (constant, lambda r: poisson(r, 0), lambda r: gamma(r, 1.0, 0)):
        with pytest.raises(ConfigError, match="must be positive"):
            make(rate)


def test_a_process_is_chosen_by_name(tmp_path):
    assert next(Arrivals("constant").times(2.0, 0)) == 0.0
    assert next(Arrivals("poisson").times(2.0, 7)) == next(poisson(2.0, 7))
    assert next(Arrivals("gamma", cv=2.0).times(2.0, 7)) == next(gamma(2.0, 2.0, 7))
    (tmp_path / "log.jsonl").write_text('{"t": 5.0}\n{"t": 6.0}\n')
    recorded = Arrivals("replay", file=str(tmp_path / "log.jsonl"), time_field="t")
    assert list(itertools.islice(recorded.times(0.5, 0), 3)) == [0.0, 2.0, 4.0]
    with pytest.raises(ConfigError, match="have no times"):
        Arrivals("closed").times(1.0, 0)
    with pytest.raises(ValueError, match="file belongs to replay"):
        Arrivals("replay")
    with pytest.raises(ValueError, match="must be positive"):
        Arrivals("gamma", cv=0.0)

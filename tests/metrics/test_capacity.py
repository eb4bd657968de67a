"""Capacity statements: figures at the break, their bounds, the ratio to the baseline, and why there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quanteval.metrics.capacity import (
    Estimate,
    capacities,
    device_of,
    slo_of,
    statement,
    with_ratio,
)
from tests.gate import evidence as make
from tests.report.load_evidence import health, loaded_variant, open_point

MANY = {"seconds": 400.0, "rates": (0.5, 1, 2, 3, 4, 6)}
LOOSE = {"ttft": {"p95": 1.0}}


@pytest.fixture(scope="module")
def variants():
    return (
        loaded_variant("base", service_s=0.2, slo=LOOSE, **MANY),
        loaded_variant("nf4", service_s=0.4, slo=LOOSE, **MANY),
    )


@pytest.fixture(scope="module")
def pair(variants):
    return capacities(variants)


def test_the_capacity_lies_where_the_promise_breaks_and_its_bounds_around_it(pair):
    base, nf4 = pair
    for one, most in ((base, 5.0), (nf4, 2.5)):
        rate = one.request_rate
        assert rate.lower <= rate.value <= rate.upper
        assert 0.3 * most < rate.value < most
        assert one.output_tps.value == pytest.approx(11 * rate.value, rel=0.05)
        assert (one.limit, one.loop, one.at_least) == ("ttft p95 <= 1 s", "open", False)
        assert one.n > 1000
    assert base.at_knee_share.request_rate < base.knee.load


def test_the_ratio_spans_the_ends_of_both_intervals(pair):
    base, nf4 = pair
    a, b = base.request_rate, nf4.request_rate
    assert nf4.ratio.value == pytest.approx(b.value / a.value)
    assert nf4.ratio.lower == pytest.approx(b.lower / a.upper)
    assert nf4.ratio.upper == pytest.approx(b.upper / a.lower)
    assert base.ratio is None
    assert base.ratio_reason == ""


def test_the_baseline_may_be_named():
    quick = [loaded_variant(name, rates=(1, 2, 4), slo=LOOSE) for name in ("one", "two")]
    assert [one.ratio_reason for one in capacities(quick)] == ["", ""]
    one, two = capacities(quick, "two")
    assert one.ratio is not None or one.ratio_reason
    assert (two.ratio, two.ratio_reason) == (None, "")


def test_without_a_search_nothing_is_stated():
    found = statement(make.variant("plain"))
    assert found.request_rate is None
    assert found.reason == "not measured: no search stage"


def test_a_promise_broken_at_the_lowest_load_is_said():
    found = statement(loaded_variant("slow", slo={"ttft": {"p99": 0.01}}))
    assert found.request_rate is None
    assert found.reason == "the SLO is broken at the lowest load, 0.5 requests/s"


def test_a_promise_that_held_everywhere_gives_at_least():
    found = statement(loaded_variant("fast", service_s=0.01, rates=(1, 2, 3)))
    assert found.at_least
    assert found.request_rate.value == pytest.approx(3, rel=0.2)
    assert with_ratio(found, found).ratio_reason == "fast broke nothing up to its highest load"


def test_without_an_slo_the_knee_is_the_limit():
    found = statement(loaded_variant("free", slo=None, seconds=600.0))
    assert found.limit == "knee"
    assert found.request_rate is not None


def test_saturated_clients_leave_no_capacity():
    points = [open_point(rate, client=health(saturated=True, reason="late")) for rate in (1, 2)]
    found = statement(loaded_variant("v", rates=(), points=points))
    assert found.request_rate is None
    assert found.reason == "not measured: repetition 0: client saturated (late)"


def test_unlike_statements_have_no_ratio(pair):
    base, nf4 = pair
    other = replace(nf4, device="Another CPU")
    assert with_ratio(other, base).ratio_reason == "measured on Another CPU and A CPU"
    tight = replace(nf4, limit="ttft p95 <= 2 s")
    assert with_ratio(tight, base).ratio_reason == "not measured under the same SLO and loop"
    none = statement(make.variant("plain"))
    assert with_ratio(none, base).ratio_reason == "plain has no capacity"
    assert with_ratio(base, none).ratio_reason == "plain has no capacity"
    nothing = replace(base, request_rate=Estimate(0.0, 0.0, 1.0))
    assert with_ratio(nf4, nothing).ratio_reason == "base serves nothing"
    half = replace(base, request_rate=Estimate(2.0, None, 3.0))
    assert with_ratio(nf4, half).ratio.upper is None


def test_the_slo_is_read_from_the_conditions_of_the_bench():
    limits = {"ttft": {"p99": 0.5}, "tpot": {"p50": 0.1}, "per_request": {"e2e": 20}}
    assert slo_of(loaded_variant("v", slo=limits, rates=())).text == (
        "ttft p99 <= 0.5 s, tpot p50 <= 0.1 s"
    )
    assert slo_of(make.variant("v")).text == "none"
    assert slo_of(loaded_variant("v", slo={"ttft": {"best": 1}}, rates=())).text == "none"


def test_the_device_is_the_processor_or_the_engines_device():
    assert device_of(loaded_variant("v", rates=())) == "A CPU"
    cuda = make.memory().model_copy(update={"device": "cuda"})
    assert device_of(loaded_variant("v", rates=(), memory=cuda)) == "cuda"
    assert device_of(make.variant("v", memory=None)) == ""

"""Load points from traces made by hand: rates, goodput, what is under way, what is left out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quanteval.metrics.latency import e2e_s, itl_s, summarize, tpot_s, ttft_s
from quanteval.metrics.load import loads_of
from quanteval.metrics.slo import Slo
from quanteval.records import ClientHealth, LoadPointRecord, RequestTrace

HEALTH = ClientHealth(
    lag_p50_s=0, lag_p99_s=0, loop_lag_p99_s=0, cpu_share=0.1, saturated=False
)  # fmt: skip


def request(at=0.0, gaps=(0.5, 0.1, 0.1), tokens=None, *, late=0.0, **more):
    """A request of an open loop, scheduled at `at` and sent `late` seconds after that."""
    times, clock = [], at + late
    for gap in gaps:
        clock += gap
        times.append(clock)
    tokens = [1] * len(times) if tokens is None else list(tokens)
    fields = {
        "load_point": "open_loop_1", "loop": "open", "concurrency": 0, "rate": 1.0, "repetition": 0,
        "warmup": False, "request_id": f"r{at}", "bucket": "1-199", "scheduled_s": at, "sent_s": at + late,
        "chunk_times_s": times, "chunk_tokens": tokens, "end_s": clock, "prompt_tokens": 5,
        "output_tokens": sum(tokens), "status": "ok",
    }  # fmt: skip
    return RequestTrace(**{**fields, **more})


def record(begin=0.0, end=10.0, **more):
    fields = {
        "name": "open_loop_1", "loop": "open", "concurrency": 0, "rate": 1.0, "repetition": 0, "started_s": 1.0,
        "measured_from_s": begin, "measured_to_s": end, "duration_s": end + 1, "client": HEALTH,
    }  # fmt: skip
    return LoadPointRecord(**{**fields, **more})


def test_an_open_loop_counts_waiting_from_the_scheduled_time():
    one = request(1.0, late=2.0)
    assert ttft_s(one) == pytest.approx(2.5)
    assert e2e_s(one) == pytest.approx(2.7)
    assert tpot_s(one) == pytest.approx(0.1)
    closed = one.model_copy(update={"loop": "closed"})
    assert ttft_s(closed) == pytest.approx(0.5)


def test_four_tokens_a_chunk():
    one = request(gaps=(0.5, 0.08, 0.08), tokens=(4, 4, 4))
    assert itl_s(one) == pytest.approx([0.02] * 8)
    # The definition divides by the output tokens after the first, three of which came with it.
    assert tpot_s(one) == pytest.approx(0.16 / 11)
    assert tpot_s(request(gaps=(0.5,), tokens=(4,))) is None


def test_a_stall_of_the_server_is_in_every_request_scheduled_during_it():
    # Service takes 0.1 s; nothing is served from 5 s to 7 s, and requests are scheduled ten a second.
    traces = []
    for k in range(100):
        at = k / 10
        late = max(0.0, 7.0 - at) if at >= 5 else 0.0
        traces.append(request(at, gaps=(0.05,), late=late))
    (load,) = loads_of(traces, [record()])
    assert load.all.ttft.at(0.99).value == pytest.approx(2.0, abs=0.1)
    assert load.all.ttft.at(0.5).value == pytest.approx(0.05)


def test_rates_are_those_of_the_window():
    traces = [request(float(k), warmup=not 2 <= k < 8) for k in range(12)]
    (load,) = loads_of(traces, [record(2.0, 7.95)], Slo(ttft={"p99": 0.6}))
    assert load.requests == 6
    assert load.offered_rate == pytest.approx(6 / 5.95)
    # Those of 2.0 to 7.0 s end within it.
    assert load.achieved_rate == load.goodput == pytest.approx(6 / 5.95)
    assert load.output_tps == pytest.approx(18 / 5.95)
    assert load.in_flight == pytest.approx(6 * 0.7 / 5.95)
    assert load.little == pytest.approx(load.in_flight)
    assert load.over_saturated == ""
    assert (load.load, load.loop) == (1.0, "open")


def test_goodput_leaves_out_what_misses_a_limit_and_what_failed():
    traces = [request(float(k)) for k in range(8)]
    traces[1] = request(1.0, gaps=(0.9, 0.01))
    traces[2] = request(2.0, status="error", error="broke in the middle")
    traces[3] = request(3.0, status="timeout")
    (load,) = loads_of(traces, [record(0.0, 8.0)], Slo(ttft={"p99": 0.6}))
    assert load.achieved_rate == pytest.approx(6 / 8)
    assert load.goodput == pytest.approx(5 / 8)
    assert load.output_tps == pytest.approx((5 * 3 + 2) / 8)
    assert (load.failed, load.failures) == (2, {"error": 1, "timeout": 1})
    assert load.error_rate.point == 2 / 8
    assert load.error_rate.lower < 2 / 8 < load.error_rate.upper
    assert load.all.ttft.n == 6


def test_a_saturated_client_is_left_out_with_its_reason():
    ill = HEALTH.model_copy(update={"saturated": True, "reason": "100 % of a core"})
    traces = [request(float(k), repetition=r, gaps=(0.1 + r,)) for k in range(9) for r in (0, 1)]
    (load,) = loads_of(traces, [record(), record(repetition=1, client=ill)])
    assert load.excluded == ("repetition 1: client saturated (100 % of a core)",)
    assert load.all.ttft.at(0.99).value == pytest.approx(0.1)
    (load,) = loads_of(traces, [record(client=ill), record(repetition=1, client=ill)])
    assert (load.requests, load.achieved_rate, load.error_rate) == (0, None, None)
    assert len(load.excluded) == 2


def test_a_backlog_that_grows_is_over_saturation_and_one_that_wanders_is_not():
    # One server of 0.1 s; 20 requests/s are twice what it takes, 9 are not.
    def served(rate):
        free, out = 0.0, []
        for k in range(400):
            at = k / rate
            free = max(free, at) + 0.1
            out.append(request(at, gaps=(free - at,), rate=rate))
        return loads_of(out, [record(0.0, 400 / rate, rate=rate)])[0]

    assert "the backlog grew by" in served(20.0).over_saturated
    assert served(9.0).over_saturated == ""


def test_buckets_are_in_order_of_length_and_add_up():
    names = ("1001+", "1-199", "200-1000")
    traces = [request(float(k), bucket=names[k % 3]) for k in range(9)]
    (load,) = loads_of(traces, [record()])
    assert list(load.buckets) == ["1-199", "200-1000", "1001+"]
    assert sum(part.requests for part in load.buckets.values()) == load.requests


def test_warm_up_alone_and_nothing_are_no_load():
    assert loads_of([]) == []
    assert loads_of([request(warmup=True)], [record()]) == []
    (single,) = loads_of([request()])
    assert single.excluded == ("repetition 0: no steady state",)


def test_the_summary_of_an_open_loop_has_its_rates_too():
    traces = [request(k / 10) for k in range(101)]
    (summary,) = summarize(traces)
    assert summary.request_rate == pytest.approx(93 / 10, rel=0.02)
    assert summary.steady_requests == 101


REQUESTS = st.lists(
    st.tuples(st.floats(0, 9.9), st.floats(0.001, 5), st.sampled_from(["ok", "error", "timeout"])),
    min_size=2,
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.floats(0.01, 5))
def test_goodput_never_exceeds_the_rate_and_quantiles_rise(rows, limit):
    traces = [request(at, gaps=(gap, 0.1), status=status) for at, gap, status in rows]
    slo = Slo(ttft={"p99": limit})
    (load,) = loads_of(traces, [record()], slo)
    assert 0 <= load.goodput <= load.achieved_rate
    values = [quantile.value for quantile in load.all.e2e.quantiles]
    assert values == sorted(values)
    assert math.isclose(load.offered_rate, len(rows) / 10)
    for status in ("error", "timeout", "cancelled", "out_of_memory"):
        (worse,) = loads_of([*traces, request(5.0, status=status)], [record()], slo)
        assert worse.goodput <= load.goodput
        assert worse.error_rate.point >= load.error_rate.point or status == "cancelled"

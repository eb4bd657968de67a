"""When the client itself is the bottleneck: late sends, a late loop, a core used up; and when it is not."""

from __future__ import annotations

import math

import pytest

from quanteval.bench import health
from quanteval.bench.health import CPU_LIMIT, LAG_FLOOR_S, HealthMeter
from quanteval.records import RequestTrace


def trace(ttft_s=0.1):
    return RequestTrace(
        load_point="p", concurrency=1, repetition=0, warmup=False, request_id="r", bucket="b",
        scheduled_s=0.0, sent_s=0.0, chunk_times_s=[ttft_s], chunk_tokens=[1], end_s=1.0,
        prompt_tokens=1, output_tokens=1, status="ok",
    )  # fmt: skip


class Clocks:
    """Stands for `time`: seconds of the wall and of the process, set by hand."""

    def __init__(self):
        self.wall = self.cpu = 0.0

    def perf_counter(self):
        return self.wall

    def process_time(self):
        return self.cpu


@pytest.fixture
def clocks(monkeypatch):
    clocks = Clocks()
    monkeypatch.setattr(health, "time", clocks)
    return clocks


def seen(clocks, lags, *, ttft_s=0.1, on_loop=True, loop_lags=(), cpu_s=1.0):
    meter = HealthMeter(on_loop=on_loop)
    meter.start()
    for lag in lags:
        meter.saw(trace(ttft_s), lag)
    meter._loop_lags.extend(loop_lags)
    clocks.wall, clocks.cpu = clocks.wall + 10.0, clocks.cpu + cpu_s
    return meter.health()


def test_a_client_that_keeps_up_is_not_saturated(clocks):
    found = seen(clocks, [0.001] * 200, loop_lags=[0.002] * 200)
    assert (found.saturated, found.reason) == (False, "")
    assert found.lag_p50_s == found.lag_p99_s == 0.001
    assert found.loop_lag_p99_s == 0.002
    assert found.cpu_share == pytest.approx(0.1)


def test_late_sends_are_named_with_the_limit(clocks):
    found = seen(clocks, [0.0] * 190 + [0.3] * 10)
    assert found.saturated
    assert found.reason == "requests were sent 0.300 s late at p99, more than 0.020 s"
    # Late against the latency that is measured, not against the clock.
    assert not seen(clocks, [0.0] * 190 + [0.3] * 10, ttft_s=4.0).saturated


def test_one_hiccup_among_few_requests_is_no_bottleneck(clocks):
    assert not seen(clocks, [0.0] * 19 + [1.0]).saturated
    assert seen(clocks, [0.0] * 5 + [1.0] * 5).saturated


def test_a_late_loop_counts_where_it_takes_the_times(clocks):
    lags = [2 * LAG_FLOOR_S] * 200
    assert "event loop woke 0.040 s late" in seen(clocks, [], loop_lags=lags).reason
    assert not seen(clocks, [], loop_lags=lags, on_loop=False).saturated


def test_a_core_used_up_counts_where_the_client_is_alone_in_its_process(clocks):
    busy = 10.0 * (CPU_LIMIT + 0.05)
    assert "of a core" in seen(clocks, [0.0], cpu_s=busy).reason
    within = seen(clocks, [0.0], cpu_s=busy, on_loop=False)
    assert not within.saturated
    assert math.isnan(within.cpu_share)


def test_a_point_without_requests_is_healthy(clocks):
    found = seen(clocks, [])
    assert (found.lag_p50_s, found.lag_p99_s, found.loop_lag_p99_s) == (0.0, 0.0, 0.0)
    assert not found.saturated

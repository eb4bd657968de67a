"""Latency figures from traces made by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quanteval.metrics.latency import (
    best_point,
    cold_start_s,
    distribution,
    itl_s,
    point,
    steady_window,
    summarize,
    tpot_s,
    ttft_s,
)
from quanteval.records import RequestTrace


def trace(sent=0.0, times=(0.5, 0.6, 0.8), tokens=None, **more):
    tokens = [1] * len(times) if tokens is None else tokens
    fields = {
        "load_point": "single_stream", "concurrency": 1, "repetition": 0, "warmup": False,
        "request_id": f"r{sent}", "bucket": "1-9", "scheduled_s": sent, "sent_s": sent,
        "chunk_times_s": [sent + t for t in times], "chunk_tokens": tokens,
        "end_s": sent + (times[-1] if times else 1.0), "prompt_tokens": 5, "output_tokens": sum(tokens),
        "status": "ok",
    }  # fmt: skip
    return RequestTrace(**{**fields, **more})


def test_one_request_by_hand():
    one = trace(sent=2.0)
    assert ttft_s(one) == pytest.approx(0.5)
    assert itl_s(one) == pytest.approx([0.1, 0.2])
    assert tpot_s(one) == pytest.approx(0.15)
    assert tpot_s(trace(times=(0.5,))) is None


def test_a_chunk_of_several_tokens_spreads_its_gap():
    one = trace(times=(0.5, 0.9), tokens=[3, 4])
    assert itl_s(one) == pytest.approx([0.1] * 4)
    assert tpot_s(one) == pytest.approx(0.4 / 6)


def test_a_stall_shows_in_the_itl_and_not_in_its_median():
    stalled = trace(times=[0.1 + 0.02 * k for k in range(50)] + [5.0])
    found = distribution(itl_s(stalled))
    assert found.at(0.5).value == pytest.approx(0.02)
    assert found.at(0.99).value > 1


def test_quantiles_without_enough_requests_have_no_upper_bound():
    few = distribution([1.0, 2.0, 3.0])
    assert few.at(0.5).value == 2.0
    assert few.at(0.95).upper is None
    many = distribution(range(300))
    assert many.at(0.99).upper is not None
    assert distribution(range(298)).at(0.99).upper is None
    assert distribution([]).quantiles == ()
    assert distribution([]).at(0.5) is None


def test_warm_up_and_failures_are_in_no_figure():
    traces = [
        trace(times=(9.0, 9.5), warmup=True, load_point="warmup"),
        trace(sent=10.0),
        trace(sent=20.0, times=(8.0,), status="error"),
        trace(sent=30.0, times=(), status="timeout"),
    ]
    (summary,) = summarize(traces)
    assert (summary.requests, summary.failed) == (4 - 1, 2)
    assert summary.ttft.n == 1
    assert summary.ttft.at(0.5).value == pytest.approx(0.5)
    assert cold_start_s(traces) == pytest.approx(9.0)
    assert cold_start_s(traces[1:]) is None


def closed_loop(concurrency=2, each=4, duration=1.0):
    """Slots that send one request after the other, a little apart."""
    out = []
    for slot in range(concurrency):
        for k in range(each):
            sent = 0.1 * slot + duration * k
            times = [duration * (i + 1) / 4 for i in range(4)]
            out.append(
                trace(
                    sent=sent,
                    times=times,
                    load_point=f"closed_loop_{concurrency}",
                    concurrency=concurrency,
                )
            )
    return out


def test_ramp_and_drain_are_left_out():
    traces = closed_loop()
    start, end = steady_window(traces)
    # All slots are full from the second slot's first request until the first slot has no more.
    assert start == pytest.approx(0.1)
    assert end == pytest.approx(4.0)
    (summary,) = summarize(traces)
    assert summary.requests == 8
    assert summary.steady_requests == 5
    # Two streams of 4 tokens a second each, counted inside the window.
    assert summary.output_tps == pytest.approx(8.0, rel=0.05)
    # Seven requests ended within it.
    assert summary.request_rate == pytest.approx(7 / (end - start))
    assert summary.stream_tps == pytest.approx(4.0)


def test_rates_that_cannot_be_known_are_none():
    lonely = [trace(load_point="closed_loop_4", concurrency=4)]
    (summary,) = summarize(lonely)
    assert summary.output_tps is None
    assert summary.request_rate is None
    assert summary.ttft.n == 0
    assert best_point([summary]) is None
    (dead,) = summarize([trace(times=(), status="error")])
    assert dead.output_tps is None
    assert dead.stream_tps is None
    assert dead.ttft.n == 0
    assert summarize([]) == []


def test_points_are_found_and_the_best_has_the_most_tokens():
    traces = [*closed_loop(2), *closed_loop(4), trace()]
    summaries = summarize(traces)
    assert best_point(summaries).load_point == "closed_loop_4"
    assert point(summaries, "single_stream").requests == 1
    assert point(summaries, "none") is None


def test_buckets_split_a_point():
    traces = [trace(sent=float(i), bucket="1-9" if i % 3 else "10-99") for i in range(9)]
    found = {s.bucket: s.requests for s in summarize(traces, by_bucket=True)}
    assert found == {"10-99": 3, "1-9": 6}


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.floats(0.001, 10), min_size=1, max_size=6), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_figures_do_not_depend_on_order_and_stay_in_range(gaps, rng: random.Random):
    traces = []
    for i, row in enumerate(gaps):
        times = [sum(row[: k + 1]) for k in range(len(row))]
        traces.append(trace(sent=100.0 * i, times=times))
    (summary,) = summarize(traces)
    shuffled = list(traces)
    rng.shuffle(shuffled)
    (again,) = summarize(shuffled)
    assert again.ttft == summary.ttft
    assert again.itl.quantiles == summary.itl.quantiles
    first = [row[0] for row in gaps]
    for quantile in summary.ttft.quantiles:
        assert min(first) - 1e-6 <= quantile.value <= max(first) + 1e-6
        assert quantile.n == len(gaps)
    assert summary.itl.n == sum(len(row) - 1 for row in gaps)

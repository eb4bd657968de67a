"""What counts under load: ramp, fillers, failures and drain, on traces whose true figures are known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quanteval.metrics.latency import (
    distribution,
    e2e_s,
    full_interval,
    goodput,
    itl_s,
    point,
    steady_requests,
    steady_window,
    summarize,
    tpot_s,
)
from quanteval.metrics.slo import Slo
from quanteval.records import RequestTrace

GAP = 0.1
OUTPUT = 10


def request(sent, tokens=OUTPUT, *, slots=4, role="measured", status="ok", first=GAP, **more):
    """One request whose first token takes `first` seconds and every other GAP."""
    times = [sent + first + GAP * k for k in range(tokens)]
    fields = {
        "load_point": f"closed_loop_{slots}", "concurrency": slots, "repetition": 0,
        "warmup": role != "measured", "request_id": f"{role}-{sent:.3f}", "bucket": "1-9",
        "scheduled_s": sent, "sent_s": sent, "chunk_times_s": times, "chunk_tokens": [1] * tokens,
        "end_s": times[-1] + 0.001 if times else sent, "prompt_tokens": 5, "output_tokens": tokens,
        "status": status,
    }  # fmt: skip
    return RequestTrace(**{**fields, **more})


def load(slots=4, each=3, **more):
    """What the load client leaves: staggered ramp, `each` measured requests a slot, cancelled fillers."""
    ramps, measured = [], []
    for slot in range(slots):
        ramp = request(
            0.0, max(1, OUTPUT * (slot + 1) // (slots + 1)), slots=slots, role="ramp", **more
        )
        ramps.append(ramp)
        sent = ramp.end_s
        for _ in range(each):
            one = request(sent, slots=slots, **more)
            measured.append(one)
            sent = one.end_s
    end = max(one.end_s for one in measured)
    last = sorted(one.end_s for one in measured)[-slots:]
    fillers = [
        request(
            sent, max(0, int((end - sent) / GAP + 1e-9)), slots=slots, role="filler",
            status="cancelled", end_s=end + 0.002, **more,
        )
        for sent in last
        if sent < end
    ]  # fmt: skip
    return [*ramps, *measured, *fillers]


def test_the_steady_state_has_every_measured_request_and_nothing_else():
    traces = load()
    (summary,) = summarize(traces)
    assert (summary.requests, summary.steady_requests, summary.failed) == (12, 12, 0)
    assert summary.ttft.n == summary.tpot.n == summary.e2e.n == 12
    assert summary.itl.n == 12 * (OUTPUT - 1)
    for found in (summary.ttft, summary.itl, summary.tpot):
        assert found.at(0.5).value == pytest.approx(GAP)
    assert summary.e2e.at(0.99).value == pytest.approx(OUTPUT * GAP)


def test_rates_are_those_of_full_slots():
    (summary,) = summarize(load(each=20))
    # Four streams, each a token every 0.1 s; a millisecond passes between two requests.
    true = 4 * OUTPUT / (OUTPUT * GAP + 0.001)
    assert summary.output_tps == pytest.approx(true, rel=0.02)
    assert summary.request_rate == pytest.approx(true / OUTPUT, rel=0.05)
    assert summary.stream_tps == pytest.approx(1 / GAP)
    assert summary.output_tps_runs == (summary.output_tps,)


def test_a_slow_ramp_changes_no_figure():
    traces = load()
    slow = [
        t.model_copy(update={"chunk_times_s": [0.001] * len(t.chunk_times_s)})
        if t.request_id.startswith("ramp")
        else t
        for t in traces
    ]
    assert summarize(slow) == summarize(traces)


def test_the_window_begins_when_the_last_ramp_has_ended_and_ends_with_the_last_measured_request():
    traces = load()
    begin, end = steady_window(traces)
    assert begin == max(t.end_s for t in traces if t.request_id.startswith("ramp"))
    assert end == max(t.end_s for t in traces if not t.warmup)


def test_without_fillers_requests_that_end_while_slots_empty_are_left_out():
    traces = [t for t in load(each=5) if not t.request_id.startswith("filler")]
    drained = full_interval(traces)[1]
    kept = steady_requests(traces)
    assert len(kept) == 20 - 3
    assert max(t.end_s for t in kept) == drained
    assert steady_window(traces)[1] == drained


def test_a_filler_that_failed_ends_the_steady_state():
    traces = load(each=5)
    sent = sorted(t.end_s for t in traces if not t.warmup)[14]
    broken = request(
        sent, 0, role="filler", status="error", end_s=sent + 0.01, first=GAP, error="no room"
    )
    (summary,) = summarize([*traces, broken])
    assert full_interval([*traces, broken])[1] <= sent + 0.01
    assert summary.steady_requests < 20
    assert summary.requests == 20
    assert (summary.failed, summary.failures) == (0, {"error": 1})


def test_requests_that_end_together_all_count():
    """A static batch: rows end in one step, a hair apart, and the slots never refill after the last."""
    traces = []
    for wave in range(3):
        for slot in range(4):
            sent = wave * (OUTPUT * GAP + 0.002) + slot * 1e-4
            traces.append(request(sent, role="ramp" if wave == 0 else "measured"))
    (summary,) = summarize(traces)
    assert summary.steady_requests == 8
    assert summary.output_tps == pytest.approx(4 / GAP, rel=0.01)
    assert summary.request_rate == pytest.approx(4 / (OUTPUT * GAP), rel=0.01)


def test_too_little_for_a_steady_state_is_none_not_zero():
    few = [request(0.0, slots=4), request(0.1, slots=4)]
    (summary,) = summarize(few)
    assert summary.requests == 2
    assert summary.steady_requests == 0
    assert steady_window(few) is None
    for figure in (summary.output_tps, summary.request_rate, summary.stream_tps):
        assert figure is None
    assert summary.output_tps_runs == ()
    assert summary.ttft.quantiles == ()


def test_a_failed_request_is_no_output_and_stays_in_the_count():
    traces = load(each=10)
    measured = [i for i, t in enumerate(traces) if not t.warmup]
    for i, status in zip(measured[5:9], ["error", "timeout", "out_of_memory", "cancelled"]):  # noqa: B905
        traces[i] = traces[i].model_copy(update={"status": status})
    (summary,) = summarize(traces)
    assert (summary.requests, summary.failed) == (40, 4)
    assert summary.failures == {"error": 1, "timeout": 1, "out_of_memory": 1, "cancelled": 1}
    assert summary.ttft.n == 36
    whole = summarize(load(each=10))[0]
    assert summary.output_tps == pytest.approx(whole.output_tps * 36 / 40, rel=0.03)
    assert summary.request_rate == pytest.approx(whole.request_rate * 36 / 40, rel=0.03)


def test_ok_without_a_single_token_is_a_failure():
    (summary,) = summarize([request(0.0, 0, slots=1)])
    assert (summary.failed, summary.failures) == (1, {"error": 1})
    assert summary.ttft.n == 0


def test_repetitions_are_pooled_and_kept_apart():
    traces = [*load(), *load(repetition=1)]
    fast = [
        t.model_copy(
            update={
                "repetition": 2,
                "sent_s": t.sent_s / 2,
                "end_s": t.end_s / 2,
                "chunk_times_s": [at / 2 for at in t.chunk_times_s],
            }
        )
        for t in load()
    ]
    (summary,) = summarize([*traces, *fast])
    assert len(summary.output_tps_runs) == 3
    assert summary.output_tps_runs[0] == summary.output_tps_runs[1]
    assert summary.output_tps_runs[2] == pytest.approx(2 * summary.output_tps_runs[0])
    # Tokens over seconds, not a mean of rates: the fast run took half as long.
    assert summary.output_tps == pytest.approx(summary.output_tps_runs[0] * 3 / 2.5)
    assert summary.ttft.n == 36


def test_a_bucket_has_latencies_and_no_rates_of_its_own():
    traces = [
        t.model_copy(update={"bucket": "10-99" if i % 2 else "1-9"}) for i, t in enumerate(load())
    ]
    parts = summarize(traces, by_bucket=True)
    (whole,) = summarize(traces)
    assert {p.bucket for p in parts} == {"1-9", "10-99"}
    assert sum(p.ttft.n for p in parts) == whole.ttft.n
    assert sum(p.requests for p in parts) == whole.requests
    assert all(p.output_tps is None and p.request_rate is None for p in parts)
    assert all(p.stream_tps == pytest.approx(1 / GAP) for p in parts)


def test_the_warm_up_is_no_load_point():
    warm = request(0.0, slots=1, role="ramp", load_point="warmup")
    assert summarize([warm]) == []
    assert point(summarize([warm, *load()]), "warmup") is None


def test_inter_token_latencies_have_no_bounds_and_independent_values_do():
    (summary,) = summarize(load(each=100))
    assert all(q.lower is None and q.upper is None for q in summary.itl.quantiles)
    assert summary.ttft.at(0.99).upper is not None
    bounds = distribution([float(i) for i in range(1000)]).at(0.95)
    assert bounds.lower < bounds.value < bounds.upper


def test_one_chunk_says_nothing_about_the_time_between_its_tokens():
    one = request(0.0, slots=1, chunk_times_s=[0.5], chunk_tokens=[8], output_tokens=8)
    assert tpot_s(one) is None
    assert itl_s(one) == []
    assert e2e_s(one) == 0.5


def test_goodput_counts_what_meets_every_limit():
    traces = load(each=20)
    all_met = goodput(traces, Slo(per_request={"ttft": 0.2, "tpot": 0.2, "e2e": 2.0}))[
        "closed_loop_4"
    ]
    assert all_met == pytest.approx(summarize(traces)[0].request_rate)
    assert goodput(traces, Slo()) == {"closed_loop_4": all_met}
    for missed in (Slo(ttft={"p99": 0.05}), Slo(tpot={"p50": 0.05}), Slo(e2e={"p95": 0.5})):
        assert goodput(traces, missed) == {"closed_loop_4": 0.0}
    assert goodput([request(0.0)], Slo()) == {"closed_loop_4": None}
    assert goodput([], Slo()) == {}


def test_a_failed_request_meets_no_limit():
    assert not Slo().met_by(request(0.0, status="error"))
    assert Slo(tpot={"p99": 1e-9}).met_by(request(0.0, 1)), "one token has no TPOT to miss"


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 5),
    each=st.integers(1, 5),
    firsts=st.lists(st.floats(0.001, 2.0), min_size=1, max_size=5),
    rng=st.randoms(use_true_random=False),
)
def test_figures_under_load_do_not_depend_on_order_and_stay_in_range(
    slots, each, firsts, rng: random.Random
):
    traces = [
        *load(slots, each, first=firsts[0]),
        *(t for i, first in enumerate(firsts[1:], 1) for t in load(slots, each, first=first, repetition=i)),
    ]  # fmt: skip
    (summary,) = summarize(traces)
    shuffled = list(traces)
    rng.shuffle(shuffled)
    assert summarize(shuffled) == [summary]
    assert summary.steady_requests <= summary.requests == slots * each * len(firsts)
    for quantile in summary.ttft.quantiles:
        assert min(firsts) - 1e-9 <= quantile.value <= max(firsts) + 1e-9
        assert quantile.lower is None or quantile.lower <= quantile.value
        assert quantile.upper is None or quantile.value <= quantile.upper
    assert summary.output_tps is None or summary.output_tps > 0

"""Layers of a request: from the requests themselves, from a server's histograms, and what no layer explains."""

from __future__ import annotations

import pytest

from quanteval.metrics.layers import (
    UNATTRIBUTED,
    breakdowns,
    from_requests,
    from_server,
    grew_most,
    read_histogram,
)
from tests.gate import evidence as make
from tests.report.load_evidence import open_point, record, request

SERVER = {
    'vllm:request_queue_time_seconds_sum{model="m"}': 2.0,
    'vllm:request_queue_time_seconds_count{model="m"}': 10.0,
    'vllm:request_queue_time_seconds_bucket{model="m",le="0.1"}': 5.0,
    'vllm:request_queue_time_seconds_bucket{model="m",le="0.3"}': 10.0,
    'vllm:request_queue_time_seconds_bucket{model="m",le="+Inf"}': 10.0,
    "vllm:request_prefill_time_seconds_sum": 1.0,
    "vllm:request_prefill_time_seconds_count": 10.0,
    "vllm:e2e_request_latency_seconds_sum": 9.0,
    "vllm:e2e_request_latency_seconds_count": 10.0,
    "vllm:num_requests_running": 3.0,
}


def requests(n=10, **more):
    """Requests that wait 0.1 s, see a token 0.2 s later (0.18 s of it prefill), then ten tokens 0.05 s apart."""
    return [request("point", float(i), 0.1, 0.2, 0.05, 11, **more) for i in range(n)]


def test_layers_of_requests_have_means_quantiles_and_shares_that_add_up():
    told = from_requests("point", requests())
    assert [item.layer for item in told.layers] == [
        "client", "queue", "prefill", "decode", UNATTRIBUTED,
    ]  # fmt: skip
    assert told.e2e_mean_s == pytest.approx(0.8)
    assert told.at("decode").share == pytest.approx(0.5 / 0.8)
    assert told.at("queue").p50_s == pytest.approx(0.1)
    assert told.at("prefill").p99_s == pytest.approx(0.18)
    assert told.at(UNATTRIBUTED).mean_s == pytest.approx(0.02)
    assert sum(item.share for item in told.layers) == pytest.approx(1)
    assert told.slowest.layer == "decode"
    assert told.n == told.at("queue").n == 10


def test_what_the_client_sent_late_is_a_layer_of_its_own():
    late = requests(sent_s=0.0)
    late = [t.model_copy(update={"sent_s": t.scheduled_s + 0.03}) for t in late]
    told = from_requests("point", late)
    assert told.at("client").mean_s == pytest.approx(0.03)
    closed = [t.model_copy(update={"loop": "closed", "concurrency": 1}) for t in late]
    assert from_requests("point", closed).at("client") is None


def test_layers_that_overlap_leave_a_negative_remainder():
    told = from_requests("point", requests(layers={"prefill": 0.5, "decode": 0.5}))
    assert told.at(UNATTRIBUTED).mean_s == pytest.approx(-0.2)


def test_failed_and_unmeasured_requests_tell_nothing():
    failed = requests(status="error")
    warm = requests(warmup=True)
    assert from_requests("point", failed + warm) is None
    assert from_requests("point", []) is None


def test_a_layer_that_is_no_number_is_not_told():
    told = from_requests("point", requests(layers={"queue": float("nan"), "decode": 0.5}))
    assert told.at("queue") is None
    assert told.at(UNATTRIBUTED).mean_s == pytest.approx(0.3)


def test_layers_of_a_server_come_from_its_histograms():
    plain = requests(layers={})
    told = from_server("point", plain, [record("point", server=SERVER)])
    assert told.source == "server"
    queue = told.at("queue")
    assert (queue.mean_s, queue.n) == (pytest.approx(0.2), 10)
    assert queue.p50_s == pytest.approx(0.1)
    assert queue.p99_s == pytest.approx(0.1 + 0.2 * 4.9 / 5)
    assert told.at("prefill").p50_s is None
    assert told.at("network").mean_s == pytest.approx(0.8 - 0.9)
    assert sum(item.mean_s for item in told.layers) == pytest.approx(0.8)


def test_runs_of_a_point_are_summed_before_the_division():
    second = {**SERVER, "vllm:request_prefill_time_seconds_sum": 3.0}
    records = [record("point", server=SERVER), record("point", repetition=1, server=second)]
    assert from_server("point", requests(layers={}), records).at("prefill").mean_s == (
        pytest.approx(4 / 20)
    )


def test_a_quantile_beyond_the_last_bound_is_not_known():
    found = read_histogram(
        [{"a_sum": 9.0, "a_count": 2.0, 'a_bucket{le="1"}': 1.0, 'a_bucket{le="+Inf"}': 2.0}],
        ["a"],
    )
    assert found.quantile(0.5) == pytest.approx(1)
    assert found.quantile(0.99) is None


@pytest.mark.parametrize(
    "metrics",
    [{}, {"a_sum": 0.0, "a_count": 0.0}, {"a_sum": float("nan"), "a_count": 1.0}, {"b_sum": 1.0}],
)
def test_a_server_that_counted_nothing_tells_nothing(metrics):
    assert read_histogram([metrics], ["a"]) is None
    assert from_server("point", requests(layers={}), [record("point", server=metrics)]) is None


def test_requests_come_before_the_servers_metrics():
    variant = make.variant("v", traces=requests(), load_points=[record("point", server=SERVER)])
    variant = type(variant)(**{**vars(variant), "traces": requests()})
    (told,) = breakdowns(variant)
    assert told.source == "requests"


def test_what_grew_most_is_the_queue_of_a_busy_server():
    quiet, busy = (
        from_requests(name, open_point(rate, name=name)[0]) for name, rate in (("a", 0.5), ("b", 6))
    )
    grown = grew_most(quiet, busy)
    assert (grown.layer, grown.first, grown.last) == ("queue", "a", "b")
    assert grown.after_s > 10 * grown.before_s
    assert grew_most(busy, busy) is None

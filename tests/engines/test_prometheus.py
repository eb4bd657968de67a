"""What servers count is read whatever else is on the page."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quanteval.engines.prometheus import (
    LAYERS,
    delta,
    mean_layers,
    neutral,
    parse,
    prefix_hit_share,
)
from quanteval.server.counting import Counts

PAGE = r"""
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m",engine="0"} 3.0
vllm:num_requests_running{engine="1", model_name="m",} 4 1700000000000
requests_total{path="C:\\a \"b\"\n}"} 7
plain 1e3
spaced	 5
# TYPE t histogram
t_bucket{le="0.1"} 2.0 # {trace_id="x"} 0.05
t_bucket{le="+Inf"} 3
t_sum 1.5
t_count 3
t_created 1.7e+09
nothing NaN
endless +Inf
broken{a="1" 5
broken{a=1} 5
broken{a="1"}
9broken 1
<html>502 Bad Gateway</html>
# EOF
"""


def test_labels_are_ordered_and_buckets_left_out():
    assert parse(PAGE) == {
        'vllm:num_requests_running{engine="0",model_name="m"}': 3,
        'vllm:num_requests_running{engine="1",model_name="m"}': 4,
        'requests_total{path="C:\\\\a \\"b\\"\\n}"}': 7,
        "plain": 1000,
        "spaced": 5,
        "t_sum": 1.5,
        "t_count": 3,
    }


def test_buckets_are_kept_when_asked_for():
    found = parse(PAGE, buckets=True)
    assert (found['t_bucket{le="0.1"}'], found['t_bucket{le="+Inf"}']) == (2, 3)


def test_samples_told_apart_by_a_label_left_out_are_summed():
    assert parse(PAGE, without=("engine",)) == {
        **{k: v for k, v in parse(PAGE).items() if not k.startswith("vllm:")},
        'vllm:num_requests_running{model_name="m"}': 7,
    }
    page = 'a{x="1"} 2\na{x="1"} 3\na{x="2"} 4\n'
    assert parse(page, without=("x",)) == {"a": 7}, "the last of two samples of one name counts"


@given(st.text())
def test_no_page_is_too_odd(text):
    assert all(isinstance(value, float) for value in parse(text, buckets=True).values())


@given(st.dictionaries(st.text(min_size=1), st.floats(allow_nan=False, allow_infinity=False)))
def test_label_values_survive_a_second_reading(values):
    """Each sample's name, put on a page again, is read as itself."""
    page = "\n".join(
        'm{label="' + label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") + f'"}} {value!r}'
        for label, value in values.items()
        if "".join(label.splitlines()) == label
    )  # fmt: skip
    found = parse(page)
    again = parse("\n".join(f"{name} {value!r}" for name, value in found.items()))
    assert again == found


def test_counters_rise_and_gauges_stand():
    before = {"a_total": 5.0, 'b_sum{x="y"}': 1.0, "gauge": 9.0, "reset_total": 100.0}
    after = {
        "a_total": 8.0,
        'b_sum{x="y"}': 1.5,
        "gauge": 2.0,
        "reset_total": 3.0,
        "new_count": 4.0,
    }
    assert delta(before, after) == {
        "a_total": 3, 'b_sum{x="y"}': 0.5, "gauge": 2, "reset_total": 3, "new_count": 4,
    }  # fmt: skip
    assert delta({}, {}) == {}


def test_servers_names_become_ours():
    metrics = {
        'vllm:num_requests_running{engine="0"}': 3.0,
        'vllm:num_requests_running{engine="1"}': 4.0,
        'vllm:kv_cache_usage_perc{engine="0"}': 0.2,
        'vllm:kv_cache_usage_perc{engine="1"}': 0.4,
        "llamacpp:prompt_tokens_total": 12.0,
        "unknown": 1.0,
    }
    found = neutral(metrics)
    assert found.pop("kv_cache_usage") == 0.30000000000000004
    assert found == {"requests_running": 7, "prompt_tokens_total": 12}
    assert neutral(found) == found


def test_the_names_of_our_own_server_are_known():
    counts = Counts()
    layers = dict.fromkeys(LAYERS, 0.5)
    with counts.following(7) as request:
        assert neutral(parse(counts.text("m")))["requests_waiting"] == 1
        request.tokens(3)
        assert neutral(parse(counts.text("m")))["requests_running"] == 1
        request.end(layers)
    told = neutral(parse(counts.text("m")))
    assert mean_layers(told) == layers
    totals = ("prompt_tokens_total", "output_tokens_total", "requests_total", "ttft_s_count",
              "e2e_s_count", "requests_running", "requests_waiting")  # fmt: skip
    assert [told[name] for name in totals] == [7, 3, 1, 1, 1, 0, 0]
    assert told["e2e_s_sum"] >= told["ttft_s_sum"] > 0


def test_mean_layers_need_a_count():
    rise = {
        "vllm:request_queue_time_seconds_sum": 3.0,
        "vllm:request_queue_time_seconds_count": 4.0,
        "vllm:request_decode_time_seconds_sum": 3.0,
        "vllm:request_decode_time_seconds_count": 0.0,
        "llamacpp:prompt_seconds_total": 2.0,
    }
    assert mean_layers(rise) == {"queue": 0.75}
    assert mean_layers({}) == {}


def test_the_share_of_prefix_hits():
    assert prefix_hit_share({}) is None
    rise = {"vllm:prefix_cache_queries_total": 200.0, "vllm:prefix_cache_hits_total": 50.0}
    assert prefix_hit_share(rise) == 0.25

"""Service-level objectives: what they say, what they refuse, and which requests meet them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quanteval.errors import ConfigError
from quanteval.metrics.slo import Slo
from quanteval.targets import build
from tests.metrics.test_latency import trace

TARGET = {"_target_": "quanteval.metrics.slo.Slo"}


def test_terms_limits_and_text():
    slo = Slo(ttft={"p99": 0.5, "p50": 0.1}, tpot={"p99.9": 0.2}, itl={"p95": 0.3})
    assert [term.text for term in slo.terms] == [
        "ttft p50 <= 0.1 s", "ttft p99 <= 0.5 s", "itl p95 <= 0.3 s", "tpot p99.9 <= 0.2 s",
    ]  # fmt: skip
    assert slo.terms[3].q == 0.999
    # Of one request only the highest percentile's limit is asked, and nothing of its gaps.
    assert slo.limits == {"ttft": 0.5, "tpot": 0.2}
    assert Slo(ttft={"p99": 0.5}, per_request={"ttft": 1, "e2e": 9}).limits == {"ttft": 1, "e2e": 9}
    assert Slo().text == "none"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ttft": {"p0.99x": 1}}, 'slo.ttft "p0.99x" must be a percentile such as p99'),
        ({"ttft": {"99": 1}}, '"99"'),
        ({"ttft": {"p0": 1}}, '"p0"'),
        ({"ttft": {"p100": 1}}, '"p100"'),
        ({"e2e": {"p99": 0}}, 'slo.e2e.p99 "0.0" must be a positive number of seconds'),
        ({"e2e": {"p99": float("inf")}}, "positive"),
        ({"e2e": {"p99": "fast"}}, '"fast" is not valid'),
        ({"per_request": {"itl": 1}}, 'slo.per_request "itl" must be ttft, tpot or e2e'),
        ({"latency": {"p99": 1}}, 'unknown key "latency"'),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(fields, message):
    with pytest.raises(ConfigError) as error:
        build({**TARGET, **fields}, where="bench.slo")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_term_counts_values_that_are_too_slow_and_failures():
    ttft, itl = Slo(ttft={"p99": 0.4}).terms[0], Slo(itl={"p99": 0.15}).terms[0]
    one = trace(times=(0.5, 0.6, 0.8))
    assert ttft.misses(one) == (1, 1)
    assert itl.misses(one) == (1, 2)
    assert itl.misses(trace(times=(0.5,))) == (0, 0)
    for status in ("error", "timeout", "cancelled", "out_of_memory"):
        assert ttft.misses(trace(times=(0.1,), status=status)) == (1, 1)
        assert itl.misses(trace(times=(0.1, 0.2), status=status)) == (1, 1)


@given(st.floats(0.01, 9), st.floats(0.01, 9), st.sampled_from(["ttft", "tpot", "e2e"]))
def test_a_looser_limit_is_met_by_whatever_meets_a_tighter_one(a, b, metric):
    one = trace(times=(0.5, 1.5, 4.0))
    tight, loose = sorted((a, b))
    if Slo(per_request={metric: tight}).met_by(one):
        assert Slo(per_request={metric: loose}).met_by(one)
    assert not Slo(per_request={metric: loose}).met_by(one.model_copy(update={"status": "error"}))

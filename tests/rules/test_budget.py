"""Budgets of bytes: counted, compared as they are, and never met by what was not measured."""

from __future__ import annotations

import math

import pytest

from quanteval.errors import ConfigError
from quanteval.evidence import RuleContext
from quanteval.rules.budget import Budget, measure
from quanteval.targets import build
from tests.gate import evidence as make

TARGET = "quanteval.rules.budget.Budget"


def one(rule, base, cand):
    (finding,) = rule.check("memory", base, cand, RuleContext())
    return finding


@pytest.mark.parametrize(
    ("rule", "outcome", "says"),
    [
        (Budget("weight_memory_bytes", max_ratio=0.6), "accept", "0.50x): meets at most 0.6x"),
        (Budget("weight_memory_bytes", max_ratio=0.5), "accept", "0.50x): meets at most 0.5x"),
        (Budget("weight_memory_bytes", max_ratio=0.4), "reject", "0.50x): misses at most 0.4x"),
        (Budget("peak_memory_bytes", max_value=90_000), "reject", "misses at most 90000 bytes"),
        (Budget("peak_memory_bytes", max_value=100_000), "accept", "meets at most 100000 bytes"),
        (Budget("artifact_bytes", max_ratio=0.5), "accept", "16000 -> 8000 bytes (0.50x)"),
    ],
)
def test_bytes_are_compared_as_they_are(rule, outcome, says):
    finding = one(rule, make.variant("base"), make.variant("cand"))
    assert finding.outcome == outcome
    assert says in finding.sentence


def test_a_finding_has_the_bytes_and_the_unit_of_its_limit():
    base, cand = make.variant("base"), make.variant("cand")
    ratio = one(Budget("artifact_bytes", max_ratio=0.7), base, cand)
    assert (ratio.unit, ratio.estimate, ratio.margin) == ("ratio", 0.5, 0.7)
    value = one(Budget("artifact_bytes", max_value=9000), base, cand)
    assert (value.unit, value.estimate, value.margin) == ("bytes", 8000, 9000)
    for finding in (ratio, value):
        assert (finding.baseline_value, finding.candidate_value) == (16_000, 8_000)
        assert (finding.method, finding.lower, finding.upper) == ("counted bytes", None, None)


def test_bytes_are_shown_to_the_last_and_ratios_apart_from_the_limit():
    base = make.variant("base", memory=make.memory(269_030_400))
    cand = make.variant("cand", memory=make.memory(163_640_001))
    assert one(Budget("weight_memory_bytes", max_ratio=1.0), base, cand).sentence == (
        "weight_memory_bytes 269030400 -> 163640001 bytes (0.61x): meets at most 1x"
    )
    limit = one(Budget("weight_memory_bytes", max_value=163_640_000), base, cand)
    assert limit.sentence.endswith("163640001 bytes (0.61x): misses at most 163640000 bytes")
    hair = make.variant("cand", memory=make.memory(269_030_401 * 6 // 10 + 400_000))
    assert "(0.601x): misses at most 0.6x" in (
        one(Budget("weight_memory_bytes", max_ratio=0.6), base, hair).sentence
    )


@pytest.mark.parametrize("metric", ["weight_memory_bytes", "peak_memory_bytes", "artifact_bytes"])
def test_bytes_that_were_not_measured_never_pass(metric):
    bare = make.variant("cand", memory=None, artifact=None)
    assert measure(metric, bare) is None
    for base, cand in ((make.variant("base"), bare), (bare, make.variant("base"))):
        finding = one(Budget(metric, max_ratio=2, required=True), base, cand)
        assert finding.outcome == "invalid"
        assert finding.sentence == f"{metric} of cand was not measured"
        assert one(Budget(metric, max_ratio=2), base, cand).outcome == "skipped"


@pytest.mark.parametrize("required", [True, False])
def test_no_bytes_are_no_measurement(required):
    rule = Budget("weight_memory_bytes", max_ratio=1.0, required=required)
    nothing, some = make.variant("base", memory=make.memory(0)), make.variant("cand")
    for base, cand in ((nothing, some), (some, nothing)):
        finding = one(rule, base, cand)
        assert finding.outcome == "invalid"
        assert finding.sentence == "weight_memory_bytes of base says nothing: it is 0"


@pytest.mark.parametrize("limit", [math.nan, math.inf, 0, -1])
@pytest.mark.parametrize("name", ["max_ratio", "max_value"])
def test_a_limit_is_a_positive_number(name, limit):
    with pytest.raises(ValueError, match="positive"):
        Budget("weight_memory_bytes", **{name: limit})


@pytest.mark.parametrize("limits", [{}, {"max_ratio": 1.0, "max_value": 1.0}])
def test_there_is_one_limit(limits):
    with pytest.raises(ValueError, match="exactly one of max_ratio, max_value"):
        Budget("weight_memory_bytes", **limits)


@pytest.mark.parametrize("metric", ["single_stream_tps", "ttft_p50_s", "best_output_tps"])
def test_timings_are_no_budgets(metric):
    with pytest.raises(ConfigError, match=rf'gate\.rules\.speed\.metric: "{metric}" is not valid'):
        build({"_target_": TARGET, "metric": metric, "max_ratio": 1}, where="gate.rules.speed")
    node = {"_target_": TARGET, "metric": "artifact_bytes", "min_ratio": 1}
    with pytest.raises(ConfigError, match='unknown key "min_ratio"'):
        build(node, where="gate.rules.speed")

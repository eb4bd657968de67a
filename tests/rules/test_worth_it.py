"""Worth it: one benefit shown is enough, none is missing until all are, and several tests share the level."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quanteval.errors import ConfigError
from quanteval.evidence import RuleContext
from quanteval.rules.speed import Speed
from quanteval.rules.worth_it import Benefit, WorthIt
from quanteval.targets import build
from tests.gate import evidence as make
from tests.gate.rounds import in_rounds, rate

MEMORY = Benefit("weight_memory_bytes", max_ratio=0.75)
RATE = Benefit("output_tps", min_ratio=1.2)
STREAM = Benefit("stream_tps", min_ratio=1.2)
EITHER = WorthIt((MEMORY, RATE))
VALUES = (100.0, 102.0, 98.0, 101.0, 99.0)


def one(rule, base, cand):
    (finding,) = rule.check("worth_it", base, cand, RuleContext(0.05))
    return finding


def rounds(name="cand", factor=1.0, weights=16_000, values=VALUES, **more):
    parts = {"memory": make.memory(weights), **more}
    return in_rounds(name, [rate(factor * x) for x in values], **parts)


BASE = rounds("base")


@pytest.mark.parametrize(
    ("weights", "factor", "outcome", "start"),
    [
        (8_000, 1.4, "accept", "worth it: weight_memory_bytes 16000 -> 8000 bytes (0.50x): meets"),
        (8_000, 0.5, "accept", "worth it: weight_memory_bytes 16000 -> 8000 bytes (0.50x): meets"),
        (16_000, 1.4, "accept", "worth it: output_tps at single_stream 99.99 -> 140 tokens/s"),
        (16_000, 1.0, "reject", "not worth it: weight_memory_bytes 16000 -> 16000 bytes (1.00x)"),
        (16_000, 1.2, "inconclusive", "not shown to be worth it: weight_memory_bytes 16000"),
    ],
)
def test_one_benefit_is_enough(weights, factor, outcome, start):
    finding = one(EITHER, BASE, rounds(weights=weights, factor=factor))
    assert finding.outcome == outcome
    assert finding.required
    assert finding.sentence.startswith(start)
    assert finding.n == len(finding.notes) == 2


def test_a_rejection_names_every_figure():
    finding = one(EITHER, BASE, rounds())
    assert finding.sentence == (
        "not worth it: weight_memory_bytes 16000 -> 16000 bytes (1.00x): misses at most 0.75x; "
        "output_tps at single_stream 99.99 -> 99.99 tokens/s (1.00x, 5 rounds each, at most 1.02x with 95 % "
        "confidence): misses at least 1.2x"
    )


def test_timings_that_did_not_take_turns_show_nothing_and_refute_nothing():
    single = make.variant("base", traces=rate(100.0), memory=make.memory(16_000))
    for factor in (0.5, 5.0):
        cand = make.variant("cand", traces=rate(100.0 * factor), memory=make.memory(16_000))
        finding = one(EITHER, single, cand)
        assert finding.outcome == "inconclusive"
        assert finding.sentence.endswith("run with runtime.bench_rounds=5")
        assert one(WorthIt((MEMORY,)), single, cand).outcome == "reject"
    assert one(EITHER, single, make.variant("cand", traces=rate(50.0))).outcome == "accept"


@pytest.mark.parametrize("more", [{"memory": None}, {"memory": make.memory(0)}])
def test_bytes_that_were_not_measured_are_invalid(more):
    for factor, outcome in ((0.5, "invalid"), (1.2, "invalid"), (1.4, "accept")):
        finding = one(EITHER, BASE, rounds(factor=factor, **more))
        assert finding.outcome == outcome
    assert one(WorthIt((MEMORY,), required=False), BASE, rounds(**more)).outcome == "invalid"
    assert "weight_memory_bytes of cand" in one(EITHER, BASE, rounds(**more)).sentence


def test_failed_requests_are_invalid_unless_another_benefit_is_shown():
    broken = [rate(500.0) for _ in VALUES]
    broken[0][0] = broken[0][0].model_copy(update={"status": "error"})
    slow = in_rounds("cand", broken, memory=make.memory(16_000))
    assert one(EITHER, BASE, slow).outcome == "invalid"
    small = in_rounds("cand", broken, memory=make.memory(8_000))
    assert one(EITHER, BASE, small).outcome == "accept"


def test_several_timings_share_the_level():
    """What one timing shows alone is not shown as one of three; bytes take no share."""
    alpha = 0.05
    rng = np.random.default_rng(0)
    base = rounds("base", values=100 * np.exp(rng.normal(0, 0.03, 5)))
    noisy = 100 * np.exp(rng.normal(0, 0.03, 5))
    request_rate = Benefit("request_rate", min_ratio=1.2)

    def lower_bound(alpha, cand):
        rule = Speed("output_tps", min_ratio=1.2, alpha=alpha)
        (finding,) = rule.check("s", base, cand, RuleContext())
        return finding.lower

    between = next(
        cand
        for factor in np.linspace(1.2, 1.4, 201)
        if lower_bound(alpha, cand := rounds(factor=float(factor), values=noisy)) > 1.2
    )
    assert lower_bound(alpha / 3, between) < 1.2
    assert one(WorthIt((RATE,)), base, between).outcome == "accept"
    assert one(WorthIt((MEMORY, RATE)), base, between).outcome == "accept"
    several = one(WorthIt((RATE, STREAM, request_rate)), base, between)
    assert several.outcome == "inconclusive"
    assert several.method == "any of 3, timings at 98.3 % confidence each"
    assert several.confidence == 0.95


def test_a_candidate_without_any_benefit_seldom_passes():
    """Three rates that vary alone, all of them on the limit: one of three is shown in at most 5 %, within 2 sd."""
    rng, sims, accepted = np.random.default_rng(11), 100, 0
    points = ("a", "b", "c")
    rule = WorthIt(tuple(Benefit("output_tps", min_ratio=1.2, load_point=p) for p in points))

    def measured(name, factor):
        groups = [
            [t for p in points for t in rate(100 * factor * math.exp(rng.normal(0, 0.03)), p)]
            for _ in range(5)
        ]
        return in_rounds(name, groups)

    for _ in range(sims):
        accepted += one(rule, measured("base", 1.0), measured("cand", 1.2)).outcome == "accept"
    assert accepted <= sims * 0.05 + 2 * math.sqrt(sims * 0.05 * 0.95)


@pytest.mark.parametrize(
    ("benefits", "match"),
    [
        ([], "name at least one"),
        ([{"metric": "weight_memory_bytes"}], "give max_ratio and nothing else"),
        ([{"metric": "weight_memory_bytes", "min_ratio": 2.0}], "give max_ratio and nothing else"),
        (
            [{"metric": "artifact_bytes", "max_ratio": 0.5, "load_point": "x"}],
            "give max_ratio and nothing else",
        ),
        ([{"metric": "output_tps", "max_ratio": 0.5}], "give min_ratio"),
        ([{"metric": "output_tps", "min_ratio": 1.0}], 'min_ratio "1.0" is no benefit'),
        ([{"metric": "ttft_p50_s", "max_ratio": 1.0}], 'max_ratio "1.0" is no benefit'),
        ([{"metric": "artifact_bytes", "max_ratio": 1.5}], 'max_ratio "1.5" is no benefit'),
        ([{"metric": "artifact_bytes", "max_ratio": math.nan}], 'limit "nan" must be positive'),
        ([{"metric": "speed", "min_ratio": 1.5}], '"speed" is not valid'),
        ([{"metric": "artifact_bytes", "most": 0.5}], 'unknown key "most"'),
    ],
)
def test_wrong_benefits_are_named(benefits, match):
    with pytest.raises(ConfigError, match=match):
        node = {"_target_": "quanteval.rules.worth_it.WorthIt", "benefits": benefits}
        build(node, where="gate.rules.worth_it")


def test_a_policy_names_benefits_by_their_fields():
    benefits = [
        {"metric": "weight_memory_bytes", "max_ratio": 0.75},
        {"metric": "output_tps", "min_ratio": 1.2},
    ]
    node = {"_target_": "quanteval.rules.worth_it.WorthIt", "benefits": benefits}
    assert build(node, where="gate.rules.worth_it") == EITHER

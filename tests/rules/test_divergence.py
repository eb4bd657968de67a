"""Bounds on the distance from the baseline: means, quantiles over tokens, and what decides nothing."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from quanteval.evidence import RuleContext
from quanteval.rules.divergence import DivergenceBound
from quanteval.stats import clustered_quantile, clustered_ratio
from tests.gate import evidence as make

RULES = {
    "mean_kl": DivergenceBound(metric="mean_kl", max=0.05, kind="divergence"),
    "median_kl": DivergenceBound(metric="median_kl", max=0.05, kind="divergence"),
    "p99_kl": DivergenceBound(metric="p99_kl", max=0.5, kind="divergence"),
    "top1_agreement": DivergenceBound(metric="top1_agreement", min=0.9, kind="divergence"),
}
METRICS = sorted(RULES)


def documents(scale, n=20, agree=95, tokens=100):
    """Return documents whose tokens have an exponential KL of this mean."""
    rng = np.random.default_rng(3)
    series = tuple(rng.exponential(scale, tokens) for _ in range(n))
    more = {"weight": np.full(n, float(tokens)), "series": {"kl": series}}
    counts = np.clip(agree + rng.integers(-2, 3, n), 0, tokens)
    return make.divergence([float(x.sum()) for x in series], counts, **more)


def baseline_of(scores):
    n = len(scores.sample_ids)
    return make.divergence(np.zeros(n), scores.weight, weight=scores.weight)


def one(rule, cand, base=None, again=None, **context):
    base = baseline_of(cand) if base is None else base
    repeated = None if again is None else make.variant("base_again", again)
    (finding,) = rule.check(
        "rule", make.variant("base", base), make.variant("cand", cand),
        RuleContext(again=repeated, **context),
    )  # fmt: skip
    return finding


@pytest.mark.parametrize(
    ("metric", "scale", "agree", "outcome"),
    [
        ("mean_kl", 0.02, 95, "accept"),
        ("mean_kl", 0.05, 95, "inconclusive"),
        ("mean_kl", 0.08, 95, "reject"),
        ("median_kl", 0.05, 95, "accept"),
        ("median_kl", 0.0715, 95, "inconclusive"),
        ("median_kl", 0.1, 95, "reject"),
        ("p99_kl", 0.05, 95, "accept"),
        ("p99_kl", 0.108, 95, "inconclusive"),
        ("p99_kl", 0.2, 95, "reject"),
        ("top1_agreement", 0.05, 95, "accept"),
        ("top1_agreement", 0.05, 89, "inconclusive"),
        ("top1_agreement", 0.05, 85, "reject"),
    ],
)
def test_a_distance_is_judged_by_its_bounds(metric, scale, agree, outcome):
    scores = documents(scale, agree=agree)
    finding = one(RULES[metric], scores)
    assert finding.outcome == outcome
    if metric in ("median_kl", "p99_kl"):
        expected = clustered_quantile(scores.series["kl"], 0.5 if metric == "median_kl" else 0.99)
    else:
        totals = scores.value if metric == "mean_kl" else scores.numbers["top1_agree"]
        expected = clustered_ratio(totals, scores.weight)
    assert finding.estimate == pytest.approx(expected.estimate)
    assert finding.lower == pytest.approx(expected.lower)
    assert finding.upper == pytest.approx(expected.upper)
    assert finding.n == 20
    assert not finding.required


def test_the_sentence_of_a_quantile():
    finding = one(RULES["p99_kl"], documents(0.05))
    low, mid, high = finding.lower, finding.estimate, finding.upper
    assert finding.sentence == (
        f"distance: p99 KL {mid:.4f} nats/token (n=20 documents, 2000 tokens, between {low:.4f} and {high:.4f} "
        "with 95 % confidence each), shown to be below 0.5 nats/token"
    )
    assert finding.method == "Woodruff's quantile over documents"


def test_a_tail_that_the_tokens_cannot_bound_is_undecided():
    finding = one(RULES["p99_kl"], documents(0.001, n=12, tokens=10))
    assert (finding.outcome, finding.upper) == ("inconclusive", math.inf)
    assert "(n=12 documents, 120 tokens, at least " in finding.sentence
    assert "too few tokens for an upper bound), not shown to be below" in finding.sentence
    assert type(finding).model_validate_json(finding.model_dump_json()) == finding
    assert one(RULES["p99_kl"], documents(1.0, n=12, tokens=10)).outcome == "reject"


@pytest.mark.parametrize("metric", METRICS)
def test_fewer_than_ten_documents_decide_nothing(metric):
    for n in (1, 9):
        for scale in (1e-4, 10.0):
            finding = one(RULES[metric], documents(scale, n=n, agree=99))
            assert finding.outcome == "inconclusive"
            assert f"{n} documents decide nothing, at least 10 are needed" in finding.sentence
    assert one(RULES[metric], documents(1e-4, n=10, agree=99)).outcome == "accept"
    assert one(RULES[metric], make.divergence([], [])).outcome == "invalid"


@pytest.mark.parametrize("metric", METRICS)
def test_a_missing_document_keeps_it_from_passing(metric):
    whole = documents(1e-4, agree=99)
    part = dataclasses.replace(
        whole,
        record=whole.record,
        **{
            name: getattr(whole, name)[:19]
            for name in ("sample_ids", "prompt_sha256", "value", "weight", "status", "finish_reason",
                         "output_tokens", "outcome")
        },
        numbers={"top1_agree": whole.numbers["top1_agree"][:19]},
        series={"kl": whole.series["kl"][:19]},
    )  # fmt: skip
    assert one(RULES[metric], whole).outcome == "accept"
    finding = one(RULES[metric], part, baseline_of(whole), max_missing=0.1)
    assert finding.outcome == "inconclusive"
    assert finding.sentence.endswith("; 1 documents are missing, so nothing is accepted")
    assert one(RULES[metric], part, baseline_of(whole)).outcome == "invalid"


@pytest.mark.parametrize("metric", METRICS)
def test_the_repeated_baselines_own_distance_is_said(metric):
    scores = documents(0.05)
    again = documents(0.001, agree=99)
    finding = one(RULES[metric], scores, again=again)
    own = one(RULES[metric], again).estimate
    assert finding.baseline_value == pytest.approx(own)
    assert "(the repeated baseline: " in finding.sentence
    assert one(RULES[metric], scores).baseline_value is None
    other = dataclasses.replace(
        again, record=again.record.model_copy(update={"fingerprint": "other"})
    )
    assert "repeated" not in one(RULES[metric], scores, again=other).sentence


def test_the_noise_of_a_mean_is_the_sum_over_tokens():
    again = make.divergence(np.full(20, 0.04), np.full(20, 100))
    told = one(RULES["mean_kl"], documents(0.02), again=again).sentence
    assert " nats/token (the repeated baseline: 0.0004) (n=20 documents, between " in told


@pytest.mark.parametrize("metric", METRICS)
def test_what_no_distance_can_be_taken_of(metric):
    good = documents(0.01)
    nan = good.value.copy()
    nan[7] = np.nan
    status = ("ok",) * 7 + ("error",) + ("ok",) * 12
    for bad in (dataclasses.replace(good, value=nan), dataclasses.replace(good, status=status)):
        finding = one(RULES[metric], bad, baseline_of(good))
        assert finding.outcome == "invalid"
        assert '"s7"' in finding.sentence
    every = dataclasses.replace(good, status=("error",) * 20)
    assert one(RULES[metric], every, baseline_of(good)).outcome == "invalid"
    fewer = dataclasses.replace(good, weight=good.weight - 1)
    finding = one(RULES[metric], fewer, baseline_of(good))
    assert "different numbers of tokens" in finding.sentence


@pytest.mark.parametrize("metric", ["median_kl", "p99_kl"])
def test_tokens_that_were_left_out_are_found(metric):
    good = documents(0.01)
    for series in (
        {},
        {"kl": (good.series["kl"][0][:-1], *good.series["kl"][1:])},
        {"kl": (np.full(100, np.nan), *good.series["kl"][1:])},
    ):
        finding = one(RULES[metric], dataclasses.replace(good, series=series))
        assert finding.outcome == "invalid"


def test_an_agreement_that_is_not_there_is_invalid():
    good = documents(0.01)
    for numbers in ({}, {"top1_agree": np.full(20, np.nan)}):
        finding = one(RULES["top1_agreement"], dataclasses.replace(good, numbers=numbers))
        assert finding.outcome == "invalid"


def test_bounds_are_possible_values():
    kl = np.zeros(20)
    kl[0] = 1.0
    assert one(RULES["mean_kl"], make.divergence(kl, np.full(20, 100))).lower == 0
    agree = np.full(20, 100.0)
    agree[0] = 80
    assert one(RULES["top1_agreement"], make.divergence(kl, agree)).upper == 1


@pytest.mark.parametrize("metric", ["mean_kl", "median_kl", "p99_kl"])
def test_a_kl_takes_max_alone(metric):
    for fields in ({"min": 0.1}, {}, {"max": 0.1, "min": 0.1}):
        with pytest.raises(ValueError, match=f'{metric} needs "max" and nothing else'):
            DivergenceBound(metric=metric, kind="divergence", **fields)
    for bad in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="max"):
            DivergenceBound(metric=metric, kind="divergence", max=bad)


def test_other_wrong_parameters_are_refused():
    with pytest.raises(ValueError, match='needs "min"'):
        DivergenceBound(metric="top1_agreement", max=0.1, kind="divergence")
    with pytest.raises(ValueError, match='metric "p95_kl" must be one of mean_kl, median_kl'):
        DivergenceBound(metric="p95_kl", max=0.1, kind="divergence")
    with pytest.raises(ValueError, match="exactly one"):
        DivergenceBound(metric="mean_kl", max=0.1)


def test_the_sentence_of_a_divergence():
    rule = DivergenceBound(metric="top1_agreement", min=0.9, kind="divergence", alpha=0.025)
    same = make.divergence(np.full(20, 1.0), np.full(20, 95))
    assert one(rule, same).sentence == (
        "distance: top-1 agreement 95.0 % (n=20 documents, between 95.0 and 95.0 with 97.5 % confidence each), "
        "shown to be above 90 %"
    )

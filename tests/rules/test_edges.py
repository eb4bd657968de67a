"""What must not slip through a rule: odd parameters, errored references, broken models, failing servers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quanteval.errors import ConfigError
from quanteval.evidence import RuleContext
from quanteval.rules.divergence import DivergenceBound
from quanteval.rules.guards import EffectivePrecision, OutputLength, SampleStatus
from quanteval.rules.non_inferiority import Margin, NonInferiority
from quanteval.rules.perplexity import PerplexityRatio
from quanteval.targets import build
from tests.gate import evidence as make

POINTS = Margin(absolute=0.05)
SHARE = Margin(relative=0.05)


def one(rule, base, cand):
    (finding,) = rule.check(
        "rule", make.variant("base", base), make.variant("cand", cand), RuleContext()
    )
    return finding


# --------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("bad", [math.nan, -0.1, 1.1])
@pytest.mark.parametrize(
    ("kind", "field", "fields"),
    [
        (SampleStatus, "max_errors", {}),
        (SampleStatus, "max_timeout_excess", {}),
        (SampleStatus, "max_truncated_excess", {}),
        (EffectivePrecision, "min_quantized", {}),
        (NonInferiority, "alpha", {"kind": "code", "margin": POINTS}),
        (PerplexityRatio, "alpha", {"kind": "perplexity", "max_ratio": 1.02}),
        (PerplexityRatio, "max_ratio", {"kind": "perplexity"}),
        (DivergenceBound, "alpha", {"kind": "divergence", "metric": "mean_kl", "max": 0.1}),
        (DivergenceBound, "min", {"kind": "divergence", "metric": "top1_agreement"}),
        (OutputLength, "min_ratio", {}),
        (Margin, "absolute", {}),
    ],
)
def test_a_limit_that_nothing_could_miss_is_refused(kind, field, fields, bad):
    if (kind, field, bad) == (PerplexityRatio, "max_ratio", 1.1):
        bad = 1.0
    with pytest.raises(ValueError, match=rf"{field}|margin"):
        kind(**{**fields, field: bad})


def test_wrong_values_in_a_policy_are_named():
    node = {
        "_target_": "quanteval.rules.guards.SampleStatus",
        "max_errors": math.nan,
    }
    with pytest.raises(ConfigError, match=r'gate\.rules\.status: max_errors "nan"'):
        build(node, where="gate.rules.status")


def test_an_exact_test_of_a_relative_margin_is_refused():
    with pytest.raises(ValueError, match='"exact" needs an absolute margin'):
        NonInferiority(margin=SHARE, kind="code", method="exact")


# --------------------------------------------------------------------------- errors


def test_errors_of_the_baseline_do_not_help_a_candidate():
    """Counted as wrong on both sides they would make a worse candidate look equal."""
    worse = np.ones(200)
    worse[:20] = 0
    errored = make.scores(values=worse, status=("error",) * 20 + ("ok",) * 180)
    finding = one(NonInferiority(margin=POINTS, kind="code"), errored, make.scores(values=worse))
    assert finding.outcome == "reject"
    assert (finding.broken, finding.fixed, finding.n) == (20, 0, 200)
    assert finding.notes == ["20 samples that errored in the baseline count as right there"]
    status = one(SampleStatus(), errored, make.scores(values=worse))
    assert status.outcome == "invalid"
    assert "10.0 % of the baseline's samples errored" in status.sentence


def test_an_errored_sample_never_counts_as_right_for_the_candidate():
    odd = make.scores(values=np.ones(200), status=("error",) * 20 + ("ok",) * 180)
    finding = one(NonInferiority(margin=POINTS, kind="code"), make.scores(values=np.ones(200)), odd)
    assert finding.outcome == "reject"
    assert finding.broken == 20


@pytest.mark.parametrize("status", ["error", "timeout"])
def test_a_sum_over_tokens_needs_all_of_them(status):
    nll = np.linspace(200, 300, 40)
    part = make.perplexity(nll, status=("ok",) * 7 + (status,) + ("ok",) * 32)
    rule = PerplexityRatio(max_ratio=1.05, kind="perplexity")
    for base, cand in ((make.perplexity(nll), part), (part, make.perplexity(nll))):
        finding = one(rule, base, cand)
        assert finding.outcome == "invalid"
        assert '"s7"' in finding.sentence
    rule = DivergenceBound(metric="mean_kl", max=0.1, kind="divergence")
    kl = make.divergence(np.ones(12), np.full(12, 99), status=("ok",) * 7 + (status,) + ("ok",) * 4)
    finding = one(rule, make.divergence(np.zeros(12), np.full(12, 100)), kl)
    assert finding.outcome == "invalid"
    assert '"s7"' in finding.sentence


# --------------------------------------------------------------------------- broken models


def test_a_perplexity_beyond_every_number_is_a_reject():
    nll = np.linspace(200, 300, 40)
    rule = PerplexityRatio(max_ratio=1.05, kind="perplexity")
    finding = one(rule, make.perplexity(nll), make.perplexity(nll * 1000))
    assert finding.outcome == "reject"
    assert finding.candidate_value == math.inf
    assert type(finding).model_validate_json(finding.model_dump_json()) == finding


def test_documents_without_tokens_are_invalid():
    nll = np.linspace(200, 300, 40)
    empty = make.perplexity(nll, weight=np.where(np.arange(40) == 3, 0.0, 100.0))
    finding = one(PerplexityRatio(max_ratio=1.05, kind="perplexity"), empty, empty)
    assert finding.outcome == "invalid"
    assert '"s3"' in finding.sentence


def test_an_agreement_that_is_not_a_number_is_invalid():
    rule = DivergenceBound(metric="top1_agreement", min=0.9, kind="divergence")
    base = make.divergence(np.zeros(12), np.full(12, 100))
    assert one(rule, base, make.divergence(np.ones(12), [np.nan] * 12)).outcome == "invalid"


def test_a_baseline_that_solves_nothing_has_no_relative_margin():
    rule = NonInferiority(margin=Margin(relative=0.05, min_baseline=0), kind="code")
    zeros = make.scores(values=np.zeros(100))
    assert one(rule, zeros, zeros).outcome == "inconclusive"


def test_an_exact_test_of_fractions_is_invalid():
    rule = NonInferiority(margin=POINTS, kind="code", method="exact")
    half = make.scores(values=np.full(100, 0.5))
    finding = one(rule, half, half)
    assert finding.outcome == "invalid"
    assert "scores of 0 and 1" in finding.sentence
    assert one(NonInferiority(margin=POINTS, kind="code"), half, half).outcome == "accept"


@pytest.mark.parametrize("share", [math.nan, 0.5])
def test_a_share_quantized_that_is_unknown_or_too_small_rejects(share):
    artifact = make.artifact(8, effective_bits=8.1)
    effective = artifact.effective.model_copy(update={"quantized_fraction": share})
    candidate = make.variant("cand", artifact=artifact.model_copy(update={"effective": effective}))
    (finding,) = EffectivePrecision().check("ran", make.variant("base"), candidate, RuleContext())
    assert finding.outcome == "reject"


# --------------------------------------------------------------------------- sample size, point rule


def test_the_samples_that_would_decide_are_more_than_there_are():
    base, cand = np.ones(60), np.ones(60)
    cand[0] = 0
    finding = one(
        NonInferiority(margin=POINTS, kind="code"),
        make.scores(values=base),
        make.scores(values=cand),
    )
    assert finding.outcome == "inconclusive"
    assert finding.n_needed > 60


def test_the_samples_needed_for_a_relative_margin_are_in_its_own_unit():
    base = np.r_[np.ones(30), np.zeros(70)]
    cand = np.r_[0, np.ones(30), np.zeros(69)]
    finding = one(
        NonInferiority(margin=SHARE, kind="code"),
        make.scores(values=base),
        make.scores(values=cand),
    )
    assert finding.outcome == "inconclusive"
    # 2.486^2 var(0.95 x - y) / (0.3 x 0.05)^2: a twentieth of 30 % is 1.5 points.
    expected = 2.4864749**2 * np.var(0.95 * base - cand) / (0.3 * 0.05) ** 2
    assert finding.n_needed == math.ceil(expected)


def test_a_point_comparison_is_named_so_and_is_no_evidence_of_quality():
    rule = NonInferiority(margin=Margin(absolute=0.02), kind="code", method="point")
    base = np.r_[np.ones(30), np.zeros(134)]
    cand = np.r_[0, np.ones(30), np.zeros(133)]
    finding = one(rule, make.scores(values=base), make.scores(values=cand))
    assert finding.outcome == "accept"
    assert finding.sentence == (
        "code: 18.3 % -> 18.3 % (n=164, 1 worse, 1 better), loss 0.0 points, not above the margin of 2: "
        "not a statistical test, it passes a loss exactly at the margin 58.4 % of the time"
    )
    assert (finding.lower, finding.upper, finding.p_value) == (None, None, None)
    assert not rule.is_quality
    assert NonInferiority(margin=POINTS, kind="code").is_quality
    lost = np.zeros(164)
    assert one(rule, make.scores(values=base), make.scores(values=lost)).outcome == "reject"
    share = NonInferiority(margin=SHARE, kind="code", method="point", task=None)
    low = np.r_[np.ones(40), np.zeros(60)]
    kept = np.r_[np.ones(38), np.zeros(62)]
    assert one(share, make.scores(values=low), make.scores(values=kept)).outcome == "accept"

"""Each rule on evidence made by hand: its outcome, its numbers, its sentence."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from quanteval.evidence import RuleContext
from quanteval.rules._common import beside, confidence
from quanteval.rules.guards import EffectivePrecision, FiniteScores, OutputLength, SampleStatus
from quanteval.rules.non_inferiority import Margin, NonInferiority, needed_pairs
from quanteval.rules.perplexity import PerplexityRatio
from quanteval.stats import tango_bound
from tests.gate import evidence as make

ALPHA = 0.05


def one(rule, baseline, candidate, **context):
    (finding,) = rule.check("rule", baseline, candidate, RuleContext(ALPHA, **context))
    return finding


def pair_of(base_values, cand_values, **more):
    baseline = make.variant("base", make.scores(values=base_values))
    return baseline, make.variant("cand", make.scores(values=cand_values, **more))


def flips(n, broken, fixed):
    """Return values with that many samples lost and gained."""
    base, cand = np.ones(n), np.ones(n)
    cand[:broken] = 0
    base[broken : broken + fixed] = 0
    return base, cand


# --------------------------------------------------------------------------- non-inferiority

CODE = NonInferiority(margin=Margin(absolute=0.05), kind="code", method="score")


def test_scores_are_judged_by_tangos_bounds():
    finding = one(CODE, *pair_of(*flips(164, 8, 5)))
    assert finding.outcome == "inconclusive"
    assert finding.estimate == pytest.approx(3 / 164)
    assert finding.upper == pytest.approx(tango_bound(8, 5, 164, ALPHA, "upper"), abs=1e-9)
    assert finding.lower == pytest.approx(tango_bound(8, 5, 164, ALPHA, "lower"), abs=1e-9)
    assert (finding.n, finding.broken, finding.fixed) == (164, 8, 5)
    assert finding.p_value == pytest.approx(0.0907032870043, abs=1e-9)
    assert finding.sentence == (
        "code: 97.0 % -> 95.1 % (n=164, 8 worse, 5 better), loss 1.8 points, between -2.0 and 5.8 with "
        "95 % confidence each: undecided at the margin of 5 points, about 486 samples would decide"
    )


@pytest.mark.parametrize(
    ("broken", "fixed", "outcome", "detected"),
    [
        (0, 0, "accept", False),
        (3, 3, "accept", False),
        (30, 2, "reject", True),
        (11, 2, "inconclusive", True),
    ],
)
def test_three_outcomes(broken, fixed, outcome, detected):
    for method in ("auto", "score"):
        rule = dataclasses.replace(CODE, method=method)
        finding = one(rule, *pair_of(*flips(200, broken, fixed)))
        assert finding.outcome == outcome, finding.sentence
        assert finding.regression_detected is detected
        assert (finding.n_needed is not None) == (outcome == "inconclusive")


def test_sentences_of_a_decision():
    assert one(CODE, *pair_of(*flips(200, 0, 0))).sentence == (
        "code: 100.0 % -> 100.0 % (n=200, 0 worse, 0 better), loss 0.0 points, at most 1.3 with 95 % confidence: "
        "within the margin of 5 points"
    )
    relative = NonInferiority(margin=Margin(relative=0.05), kind="code", alpha=0.025)
    finding = one(relative, *pair_of(*flips(400, 60, 0)))
    lower = f"{100 * finding.lower:.1f}"
    assert finding.sentence == (
        "code: 100.0 % -> 85.0 % (n=400, 60 worse, 0 better), loss 15.0 % of the baseline's score, "
        f"at least {lower} with 97.5 % confidence: beyond the margin of 5 %"
    )


@pytest.mark.parametrize(
    ("value", "limit", "digits", "text"),
    [
        (4.96, 5.0, 1, "4.96"), (5.04, 5.0, 1, "5.04"), (4.9, 5.0, 1, "4.9"), (5.0, 5.0, 1, "5.0"),
        (1.04996, 1.05, 3, "1.04996"), (-0.01, 5.0, 1, "0.0"), (5.0 + 1e-9, 5.0, 1, "5.000000"),
    ],
)  # fmt: skip
def test_a_bound_does_not_look_equal_to_what_it_was_compared_with(value, limit, digits, text):
    assert beside(value, limit, digits) == text


@pytest.mark.parametrize(
    ("alpha", "text"), [(0.05, "95 %"), (0.025, "97.5 %"), (0.0005, "99.95 %"), (0.3, "70 %")]
)
def test_confidence_is_never_rounded_up(alpha, text):
    assert confidence(alpha) == text


def test_zero_flips_accept_only_from_59_samples_at_five_points():
    exact = dataclasses.replace(CODE, method="exact")
    assert one(exact, *pair_of(*flips(58, 0, 0))).outcome == "inconclusive"
    assert one(exact, *pair_of(*flips(59, 0, 0))).outcome == "accept"


def test_errored_samples_stay_in_the_denominator():
    base, cand = flips(100, 30, 0)
    finding = one(CODE, *pair_of(base, cand, status=("error",) * 30 + ("ok",) * 70))
    assert finding.n == 100
    assert finding.outcome == "reject"


def test_relative_margins_need_a_baseline_that_solves_something():
    rule = NonInferiority(margin=Margin(relative=0.05), kind="code")
    base, cand = flips(400, 0, 0)
    base[:] = cand[:] = 0
    base[:40] = cand[:40] = 1
    low = one(rule, *pair_of(base, cand))
    assert low.outcome == "inconclusive"
    assert "10.0 %, below the 20.0 %" in low.sentence
    assert one(rule, *pair_of(np.ones(400), np.ones(400))).outcome == "accept"
    assert one(rule, *pair_of(*flips(400, 60, 0))).outcome == "reject"


def test_what_cannot_be_paired_is_invalid():
    base, cand = flips(60, 0, 0)
    baseline, candidate = pair_of(base, cand)
    scores = candidate.scores["code"]
    cases = {
        "no scores": {},
        "a sample twice": {"sample_ids": ("s0", *scores.sample_ids[:-1])},
        "different prompt ids": {"prompt_sha256": ("x", *scores.prompt_sha256[1:])},
        "no finite score": {"value": np.full(60, np.nan)},
        "outside 0 to 1": {"value": np.full(60, 2.0)},
        "every sample errored": {"status": ("error",) * 60},
        "no sample was scored on both sides": {"sample_ids": tuple(f"x{i}" for i in range(60))},
    }
    for says, change in cases.items():
        changed = {"code": dataclasses.replace(scores, **change)} if change else {}
        finding = one(
            dataclasses.replace(CODE, task="code", kind=None),
            baseline,
            dataclasses.replace(candidate, scores=changed),
        )
        assert finding.outcome == "invalid", says
        assert says in finding.sentence


def test_missing_samples_are_allowed_only_as_far_as_stated():
    base, cand = flips(100, 0, 0)
    baseline, candidate = pair_of(base, cand[:99])
    assert one(CODE, baseline, candidate).outcome == "invalid"
    finding = one(CODE, baseline, candidate, max_missing=0.02)
    assert finding.outcome == "accept"
    assert finding.n == 99
    # What is missing counts as lost: the bound is that of one broken pair in a hundred.
    assert finding.upper == pytest.approx(tango_bound(1, 0, 100, ALPHA, "upper"), abs=1e-9)
    assert finding.estimate == 0
    assert "1 samples were not scored on both sides" in finding.notes[0]


def test_a_kind_without_tasks_is_skipped_and_a_named_task_is_missed():
    baseline, candidate = make.variant("base"), make.variant("cand")
    assert one(CODE, baseline, candidate).outcome == "skipped"
    named = dataclasses.replace(CODE, kind=None, task="code")
    assert one(named, baseline, candidate).outcome == "invalid"


@pytest.mark.parametrize(
    "fields", [{}, {"absolute": 0.1, "relative": 0.1}, {"absolute": 0}, {"absolute": 1.5}]
)
def test_margins_are_checked(fields):
    with pytest.raises(ValueError, match=r"give exactly one|between 0 and 1"):
        Margin(**fields)


def test_needed_pairs_is_the_published_approximation():
    f, d, m = 13 / 164, 3 / 164, 0.05
    z = 1.6448536 + 0.8416212
    assert needed_pairs(f - d * d, d, m, 0.05) == int(np.ceil(z * z * (f - d * d) / (m - d) ** 2))
    assert needed_pairs(0.1, 0.05, 0.05, 0.05) is None


# --------------------------------------------------------------------------- perplexity

PPL = PerplexityRatio(max_ratio=1.05, kind="perplexity")
NLL = np.random.default_rng(1).normal(270, 30, 40)


def documents(change, n=40, noise=0.3):
    jitter = np.random.default_rng(2).normal(0, noise, n)
    baseline = make.variant("base", make.perplexity(NLL[:n]))
    return baseline, make.variant("cand", make.perplexity(NLL[:n] + 100 * change + jitter))


@pytest.mark.parametrize(
    ("ratio", "outcome"),
    [(1.003, "accept"), (1.05, "inconclusive"), (1.1, "reject"), (0.97, "accept")],
)
def test_perplexity_is_judged_by_its_ratio(ratio, outcome):
    finding = one(PPL, *documents(np.log(ratio)))
    assert finding.outcome == outcome, finding.sentence
    assert finding.estimate == pytest.approx(ratio, rel=2e-3)
    assert finding.lower <= finding.estimate <= finding.upper
    assert finding.candidate_value / finding.baseline_value == pytest.approx(finding.estimate)
    assert "n=40 documents" in finding.sentence


def test_the_documents_needed_depend_on_the_level():
    """n (z_alpha + z_power)^2 (se/distance)^2: a stricter level needs more."""
    usual, strict = (
        one(dataclasses.replace(PPL, alpha=alpha), *documents(np.log(1.0495))).n_needed
        for alpha in (0.05, 0.005)
    )
    assert strict / usual == pytest.approx(
        (2.5758 + 0.8416) ** 2 / (1.6449 + 0.8416) ** 2, rel=0.02
    )


def test_one_outlier_document_is_named():
    baseline, candidate = documents(0.0)
    scores = candidate.scores["prose"]
    value = scores.value.copy()
    value[17] += 200
    candidate = make.variant("cand", dataclasses.replace(scores, value=value))
    finding = one(PPL, baseline, candidate)
    assert '"s17"' in finding.notes[0]
    assert finding.outcome == "inconclusive"


def test_what_perplexity_cannot_use():
    assert one(PPL, *documents(0.0, n=9)).outcome == "inconclusive"
    baseline, candidate = documents(0.0)
    scores = candidate.scores["prose"]
    value = scores.value.copy()
    value[5] = np.inf
    finding = one(PPL, baseline, make.variant("cand", dataclasses.replace(scores, value=value)))
    assert finding.outcome == "invalid"
    assert '"s5"' in finding.sentence
    other = dataclasses.replace(scores, weight=scores.weight + 1)
    finding = one(PPL, baseline, make.variant("cand", other))
    assert "different numbers of tokens" in finding.sentence


def test_the_same_documents_give_the_same_bounds():
    assert one(PPL, *documents(0.01)) == one(PPL, *documents(0.01))


# --------------------------------------------------------------------------- guards


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        ({"error": 1}, "reject"),
        ({"timeout": 3}, "reject"),
        ({"truncated": 11}, "reject"),
        ({"timeout": 2, "truncated": 4}, "accept"),
    ],
)
def test_samples_that_went_wrong(status, outcome):
    marks = [name for name, count in status.items() for _ in range(count)]
    statuses = tuple(marks + ["ok"] * (50 - len(marks)))
    baseline, candidate = pair_of(np.ones(50), np.ones(50), status=statuses)
    rule = SampleStatus(max_timeout_excess=0.05, max_truncated_excess=0.2)
    assert one(rule, baseline, candidate).outcome == outcome


def test_the_baselines_own_truncations_are_no_ones_fault():
    same = make.scores(values=np.ones(10), status=("truncated",) * 5 + ("ok",) * 5)
    finding = one(SampleStatus(), make.variant("base", same), make.variant("cand", same))
    assert finding.outcome == "accept"
    assert "50.0 % truncated (n=10)" in finding.sentence


def test_output_length_stays_in_its_band():
    baseline, candidate = pair_of(np.ones(10), np.ones(10), output_tokens=np.full(10, 60))
    finding = one(OutputLength(), baseline, candidate)
    assert finding.outcome == "reject"
    assert "40.0 -> 60.0 output tokens a sample (n=10), ratio 1.50" in finding.sentence
    prose = make.variant("base", make.perplexity(NLL))
    assert one(OutputLength(), prose, prose).outcome == "skipped"


def test_scores_must_be_finite():
    baseline, candidate = pair_of(np.ones(3), [1, np.nan, 1])
    finding = one(FiniteScores(), baseline, candidate)
    assert finding.outcome == "reject"
    assert '"s1"' in finding.sentence


@pytest.mark.parametrize(
    ("artifact", "outcome"),
    [
        (make.artifact(8, effective_bits=8.1), "accept"),
        (make.artifact(4, effective_bits=4.5), "accept"),
        (make.artifact(16), "accept"),
        (make.artifact(4, effective_bits=16), "reject"),
        (make.artifact(4, effective_bits=8), "reject"),
        (make.artifact(8, effective_bits=4), "reject"),
        (make.artifact(8, activation=8, ran_activation=16), "reject"),
        (make.artifact(8).model_copy(update={"effective": None}), "invalid"),
        (None, "invalid"),
    ],
)
def test_a_scheme_that_did_not_run_is_caught(artifact, outcome):
    candidate = make.variant("cand", artifact=artifact)
    assert one(EffectivePrecision(), make.variant("base"), candidate).outcome == outcome


# --------------------------------------------------------------------------- vetoes


def test_a_veto_counts_only_against_a_candidate():
    rule = NonInferiority(margin=Margin(absolute=0.05), kind="code", required=False, veto=True)
    outcomes = {}
    for name, broken in (("same", 0), ("some", 9), ("many", 60)):
        finding = one(rule, *pair_of(*flips(200, broken, 0)))
        outcomes[name] = (finding.outcome, finding.required)
    assert outcomes == {
        "same": ("accept", False), "some": ("inconclusive", False), "many": ("reject", True),
    }  # fmt: skip
    base, cand = pair_of(*flips(200, 0, 0))
    odd = dataclasses.replace(cand.scores["code"], prompt_sha256=("other",) * 200)
    finding = one(rule, base, dataclasses.replace(cand, scores={"code": odd}))
    assert (finding.outcome, finding.required) == ("invalid", True)
    nothing = make.variant("base"), make.variant("cand")
    assert one(rule, *nothing).outcome == "skipped"
    with pytest.raises(ValueError, match="required: false"):
        dataclasses.replace(rule, required=True)


# --------------------------------------------------------------------------- perplexity of one long text


def long_text(sums, name="base", windows=40):
    parts = np.full(windows, sums / windows) + np.linspace(-1, 1, windows)
    scores = make.perplexity(np.array([parts.sum()]))
    series = {"window_nll": (parts,), "window_tokens": (np.full(windows, 50.0),)}
    return make.variant(
        name, dataclasses.replace(scores, series=series, weight=np.array([50.0 * windows]))
    )


def test_of_one_long_text_the_windows_decide():
    rule = PerplexityRatio(max_ratio=1.05, kind="perplexity")
    finding = one(rule, long_text(4000.0), long_text(4010.0, "cand"))
    assert (finding.outcome, finding.n) == ("accept", 40)
    assert finding.method == "clustered t over windows"
    assert "(n=40 windows)" in finding.sentence
    assert finding.estimate == pytest.approx(np.exp(10 / 2000))
    worse = one(rule, long_text(4000.0), long_text(4400.0, "cand"))
    assert worse.outcome == "reject"
    few = one(rule, long_text(400.0, windows=4), long_text(400.0, "cand", windows=4))
    assert (few.outcome, few.sentence) == (
        "inconclusive", "prose: 4 windows decide nothing, at least 10 are needed",
    )  # fmt: skip


def test_windows_that_differ_are_no_units():
    rule = PerplexityRatio(max_ratio=1.05, kind="perplexity")
    base, cand = long_text(4000.0), long_text(4000.0, "cand", windows=20)
    prose = dataclasses.replace(cand.scores["prose"], weight=base.scores["prose"].weight)
    finding = one(rule, base, dataclasses.replace(cand, scores={"prose": prose}))
    assert finding.sentence == "prose: 1 documents decide nothing, at least 10 are needed"

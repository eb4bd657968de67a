"""Too good to be true: a candidate that gains more than chance explains, or that shows no trace of quantization."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quanteval.evidence import RuleContext, ScoreSet, VariantEvidence
from quanteval.looks import betting_order, level
from quanteval.records import Finding, Outcome
from quanteval.rules._common import (
    Pairs,
    bare,
    beside,
    check_alpha,
    check_share,
    confidence,
    first_unscored,
    invalid,
    pair,
    percent,
)
from quanteval.rules.flips import errored_problems, replaced
from quanteval.rules.non_inferiority import paired_units, unusable
from quanteval.rules.perplexity import MINIMUM_DOCUMENTS
from quanteval.stats import NonInferiority as Test
from quanteval.stats import absolute_loss, log_perplexity_ratio
from quanteval.stats.sequential import betting_loss

LOOK_AT_GAIN = (
    "look at the baseline's errors, truncations and parsing, and at leaked answers in what "
    "the candidate was tuned on"
)
LOOK_AT_LOSSES = (
    "look at what the baseline served, and at these documents in what the candidate was tuned on"
)
LOOK_AT_SERVED = "the baseline itself was probably served; look at what the candidate loaded"


@dataclass(frozen=True)
class Plausibility:
    """Raise an alarm where a candidate is shown to be better than quantization explains; a fault lies behind it.

    Scores in [0, 1]: rejected when the gain is shown to exceed `max_gain` (a share of the problems; the paired test
    of a loss, turned round). Perplexity: when its ratio is shown to lie below 1 - max_gain. Perplexity and divergence:
    when the candidate was quantized and its documents have exactly the baseline's likelihoods, or a KL of exactly 0.
    `alpha` is this rule's own and small, since an alarm should be rare: it is the chance of a false one. 'accept'
    says that nothing is suspicious, with errored and missing samples counted as gains.
    """

    max_gain: float = 0.02
    alpha: float = 0.001
    required: bool = False

    is_quality = False

    def __post_init__(self) -> None:
        check_share("max_gain", self.max_gain, below=1)
        if self.max_gain == 0:
            raise ValueError(f'max_gain "{self.max_gain}" must be above 0 (0.02 is two points)')
        check_alpha(self.alpha)

    def check(
        self,
        name: str,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        context: RuleContext,
    ) -> list[Finding]:
        """Return a finding for each task of the candidate; for scores `estimate`, `lower` and `upper` are the gain."""
        if not candidate.scores:
            sentence = "no task was run"
            return [bare(name, required=self.required, outcome="skipped", sentence=sentence)]
        artifact = candidate.artifact
        quantized = artifact is not None and artifact.precision.quantized
        findings = []
        for task, cand in candidate.scores.items():
            pairs = pair(task, baseline, candidate, context.max_missing)
            if pairs.problem:
                found = invalid(name, required=self.required, task=task, problem=pairs.problem)
            elif cand.record.kind == "perplexity":
                found = self._perplexity(name, baseline.scores[task], cand, pairs, quantized)
            elif cand.record.kind == "divergence":
                found = self._divergence(name, cand, pairs, quantized if artifact else None)
            else:
                found = self._scores(name, baseline.scores[task], cand, pairs)
            findings.append(found)
        return findings

    # ---- scores in [0, 1]

    def _scores(self, name: str, base: ScoreSet, cand: ScoreSet, pairs: Pairs) -> Finding:
        if problem := unusable(base) or unusable(cand):
            return invalid(name, required=self.required, task=pairs.task, problem=problem)
        x, y = paired_units(base, cand, pairs)
        lost = errored_problems(base, cand, pairs)
        alpha = level(cand.record, self.alpha)
        order = betting_order(cand.record, pairs.problem_ids)

        def test(before: np.ndarray, after: np.ndarray) -> Test:
            # The loss of going back from the candidate to the baseline is the candidate's gain.
            if order is not None:
                sides = after[order], before[order]
                return betting_loss(*sides, self.max_gain, alpha=alpha, reject_alpha=alpha)
            # The score test: near enough to its level for an alarm, and the exact one takes a second at alpha 0.001.
            return absolute_loss(
                after, before, self.max_gain, alpha=alpha, reject_alpha=alpha, method="score"
            )

        found = test(x, y)
        outcome: Outcome = "reject" if found.rejected else "accept"
        if outcome == "accept" and (lost.any() or pairs.missing):
            gain = replaced(np.where(lost, 1.0, y - x), pairs.missing, 1.0)
            best = gain >= 1.0
            if test(np.where(best, 0.0, x), np.where(best, 1.0, y)).rejected:
                outcome = "inconclusive"
        limit, sure = 100 * self.max_gain, confidence(alpha)
        gained, least, most = (
            beside(100 * v, limit, 1) for v in (found.loss, found.lower, found.upper)
        )
        told = {
            "accept": f"between {least} and {most} with {sure} confidence each: not shown to exceed the "
            f"{limit:g} that are plausible",
            "reject": f"at least {least} with {sure} confidence: more than the {limit:g} that are plausible; "
            f"{LOOK_AT_GAIN}",
            "inconclusive": f"but with what errored or is missing it could be more than the {limit:g} "
            "that are plausible",
        }[outcome]
        before, after = float(x.mean()), float(y.mean())
        return Finding(
            rule=name,
            required=self.required,
            outcome=outcome,
            sentence=f"{pairs.task}: {percent(before)} -> {percent(after)} (n={len(x)}), "
            f"gain {gained} points, {told}",
            task=pairs.task,
            metric="gain of the mean score",
            unit="share",
            method={
                "betting": "betting e-process",
            }.get(found.method, "score test"),
            n=len(x),
            baseline_value=before,
            candidate_value=after,
            estimate=found.loss,
            lower=found.lower,
            upper=found.upper,
            confidence=1 - alpha,
            margin=self.max_gain,
            p_value=found.p_reject,
            broken=int((x > y).sum()),
            fixed=int((x < y).sum()),
        )

    # ---- documents

    def _perplexity(
        self, name: str, base: ScoreSet, cand: ScoreSet, pairs: Pairs, quantized: bool
    ) -> Finding:
        task, n = pairs.task, len(pairs.sample_ids)
        for side, scores in (("the baseline", base), ("the candidate", cand)):
            if bad := first_unscored(scores):
                problem = f'{side} has no finite likelihood for "{bad}"'
                return invalid(name, required=self.required, task=task, problem=problem)
        tokens = base.weight[pairs.baseline_rows]
        if not np.array_equal(tokens, cand.weight[pairs.candidate_rows]):
            problem = "the variants scored different numbers of tokens"
            return invalid(name, required=self.required, task=task, problem=problem)
        x, y = base.value[pairs.baseline_rows], cand.value[pairs.candidate_rows]
        if quantized and np.array_equal(x, y):
            told = f"{task}: all {n} documents have exactly the baseline's likelihood; {LOOK_AT_SERVED}"
            return bare(name, required=self.required, outcome="reject", sentence=told, task=task)
        if n < MINIMUM_DOCUMENTS:
            told = f"{task}: {n} documents decide nothing, at least {MINIMUM_DOCUMENTS} are needed"
            return bare(
                name, required=self.required, outcome="inconclusive", sentence=told, task=task
            )
        alpha, limit = level(cand.record, self.alpha), 1 - self.max_gain
        found = log_perplexity_ratio(x, y, tokens, alpha)
        alarm = found.upper < math.log(limit)
        # A document that is missing has no best case, so that nothing can be ruled out.
        outcome: Outcome = "reject" if alarm else "inconclusive" if pairs.missing else "accept"
        with np.errstate(over="ignore"):
            values = [float(np.exp(v)) for v in (found.estimate, found.lower, found.upper)]
        ratio, lower, upper = (beside(v, limit, 3) for v in values)
        sure = f"with {confidence(alpha)} confidence"
        told = {
            "accept": f"between {lower} and {upper} {sure} each: not shown to be below the {limit:g} that is plausible",
            "reject": f"at most {upper} {sure}: below the {limit:g} that is plausible; {LOOK_AT_LOSSES}",
            "inconclusive": f"not below the {limit:g} that is plausible, but {pairs.missing} documents are missing",
        }[outcome]
        return Finding(
            rule=name,
            required=self.required,
            outcome=outcome,
            sentence=f"{task}: perplexity ratio {ratio} (n={n} documents), {told}",
            task=task,
            metric="token perplexity",
            unit="ratio",
            method="clustered t over documents",
            n=n,
            estimate=values[0],
            lower=values[1],
            upper=values[2],
            confidence=1 - alpha,
            margin=limit,
        )

    def _divergence(
        self, name: str, cand: ScoreSet, pairs: Pairs, quantized: bool | None
    ) -> Finding:
        """Look for a candidate without any distance; `quantized` is None where no artifact is recorded."""
        task = pairs.task
        outcome: Outcome
        if bad := first_unscored(cand):
            problem = f'the candidate has no finite divergence for "{bad}"'
            return invalid(name, required=self.required, task=task, problem=problem)
        moved = int((cand.value[pairs.candidate_rows] != 0).sum())
        n = len(pairs.sample_ids)
        if quantized is None:
            outcome = "invalid" if self.required else "skipped"
            told = "whether the candidate is quantized is not recorded"
        elif quantized and not moved:
            outcome, told = "reject", f"the KL of all {n} documents is exactly 0; {LOOK_AT_SERVED}"
        elif quantized:
            outcome, told = (
                "accept",
                f"{moved} of {n} documents have a KL above 0, as a quantized model should",
            )
        else:
            outcome, told = (
                "accept",
                "the candidate is not quantized, so that a KL of 0 would be plausible",
            )
        return bare(
            name, required=self.required, outcome=outcome, sentence=f"{task}: {told}", task=task
        )

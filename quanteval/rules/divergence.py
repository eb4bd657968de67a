"""Distance from the baseline's distributions: bounds on KL and top-1 agreement, documents as the unit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quanteval.evidence import RuleContext, ScoreSet, VariantEvidence
from quanteval.records import Finding, Outcome
from quanteval.rules._common import (
    Comparison,
    bare,
    beside,
    check_alpha,
    check_each_task,
    check_selection,
    check_share,
    confidence,
    first_unscored,
    invalid,
)
from quanteval.stats import clustered_quantile, clustered_ratio

MINIMUM_DOCUMENTS = 10
LABELS = {
    "mean_kl": "mean KL",
    "median_kl": "median KL",
    "p99_kl": "p99 KL",
    "top1_agreement": "top-1 agreement",
}
QUANTILES = {"median_kl": 0.5, "p99_kl": 0.99}
Rows = NDArray[np.intp]


@dataclass(frozen=True)
class Distance:
    """A distance with one-sided bounds; `tokens` counts what it was taken over."""

    estimate: float
    lower: float
    upper: float
    tokens: int


@dataclass(frozen=True)
class DivergenceBound:
    """Keep `metric` on the right side of a bound: a KL (nats a token) below `max`, or top1_agreement above `min`.

    Divergence says how far a variant moved, not whether it became worse: it warns, and by default it
    is not required. Accept and reject need the confidence bound on their side of the limit. A mean and
    an agreement are ratios over documents with Student's t, a median and a p99 quantiles over the tokens
    of all documents (Woodruff); a quantile that the tokens cannot bound is undecided. Fewer than 10
    documents decide nothing, and nothing is accepted while documents are missing.
    """

    metric: Literal["mean_kl", "median_kl", "p99_kl", "top1_agreement"]
    max: float | None = None
    min: float | None = None
    task: str | None = None
    kind: str | None = None
    required: bool = False
    alpha: float | None = None

    is_quality = False

    def __post_init__(self) -> None:
        check_selection(self.task, self.kind)
        if self.metric not in LABELS:
            raise ValueError(f'metric "{self.metric}" must be one of {", ".join(LABELS)}')
        wanted = "max" if self._is_kl else "min"
        if (self.max is None) == (self.min is None) or getattr(self, wanted) is None:
            raise ValueError(f'{self.metric} needs "{wanted}" and nothing else')
        if self.max is not None and not 0 < self.max < math.inf:
            raise ValueError(f'max "{self.max}" must be a number above 0')
        if self.min is not None:
            check_share("min", self.min, below=1)
        check_alpha(self.alpha)

    @property
    def _is_kl(self) -> bool:
        return self.metric != "top1_agreement"

    def check(
        self,
        name: str,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        context: RuleContext,
    ) -> list[Finding]:
        """Return a finding for each task concerned."""
        return check_each_task(self, self._check_task, name, baseline, candidate, context)

    def _check_task(self, c: Comparison) -> Finding:
        task, rows = c.task, c.pairs.candidate_rows
        if bad := first_unscored(c.cand):
            problem = f'the candidate has no finite divergence for "{bad}"'
            return invalid(c.rule, required=self.required, task=task, problem=problem)
        tokens = c.base.weight[c.pairs.baseline_rows]
        if not np.array_equal(tokens, c.cand.weight[rows]):
            problem = "the variants scored different numbers of tokens"
            return invalid(c.rule, required=self.required, task=task, problem=problem)
        if problem := self._lacks(c.cand, rows):
            return invalid(c.rule, required=self.required, task=task, problem=problem)
        if len(rows) < MINIMUM_DOCUMENTS:
            sentence = f"{task}: {len(rows)} documents decide nothing, at least {MINIMUM_DOCUMENTS} are needed"
            return bare(
                c.rule, required=self.required, outcome="inconclusive", sentence=sentence, task=task
            )
        found = self._measure(c.cand, rows, c.alpha)
        limit = float(self.max if self.max is not None else self.min or 0)
        inside = found.upper < limit if self._is_kl else found.lower > limit
        beyond = found.lower > limit if self._is_kl else found.upper < limit
        outcome: Outcome = "inconclusive"
        if inside and not c.pairs.missing:
            # A document that is missing has no worst case, so it can only keep a candidate from passing.
            outcome = "accept"
        elif beyond:
            outcome = "reject"
        own = self._of_repetition(c)
        return Finding(
            rule=c.rule,
            required=self.required,
            outcome=outcome,
            sentence=self._sentence(c, found, limit, outcome, own),
            task=task,
            metric=LABELS[self.metric],
            unit="nats/token" if self._is_kl else "share",
            method="Woodruff's quantile over documents"
            if self.metric in QUANTILES
            else "clustered t over documents",
            n=len(rows),
            baseline_value=own,
            candidate_value=found.estimate,
            estimate=found.estimate,
            lower=found.lower,
            upper=found.upper,
            confidence=1 - c.alpha,
            margin=limit,
        )

    def _lacks(self, scores: ScoreSet, rows: Rows) -> str:
        """Return what keeps this metric from being measured, '' for nothing."""
        if self.metric == "mean_kl":
            return ""
        if not self._is_kl:
            agree = scores.numbers.get("top1_agree")
            if agree is None or not np.isfinite(agree[rows]).all():
                return "not every document has a top-1 agreement"
            return ""
        if "kl" not in scores.series:
            return "the KL of single tokens was not stored"
        for row, values in zip(rows, _series(scores, rows), strict=True):
            if len(values) != scores.weight[row] or not np.isfinite(values).all():
                return f'document "{scores.sample_ids[row]}" lacks the KL of some of its tokens'
        return ""

    def _measure(self, scores: ScoreSet, rows: Rows, alpha: float) -> Distance:
        if self.metric in QUANTILES:
            quantile = clustered_quantile(_series(scores, rows), QUANTILES[self.metric], alpha)
            lower = max(0.0, quantile.lower)  # no KL is below 0, whatever few tokens can bound
            return Distance(quantile.estimate, lower, quantile.upper, quantile.n)
        totals = scores.value if self._is_kl else scores.numbers["top1_agree"]
        ratio = clustered_ratio(totals[rows], scores.weight[rows], alpha)
        highest = math.inf if self._is_kl else 1.0
        lower, upper = max(0.0, ratio.lower), min(highest, ratio.upper)
        return Distance(ratio.estimate, lower, upper, int(scores.weight[rows].sum()))

    def _of_repetition(self, c: Comparison) -> float | None:
        """Return the same metric of the repeated baseline, which is its noise floor; None when it is not known."""
        if c.noise is None:
            return None
        again, pairs = c.noise
        rows = pairs.candidate_rows
        if len(rows) < 2 or first_unscored(again) or self._lacks(again, rows):
            return None
        return self._measure(again, rows, c.alpha).estimate

    def _sentence(
        self, c: Comparison, found: Distance, limit: float, outcome: Outcome, own: float | None
    ) -> str:
        verb = {
            "accept": "shown to be",
            "reject": "shown not to be",
            "inconclusive": "not shown to be",
        }[outcome]
        unit, scale, side = ("nats/token", 1, "below") if self._is_kl else ("%", 100, "above")
        digits = 1 if not self._is_kl else 4 if found.estimate >= 1e-3 else 6

        def shown(value: float) -> str:
            return beside(scale * value, scale * limit, digits)

        n = f"n={len(c.pairs.sample_ids)} documents"
        if self.metric in QUANTILES:
            n += f", {found.tokens} tokens"
        sure = f"with {confidence(c.alpha)} confidence"
        if math.isinf(found.upper):
            bounds = f"at least {shown(found.lower)} {sure}, too few tokens for an upper bound"
        else:
            bounds = f"between {shown(found.lower)} and {shown(found.upper)} {sure} each"
        noise = "" if own is None else f" (the repeated baseline: {shown(own)})"
        missing = c.pairs.missing
        lacking = f"; {missing} documents are missing, so nothing is accepted" if missing else ""
        return (
            f"{c.task}: {LABELS[self.metric]} {shown(found.estimate)} {unit}{noise} ({n}, {bounds}), "
            f"{verb} {side} {scale * limit:g} {unit}{lacking}"
        )


def _series(scores: ScoreSet, rows: Rows) -> Sequence[NDArray[np.float64]]:
    """Return the KL of each token, one array a document, in the order of `rows`."""
    values = scores.series["kl"]
    return [values[int(row)] for row in rows]

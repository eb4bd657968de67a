"""Distance from the baseline's distributions: bounds on mean KL and top-1 agreement, documents as the unit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quanteval.evidence import RuleContext, VariantEvidence
from quanteval.records import Finding, Outcome
from quanteval.rules._common import (
    Comparison,
    beside,
    check_alpha,
    check_each_task,
    check_selection,
    check_share,
    confidence,
    first_unscored,
    invalid,
)
from quanteval.stats import ClusterEstimate, clustered_ratio


@dataclass(frozen=True)
class DivergenceBound:
    """Keep `metric` on the right side of a bound: mean_kl below `max`, or top1_agreement above `min`.

    Divergence says how far a variant moved, not whether it became worse: it warns, and by default it
    is not required. Accept and reject need the confidence bound on their side of the limit.
    """

    metric: Literal["mean_kl", "top1_agreement"]
    max: float | None = None
    min: float | None = None
    task: str | None = None
    kind: str | None = None
    required: bool = False
    alpha: float | None = None

    is_quality = False

    def __post_init__(self) -> None:
        check_selection(self.task, self.kind)
        wanted = "max" if self.metric == "mean_kl" else "min"
        if (self.max is None) == (self.min is None) or getattr(self, wanted) is None:
            raise ValueError(f'{self.metric} needs "{wanted}" and nothing else')
        if self.max is not None and not 0 < self.max < math.inf:
            raise ValueError(f'max "{self.max}" must be a number above 0')
        if self.min is not None:
            check_share("min", self.min, below=1)
        check_alpha(self.alpha)

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
        task, alpha, scores = c.task, c.alpha, c.cand
        if bad := first_unscored(scores):
            problem = f'the candidate has no finite divergence for "{bad}"'
            return invalid(c.rule, required=self.required, task=task, problem=problem)
        agree = scores.numbers.get("top1_agree")
        totals = scores.value if self.metric == "mean_kl" else agree
        if totals is None or len(totals) < 2 or not np.isfinite(totals).all():
            problem = f"fewer than two documents with {self.metric}"
            return invalid(c.rule, required=self.required, task=task, problem=problem)
        found = clustered_ratio(totals, scores.weight, alpha)
        limit = float(self.max if self.max is not None else self.min or 0)
        inside = found.upper < limit if self.max is not None else found.lower > limit
        beyond = found.lower > limit if self.max is not None else found.upper < limit
        outcome: Outcome = "accept" if inside else "reject" if beyond else "inconclusive"
        label, unit = (
            ("mean KL", "nats/token") if self.metric == "mean_kl" else ("top-1 agreement", "share")
        )
        return Finding(
            rule=c.rule,
            required=self.required,
            outcome=outcome,
            sentence=_sentence(task, found, limit, outcome, is_kl=self.metric == "mean_kl"),
            task=task,
            metric=label,
            unit=unit,
            method="clustered t over documents",
            n=len(totals),
            candidate_value=found.estimate,
            estimate=found.estimate,
            lower=found.lower,
            upper=found.upper,
            confidence=1 - alpha,
            margin=limit,
        )


def _sentence(
    task: str, found: ClusterEstimate, limit: float, outcome: Outcome, *, is_kl: bool
) -> str:
    verb = {
        "accept": "shown to be",
        "reject": "shown not to be",
        "inconclusive": "not shown to be",
    }
    label, unit, scale = ("mean KL", "nats/token", 1) if is_kl else ("top-1 agreement", "%", 100)
    digits = 1 if not is_kl else 4 if found.estimate >= 1e-3 else 6
    seen, lower, upper = (
        beside(scale * value, scale * limit, digits)
        for value in (found.estimate, found.lower, found.upper)
    )
    return (
        f"{task}: {label} {seen} {unit} (n={found.clusters} documents, between {lower} and {upper} with "
        f"{confidence(found.alpha)} confidence each), {verb[outcome]} {'below' if is_kl else 'above'} "
        f"{scale * limit:g} {unit}"
    )

"""Non-inferiority of paired scores in [0, 1]: is the loss shown to be within a margin, or beyond it?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import ndtri

from quanteval.interfaces import VariantEvidence
from quanteval.records import Finding, Outcome
from quanteval.rules._common import (
    Pairs,
    bare,
    check_selection,
    first_non_finite,
    invalid,
    pair,
    percent,
    select_tasks,
)
from quanteval.stats import NonInferiority as Test
from quanteval.stats import absolute_loss, mcnemar_exact, relative_loss

POWER = 0.8


@dataclass(frozen=True)
class Margin:
    """The loss agreed to count as none: `absolute` (share of samples) or `relative` (share of the baseline's score).

    A relative margin says little on a baseline that solves little: below `min_baseline` it is refused.
    """

    absolute: float | None = None
    relative: float | None = None
    min_baseline: float = 0.2

    def __post_init__(self) -> None:
        if (self.absolute is None) == (self.relative is None):
            raise ValueError(
                f'absolute "{self.absolute}" and relative "{self.relative}": give exactly one'
            )
        if not 0 < self.value < 1:
            raise ValueError(f'margin "{self.value}" must be between 0 and 1 (0.02 is two points)')

    @property
    def value(self) -> float:
        """The margin in its own unit."""
        return self.absolute if self.absolute is not None else float(self.relative or 0)


@dataclass(frozen=True)
class NonInferiority:
    """Accept when the loss is shown to be below the margin, reject when above, inconclusive otherwise.

    `method` 'auto' is the exact unconditional test for 0/1 scores up to a size where it is affordable
    and the bounded score test otherwise (Tango's for 0/1 scores); 'score' is that test always.
    Samples that errored or timed out count with the value they have, 0: they never leave the
    denominator.
    """

    margin: Margin
    task: str | None = None
    kind: str | None = None
    required: bool = True
    alpha: float | None = None
    method: Literal["auto", "exact", "score"] = "auto"
    max_missing: float = 0.0

    is_quality = True

    def __post_init__(self) -> None:
        check_selection(self.task, self.kind)

    def check(
        self, name: str, baseline: VariantEvidence, candidate: VariantEvidence, alpha: float
    ) -> list[Finding]:
        """Return a finding for each task concerned."""
        chosen = select_tasks(
            name, required=self.required, task=self.task, kind=self.kind,
            baseline=baseline, candidate=candidate,
        )  # fmt: skip
        if chosen.finding:
            return [chosen.finding]
        level = self.alpha if self.alpha is not None else alpha
        return [self._check_task(name, task, baseline, candidate, level) for task in chosen.tasks]

    def _check_task(
        self,
        name: str,
        task: str,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        alpha: float,
    ) -> Finding:
        pairs = pair(task, baseline, candidate, self.max_missing)
        if pairs.problem:
            return invalid(name, required=self.required, task=task, problem=pairs.problem)
        base, cand = baseline.scores[task], candidate.scores[task]
        for scores in (base, cand):
            if bad := first_non_finite(scores):
                problem = f'sample "{bad}" has no finite score'
                return invalid(name, required=self.required, task=task, problem=problem)
        x, y = base.value[pairs.baseline_rows], cand.value[pairs.candidate_rows]
        if ((x < 0) | (x > 1) | (y < 0) | (y > 1)).any():
            problem = "a score lies outside 0 to 1"
            return invalid(name, required=self.required, task=task, problem=problem)
        if set(base.status) == {"error"} or set(cand.status) == {"error"}:
            return invalid(name, required=self.required, task=task, problem="every sample errored")
        if self.margin.relative is not None and x.mean() < self.margin.min_baseline:
            return bare(
                name, required=self.required, outcome="inconclusive", task=task,
                sentence=f"{task}: the baseline scores {percent(float(x.mean()))}, below the "
                f"{percent(self.margin.min_baseline)} from which a relative margin means something",
            )  # fmt: skip
        return self._decide(name, pairs, x, y, alpha)

    def _decide(
        self, name: str, pairs: Pairs, x: np.ndarray, y: np.ndarray, alpha: float
    ) -> Finding:
        if self.margin.relative is not None:
            test = relative_loss(x, y, self.margin.value, alpha=alpha, reject_alpha=alpha)
        else:
            test = absolute_loss(
                x, y, self.margin.value, alpha=alpha, reject_alpha=alpha, method=self.method
            )
        outcome: Outcome = "inconclusive"
        if test.accepted and not test.rejected:
            outcome = "accept"
        elif test.rejected and not test.accepted:
            outcome = "reject"
        broken, fixed = int((x > y).sum()), int((x < y).sum())
        needed = needed_pairs(float(np.var(x - y)), test.loss, test.margin, alpha)
        return Finding(
            rule=name,
            required=self.required,
            outcome=outcome,
            sentence=_sentence(pairs, x, y, test, outcome, needed, relative=self.margin.relative is not None),
            task=pairs.task,
            metric="mean score",
            unit="share of the baseline" if self.margin.relative is not None else "share",
            method=_method(test.method),
            n=len(x),
            baseline_value=float(x.mean()),
            candidate_value=float(y.mean()),
            estimate=test.loss,
            lower=test.lower,
            upper=test.upper,
            confidence=1 - alpha,
            margin=test.margin,
            p_value=test.p_accept,
            broken=broken,
            fixed=fixed,
            n_needed=needed if outcome == "inconclusive" else None,
            regression_detected=mcnemar_exact(broken, fixed, "greater") <= alpha,
            notes=[f"{pairs.missing} samples were scored on one side only"] if pairs.missing else [],
        )  # fmt: skip


def needed_pairs(variance: float, loss: float, margin: float, alpha: float) -> int | None:
    """Return how many pairs decide with 80 % power if loss and variance stay as seen; None at the margin.

    n = (z_alpha + z_power)^2 variance / (margin - loss)^2, the normal approximation; the variance of
    the paired difference is f - D^2 for 0/1 scores with discordance f and loss D. With no discordance
    seen, one discordant pair is assumed.
    """
    distance = abs(margin - loss)
    if distance < 1e-9:
        return None
    z = -float(ndtri(alpha)) + float(ndtri(POWER))
    smallest = math.ceil(math.log(alpha) / math.log(1 - margin))
    return max(math.ceil(z * z * variance / distance**2), smallest if loss < margin else 1)


def _method(method: str) -> str:
    return {
        "exact": "exact unconditional test, Tango's ordering",
        "score": "score test (Tango's for 0/1 scores)",
        "score_ratio": "score test of the ratio (Tang; Nam and Blackwelder)",
    }.get(method, method)


def _sentence(
    pairs: Pairs,
    x: np.ndarray,
    y: np.ndarray,
    test: Test,
    outcome: Outcome,
    needed: int | None,
    *,
    relative: bool,
) -> str:
    broken, fixed = int((x > y).sum()), int((x < y).sum())
    unit = "%" if relative else "points"
    sure = percent(1 - test.alpha)
    seen = (
        f"{pairs.task}: {percent(float(x.mean()))} -> {percent(float(y.mean()))} (n={len(x)}, {broken} worse, "
        f"{fixed} better), loss {100 * test.loss:.1f} {unit}"
    )
    if outcome == "accept":
        return (
            f"{seen}, at most {100 * test.upper:.1f} with {sure} confidence: "
            f"within the margin of {100 * test.margin:g}"
        )
    if outcome == "reject":
        return (
            f"{seen}, at least {100 * test.lower:.1f} with {sure} confidence: "
            f"beyond the margin of {100 * test.margin:g}"
        )
    more = (
        f"about {needed} samples would decide"
        if needed
        else "no number of samples decides at the margin"
    )
    return (
        f"{seen}, between {100 * test.lower:.1f} and {100 * test.upper:.1f} with {sure} confidence each: "
        f"undecided at the margin of {100 * test.margin:g}, {more}"
    )

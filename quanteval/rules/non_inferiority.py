"""Non-inferiority of paired scores in [0, 1]: is the loss shown to be within a margin, or beyond it?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from quanteval.interfaces import ScoreSet, VariantEvidence
from quanteval.records import Finding, Outcome
from quanteval.rules._common import (
    Pairs,
    bare,
    beside,
    check_alpha,
    check_each_task,
    check_selection,
    check_share,
    confidence,
    first_non_finite,
    invalid,
    percent,
)
from quanteval.stats import NonInferiority as Test
from quanteval.stats import absolute_loss, mcnemar_exact, point_rule_error, relative_loss

POWER = 0.8
POINTS, RELATIVE = "points", "% of the baseline's score"
FloatArray = NDArray[np.float64]


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
        check_share("min_baseline", self.min_baseline)

    @property
    def value(self) -> float:
        """The margin in its own unit."""
        return self.absolute if self.absolute is not None else float(self.relative or 0)


@dataclass(frozen=True)
class NonInferiority:
    """Accept when the loss is shown to be below the margin, reject when above, inconclusive otherwise.

    `method` 'auto' is the exact unconditional test for 0/1 scores up to a size where it is affordable
    and the bounded score test otherwise (Tango's for 0/1 scores); 'score' is that test always.
    'point' compares the loss seen with the margin, as other tools do: it is no statistical test, so
    it can keep a candidate from being accepted but is itself no evidence that quality was kept.

    No sample leaves the denominator: one that errored counts against the candidate, as right on the
    baseline's side and as wrong on the candidate's. Timed-out and truncated samples keep their value.
    """

    margin: Margin
    task: str | None = None
    kind: str | None = None
    required: bool = True
    alpha: float | None = None
    method: Literal["auto", "exact", "score", "point"] = "auto"
    max_missing: float = 0.0

    def __post_init__(self) -> None:
        check_selection(self.task, self.kind)
        check_alpha(self.alpha)
        check_share("max_missing", self.max_missing, below=1)
        if self.method == "exact" and self.margin.relative is not None:
            raise ValueError('method "exact" needs an absolute margin; use "auto"')

    @property
    def is_quality(self) -> bool:
        """Whether acceptance is evidence of quality: not that of a point comparison."""
        return self.method != "point"

    def check(
        self, name: str, baseline: VariantEvidence, candidate: VariantEvidence, alpha: float
    ) -> list[Finding]:
        """Return a finding for each task concerned."""
        return check_each_task(self, self._check_pairs, name, baseline, candidate, alpha)

    def _check_pairs(
        self,
        name: str,
        pairs: Pairs,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        alpha: float,
    ) -> Finding:
        task = pairs.task
        base, cand = baseline.scores[task], candidate.scores[task]
        if problem := _unusable(base) or _unusable(cand):
            return invalid(name, required=self.required, task=task, problem=problem)
        lost = _errored(base, pairs.baseline_rows)
        x = np.where(lost, 1.0, base.value[pairs.baseline_rows])
        y = np.where(_errored(cand, pairs.candidate_rows), 0.0, cand.value[pairs.candidate_rows])
        if self.method == "exact" and not np.isin([x, y], (0.0, 1.0)).all():
            problem = "the exact test needs scores of 0 and 1"
            return invalid(name, required=self.required, task=task, problem=problem)
        if self.margin.relative is not None and not x.mean() >= max(self.margin.min_baseline, 1e-9):
            return bare(
                name, required=self.required, outcome="inconclusive", task=task,
                sentence=f"{task}: the baseline scores {percent(float(x.mean()))}, below the "
                f"{percent(self.margin.min_baseline)} from which a relative margin means something",
            )  # fmt: skip
        notes = [f"{pairs.missing} samples were scored on one side only"] if pairs.missing else []
        if lost.any():
            notes.append(f"{lost.sum()} samples that errored in the baseline count as right there")
        if self.method == "point":
            return self._compare_points(name, task, x, y, notes)
        return self._decide(name, task, x, y, alpha, notes)

    def _compare_points(
        self, name: str, task: str, x: FloatArray, y: FloatArray, notes: list[str]
    ) -> Finding:
        """Compare the loss seen with the margin, and say how often that is wrong for a loss at the margin."""
        margin, before, after = self.margin.value, float(x.mean()), float(y.mean())
        relative = self.margin.relative is not None
        loss = 1 - after / before if relative else before - after
        broken, fixed = int((x > y).sum()), int((x < y).sum())
        absolute = margin * before if relative else margin
        wrong = point_rule_error(len(x), max((broken + fixed) / len(x), absolute), absolute)
        kept = loss <= margin + 1e-12
        unit = RELATIVE if relative else POINTS
        return Finding(
            rule=name,
            required=self.required,
            outcome="accept" if kept else "reject",
            sentence=f"{_seen(task, x, y)}, loss {beside(100 * loss, 100 * margin, 1)} {unit}, "
            f"{'not above' if kept else 'above'} the margin of {100 * margin:g}: not a statistical test, "
            f"it passes a loss exactly at the margin {percent(wrong)} of the time",
            task=task,
            metric="mean score",
            unit="share of the baseline" if relative else "share",
            method="point comparison, not a statistical test",
            n=len(x),
            baseline_value=before,
            candidate_value=after,
            estimate=loss,
            margin=margin,
            broken=broken,
            fixed=fixed,
            notes=notes,
        )

    def _decide(
        self, name: str, task: str, x: FloatArray, y: FloatArray, alpha: float, notes: list[str]
    ) -> Finding:
        if self.margin.relative is not None:
            test = relative_loss(x, y, self.margin.value, alpha=alpha, reject_alpha=alpha)
        else:
            test = absolute_loss(
                x, y, self.margin.value, alpha=alpha, reject_alpha=alpha,
                method="exact" if self.method == "exact" else "score" if self.method == "score" else "auto",
            )  # fmt: skip
        outcome: Outcome = "inconclusive"
        if test.accepted and not test.rejected:
            outcome = "accept"
        elif test.rejected and not test.accepted:
            outcome = "reject"
        broken, fixed = int((x > y).sum()), int((x < y).sum())
        needed = self._needed(x, y, test, alpha)
        return Finding(
            rule=name,
            required=self.required,
            outcome=outcome,
            sentence=_sentence(task, x, y, test, outcome, needed, relative=self.margin.relative is not None),
            task=task,
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
            notes=notes,
        )  # fmt: skip

    def _needed(self, x: FloatArray, y: FloatArray, test: Test, alpha: float) -> int | None:
        """Return the samples that would decide, more than there are; a relative loss in the baseline's own unit."""
        scale = float(x.mean()) if self.margin.relative is not None else 1.0
        kept = 1 - test.margin if self.margin.relative is not None else 1.0
        variance = float(np.var(kept * x - y)) / scale**2
        needed = needed_pairs(variance, test.loss, test.margin, alpha)
        return None if needed is None else max(needed, len(x) + 1)


def _unusable(scores: ScoreSet) -> str:
    """Return why these scores cannot be compared, '' when they can."""
    if bad := first_non_finite(scores):
        return f'sample "{bad}" has no finite score'
    if ((scores.value < 0) | (scores.value > 1)).any():
        return "a score lies outside 0 to 1"
    return "every sample errored" if set(scores.status) == {"error"} else ""


def _errored(scores: ScoreSet, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    return np.array([scores.status[row] == "error" for row in rows], dtype=bool)


def needed_pairs(variance: float, loss: float, margin: float, alpha: float) -> int | None:
    """Return how many pairs decide with 80 % power if loss and variance stay as seen; None at the margin.

    n = (z_alpha + z_power)^2 variance / (margin - loss)^2, the normal approximation; the variance of
    the paired difference is f - D^2 for 0/1 scores with discordance f and loss D. Below the margin it
    is never less than what zero discordant pairs need, ln(alpha)/ln(1 - margin).
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


def _seen(task: str, x: FloatArray, y: FloatArray) -> str:
    worse, better = int((x > y).sum()), int((x < y).sum())
    before, after = percent(float(x.mean())), percent(float(y.mean()))
    return f"{task}: {before} -> {after} (n={len(x)}, {worse} worse, {better} better)"


def _sentence(
    task: str,
    x: FloatArray,
    y: FloatArray,
    test: Test,
    outcome: Outcome,
    needed: int | None,
    *,
    relative: bool,
) -> str:
    unit = RELATIVE if relative else POINTS
    sure, limit = confidence(test.alpha), 100 * test.margin
    margin = f"the margin of {limit:g} {'%' if relative else unit}"
    loss, lower, upper = (beside(100 * v, limit, 1) for v in (test.loss, test.lower, test.upper))
    seen = f"{_seen(task, x, y)}, loss {loss} {unit}"
    if outcome == "accept":
        return f"{seen}, at most {upper} with {sure} confidence: within {margin}"
    if outcome == "reject":
        return f"{seen}, at least {lower} with {sure} confidence: beyond {margin}"
    more = (
        f"about {needed} samples would decide"
        if needed
        else "no number of samples decides at the margin"
    )
    return (
        f"{seen}, between {lower} and {upper} with {sure} confidence each: "
        f"undecided at {margin}, {more}"
    )

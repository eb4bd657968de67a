"""The question of the gate as one call: is the variant's loss on paired scores proved below, or above, the margin?

Chooses between the exact, the score and the t test and returns both p-values with both bounds; what follows from them
is policy and is decided elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr

from quanteval.stats._checks import FloatArray, finite_vector, level_alpha, same_length
from quanteval.stats.clustered import cluster_mean
from quanteval.stats.exact import (
    MAX_EXACT_PAIRS,
    decision_bound,
    exact_critical_z,
    exact_p,
    reference_p,
)
from quanteval.stats.paired import (
    as_counts,
    bounded_score,
    recovery_bound,
    recovery_score,
    score_bound,
)

Method = Literal["auto", "exact", "score", "t"]


@dataclass(frozen=True)
class NonInferiority:
    """Evidence about a loss and its margin, both in the same unit; a positive loss is worse.

    `upper` is the one-sided bound at 1 - alpha and `lower` the one at 1 - reject_alpha. `p_accept` tests "loss at least
    the margin", `p_reject` tests "loss at most the margin". `broken` and `fixed` count flips of 0/1 scores, else None.
    """

    loss: float
    lower: float
    upper: float
    margin: float
    p_accept: float
    p_reject: float
    alpha: float
    reject_alpha: float
    n: int
    method: Literal[
        "exact", "score", "t", "score_ratio", "score_exact", "stratified_score", "betting"
    ]
    broken: int | None = None
    fixed: int | None = None

    @property
    def accepted(self) -> bool:
        """Whether the loss is proved to be below the margin."""
        return self.p_accept <= self.alpha

    @property
    def rejected(self) -> bool:
        """Whether the loss is proved to be above the margin."""
        return self.p_reject <= self.reject_alpha

    @property
    def regression_detected(self) -> bool:
        """Whether the variant is proved to be worse at all, tolerable or not."""
        return self.lower > 0.0


def absolute_loss(
    baseline: ArrayLike,
    variant: ArrayLike,
    margin: float,
    *,
    alpha: float = 0.05,
    reject_alpha: float = 0.05,
    method: Method = "auto",
    lo: float = -1.0,
    hi: float = 1.0,
) -> NonInferiority:
    """Judge the mean of baseline - variant, one pair an item (or a problem, its samples averaged), by its margin.

    `auto` takes the exact test for 0/1 scores to `MAX_EXACT_PAIRS` pairs; for fractions to that size the bounded score
    statistic, referred to the exact null of 0/1 scores (`exact.reference_p`); and the bounded score test beyond.
    `t` is for metrics without limits. `lo` and `hi` limit the differences. The exact test's bounds
    are score bounds at its own critical values for this margin (`exact.decision_bound`), so that bounds and decision
    always agree. Raises `ValueError` on empty, unpaired or NaN input, and when `exact` is asked of scores that are
    not 0/1.
    """
    base, var = finite_vector("baseline", baseline), finite_vector("variant", variant)
    same_length("baseline", base, "variant", var)
    if not math.isfinite(margin):
        raise ValueError(f"margin is '{margin}'; it must be finite")
    level_alpha(alpha)
    level_alpha(reject_alpha)
    d = base - var
    counts = (
        as_counts(d)
        if bool(np.isin(base, (0.0, 1.0)).all() and np.isin(var, (0.0, 1.0)).all())
        else None
    )
    if method == "exact" and counts is None:
        raise ValueError("method 'exact' needs scores of 0 and 1; use 'score'")
    if method == "auto":
        affordable = d.size <= MAX_EXACT_PAIRS
        if counts is None and affordable and (lo, hi) == (-1.0, 1.0):
            return _referred_score(d, margin, alpha, reject_alpha)
        method = "exact" if counts is not None and affordable else "score"
    broken, fixed = counts[:2] if counts else (None, None)
    loss = float(d.mean())
    if method == "exact" and counts is not None:
        b, c, n = counts
        return NonInferiority(
            loss=loss,
            lower=decision_bound(b, c, n, margin, reject_alpha, "lower"),
            upper=decision_bound(b, c, n, margin, alpha, "upper"),
            margin=margin,
            p_accept=exact_p(b, c, n, margin),
            p_reject=exact_p(c, b, n, -margin),
            alpha=alpha,
            reject_alpha=reject_alpha,
            n=n,
            method="exact",
            broken=b,
            fixed=c,
        )
    if method == "score":
        z = bounded_score(d, margin, lo, hi)
        return NonInferiority(
            loss=loss,
            lower=score_bound(d, reject_alpha, "lower", lo, hi),
            upper=score_bound(d, alpha, "upper", lo, hi),
            margin=margin,
            p_accept=float(ndtr(z)),
            p_reject=float(ndtr(-z)),
            alpha=alpha,
            reject_alpha=reject_alpha,
            n=d.size,
            method="score",
            broken=broken,
            fixed=fixed,
        )
    if method != "t":
        raise ValueError(f"method is '{method}'; use 'auto', 'exact', 'score' or 't'")
    upper, lower = cluster_mean(d, alpha), cluster_mean(d, reject_alpha)
    return NonInferiority(
        loss=loss,
        lower=lower.lower,
        upper=upper.upper,
        margin=margin,
        p_accept=upper.p_at_least(margin),
        p_reject=1.0 - upper.p_at_least(margin),
        alpha=alpha,
        reject_alpha=reject_alpha,
        n=d.size,
        method="t",
        broken=broken,
        fixed=fixed,
    )


def _referred_score(
    d: FloatArray, margin: float, alpha: float, reject_alpha: float
) -> NonInferiority:
    z = bounded_score(d, margin)
    p_accept, p_reject = reference_p(z, d.size, margin), reference_p(-z, d.size, -margin)
    upper = _referred_bound(d, margin, alpha, accepted=p_accept <= alpha)
    lower = -_referred_bound(-d, -margin, reject_alpha, accepted=p_reject <= reject_alpha)
    return NonInferiority(
        loss=float(d.mean()),
        lower=lower,
        upper=upper,
        margin=margin,
        p_accept=p_accept,
        p_reject=p_reject,
        alpha=alpha,
        reject_alpha=reject_alpha,
        n=d.size,
        method="score_exact",
    )


def _referred_bound(d: FloatArray, margin: float, alpha: float, *, accepted: bool) -> float:
    """Return the upper score bound at the exact test's critical value, on the side of the margin that was decided."""
    limit = exact_critical_z(d.size, margin, alpha)
    level = alpha if limit == -np.inf else max(float(ndtr(limit)), 1e-300)
    bound = score_bound(d, level, "upper")
    if accepted:
        return min(bound, float(np.nextafter(margin, -np.inf)))
    return max(bound, margin)


def relative_loss(
    baseline: ArrayLike,
    variant: ArrayLike,
    margin: float,
    *,
    alpha: float = 0.05,
    reject_alpha: float = 0.05,
) -> NonInferiority:
    """Judge the share of the baseline's score that is lost, 1 - mean(variant)/mean(baseline), by its margin.

    Scores lie in [0, 1]; a margin of 0.01 asks for "recovery above 99%". Score test of the ratio, see `recovery_score`.
    On a baseline that solves little a ratio says little: set a minimum for the baseline's score before using it.
    """
    if not 0.0 < margin < 1.0:
        raise ValueError(f"margin is '{margin}'; a relative margin lies strictly between 0 and 1")
    base, var = finite_vector("baseline", baseline), finite_vector("variant", variant)
    z = recovery_score(base, var, 1.0 - margin)
    most_kept = recovery_bound(base, var, reject_alpha, "upper")
    least_kept = recovery_bound(base, var, alpha, "lower")
    counts = as_counts(base - var)
    return NonInferiority(
        loss=1.0 - float(var.sum() / base.sum()),
        lower=1.0 - most_kept,
        upper=1.0 - least_kept,
        margin=margin,
        p_accept=float(ndtr(z)),
        p_reject=float(ndtr(-z)),
        alpha=alpha,
        reject_alpha=reject_alpha,
        n=base.size,
        method="score_ratio",
        broken=counts[0] if counts else None,
        fixed=counts[1] if counts else None,
    )

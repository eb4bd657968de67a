"""One bounded score test over several strata: the weighted mean drop of a suite of tasks against a pooled margin.

The strata are independent samples with weights fixed beforehand. As in `bounded_score` the variance is taken under the
hypothesis, by a nonparametric likelihood whose support reaches the limit of the differences, so a task in which nothing
changed still contributes what it cannot exclude.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, ndtri

from quanteval.stats._checks import (
    FloatArray,
    Side,
    finite_vector,
    level_alpha,
    margin_inside,
    same_length,
    side_sign,
)
from quanteval.stats.noninferiority import NonInferiority
from quanteval.stats.paired import as_counts


@dataclass(frozen=True)
class _Stratum:
    """The distinct differences of one stratum in ascending order, the share of each, and its weight in the whole."""

    values: FloatArray
    shares: FloatArray
    n: int
    mean: float
    weight: float

    def mirrored(self) -> _Stratum:
        return _Stratum(-self.values[::-1], self.shares[::-1], self.n, -self.mean, self.weight)

    def rise(self, kappa: float, hi: float) -> tuple[float, float]:
        """Return by how much the multiplier kappa raises the mean of this stratum, and the derivative by kappa.

        With g = mean + rise - values and lam = kappa weight/n the rise is the root of sum g/(1 + lam g) = 0, or what
        puts the mean at hi - 1/lam when that is more: then the limit itself carries likelihood.
        """
        scale = self.weight / self.n
        lam = kappa * scale
        if lam == 0.0:
            return 0.0, scale * float(self.shares @ (self.values - self.mean) ** 2)
        capped = hi - self.mean - 1.0 / lam
        # at the last of these starts the largest value alone has likelihood 1: the root is not to the left of it
        top, top_share = float(self.values[-1]), float(self.shares[-1])
        rise = max(0.0, capped, top - self.mean - (1.0 - top_share) / lam)
        offset = self.mean - self.values
        for _ in range(100):
            g = offset + rise
            weight = self.shares / (1.0 + lam * g)
            residual = float(weight @ g)
            curvature = float(weight @ (weight / self.shares))
            if residual >= 0.0:
                break
            # Newton's step for 1/sum(weight), a harmonic mean: concave in the rise, so no step passes the root
            step = -residual * float(weight.sum()) / curvature
            rise += step
            if step <= 1e-15 * rise:
                break
        if rise <= capped:
            return capped, scale / (lam * lam)
        g = offset + rise
        weight = self.shares / (1.0 + lam * g)
        squared = weight * weight / self.shares
        return rise, scale * float(squared @ (g * g)) / float(squared.sum())


def _strata(
    strata: Sequence[ArrayLike], weights: ArrayLike, lo: float, hi: float
) -> list[_Stratum]:
    if not lo < hi:
        raise ValueError(f"the limits '{lo}' and '{hi}' of the differences must increase")
    if len(strata) == 0:
        raise ValueError("'strata' holds 0 samples; at least 1 needed")
    weight = finite_vector("weights", weights)
    if weight.size != len(strata):
        raise ValueError(
            f"'weights' has {weight.size} values and 'strata' has {len(strata)}; one weight a stratum"
        )
    bad = np.flatnonzero(weight <= 0.0)
    if bad.size:
        raise ValueError(f"'weights' is '{weight[bad[0]]}' at index {bad[0]}; weights are positive")
    weight = weight / math.fsum(weight.tolist())
    slack = 1e-9 * (hi - lo)  # a mean of k pass rates can miss 1 by a rounding error
    made = []
    for t, sample in enumerate(strata):
        x = finite_vector(f"strata[{t}]", sample)
        out = np.flatnonzero((x < lo - slack) | (x > hi + slack))
        if out.size:
            raise ValueError(
                f"'strata[{t}]' is '{x[out[0]]}' at index {out[0]}; it must lie between {lo:g} and {hi:g}"
            )
        values, counts = np.unique(np.clip(x, lo, hi), return_counts=True)
        mean = min(hi, max(lo, math.fsum((values * counts).tolist()) / x.size))
        made.append(_Stratum(values, counts / x.size, x.size, mean, float(weight[t])))
    return made


def _rise(strata: Sequence[_Stratum], kappa: float, hi: float) -> tuple[float, float]:
    rise = slope = 0.0
    for s in strata:
        up, derivative = s.rise(kappa, hi)
        rise += s.weight * up
        slope += s.weight * derivative
    return rise, slope


def _multiplier(strata: Sequence[_Stratum], hi: float, target: float, squared_z: float) -> float:
    """Return kappa at which the weighted mean has risen by `target`; if `squared_z` > 0, kappa times the rise is that.

    Both grow with kappa. The rise is at least hi - mean - n/kappa, which bounds kappa from above. Newton's method
    within a bracket; where the rise is flat or has a kink, bisection.
    """
    room = math.fsum(s.weight * (hi - s.mean) for s in strata)
    n = sum(s.n for s in strata)
    low, high = 0.0, (n + squared_z) / (room - target)
    variance = _rise(strata, 0.0, hi)[1]
    kappa = 0.5 * high
    if variance > 0.0:  # the rise begins with this slope
        start = math.sqrt(squared_z / variance) if squared_z > 0.0 else target / variance
        kappa = min(start, kappa)
    for _ in range(300):
        rise, slope = _rise(strata, kappa, hi)
        if squared_z > 0.0:
            excess, slope = kappa * rise - squared_z, rise + kappa * slope
        else:
            excess = rise - target
        if excess > 0.0:
            high = kappa
        else:
            low = kappa
        step = kappa - excess / slope if slope > 0.0 else -kappa
        if excess == 0.0 or abs(step - kappa) <= 4e-15 * kappa or high - low <= 4e-15 * high:
            return kappa
        kappa = step if low < step < high else 0.5 * (low + high)
    return kappa


def _z(strata: Sequence[_Stratum], margin: float, hi: float, lo: float) -> float:
    gap = math.fsum(s.weight * (margin - s.mean) for s in strata)
    if gap == 0.0:
        return 0.0
    if gap < 0.0:
        return -_z([s.mirrored() for s in strata], -margin, -lo, -hi)
    return -math.sqrt(_multiplier(strata, hi, gap, 0.0) * gap)


def stratified_score(
    strata: Sequence[ArrayLike],
    weights: ArrayLike,
    margin: float,
    lo: float = -1.0,
    hi: float = 1.0,
) -> float:
    """Return the score statistic z of the hypothesis "the weighted mean of the strata is the margin".

    `strata` holds one vector of differences within [lo, hi] a stratum, of any lengths n_t; `weights` one positive
    number W_t each, normalised to sum 1. With Dhat = sum W_t mean_t, z = (Dhat - m)/sqrt(sum W_t^2 V_t/n_t). The
    variances V_t belong to the nonparametric likelihood constrained to sum W_t m_t = m, the limit beyond m being part
    of every support. One multiplier kappa tilts stratum t by lam_t = kappa W_t/n_t, which makes its mean m_t the larger
    of the root of sum g_i/(1 + lam_t g_i) = 0, g_i = m_t - d_i, and hi - 1/lam_t; kappa solves sum W_t m_t = m. Then
    m_t - mean_t = lam_t V_t, hence z^2 = kappa (m - Dhat), which is what is computed; the mirror image for Dhat > m.
    For one stratum it is `bounded_score`. p = Phi(z) tests "the weighted mean is at least m". Raises `ValueError` for
    no strata, an empty one, NaN, values beyond the limits, weights that are not positive and a margin not strictly
    inside the limits.
    """
    return _z(_strata(strata, weights, lo, hi), margin_inside(margin, lo, hi), hi, lo)


def stratified_bound(
    strata: Sequence[ArrayLike],
    weights: ArrayLike,
    alpha: float,
    side: Side = "upper",
    lo: float = -1.0,
    hi: float = 1.0,
) -> float:
    """Return the one-sided (1 - alpha) bound of the weighted mean of the strata, by inverting `stratified_score`.

    It is Dhat plus the rise of the mean at the kappa for which kappa times the rise is the squared normal quantile.
    """
    made = _strata(strata, weights, lo, hi)
    critical, sign = -float(ndtri(level_alpha(alpha))), side_sign(side)
    if sign < 0:
        made, hi = [s.mirrored() for s in made], -lo
    if all(s.mean >= hi for s in made):
        return sign * hi
    kappa = _multiplier(made, hi, 0.0, critical * critical)
    point = math.fsum(s.weight * s.mean for s in made)
    return sign * min(hi, point + _rise(made, kappa, hi)[0])


def stratified_loss(
    baseline: Sequence[ArrayLike],
    variant: Sequence[ArrayLike],
    weights: ArrayLike,
    margin: float,
    alpha: float = 0.05,
    reject_alpha: float = 0.05,
) -> NonInferiority:
    """Judge the weighted mean over strata of baseline - variant by its margin, with `stratified_score`.

    One pair of vectors a stratum, one pair of scores in [0, 1] an item (or a problem, its samples averaged). Weights
    proportional to the sizes give the drop over all items, equal weights the mean of the tasks' drops. `n` of the
    result counts all items; `broken` and `fixed` are totals, None unless all scores are 0 or 1. Raises `ValueError`
    as `stratified_score` does, and for strata that cannot be paired.
    """
    if len(baseline) != len(variant):
        raise ValueError(
            f"'baseline' has {len(baseline)} strata and 'variant' has {len(variant)}; they must be paired"
        )
    level_alpha(alpha)
    level_alpha(reject_alpha)
    strata: list[FloatArray] = []
    broken, fixed, binary = 0, 0, True
    for t, (scores, new_scores) in enumerate(zip(baseline, variant, strict=True)):
        base = finite_vector(f"baseline[{t}]", scores)
        var = finite_vector(f"variant[{t}]", new_scores)
        same_length(f"baseline[{t}]", base, f"variant[{t}]", var)
        strata.append(base - var)
        binary = binary and bool(np.isin(base, (0.0, 1.0)).all() and np.isin(var, (0.0, 1.0)).all())
        counts = as_counts(strata[-1]) if binary else None
        if counts is not None:
            broken, fixed = broken + counts[0], fixed + counts[1]
    z = stratified_score(strata, weights, margin)
    weight = finite_vector("weights", weights)
    shares = weight / math.fsum(weight.tolist())
    return NonInferiority(
        loss=math.fsum(w * float(d.mean()) for w, d in zip(shares.tolist(), strata, strict=True)),
        lower=stratified_bound(strata, weights, reject_alpha, "lower"),
        upper=stratified_bound(strata, weights, alpha, "upper"),
        margin=margin,
        p_accept=float(ndtr(z)),
        p_reject=float(ndtr(-z)),
        alpha=alpha,
        reject_alpha=reject_alpha,
        n=sum(d.size for d in strata),
        method="stratified_score",
        broken=broken if binary else None,
        fixed=fixed if binary else None,
    )

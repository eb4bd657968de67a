"""Tests and bounds for the drop between a baseline and a variant measured on the same items.

The engine is a score test whose variance is estimated under the hypothesis tested, so that it keeps a width when no
answer changed. For outcomes 0/1 it is Tango's test (closed form here, by counts), with a relative margin it is the
score test of the ratio of two paired shares, and it takes fractions such as pass rates unchanged. McNemar, Newcombe
and Wald are here for reports and comparison; the exact test is in `exact`.

Everywhere: b = baseline right and variant wrong, c = the opposite, drop = (b - c)/n, positive is worse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import chdtrc, ndtr, ndtri

from quanteval.stats._checks import (
    FloatArray,
    Side,
    finite_vector,
    level_alpha,
    margin_inside,
    pair_table,
    probability,
    same_length,
    side_sign,
)
from quanteval.stats._root import bracketed_root
from quanteval.stats.intervals import Interval, binomial_cdf, wilson_bound


@dataclass(frozen=True)
class PairCounts:
    """How n paired 0/1 outcomes fall: `broken` right to wrong (b), `fixed` wrong to right (c)."""

    both_right: int
    broken: int
    fixed: int
    both_wrong: int

    @property
    def n(self) -> int:
        """Number of pairs."""
        return self.both_right + self.broken + self.fixed + self.both_wrong

    @property
    def drop(self) -> float:
        """Loss of accuracy as a share of all pairs; positive is worse."""
        return (self.broken - self.fixed) / self.n

    @property
    def flip_rate(self) -> float:
        """Share of pairs whose outcome changed, in either direction."""
        return (self.broken + self.fixed) / self.n


def pair_counts(baseline: ArrayLike, variant: ArrayLike) -> PairCounts:
    """Count paired outcomes; raises `ValueError` on unequal lengths and on values other than 0 and 1."""
    base, var = finite_vector("baseline", baseline), finite_vector("variant", variant)
    same_length("baseline", base, "variant", var)
    for name, values in (("baseline", base), ("variant", var)):
        bad = np.flatnonzero((values != 0.0) & (values != 1.0))
        if bad.size:
            raise ValueError(
                f"'{name}' is '{values[bad[0]]}' at index {bad[0]}; outcomes are 0 or 1"
            )
    right, now_right = base == 1.0, var == 1.0
    return PairCounts(
        both_right=int(np.sum(right & now_right)),
        broken=int(np.sum(right & ~now_right)),
        fixed=int(np.sum(~right & now_right)),
        both_wrong=int(np.sum(~right & ~now_right)),
    )


# --- Tango: paired 0/1 outcomes, absolute margin -------------------------------------------------


def tango_z_table(b: ArrayLike, c: ArrayLike, n: int, margin: float) -> FloatArray:
    """Return Tango's score statistic for arrays of counts that broadcast; no checks beyond the margin's range.

    z(m) = (b - c - n m) / sqrt(n (2 q + m (1 - m))), with q the maximum likelihood estimate of P(fixed) when
    P(broken) = q + m: the larger root of 2n q^2 - (b(1 + m) + c(1 - m) - 2nm) q - c m (1 - m) = 0.
    Tango, Statistics in Medicine 17 (1998), with the sign turned so that a large drop is a large z.
    """
    margin_inside(margin, -1.0, 1.0)
    if (
        margin < 0.0
    ):  # by symmetry, so that swapping baseline and variant mirrors the numbers to the last bit
        return -tango_z_table(c, b, n, -margin)
    broken, fixed = np.asarray(b, dtype=np.float64), np.asarray(c, dtype=np.float64)
    linear = broken * (1.0 + margin) + fixed * (1.0 - margin) - 2.0 * n * margin
    constant = fixed * margin * (1.0 - margin)
    root = np.sqrt(linear * linear + 8.0 * n * constant)
    # the second form where the first would subtract two nearly equal numbers
    safe = np.where(root > linear, root - linear, 1.0)
    q = np.where(linear >= 0.0, (linear + root) / (4.0 * n), 2.0 * constant / safe)
    variance = n * (2.0 * q + margin * (1.0 - margin))
    difference = broken - fixed - n * margin
    return np.where(
        variance > 0.0, difference / np.sqrt(np.where(variance > 0.0, variance, 1.0)), 0.0
    )


def tango_z(b: int, c: int, n: int, margin: float) -> float:
    """Return Tango's score statistic of the hypothesis drop = margin; negative when the drop seen is smaller."""
    pair_table(b, c, n)
    return float(tango_z_table(b, c, n, margin))


def tango_p(b: int, c: int, n: int, margin: float) -> float:
    """Return the one-sided p-value of "the drop is at least the margin": Phi(z(margin))."""
    return float(ndtr(tango_z(b, c, n, margin)))


def tango_bound(b: int, c: int, n: int, alpha: float, side: Side) -> float:
    """Return the one-sided (1 - alpha) score bound of the drop, by inverting `tango_z`.

    With no discordant pair the upper bound is z^2/(n + z^2).
    """
    pair_table(b, c, n)
    sign, critical = side_sign(side), -float(ndtri(level_alpha(alpha)))
    if sign < 0:
        return -tango_bound(c, b, n, alpha, "upper")
    point = (b - c) / n
    if point >= 1.0:
        return 1.0

    def excess(margin: float) -> float:
        return float(tango_z_table(b, c, n, margin)) + critical

    return bracketed_root(excess, point, 1.0, critical, -critical)


def tango_interval(b: int, c: int, n: int, level: float = 0.95) -> Interval:
    """Return Tango's two-sided score interval of the drop; its 90% upper limit is the one-sided 95% bound."""
    alpha = (1.0 - probability("level", level)) / 2.0
    lower = tango_bound(b, c, n, alpha, "lower")
    return Interval((b - c) / n, lower, tango_bound(b, c, n, alpha, "upper"), level)


# --- Bounded score: any paired differences with known limits --------------------------------------


@dataclass(frozen=True)
class _Distinct:
    """Distinct differences with their multiplicities: a score of k samples a problem has only 2k + 1 of them."""

    values: FloatArray
    counts: FloatArray
    n: int
    mean: float
    lo: float
    hi: float

    def mirrored(self) -> _Distinct:
        return _Distinct(
            -self.values[::-1], self.counts[::-1], self.n, -self.mean, -self.hi, -self.lo
        )


def _distinct(d: ArrayLike, lo: float, hi: float) -> _Distinct:
    if not lo < hi:
        raise ValueError(f"the limits '{lo}' and '{hi}' of the differences must increase")
    x = finite_vector("d", d)
    slack = 1e-9 * (hi - lo)  # a mean of k pass rates can miss 1 by a rounding error
    bad = np.flatnonzero((x < lo - slack) | (x > hi + slack))
    if bad.size:
        raise ValueError(
            f"'d' is '{x[bad[0]]}' at index {bad[0]}; it must lie between {lo:g} and {hi:g}"
        )
    clipped = np.clip(x, lo, hi)
    values, counts = np.unique(clipped, return_counts=True)
    mean = math.fsum((values * counts).tolist()) / x.size
    return _Distinct(values, counts.astype(np.float64), x.size, min(hi, max(lo, mean)), lo, hi)


def _tilt(g: FloatArray, counts: FloatArray, cap: float) -> float:
    """Return the multiplier lam in (0, cap] of the constrained likelihood: the root of sum g/(1 + lam g), or cap.

    The sum falls in lam, is positive at 0, and runs to -inf where 1 + lam g first vanishes; when the root lies
    beyond cap, the likelihood puts the remaining mass on the bound itself.
    """
    smallest = float(g[0])  # g ascends
    upper = cap
    if smallest < 0.0 and 1.0 + cap * smallest <= 1e-15:
        upper = cap * (1.0 - 1e-15)
    elif float(counts @ (g / (1.0 + cap * g))) >= 0.0:
        return cap
    low, high, lam = 0.0, upper, 0.5 * upper
    for _ in range(200):
        share = g / (1.0 + lam * g)
        value, slope = float(counts @ share), -float(counts @ (share * share))
        if value > 0.0:
            low = lam
        else:
            high = lam
        step = lam - value / slope if slope < 0.0 else low
        new = step if low < step < high else 0.5 * (low + high)
        if abs(new - lam) <= 1e-15 * upper + 1e-14 * lam:
            return new
        lam = new
    return lam


def _score_z(data: _Distinct, margin: float) -> float:
    gap = margin - data.mean
    if gap == 0.0:
        return 0.0
    if gap < 0.0:
        return -_score_z(data.mirrored(), -margin)
    g = (margin - data.values)[::-1]
    lam = _tilt(g, data.counts[::-1], 1.0 / (data.hi - margin))
    return -math.sqrt(data.n * lam * gap)


def bounded_score(d: ArrayLike, margin: float, lo: float = -1.0, hi: float = 1.0) -> float:
    """Return the score statistic z of the hypothesis "the mean of d is the margin", for d within [lo, hi].

    z = (mean(d) - m)/sqrt(V(m)/n). V is the variance under the nonparametric likelihood constrained to mean m, whose
    support is the observed values and the limit beyond m: with g_i = m - d_i and, for mean(d) < m, lam the root of
    sum g_i/(1 + lam g_i) = 0 or 1/(hi - m) if there is none below it, the weights are 1/(n(1 + lam g_i)) and what is
    missing to 1 lies on hi. That makes V = (m - mean(d))/lam, so z^2 = n lam (m - mean(d)), which is what is computed.
    For d in {-1, 0, 1} this is Tango's statistic; for d = rho baseline - variant, margin 0, limits [-1, rho], it is
    the score statistic of the ratio of two paired shares. p = Phi(z) tests "mean at least m".
    Raises `ValueError` for no values, NaN, values beyond the limits and a margin not strictly inside them.
    """
    data = _distinct(d, lo, hi)
    return _score_z(data, margin_inside(margin, lo, hi))


def score_bound(
    d: ArrayLike, alpha: float, side: Side = "upper", lo: float = -1.0, hi: float = 1.0
) -> float:
    """Return the one-sided (1 - alpha) bound of the mean of d within [lo, hi], by inverting `bounded_score`."""
    data = _distinct(d, lo, hi)
    sign, critical = side_sign(side), -float(ndtri(level_alpha(alpha)))
    if sign < 0:
        data = data.mirrored()
    if data.mean >= data.hi:
        return sign * data.hi

    def excess(margin: float) -> float:
        return -critical if margin >= data.hi else _score_z(data, margin) + critical

    return sign * bracketed_root(excess, data.mean, data.hi, critical, -critical)


def score_interval(
    d: ArrayLike, level: float = 0.95, lo: float = -1.0, hi: float = 1.0
) -> Interval:
    """Return the two-sided bounded-score interval of the mean of d."""
    alpha = (1.0 - probability("level", level)) / 2.0
    lower = score_bound(d, alpha, "lower", lo, hi)
    return Interval(_distinct(d, lo, hi).mean, lower, score_bound(d, alpha, "upper", lo, hi), level)


# --- Relative margins -----------------------------------------------------------------------------


def recovery_score(baseline: ArrayLike, variant: ArrayLike, rho: float) -> float:
    """Return the score statistic of "the variant keeps the share rho of the baseline's score".

    Scores lie in [0, 1]. This is `bounded_score` of rho baseline - variant at margin 0 with limits [-1, rho]; negative
    when more is kept, p = Phi(z) tests "recovery at most rho". For 0/1 scores it equals the score test of Tang, Tang
    and Chan (2003) and Nam and Blackwelder (2002).
    """
    base, var = _scores("baseline", baseline), _scores("variant", variant)
    same_length("baseline", base, "variant", var)
    if not rho > 0.0:
        raise ValueError(f"rho is '{rho}'; a recovery is a positive share of the baseline's score")
    return bounded_score(rho * base - var, 0.0, -1.0, rho)


def recovery_bound(
    baseline: ArrayLike, variant: ArrayLike, alpha: float, side: Side = "lower"
) -> float:
    """Return the one-sided (1 - alpha) bound of the recovery mean(variant)/mean(baseline).

    0 and infinity are possible values: a variant that solved nothing has lower bound 0. Raises `ValueError` when the
    baseline's own mean is 0, since a ratio to nothing is not defined.
    """
    base, var = _scores("baseline", baseline), _scores("variant", variant)
    same_length("baseline", base, "variant", var)
    critical, sign = -float(ndtri(level_alpha(alpha))), side_sign(side)
    if not base.any():
        raise ValueError("the baseline's mean score is '0'; use an absolute margin")
    ratio = float(var.sum() / base.sum())

    def excess(rho: float) -> float:
        return recovery_score(base, var, rho) - sign * critical

    if sign < 0:
        if ratio == 0.0:
            return 0.0
        low = ratio
        while (
            excess(low) > 0.0
        ):  # z runs to -inf for small rho unless the variant may have solved nothing
            low /= 2.0
            if low < 1e-9:
                return 0.0
        return bracketed_root(excess, low, ratio, -critical, critical)
    high = max(ratio, 1e-3)
    while excess(high) < 0.0:
        high *= 2.0
        if high > 1e9:
            return math.inf
    return bracketed_root(excess, ratio or 1e-12, high, -critical, critical)


def _scores(name: str, values: ArrayLike) -> FloatArray:
    x = finite_vector(name, values)
    bad = np.flatnonzero((x < -1e-9) | (x > 1.0 + 1e-9))
    if bad.size:
        raise ValueError(f"'{name}' is '{x[bad[0]]}' at index {bad[0]}; scores lie between 0 and 1")
    return np.clip(x, 0.0, 1.0)


# --- For reports and comparison -------------------------------------------------------------------


def mcnemar_exact(
    b: int, c: int, alternative: Literal["two-sided", "greater"] = "two-sided"
) -> float:
    """Return McNemar's exact p-value of "flips go either way equally"; `greater` tests "more broke than were fixed".

    Binomial(b + c, 1/2) tails; two-sided is twice the smaller, at most 1. It detects a change; it cannot show that
    there is none, so it is never an acceptance rule.
    """
    pair_table(b, c, max(1, b + c))
    if alternative == "greater":
        return binomial_cdf(c, b + c, 0.5)
    return min(1.0, 2.0 * binomial_cdf(min(b, c), b + c, 0.5))


def mcnemar_midp(b: int, c: int) -> float:
    """Return McNemar's two-sided mid-p: 2 (P(X < min) + P(X = min)/2), which is 1 when b = c."""
    pair_table(b, c, max(1, b + c))
    if b == c:
        return 1.0
    smaller, n = min(b, c), b + c
    return binomial_cdf(smaller, n, 0.5) + binomial_cdf(smaller - 1, n, 0.5)


def mcnemar_chi2(b: int, c: int, *, continuity: bool = False) -> tuple[float, float]:
    """Return McNemar's chi-squared statistic (b - c)^2/(b + c) and its p-value; with correction |b - c| - 1."""
    pair_table(b, c, max(1, b + c))
    if b + c == 0:
        return 0.0, 1.0
    gap = max(0.0, abs(b - c) - 1.0) if continuity else float(abs(b - c))
    statistic = gap * gap / (b + c)
    return statistic, float(chdtrc(1, statistic))


def newcombe_interval(
    counts: PairCounts, level: float = 0.95, method: Literal[8, 10] = 10
) -> Interval:
    """Return Newcombe's interval of the drop: two Wilson intervals, joined with the correlation phi of the pairs.

    Newcombe, Statistics in Medicine 17 (1998), methods 8 and 10; 10 shrinks a positive phi by a continuity correction.
    """
    if method not in (8, 10):
        raise ValueError(f"method is '{method}'; use 8 or 10")
    both, broken, fixed, neither, n = (
        counts.both_right,
        counts.broken,
        counts.fixed,
        counts.both_wrong,
        counts.n,
    )
    alpha = (1.0 - probability("level", level)) / 2.0
    base, var = both + broken, both + fixed
    product = float(base) * (n - base) * var * (n - var)
    cross = float(both) * neither - float(broken) * fixed
    if method == 10 and cross > 0.0:
        cross = max(0.0, cross - n / 2.0)
    phi = cross / math.sqrt(product) if product > 0.0 else 0.0
    below_base = base / n - wilson_bound(base, n, alpha, "lower")
    above_base = wilson_bound(base, n, alpha, "upper") - base / n
    below_var = var / n - wilson_bound(var, n, alpha, "lower")
    above_var = wilson_bound(var, n, alpha, "upper") - var / n

    def joined(first: float, second: float) -> float:
        return math.sqrt(max(0.0, first**2 - 2.0 * phi * first * second + second**2))

    return Interval(
        counts.drop,
        counts.drop - joined(below_base, above_var),
        counts.drop + joined(above_base, below_var),
        level,
    )


def wald_interval(b: int, c: int, n: int, level: float = 0.95) -> Interval:
    """Return the textbook paired interval, drop +- z sqrt((b + c - (b - c)^2/n))/n.

    Shown for comparison only: with few flips it is far too short and with none it has no width at all.
    """
    pair_table(b, c, n)
    z = -float(ndtri((1.0 - probability("level", level)) / 2.0))
    half = z * math.sqrt(max(0.0, b + c - (b - c) ** 2 / n)) / n
    drop = (b - c) / n
    return Interval(drop, drop - half, drop + half, level)


def as_counts(d: ArrayLike) -> tuple[int, int, int] | None:
    """Return (b, c, n) when every difference is -1, 0 or 1, so that the exact test applies; otherwise None."""
    x: NDArray[np.float64] = finite_vector("d", d)
    if not bool(np.isin(x, (-1.0, 0.0, 1.0)).all()):
        return None
    return int(np.sum(x == 1.0)), int(np.sum(x == -1.0)), x.size

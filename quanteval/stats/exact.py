"""The exact unconditional non-inferiority test for paired 0/1 outcomes, and the machinery of exact probabilities.

Tables (b, c) are ordered by Tango's statistic; the p-value is the largest probability, over the unknown flip rate, of a
table at least as good when the drop equals the margin. So a wrong acceptance is never likelier than alpha, whatever the
flip rate, up to the grid on which that maximum is searched (refined around its peaks).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, gammaln, xlog1py, xlogy

from quanteval.stats._checks import (
    FloatArray,
    Side,
    level_alpha,
    margin_inside,
    pair_table,
    side_sign,
)
from quanteval.stats.paired import tango_bound, tango_z, tango_z_table

MAX_EXACT_PAIRS = 5_000
"""Up to here one p-value takes a few hundredths of a second; beyond, Tango's test is near enough to its level."""

Region = NDArray[np.int64]
"""region[c] is the largest b inside for c fixed pairs, -1 for none."""

_TIE = 1e-9  # tables of equal z differ by rounding alone; the distinct values near a critical one are wider apart
_REACH_SD = 9.0  # beyond nine standard deviations a binomial holds less than 1e-17


def accept_region(n: int, margin: float, z_limit: float) -> Region:
    """Return, for each c = 0..n, the largest b <= n - c whose z(margin) is at most z_limit (-1 when there is none).

    Relies on z growing with b at fixed c, which the score test's tables do.
    """
    c = np.arange(n + 1)
    low, high = np.full(n + 1, -1), n - c  # low is inside (or none is), high + 1 is outside
    while bool((low < high).any()):
        middle = (low + high + 1) // 2
        inside = tango_z_table(np.maximum(middle, 0), c, n, margin) <= z_limit
        open_ = low < high
        low = np.where(open_ & inside, middle, low)
        high = np.where(open_ & ~inside, middle - 1, high)
    return low.astype(np.int64)


def region_probability(region: Region, n: int, broken: float, fixed: float) -> float:
    """Return P(b <= region[c]) when a pair breaks with probability `broken` and is fixed with probability `fixed`.

    (b, c) is trinomial: c ~ Bin(n, fixed) and, given c, b ~ Bin(n - c, broken/(1 - fixed)).
    """
    if broken < 0.0 or fixed < 0.0 or broken + fixed > 1.0 + 1e-12:
        raise ValueError(f"P(broken)='{broken}' and P(fixed)='{fixed}' are not shares of one whole")
    half = _REACH_SD * float(np.sqrt(n * fixed * (1.0 - fixed))) + 40.0
    first, last = max(0, int(n * fixed - half)), min(n, int(n * fixed + half))
    c = np.arange(first, last + 1)
    log_choose = gammaln(n + 1.0) - gammaln(c + 1.0) - gammaln(n - c + 1.0)
    weight = np.exp(log_choose + xlogy(c, fixed) + xlog1py(n - c, -fixed))
    share = min(1.0, broken / (1.0 - fixed)) if fixed < 1.0 else 0.0
    limit = region[first : last + 1]
    trials = n - c
    whole = limit >= trials
    partial = ~whole & (limit >= 0)
    tail = np.where(whole, 1.0, 0.0)
    tail[partial] = betainc(trials[partial] - limit[partial], limit[partial] + 1.0, 1.0 - share)
    return min(1.0, float(weight @ tail))


@lru_cache(maxsize=64)
def _flip_rates(n: int, margin: float) -> FloatArray:
    """Return flip rates from |margin| to 1, even in the arcsine scale, on which all peaks are about equally wide."""
    lowest = abs(margin)
    points = int(60 + 4 * np.sqrt(n))
    even = np.sin(np.linspace(np.arcsin(np.sqrt(lowest)), np.pi / 2.0, points)) ** 2
    first = (
        lowest + np.geomspace(0.02, 16.0, 24) / n
    )  # the first pairs flipping the other way matter most
    return np.unique(np.clip(np.concatenate((even, first)), lowest, 1.0))


def region_size(region: Region, n: int, margin: float) -> float:
    """Return the largest probability of the region over all flip rates when the drop equals the margin."""

    def at(flip_rate: float) -> float:
        return region_probability(
            region, n, max(0.0, flip_rate + margin) / 2.0, max(0.0, flip_rate - margin) / 2.0
        )

    grid = _flip_rates(n, margin)
    values = np.array([at(float(f)) for f in grid])
    best = float(values.max())
    padded = np.concatenate(([-1.0], values, [-1.0]))
    peaks = np.flatnonzero((padded[1:-1] >= padded[:-2]) & (padded[1:-1] >= padded[2:]))
    for i in peaks[np.argsort(values[peaks])[::-1][:3]]:
        if values[i] < 0.9 * best:
            break
        low, high = float(grid[max(0, i - 1)]), float(grid[min(grid.size - 1, i + 1)])
        best = max(best, _maximum(at, low, high))
    return best


def _maximum(f: Callable[[float], float], low: float, high: float) -> float:
    """Return the largest value of f that a golden-section search between low and high meets."""
    ratio = 0.6180339887498949
    x1, x2 = high - ratio * (high - low), low + ratio * (high - low)
    f1, f2 = f(x1), f(x2)
    best = max(f1, f2)
    for _ in range(20):
        if f1 >= f2:
            high, x2, f2 = x2, x1, f1
            x1 = high - ratio * (high - low)
            f1 = f(x1)
        else:
            low, x1, f1 = x1, x2, f2
            x2 = low + ratio * (high - low)
            f2 = f(x2)
        best = max(best, f1, f2)
    return best


def _affordable(n: int) -> None:
    if n > MAX_EXACT_PAIRS:
        raise ValueError(
            f"n is '{n}'; the exact test takes at most {MAX_EXACT_PAIRS} pairs, use Tango's"
        )


@lru_cache(maxsize=4096)
def exact_p(b: int, c: int, n: int, margin: float) -> float:
    """Return the exact unconditional p-value of "the drop is at least the margin".

    max over flip rates f of P(z(margin) <= z seen | P(broken) = (f + margin)/2, P(fixed) = (f - margin)/2). With no
    discordant pair it is at least (1 - margin)^n, which it equals, or nearly, until that falls well below 0.05.
    """
    pair_table(b, c, n)
    _affordable(n)
    margin_inside(margin, -1.0, 1.0)
    region = accept_region(n, margin, tango_z(b, c, n, margin) + _TIE)
    return region_size(region, n, margin)


def exact_accept(b: int, c: int, n: int, margin: float, alpha: float = 0.05) -> bool:
    """Say whether the exact test shows the drop to be below the margin at level alpha."""
    return exact_p(b, c, n, margin) <= level_alpha(alpha)


@lru_cache(maxsize=256)
def exact_critical_z(n: int, margin: float, alpha: float = 0.05) -> float:
    """Return the z(margin) up to which the exact test accepts: `exact_p` <= alpha if and only if z <= this.

    -inf when no table of n pairs can be accepted. One value serves every flip rate, which makes power cheap.
    """
    pair_table(0, 0, n)
    _affordable(n)
    margin_inside(margin, -1.0, 1.0)
    level_alpha(alpha)

    def within(z: float) -> bool:
        return region_size(accept_region(n, margin, z + _TIE), n, margin) <= alpha

    low, high = tango_z(0, n, n, margin), 0.0
    if not within(low):
        return -np.inf
    while high - low > 1e-3:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if within(middle) else (low, middle)
    # `low` is within but need not be attained; between the two, walk over the values that tables attain
    inner, outer = accept_region(n, margin, low + _TIE), accept_region(n, margin, high + _TIE)
    c = np.repeat(np.arange(n + 1), outer - inner)
    b = np.concatenate([np.arange(i + 1, o + 1) for i, o in zip(inner, outer, strict=True)])
    candidates = np.append(low, np.unique(tango_z_table(b, c, n, margin)))
    good, bad = 0, candidates.size
    while bad - good > 1:
        index = (good + bad) // 2
        good, bad = (index, bad) if within(float(candidates[index])) else (good, index)
    return float(candidates[good]) + 0.5 * _TIE


@lru_cache(maxsize=1024)
def exact_bound(b: int, c: int, n: int, alpha: float = 0.05, side: Side = "upper") -> float:
    """Return the one-sided (1 - alpha) exact bound of the drop: the margin at which `exact_p` crosses alpha.

    Found by bisection to 1e-6 from Tango's bound. With no discordant pair the upper bound is about 1 - alpha^(1/n).
    The decision belongs to `exact_p` at the margin: tables change places as the margin moves, so p can wobble where
    it crosses alpha, and the bound can then disagree with the decision in its last digits.
    """
    pair_table(b, c, n)
    _affordable(n)
    level_alpha(alpha)
    if side_sign(side) < 0:
        return -exact_bound(c, b, n, alpha, "upper")
    point = (b - c) / n
    if point >= 1.0:
        return 1.0
    low, high = point, tango_bound(b, c, n, alpha, "upper")
    while high < 1.0 - 1e-6 and exact_p(b, c, n, high) > alpha:
        low, high = high, min(1.0 - 5e-7, high + 0.25 * (high - point))
    while high - low > 1e-6:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if exact_p(b, c, n, middle) > alpha else (low, middle)
    return high

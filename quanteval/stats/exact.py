"""The exact unconditional non-inferiority test for paired 0/1 outcomes, and the machinery of exact probabilities.

Tables (b, c) are ordered by Tango's statistic; the p-value is the largest probability, over the unknown flip rate, of a
table at least as good when the drop equals the margin. So a wrong acceptance is never likelier than alpha, whatever the
flip rate, up to the grid on which that maximum is searched (refined around its peaks).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, gammaln, ndtr, ndtri, xlog1py, xlogy

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
_FULL, _SCAN = (
    34.0,
    18.5,
)  # what is below exp(-34) = 2e-15 or exp(-18.5) = 1e-8 is left out of a probability


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
    return float(_probabilities(region, n, np.array([broken]), np.array([fixed]), _FULL)[0])


@lru_cache(maxsize=64)
def _log_choose(n: int) -> FloatArray:
    c = np.arange(n + 1)
    return np.asarray(gammaln(n + 1.0) - gammaln(c + 1.0) - gammaln(n - c + 1.0))


def _reach(variance: FloatArray, nats: float) -> FloatArray:
    """Return the distance from its mean beyond which a binomial holds less than exp(-nats) (Bernstein)."""
    return np.asarray(nats / 3.0 + np.sqrt(nats * nats / 9.0 + 2.0 * nats * variance))


def _probabilities(
    region: Region, n: int, broken: FloatArray, fixed: FloatArray, nats: float
) -> FloatArray:
    """Return P(b <= region[c]) for each pair of probabilities, leaving out terms below exp(-nats).

    The values of c that matter lie in one flat array, those of each pair of probabilities in a run: the incomplete beta
    function costs most, and one call serves all.
    """
    half = _reach(n * fixed * (1.0 - fixed), nats)
    first = np.maximum(0, np.floor(n * fixed - half)).astype(np.int64)
    length = np.minimum(n, np.ceil(n * fixed + half)).astype(np.int64) - first + 1
    start = np.cumsum(length) - length
    c = np.arange(int(length.sum())) + np.repeat(first - start, length)
    share = np.where(
        fixed < 1.0, np.minimum(1.0, broken / np.where(fixed < 1.0, 1.0 - fixed, 1.0)), 0.0
    )
    p_c, p_b = np.repeat(fixed, length), np.repeat(share, length)
    log_weight = _log_choose(n)[c] + xlogy(c, p_c) + xlog1py(n - c, -p_c)
    limit, trials = region[c], n - c
    over = limit + 0.5 > trials * p_b
    tail = np.where((limit >= trials) | ((limit >= 0) & over), 1.0, 0.0)
    open_ = np.flatnonzero((limit >= 0) & (limit < trials) & (log_weight > -nats))
    limit, trials, p_b = limit[open_], trials[open_], p_b[open_]
    # Chernoff's bound of what is missing to the 0 or 1 in place: beyond the nearest count outside, or up to the limit
    count = limit + over[open_]
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = xlogy(count, count / (trials * p_b)) + xlogy(
            trials - count, (trials - count) / (trials * (1.0 - p_b))
        )
    close = ~(apart - log_weight[open_] > nats)
    limit, trials, p_b = limit[close], trials[close], p_b[close]
    tail[open_[close]] = betainc(trials - limit, limit + 1.0, 1.0 - p_b)
    weight = np.exp(log_weight)
    return np.minimum(1.0, np.add.reduceat(weight * tail, start))


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
    return _worst(region, n, margin)[0]


def _at(region: Region, n: int, margin: float, flip_rates: FloatArray, nats: float) -> FloatArray:
    broken = np.maximum(0.0, flip_rates + margin) / 2.0
    return _probabilities(region, n, broken, np.maximum(0.0, flip_rates - margin) / 2.0, nats)


def _worst(region: Region, n: int, margin: float, least: float = 0.0) -> tuple[float, float]:
    """Return the largest probability of the region over the flip rates, and the flip rate that has it.

    A scan of the grid to about 1e-8, closer for tiny regions unless their size is below `least`, then the highest
    peaks in full precision: twice nine points between the neighbours and the vertex of the parabola through the best
    three.
    """
    grid = _flip_rates(n, margin)
    # the precision follows the size, down to the smallest that a double can hold
    for nats in (_SCAN, 60.0, 200.0, 760.0):
        values = _at(region, n, margin, grid, nats)
        if max(least, float(values.max())) > 1e4 * np.exp(-nats):
            break
    full = nats + _FULL - _SCAN
    padded = np.concatenate(([-1.0], values, [-1.0]))
    peaks = np.flatnonzero((padded[1:-1] >= padded[:-2]) & (padded[1:-1] >= padded[2:]))
    peaks = peaks[np.argsort(values[peaks])[::-1][:3]]
    peaks = peaks[values[peaks] >= 0.9 * values[peaks[0]]]
    low, high = grid[np.maximum(peaks - 1, 0)], grid[np.minimum(peaks + 1, grid.size - 1)]
    best, where = -1.0, 0.0
    for last in (False, True):
        points = np.linspace(low, high, 9)
        found = _at(region, n, margin, points.T.ravel(), full).reshape(peaks.size, 9).T
        column = np.arange(peaks.size)
        top = np.argmax(found, axis=0)
        inner = np.clip(top, 1, 7)
        if last:
            left, middle, right = (found[inner + k, column] for k in (-1, 0, 1))
            bend = left - 2.0 * middle + right
            shift = np.where(
                bend < 0.0, 0.5 * (left - right) / np.where(bend < 0.0, bend, 1.0), 0.0
            )
            vertex = points[inner, column] + np.clip(shift, -1.0, 1.0) * (high - low) / 8.0
            points, found = (
                np.vstack((points, vertex)),
                np.vstack((found, _at(region, n, margin, vertex, full))),
            )
        index = np.unravel_index(int(np.argmax(found)), found.shape)
        if found[index] > best:
            best, where = float(found[index]), float(points[index])
        low, high = points[inner - 1, column], points[inner + 1, column]
    return best, where


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

    It is the largest z of an acceptable table (and a trifle for rounding), -inf when no table of n pairs can be
    accepted. One value serves every flip rate, which makes power cheap. Common suites and margins are looked up in
    `critical`; other values take a few tenths of a second at the most pairs allowed.
    """
    from quanteval.stats.critical import key, shipped  # the file is read at the first call

    known = shipped().get(key(n, margin, alpha))
    return search_critical_z(n, margin, alpha) if known is None else known


def search_critical_z(n: int, margin: float, alpha: float) -> float:
    """Return `exact_critical_z` without looking it up."""
    pair_table(0, 0, n)
    _affordable(n)
    margin_inside(margin, -1.0, 1.0)
    level_alpha(alpha)
    aim, worst = float(ndtri(alpha)), [1.0]

    def size(z: float) -> float:
        """The size of the region up to z; where it is above alpha, some flip rate's probability above alpha."""
        region = accept_region(n, margin, z + _TIE)
        known = float(_at(region, n, margin, np.array(worst), _FULL).max())
        if known > alpha:  # most regions that are too large show it where the last one was worst
            return known
        largest, where = _worst(region, n, margin, alpha)
        worst[:] = [*worst[-4:], where]
        return largest

    low, high = tango_z(0, n, n, margin), 0.0
    if size(low) > alpha:
        return -np.inf
    guess, step = aim, 0
    while high - low > 1e-3:
        found = size(guess)
        low, high = (guess, high) if found <= alpha else (low, guess)
        # the normal scale makes the size nearly straight; aim past the root, so that the bracket closes
        past = 4e-4 if found <= alpha else -4e-4
        guess += aim - float(ndtri(found)) + past if 0.0 < found < 1.0 else 0.0
        step += 1
        if step > 8 or not low < guess < high:
            guess = 0.5 * (low + high)
    # `low` is within but need not be attained: walk over the values of tables, from the last one up to it
    inner, outer = accept_region(n, margin, low + _TIE), accept_region(n, margin, high + _TIE)
    c = np.repeat(np.arange(n + 1), outer - inner)
    b = np.concatenate([np.arange(i + 1, o + 1) for i, o in zip(inner, outer, strict=True)])
    some = np.flatnonzero(inner >= 0)
    last = float(tango_z_table(inner[some], some, n, margin).max())
    candidates = np.append(last, np.unique(tango_z_table(b, c, n, margin)))
    good, bad = 0, candidates.size
    while bad - good > 1:
        index = (good + bad) // 2
        good, bad = (index, bad) if size(float(candidates[index])) <= alpha else (good, index)
    return float(candidates[good]) + 0.5 * _TIE


@lru_cache(maxsize=1024)
def exact_bound(b: int, c: int, n: int, alpha: float = 0.05, side: Side = "upper") -> float:
    """Return the one-sided (1 - alpha) exact bound of the drop: the margin at which `exact_p` crosses alpha.

    Found by bisection to 1e-6 from Tango's bound. With no discordant pair the upper bound is about 1 - alpha^(1/n).
    For reports: the decision belongs to `exact_p` at the margin. Tables change places as the margin moves, so p can
    wobble where it crosses alpha, and this bound can then disagree with the decision in its last digits;
    `decision_bound` does not.
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


def reference_p(z: float, n: int, margin: float) -> float:
    """Return how often 0/1 scores on the margin give a z this small, at the worst flip rate: `exact_p` of a statistic.

    For scores that are not 0/1 it is a reference and not exact: they vary less than 0/1 scores of the same mean, and
    where few of them are fractions the normal approximation errs as much as it does for none.
    """
    _affordable(n)
    margin_inside(margin, -1.0, 1.0)
    return region_size(accept_region(n, margin, z + _TIE), n, margin)


def decision_bound(
    b: int, c: int, n: int, margin: float, alpha: float = 0.05, side: Side = "upper"
) -> float:
    """Return the score bound of the drop at the exact test's critical value for this margin, -1 to 1.

    The upper bound is the root of `tango_z` = `exact_critical_z`(n, margin, alpha), so it lies below the margin exactly
    when `exact_p` <= alpha, and the lower bound above it exactly when the swapped table is accepted at -margin. At
    the margin it has the level of the exact test; away from it that of Tango's with a critical value mostly stricter
    than the normal one. Where no table can be accepted it is `exact_bound`.
    """
    margin_inside(margin, -1.0, 1.0)
    if side_sign(side) < 0:
        return -decision_bound(c, b, n, -margin, alpha, "upper")
    limit = exact_critical_z(n, margin, alpha)
    if limit == -np.inf:
        bound = exact_bound(b, c, n, alpha, "upper")
    else:
        bound = tango_bound(b, c, n, max(float(ndtr(limit)), 1e-300), "upper")
    # on the margin itself rounding would decide
    if exact_p(b, c, n, margin) <= alpha:
        return min(bound, float(np.nextafter(margin, -np.inf)))
    return max(bound, margin)

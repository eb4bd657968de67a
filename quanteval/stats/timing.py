"""Ratios of speed between a variant and the baseline, and how many requests a tail needs.

Throughput compares whole runs (requests inside one run depend on each other); latency quantiles compare the requests of
interleaved runs by order statistics. Ratios are always variant over baseline. Nothing here resamples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betainc, ndtri, stdtrit

from quanteval.stats._checks import FloatArray, finite_vector, level_alpha, probability
from quanteval.stats.intervals import min_n_quantile_bound, quantile_bounds


@dataclass(frozen=True)
class RatioBounds:
    """A ratio variant/baseline with one-sided bounds, each at level 1 - alpha; 0 and inf mean "no bound"."""

    ratio: float
    lower: float
    upper: float
    alpha: float
    n_baseline: int
    n_variant: int


def _positive_logs(name: str, values: ArrayLike, minimum: int) -> FloatArray:
    x = finite_vector(name, values, minimum=minimum)
    bad = np.flatnonzero(x <= 0.0)
    if bad.size:
        raise ValueError(
            f"'{name}' is '{x[bad[0]]}' at index {bad[0]}; a ratio needs positive values"
        )
    return np.log(x)


def throughput_ratio(baseline: ArrayLike, variant: ArrayLike, alpha: float = 0.05) -> RatioBounds:
    """Return the ratio of geometric means over runs, with bounds from Welch's t on the logarithms.

    One value a run (tokens/s, requests/s), at least two runs an arm. Degrees of freedom by Welch and Satterthwaite
    (Welch, Biometrika 34, 1947). Equal values in each arm leave no spread, and the bounds are then the ratio.
    """
    base, var = _positive_logs("baseline", baseline, 2), _positive_logs("variant", variant, 2)
    level_alpha(alpha)
    difference = float(var.mean() - base.mean())
    s_base, s_var = float(base.var(ddof=1)) / base.size, float(var.var(ddof=1)) / var.size
    variance = s_base + s_var
    reach = 0.0
    if variance > 0.0:
        share = s_base / variance  # of the variance; as a share it cannot underflow when squared
        df = 1.0 / (share**2 / (base.size - 1) + (1.0 - share) ** 2 / (var.size - 1))
        reach = math.sqrt(variance) * -float(stdtrit(df, alpha))
    return RatioBounds(
        math.exp(difference),
        math.exp(difference - reach),
        math.exp(difference + reach),
        alpha,
        base.size,
        var.size,
    )


def quantile_ratio(
    baseline: ArrayLike, variant: ArrayLike, q: float, alpha: float = 0.05
) -> RatioBounds:
    """Return the ratio of the q-quantiles of two positive samples, with distribution-free bounds.

    On logarithms, with each sample's own one-sided order-statistic bounds L and U around its quantile l:
    ln upper = (l_v - l_b) + sqrt((U_v - l_v)^2 + (l_b - L_b)^2), the lower bound likewise with the other two; the
    recovery of variance estimates of Zou and Donner (Statistics in Medicine 27, 2008). Where a sample is too small for
    one of its bounds, the ratio's bound is inf (upper) or 0 (lower): see `min_n_quantile_bound`.
    """
    base = quantile_bounds(_positive_logs("baseline", baseline, 1), q, alpha)
    var = quantile_bounds(_positive_logs("variant", variant, 1), q, alpha)
    difference = var.point - base.point
    above = math.hypot(var.upper - var.point, base.point - base.lower)
    below = math.hypot(var.point - var.lower, base.upper - base.point)
    return RatioBounds(
        math.exp(difference),
        math.exp(difference - below),
        math.exp(difference + above),
        alpha,
        base.n,
        var.n,
    )


def early_stopping_queries(misses: int, percentile: float, confidence: float = 0.99) -> int:
    """Return how many requests in all prove "at most 1 - percentile miss the limit" when `misses` of them missed it.

    The smallest n for which misses or fewer would be seen with probability at most 1 - confidence if exactly
    1 - percentile missed: I_percentile(n - misses, misses + 1) <= 1 - confidence, the early-stopping rule of the
    MLPerf inference benchmark with tolerance 0. For p99: 459, 662 and 1307 requests with 0, 1 and 5 misses.
    """
    if misses < 0:
        raise ValueError(f"misses is '{misses}'; a count is not negative")
    probability("percentile", percentile)
    limit = 1.0 - probability("confidence", confidence)

    def enough(total: int) -> bool:
        return float(betainc(total - misses, misses + 1, percentile)) <= limit * (1.0 + 1e-12)

    low = misses  # never enough: all of them missed
    high = misses + min_n_quantile_bound(percentile, min(limit, 0.49))
    while not enough(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def query_count(percentile: float, margin: float, confidence: float = 0.99) -> int:
    """Return the requests needed to place a miss rate within +-margin: z^2 p(1 - p)/margin^2, two-sided confidence.

    The formula behind the query counts of the MLPerf inference rules; margins there are (1 - percentile)/20.
    """
    probability("percentile", percentile)
    if not margin > 0.0:
        raise ValueError(f"margin is '{margin}'; it must be positive")
    z = float(ndtri(1.0 - (1.0 - probability("confidence", confidence)) / 2.0))
    return math.ceil(z * z * percentile * (1.0 - percentile) / margin**2)

"""Intervals for one sample: a binomial share (Wilson, Clopper-Pearson) and a quantile (order statistics).

Shares of a handful of events and tails of a latency distribution both live here because neither assumes a shape.
Differences between two variants are in `paired`, `clustered` and `timing`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betainc, betaincinv, ndtri

from quanteval.stats._checks import Side, finite_vector, level_alpha, probability, side_sign


@dataclass(frozen=True)
class Interval:
    """A two-sided interval around a point estimate, at the stated level."""

    point: float
    lower: float
    upper: float
    level: float


def _check_share(x: int, n: int) -> None:
    if n < 1:
        raise ValueError(f"n is '{n}'; a share needs at least one item")
    if not 0 <= x <= n:
        raise ValueError(f"x is '{x}'; it must lie between 0 and n={n}")


def wilson_bound(x: int, n: int, alpha: float, side: Side) -> float:
    """Return the one-sided Wilson (score) bound of a binomial share at level 1 - alpha.

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), Wilson, JASA 22 (1927). At x = 0 the upper bound is
    z^2/(n + z^2), never 0.
    """
    _check_share(x, n)
    z = side_sign(side) * -float(ndtri(level_alpha(alpha)))
    p = x / n
    bound = (p + z * z / (2 * n) + z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))) / (
        1 + z * z / n
    )
    if side == "lower":
        return 0.0 if x == 0 else max(0.0, bound)
    return 1.0 if x == n else min(1.0, bound)


def wilson_interval(x: int, n: int, level: float = 0.95) -> Interval:
    """Return the two-sided Wilson interval of x successes in n items."""
    alpha = (1.0 - probability("level", level)) / 2.0
    return Interval(
        x / max(n, 1), wilson_bound(x, n, alpha, "lower"), wilson_bound(x, n, alpha, "upper"), level
    )


def clopper_pearson_bound(x: int, n: int, alpha: float, side: Side) -> float:
    """Return the one-sided exact bound of a binomial share at level 1 - alpha (Clopper and Pearson, 1934).

    Quantiles of Beta(x + 1, n - x) above and Beta(x, n - x + 1) below; for x = 0 the upper bound is 1 - alpha^(1/n).
    """
    _check_share(x, n)
    level_alpha(alpha)
    if side_sign(side) > 0:
        return 1.0 if x == n else float(betaincinv(x + 1, n - x, 1.0 - alpha))
    return 0.0 if x == 0 else float(betaincinv(x, n - x + 1, alpha))


def clopper_pearson_interval(x: int, n: int, level: float = 0.95) -> Interval:
    """Return the two-sided exact interval of x successes in n items."""
    alpha = (1.0 - probability("level", level)) / 2.0
    lower = clopper_pearson_bound(x, n, alpha, "lower")
    return Interval(x / n, lower, clopper_pearson_bound(x, n, alpha, "upper"), level)


def binomial_cdf(k: int, n: int, p: float) -> float:
    """Return P(X <= k) for X ~ Binomial(n, p), through the regularised incomplete beta function."""
    if k < 0:
        return 0.0
    return 1.0 if k >= n else float(betainc(n - k, k + 1, 1.0 - p))


@dataclass(frozen=True)
class QuantileBounds:
    """A sample quantile with one-sided distribution-free bounds, each at level 1 - alpha.

    A bound that so few values cannot give is infinite (`lower` = -inf, `upper` = inf).
    """

    point: float
    lower: float
    upper: float
    q: float
    alpha: float
    n: int


def quantile_ranks(n: int, q: float, alpha: float) -> tuple[int, int]:
    """Return the ranks (1-based) of the order statistics that bound the q-quantile; 0 and n + 1 mean no bound.

    The upper rank r is the smallest with P(Bin(n, q) <= r - 1) >= 1 - alpha, the lower the largest with
    P(Bin(n, q) <= r - 1) <= alpha. Independent draws from any distribution.
    """
    probability("q", q)
    level_alpha(alpha)
    if n < 1:
        raise ValueError(f"n is '{n}'; a quantile needs at least one value")
    ranks = np.arange(1, n + 1)
    cdf = betainc(n - ranks + 1.0, ranks, 1.0 - q)  # P(Bin(n, q) <= r - 1)
    # a hair of slack, so that the rank does not hang on the last bit where the probability equals alpha
    lower = int(np.searchsorted(cdf, alpha + 1e-12, side="right"))
    upper = int(np.searchsorted(cdf, 1.0 - alpha - 1e-12, side="left")) + 1
    return lower, upper


def quantile_bounds(values: ArrayLike, q: float, alpha: float = 0.05) -> QuantileBounds:
    """Return the sample quantile (linear interpolation) and its one-sided order-statistic bounds."""
    x = np.sort(finite_vector("values", values))
    low, high = quantile_ranks(x.size, q, alpha)
    point = float(np.quantile(x, q))
    lower = -math.inf if low == 0 else min(point, float(x[low - 1]))
    upper = math.inf if high > x.size else max(point, float(x[high - 1]))
    return QuantileBounds(point, lower, upper, q, alpha, x.size)


def min_n_quantile_bound(q: float, alpha: float = 0.05, side: Side = "upper") -> int:
    """Return the fewest values from which a distribution-free bound of the q-quantile exists.

    The largest value bounds it from above when q^n <= alpha: n >= ln(alpha)/ln(q); for the lower side 1 - q stands
    in place of q. p99 at alpha 0.05 needs 299.
    """
    share = probability("q", q) if side_sign(side) > 0 else 1.0 - probability("q", q)
    return max(1, math.ceil(math.log(level_alpha(alpha)) / math.log(share) - 1e-9))

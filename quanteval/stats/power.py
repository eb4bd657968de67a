"""What a suite can decide before it is run: error rates, smallest margin, items needed; pass@k and multiplicity.

All probabilities of the gate's 0/1 rules are sums over every possible table of broken and fixed pairs, without
simulation. A suite is described by its number of pairs, the share of them expected to flip and the true drop; the
accuracy itself does not enter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import betainc, ndtri

from quanteval.stats._checks import finite_vector, level_alpha, pair_table, probability
from quanteval.stats.exact import (
    MAX_EXACT_PAIRS,
    Region,
    accept_region,
    exact_critical_z,
    region_probability,
)

PairedRule = Literal["exact", "tango", "point"]
"""The exact test (Tango's beyond `MAX_EXACT_PAIRS`, as in the gate), Tango's, or the bare "drop seen <= margin"."""

_SEARCH_LIMIT_PAIRS = 20_000


@dataclass(frozen=True)
class OperatingCharacteristics:
    """Probabilities of the three verdicts; they add up to 1."""

    accept: float
    inconclusive: float
    reject: float


def flip_probabilities(flip_rate: float, drop: float) -> tuple[float, float]:
    """Return P(broken) and P(fixed) of a pair from the share of pairs that flip and the true drop."""
    if not abs(drop) <= flip_rate <= 1.0:
        raise ValueError(
            f"flip rate is '{flip_rate}'; it must lie between the drop '{abs(drop)}' and 1"
        )
    return (flip_rate + drop) / 2.0, (flip_rate - drop) / 2.0


def point_region(n: int, margin: float) -> Region:
    """Return the tables that pass the bare rule (b - c)/n <= margin."""
    c = np.arange(n + 1)
    largest: Region = np.floor(c + n * margin + 1e-9).astype(np.int64)
    return np.minimum(np.maximum(largest, -1), n - c)


def _rule_region(rule: PairedRule, n: int, margin: float, alpha: float) -> Region:
    if rule == "point":
        return point_region(n, margin)
    if rule not in ("exact", "tango"):
        raise ValueError(f"rule is '{rule}'; use 'exact', 'tango' or 'point'")
    if rule == "exact" and n <= MAX_EXACT_PAIRS:
        return accept_region(n, margin, exact_critical_z(n, margin, alpha))
    return accept_region(n, margin, float(ndtri(level_alpha(alpha))))


def accept_probability(
    n: int,
    flip_rate: float,
    drop: float,
    margin: float,
    *,
    alpha: float = 0.05,
    rule: PairedRule = "exact",
) -> float:
    """Return the exact probability that the rule accepts a variant with the given true drop.

    At drop = margin it is the rate of wrong releases, at drop = 0 the power.
    """
    pair_table(0, 0, n)
    broken, fixed = flip_probabilities(flip_rate, drop)
    return region_probability(_rule_region(rule, n, margin, alpha), n, broken, fixed)


def operating_characteristics(
    n: int,
    flip_rate: float,
    drop: float,
    margin: float,
    *,
    alpha: float = 0.05,
    reject_alpha: float = 0.05,
    rule: PairedRule = "exact",
) -> OperatingCharacteristics:
    """Return the exact probabilities of accept, inconclusive and reject; the point rule has no middle."""
    accept = accept_probability(n, flip_rate, drop, margin, alpha=alpha, rule=rule)
    if rule == "point":
        return OperatingCharacteristics(accept, 0.0, 1.0 - accept)
    broken, fixed = flip_probabilities(flip_rate, drop)
    # "the drop is proved above m" is "the gain of the swapped pair is proved below -m"
    reject = region_probability(_rule_region(rule, n, -margin, reject_alpha), n, fixed, broken)
    return OperatingCharacteristics(accept, max(0.0, 1.0 - accept - reject), reject)


def point_rule_error(n: int, flip_rate: float, margin: float) -> float:
    """Return how often "drop seen <= margin" passes a variant whose true drop is the margin: about one half."""
    return accept_probability(n, flip_rate, margin, margin, rule="point")


# --- Planning -------------------------------------------------------------------------------------


def certifiable_margin_approx(
    n: int, flip_rate: float, alpha: float = 0.05, power: float = 0.8
) -> float:
    """Return (z_{1 - alpha} + z_power) sqrt(f/n), the smallest margin by the normal approximation at true drop 0.

    Too hopeful where n f is below about 10; `certifiable_margin` is exact.
    """
    pair_table(0, 0, n)
    flip_probabilities(flip_rate, 0.0)
    return _z_sum(alpha, power) * math.sqrt(flip_rate / n)


def certifiable_margin(
    n: int,
    flip_rate: float,
    alpha: float = 0.05,
    power: float = 0.8,
    *,
    drop: float = 0.0,
    rule: Literal["exact", "tango"] = "tango",
) -> float:
    """Return the smallest margin that n pairs certify with the given power, to 1e-5; 1 when none below it.

    The flip rate and the true drop are held fixed while the margin varies. Tango's rule answers in milliseconds; the
    exact rule needs a tenth of a point more from some hundred pairs on (two points at 20) and up to some seconds.
    """
    probability("power", power)

    def enough(margin: float) -> bool:
        return accept_probability(n, flip_rate, drop, margin, alpha=alpha, rule=rule) >= power

    low = max(drop, 0.0)
    if rule == "exact":  # never below Tango's, so most of the search can use the cheap rule
        low = certifiable_margin(n, flip_rate, alpha, power, drop=drop) - 1e-5
        if low >= 1.0 - 1e-4:
            return 1.0
    high, width = low, 1e-3
    while not enough(high := min(high + width, 1.0 - 1e-6)):
        if high >= 1.0 - 1e-6:
            return 1.0
        low, width = high, 1.5 * width
    return _smallest(enough, low, high, 1e-5)


def _smallest(enough: Callable[[float], bool], low: float, high: float, tol: float) -> float:
    while high - low > tol:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def pairs_needed_approx(
    margin: float, flip_rate: float, drop: float = 0.0, alpha: float = 0.05, power: float = 0.8
) -> int:
    """Return the pairs needed by the normal approximation, (z_{1 - alpha} + z_power)^2 (f - D^2)/(m - D)^2."""
    flip_probabilities(flip_rate, drop)
    if not drop < margin < 1.0:
        raise ValueError(
            f"margin is '{margin}'; no number of pairs certifies a true drop of '{drop}'"
        )
    n = _z_sum(alpha, power) ** 2 * (flip_rate - drop**2) / (margin - drop) ** 2
    return max(1, math.ceil(n - 1e-9))


def pairs_needed(
    margin: float,
    flip_rate: float,
    drop: float = 0.0,
    alpha: float = 0.05,
    power: float = 0.8,
    *,
    rule: Literal["exact", "tango"] = "tango",
) -> int:
    """Return the number of pairs from which on the rule accepts a variant of the given true drop with this power.

    Power saws up and down with n, so this is one past the last n that falls short. Above 20,000 pairs, where the
    normal approximation is good, it is that. Large answers, and all of the exact rule's, are rounded up to about 1%.
    """
    start = pairs_needed_approx(margin, flip_rate, drop, alpha, power)
    if start > _SEARCH_LIMIT_PAIRS:
        return start

    def enough(n: int) -> bool:
        return accept_probability(n, flip_rate, drop, margin, alpha=alpha, rule=rule) >= power

    # from high enough that the saw has settled, down to the first n that falls short
    if rule == "exact":  # its power is at most Tango's, and close to it
        start = pairs_needed(margin, flip_rate, drop, alpha, power)
        step, top = max(1, start // 100), math.ceil(1.1 * start)
    else:
        step, top = max(1, start // 500), math.ceil(1.4 * start) + math.ceil(8.0 / margin)
    while not all(enough(n) for n in range(max(1, top - 5 * step), top + 1, step)):
        top = math.ceil(1.2 * top) + 1
    while top > step and enough(top - step):
        top -= step
    return top


def pairs_needed_recovery_approx(
    rho: float, baseline_score: float, flip_rate: float, alpha: float = 0.05, power: float = 0.8
) -> int:
    """Return the pairs needed to show "recovery above rho" for an equally good variant, by normal approximation.

    (z_{1 - alpha} + z_power)^2 f/((1 - rho) p)^2: the relative margin is worth (1 - rho) p in absolute terms.
    """
    probability("rho", rho)
    return pairs_needed_approx(
        (1.0 - rho) * probability("baseline_score", baseline_score), flip_rate, 0.0, alpha, power
    )


def detectable_drop(n: int, aa_flip_rate: float, alpha: float = 0.05, power: float = 0.8) -> float:
    """Return the smallest drop that the one-sided exact McNemar test finds with the given power (the MDE), to 1e-5.

    Pairs flip at the A/A rate in both directions evenly, and the drop comes on top. 1 when no drop is detectable.
    """
    pair_table(0, 0, n)
    if not 0.0 <= aa_flip_rate < 1.0:
        raise ValueError(f"aa_flip_rate is '{aa_flip_rate}'; it must lie between 0 and 1")
    probability("power", power)
    fixed = aa_flip_rate / 2.0
    region = _undetected_region(n, level_alpha(alpha))

    def enough(drop: float) -> bool:
        return 1.0 - region_probability(region, n, fixed + drop, fixed) >= power

    largest = 1.0 - aa_flip_rate
    return _smallest(enough, 0.0, largest, 1e-5) if enough(largest) else 1.0


def _undetected_region(n: int, alpha: float) -> Region:
    """Return, for each c, the largest b at which P(Bin(b + c, 1/2) >= b) still exceeds alpha."""
    c = np.arange(n + 1)
    low, high = np.zeros(n + 1, dtype=np.int64), n - c
    while bool((low < high).any()):
        middle = (low + high + 1) // 2
        quiet = betainc(np.maximum(middle, 1), c + 1.0, 0.5) > alpha
        open_ = low < high
        low = np.where(open_ & quiet, middle, low)
        high = np.where(open_ & ~quiet, middle - 1, high)
    return low


def _z_sum(alpha: float, power: float) -> float:
    return float(ndtri(probability("power", power)) - ndtri(level_alpha(alpha)))


def flip_rate_from_sd(n: int, sd: float) -> float:
    """Return the A/A flip rate that a run-to-run standard deviation of the score implies: 2 n sd^2."""
    pair_table(0, 0, n)
    if sd < 0.0 or not math.isfinite(sd):
        raise ValueError(f"sd is '{sd}'; it must be finite and not negative")
    return 2.0 * n * sd * sd


# --- Several samples, several tests ---------------------------------------------------------------


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of P(at least one of k samples passes) from c passes among n samples.

    1 - C(n - c, k)/C(n, k), as a product. Chen et al., "Evaluating Large Language Models Trained on Code" (2021).
    """
    _sample_counts(n, c, k)
    if n - c < k:
        return 1.0
    return 1.0 - math.prod((n - c - i) / (n - i) for i in range(k))


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of P(all of k samples pass), C(c, k)/C(n, k)."""
    _sample_counts(n, c, k)
    return math.prod((c - i) / (n - i) for i in range(k)) if k <= c else 0.0


def _sample_counts(n: int, c: int, k: int) -> None:
    if n < 1 or not 0 <= c <= n:
        raise ValueError(
            f"c={c} of n={n} samples passed; it must be between 0 and n, and n at least 1"
        )
    if not 1 <= k <= n:
        raise ValueError(f"k is '{k}'; it must lie between 1 and the {n} samples drawn")


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Return Holm's step-down adjusted p-values, in the order given (Holm, Scandinavian J. Statistics 6, 1979)."""
    p = finite_vector("p_values", p_values)
    bad = np.flatnonzero((p < 0.0) | (p > 1.0))
    if bad.size:
        raise ValueError(
            f"'p_values' is '{p[bad[0]]}' at index {bad[0]}; a p-value lies between 0 and 1"
        )
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)))
    return tuple(float(value) for value in adjusted)


def retry_probability(single: float, attempts: int) -> float:
    """Return how often at least one of several independent attempts passes: 1 - (1 - p)^attempts."""
    if not 0.0 <= single <= 1.0:
        raise ValueError(f"single is '{single}'; a probability lies between 0 and 1")
    if attempts < 1:
        raise ValueError(f"attempts is '{attempts}'; at least one is needed")
    return -math.expm1(attempts * math.log1p(-single)) if single < 1.0 else 1.0

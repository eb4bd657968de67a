"""Stopping early without cheating: group-sequential bounds at planned looks, and a betting test valid at any time.

Peeking at a fixed-sample test and stopping when it looks good releases bad variants several times as often as stated.
Items must come in a seeded random order, never in the data set's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, ndtri

from quanteval.stats._checks import (
    FloatArray,
    finite_vector,
    level_alpha,
    margin_inside,
    same_length,
)
from quanteval.stats._root import bracketed_root
from quanteval.stats.noninferiority import NonInferiority

_TAIL_SD = 9.0
_UNREACHABLE_Z = 37.0  # Phi(-37) is the smallest normal tail a double can hold


@dataclass(frozen=True)
class SequentialDesign:
    """One-sided bounds on z at each look; `nominal_alpha` are the levels at which a bound reported there is valid.

    Accept at look k when z <= -z_bounds[k], reject when z >= z_bounds[k]. The drop's repeated upper bound after
    stopping at look k is the score bound at `nominal_alpha[k]`.
    """

    fractions: tuple[float, ...]
    z_bounds: tuple[float, ...]
    nominal_alpha: tuple[float, ...]
    alpha: float


def obrien_fleming_spent(fraction: float, alpha: float) -> float:
    """Return the share of alpha spent by an information fraction: 2 - 2 Phi(z_{1 - alpha/2}/sqrt(t)).

    Lan and DeMets, Biometrika 70 (1983), the function that resembles O'Brien and Fleming's bounds.
    """
    return 2.0 * float(ndtr(float(ndtri(alpha / 2.0)) / math.sqrt(fraction)))


def sequential_design(fractions: int | Sequence[float], alpha: float = 0.05) -> SequentialDesign:
    """Return the one-sided O'Brien-Fleming-type bounds for looks at the given information fractions.

    A whole number K stands for K equally spaced looks; otherwise the fractions rise and end at 1. Bounds solve, look
    by look, P(first crossing at k) = spent(t_k) - spent(t_{k-1}), with the joint law of the statistic carried forward
    by Gauss-Legendre quadrature (Armitage, McPherson and Rowe, 1969). Equal looks at alpha 0.05, K = 5: 4.2292, 2.8881,
    2.2981, 1.9618, 1.7397.
    """
    level_alpha(alpha)
    times = _information(fractions)
    nodes, weights = np.polynomial.legendre.leggauss(_node_count(times))
    bounds: list[float] = []
    points, mass = (
        np.zeros(1),
        np.ones(1),
    )  # Brownian motion at time 0, then restricted to paths that never crossed
    before, spent_before = 0.0, 0.0
    for time in times:
        step_sd, spent = math.sqrt(time - before), obrien_fleming_spent(time, alpha)
        target, scale = spent - spent_before, math.sqrt(time)
        bound = _crossing_bound(points, mass, step_sd, scale, target)
        bounds.append(bound)
        low, high = -_TAIL_SD * scale, min(bound, _TAIL_SD) * scale
        grid = 0.5 * (high - low) * nodes + 0.5 * (high + low)
        steps = (grid[:, None] - points[None, :]) / step_sd
        density = np.exp(-0.5 * steps**2) @ mass / (step_sd * math.sqrt(2.0 * math.pi))
        points, mass = grid, 0.5 * (high - low) * weights * density
        before, spent_before = time, spent
    nominal = tuple(float(ndtr(-bound)) for bound in bounds)
    return SequentialDesign(times, tuple(bounds), nominal, alpha)


def _node_count(times: tuple[float, ...]) -> int:
    """Return enough nodes to put more than one on every standard deviation of the shortest step."""
    shortest = min(b - a for a, b in pairwise((0.0, *times)))
    return min(2000, max(200, math.ceil(40.0 / math.sqrt(shortest))))


def _information(fractions: int | Sequence[float]) -> tuple[float, ...]:
    if isinstance(fractions, int):
        if fractions < 1:
            raise ValueError(f"looks is '{fractions}'; at least one look is needed")
        return tuple((k + 1) / fractions for k in range(fractions))
    times = tuple(float(t) for t in finite_vector("fractions", fractions))
    if times[0] <= 0.0 or any(b <= a for a, b in pairwise(times)):
        raise ValueError(f"the fractions '{times}' must rise from above 0")
    if abs(times[-1] - 1.0) > 1e-9:
        raise ValueError(f"the last fraction is '{times[-1]}'; the last look must be at 1")
    return times


def _crossing_bound(
    points: FloatArray, mass: FloatArray, step_sd: float, scale: float, target: float
) -> float:
    """Return the z whose crossing at this look, by paths not stopped before, has the target probability."""

    def excess(z: float) -> float:
        return float(mass @ ndtr((points - z * scale) / step_sd)) - target

    top = excess(_UNREACHABLE_Z)
    if target <= 0.0 or top >= 0.0:
        return _UNREACHABLE_Z
    return bracketed_root(excess, 0.0, _UNREACHABLE_Z, fa=excess(0.0), fb=top)


@dataclass(frozen=True)
class BettingTest:
    """Outcome of the betting test: wealth at the end, its highest value, and where it first proved either side.

    `accepted_at` and `rejected_at` are the numbers of items after which 1/alpha was reached, None for never.
    `p_accept` and `p_reject` are the anytime-valid p-values, the reciprocals of the highest wealth.
    """

    wealth_accept: float
    wealth_reject: float
    p_accept: float
    p_reject: float
    accepted_at: int | None
    rejected_at: int | None
    n: int


def betting_test(
    d: ArrayLike,
    margin: float,
    alpha: float = 0.05,
    reject_alpha: float = 0.05,
    *,
    lo: float = -1.0,
    hi: float = 1.0,
) -> BettingTest:
    """Test "the mean of d is at least the margin", and the opposite, at every item at once.

    Wealth K_t = prod (1 + lam_i (m - d_i)) with each stake fixed before its item is seen: lam_i = m/v_i, at most
    0.9/(hi - m), where v_i is the mean square of the differences so far, shrunk to 5% by a prior worth 40 items. Under
    "mean at least m" K is a nonnegative supermartingale, so P(K ever reaches 1/alpha) <= alpha (Ville); stopping,
    resuming and appending items are all allowed. Waudby-Smith and Ramdas, JRSS B 86 (2024). The margin is positive.
    Differences must come in random order. The mirrored bet tests the other side.
    """
    x = finite_vector("d", d)
    bad = np.flatnonzero((x < lo - 1e-9) | (x > hi + 1e-9))
    if bad.size:
        raise ValueError(
            f"'d' is '{x[bad[0]]}' at index {bad[0]}; it must lie between {lo:g} and {hi:g}"
        )
    margin_inside(margin, max(lo, 0.0), hi)
    level_alpha(alpha)
    level_alpha(reject_alpha)
    seen = np.arange(x.size)
    squares_before = np.concatenate(([0.0], np.cumsum(x * x)[:-1]))
    stake = margin / ((2.0 + squares_before) / (40.0 + seen))
    accept = np.cumsum(np.log1p(np.minimum(stake, 0.9 / (hi - margin)) * (margin - x)))
    reject = np.cumsum(np.log1p(np.minimum(stake, 0.9 / (margin - lo)) * (x - margin)))
    return BettingTest(
        wealth_accept=_exp(accept[-1]),
        wealth_reject=_exp(reject[-1]),
        p_accept=min(1.0, math.exp(-float(accept.max()))),
        p_reject=min(1.0, math.exp(-float(reject.max()))),
        accepted_at=_first_reaching(accept, -math.log(alpha)),
        rejected_at=_first_reaching(reject, -math.log(reject_alpha)),
        n=x.size,
    )


def betting_loss(
    baseline: ArrayLike,
    variant: ArrayLike,
    margin: float,
    *,
    alpha: float = 0.05,
    reject_alpha: float = 0.05,
) -> NonInferiority:
    """Judge the mean of baseline - variant by its margin with `betting_test`; scores in [0, 1], in random order.

    The bounds are the margins at which the anytime-valid p-values cross the levels, so the decision at `margin` and
    the bounds agree; they hold at every look. A lower bound that is not above 0 is -1: bets need a positive margin.
    """
    base, var = finite_vector("baseline", baseline), finite_vector("variant", variant)
    same_length("baseline", base, "variant", var)
    d = base - var
    test = betting_test(d, margin, alpha, reject_alpha)

    def accepts(m: float) -> bool:
        return betting_test(d, m, alpha, reject_alpha).p_accept <= alpha

    def not_rejects(m: float) -> bool:
        return betting_test(d, m, alpha, reject_alpha).p_reject > reject_alpha

    accepted, rejected = test.p_accept <= alpha, test.p_reject <= reject_alpha
    edge = 1.0 - 1e-6
    if accepted:
        upper = _crossing(accepts, 1e-6, margin)
    else:
        upper = _crossing(accepts, margin, edge) if accepts(edge) else 1.0
    if rejected:
        lower = _crossing(not_rejects, margin, edge)
    elif not_rejects(1e-6):
        lower = -1.0
    else:
        lower = _crossing(not_rejects, 1e-6, margin)
    return NonInferiority(
        loss=float(d.mean()),
        lower=lower,
        upper=upper,
        margin=margin,
        p_accept=test.p_accept,
        p_reject=test.p_reject,
        alpha=alpha,
        reject_alpha=reject_alpha,
        n=d.size,
        method="betting",
    )


def _crossing(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return the margin, to 1e-5, from which on a condition that holds at `high` holds."""
    if holds(low):
        return low
    while high - low > 1e-5:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _exp(log_wealth: float) -> float:
    return math.exp(min(float(log_wealth), 700.0))


def _first_reaching(log_wealth: FloatArray, limit: float) -> int | None:
    reached = np.flatnonzero(log_wealth >= limit)
    return int(reached[0]) + 1 if reached.size else None

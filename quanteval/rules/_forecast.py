"""What a rule on paired 0/1 scores can decide before it is run: sums over all tables, no simulation.

A harmless variant flips problems evenly in both directions, at the rate that the suite is said to have;
a loss comes on top of these flips. Up to 1000 problems the figures are those of the exact test, beyond
that Tango's, which is then the same to a few tenths of a per cent; above 20,000 some are normal
approximations. A relative margin is counted as the points it is worth at the baseline's score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import ndtri

from quanteval.evidence import Forecast, SuiteFacts
from quanteval.rules._common import FloatArray, percent
from quanteval.rules.margin import Margin
from quanteval.stats import (
    accept_probability,
    certifiable_margin,
    certifiable_margin_approx,
    detectable_drop,
    exact_accept,
    operating_characteristics,
    pairs_needed,
    pairs_needed_approx,
    point_rule_error,
    recovery_score,
    tango_p,
)
from quanteval.stats.exact import MAX_EXACT_PAIRS

POWER = 0.8
COMPLETIONS = 4
_EXACT_LIMIT = 1000  # beyond, the exact test's power is Tango's to a few tenths of a per cent
_EXACT_SEARCH_LIMIT = 500  # searches ask for the power many times
_SEARCH_LIMIT = 20_000
_NORMAL_FLIPS = 100.0  # as many expected flips make the normal approximation good to a per cent
_NORMAL_FLIPS_NEEDED = 300.0
_RARE_MARGIN = 0.02  # below, flips are rare events: only n margin and n flips matter

Method = Literal["exact", "tango"]


@dataclass(frozen=True)
class _Test:
    """The test of one rule on one suite: n problems, its margin in points of accuracy, its level."""

    n: int
    limit: float
    alpha: float
    method: Method
    relative: float | None = None
    """The margin as a share of the baseline's score, for the test of the ratio."""
    score: float | None = None

    @property
    def cheap(self) -> Method:
        """The method whose power is computed."""
        return self.method if self.n <= _EXACT_LIMIT else "tango"

    def accept(self, n: int, flips: float, drop: float = 0.0) -> float:
        """Return P(accept) with n problems, when flips of the noise and a drop are given."""
        rule: Method = self.method if n <= _EXACT_LIMIT else "tango"
        rate = min(1.0, flips + drop)
        return accept_probability(n, rate, drop, self.limit, alpha=self.alpha, rule=rule)

    def reject(self, flips: float, drop: float) -> float:
        """Return P(reject) when a drop comes on top of the flips of the noise."""
        return operating_characteristics(
            self.n, min(1.0, flips + drop), drop, self.limit,
            alpha=self.alpha, reject_alpha=self.alpha, rule=self.cheap,
        ).reject  # fmt: skip

    @property
    def solved(self) -> int:
        """How many problems the baseline solves, all of them where that is not known."""
        return self.n if self.score is None else round(self.score * self.n)

    def accepts_table(self, broken: int, fixed: int) -> bool:
        """Say what the gate's own test says of a table."""
        if self.relative is not None:
            x, y = _scores(self.n, self.solved, broken, fixed)
            return recovery_score(x, y, 1 - self.relative) <= float(ndtri(self.alpha))
        return self._below(broken, fixed, self.limit)

    def rejects_table(self, broken: int, fixed: int) -> bool:
        """Say what the gate's own test says of a table."""
        if self.relative is not None:
            x, y = _scores(self.n, self.solved, broken, fixed)
            return recovery_score(x, y, 1 - self.relative) >= -float(ndtri(self.alpha))
        return self._below(fixed, broken, -self.limit)

    def _below(self, broken: int, fixed: int, margin: float) -> bool:
        if self.method == "exact" and self.n <= MAX_EXACT_PAIRS:
            return exact_accept(broken, fixed, self.n, margin, self.alpha)
        return tango_p(broken, fixed, self.n, margin) <= self.alpha

    @property
    def without_flips(self) -> int:
        """How many problems it takes to accept a variant that answers exactly like the baseline."""
        margin = self.limit if self.relative is None else self.relative
        # Tango's bound without a flip is z^2/(n + z^2).
        tango = math.floor(float(ndtri(self.alpha)) ** 2 * (1 - margin) / margin) + 1
        if self.relative is not None:  # the test of the ratio counts the problems solved
            return math.ceil(tango / max(self.solved / self.n, 1e-9))
        return tango if self.method == "tango" else _exact_without_flips(margin, self.alpha, tango)


def _exact_without_flips(margin: float, alpha: float, tango: int) -> int:
    """Return from how many pairs on the exact test accepts when nothing flips; beyond its reach, Tango's."""
    low = math.ceil(math.log(alpha) / math.log1p(-margin))  # its p-value is at least (1 - margin)^n
    if low > MAX_EXACT_PAIRS:
        return max(MAX_EXACT_PAIRS + 1, tango)
    if exact_accept(0, 0, low, margin, alpha):
        return low
    high = low
    while not exact_accept(0, 0, high, margin, alpha):
        low, high = high, math.ceil(1.2 * high) + 1
        if high > MAX_EXACT_PAIRS:
            return max(MAX_EXACT_PAIRS + 1, tango)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if exact_accept(0, 0, middle, margin, alpha) else (middle, high)
    return high


def _scores(n: int, solved: int, broken: int, fixed: int) -> tuple[FloatArray, FloatArray]:
    x = (np.arange(n) < solved).astype(np.float64)
    y = x.copy()
    y[:broken] = 0.0
    y[n - fixed :] = 1.0
    return x, y


def forecast_loss(
    name: str, margin: Margin, suite: SuiteFacts, alpha: float, method: str = "auto"
) -> Forecast:
    """Return what a non-inferiority rule decides on one task, if a harmless variant flips as the suite says.

    `method` is the rule's. Shares are in the margin's own unit. Nothing is returned for what cannot be: a loss
    above the baseline's score, and a margin or a loss that nothing would show.
    """
    n, flips = suite.n, suite.flip_rate
    score = suite.score
    worth = (0.5 if score is None else score) if margin.is_relative else 1.0
    limit = margin.value * worth
    assumed = f"{percent(flips)} flips ({suite.source})"
    if margin.is_relative:
        seen = "assumed" if score is None else "seen"
        assumed += f", baseline at {percent(worth)} ({seen}): worth {100 * limit:.2g} points"
    problem = ""
    if margin.is_relative and worth < max(margin.min_baseline, 1e-9):
        problem = (
            f"the baseline scores {percent(worth)}, a relative margin needs "
            f"{percent(margin.min_baseline)}"
        )
    elif method == "exact" and n > MAX_EXACT_PAIRS:
        problem = f'{n} problems, the exact test takes {MAX_EXACT_PAIRS}: use method "auto"'
    if problem:
        return Forecast(
            name, suite.task, n, margin.text, assumed, accept_harmless=0.0,
            warnings=(f"can never decide: {problem}",),
        )  # fmt: skip
    double = 2 * limit if 2 * limit <= (1.0 if score is None else score) else None
    if method == "point":
        return _point(name, margin, suite, assumed, limit, double)
    test = _Test(
        n, limit, alpha,
        "tango" if method == "score" or margin.is_relative else "exact",
        margin.value if margin.is_relative else None,
        worth if margin.is_relative else score,
    )  # fmt: skip
    harmless = test.accept(n, flips)
    certifiable: float | None = _certifiable(test, flips) / worth
    detectable: float | None = _detectable(test, flips) / worth
    if certifiable is not None and certifiable >= 1:
        certifiable = None
    largest = 1.0 if score is None or margin.is_relative else score
    if detectable is not None and detectable >= largest:
        detectable = None
    return Forecast(
        rule=name,
        task=suite.task,
        n=n,
        margin=margin.text,
        assumed=assumed,
        certifiable=certifiable,
        detectable=detectable,
        n_needed=_needed(test, flips),
        accept_harmless=harmless,
        reject_double=None if double is None else test.reject(flips, double),
        remarks=(
            *_impossible(margin, suite, double),
            *(
                ("no loss, however large, is sure enough to be detected",)
                if detectable is None
                else ()
            ),
            *(_what_more_buys(test, flips) if harmless < POWER else ()),
        ),
        warnings=_warnings(test, harmless),
    )


def _point(
    name: str,
    margin: Margin,
    suite: SuiteFacts,
    assumed: str,
    limit: float,
    double: float | None,
) -> Forecast:
    """Return how often a bare comparison of the scores goes which way; it has no certainty to plan for."""
    n, flips = suite.n, suite.flip_rate
    wrong = point_rule_error(n, min(1.0, flips + limit), limit)
    return Forecast(
        rule=name,
        task=suite.task,
        n=n,
        margin=margin.text,
        assumed=assumed,
        accept_harmless=accept_probability(n, flips, 0.0, limit, rule="point"),
        reject_double=None
        if double is None
        else 1 - accept_probability(n, min(1.0, flips + double), double, limit, rule="point"),
        remarks=(
            f"not a statistical test: it passes a loss exactly at the margin {percent(wrong)} of the time",
            *_impossible(margin, suite, double),
        ),
    )


def _impossible(margin: Margin, suite: SuiteFacts, double: float | None) -> tuple[str, ...]:
    if double is not None:
        return ()
    if suite.score is None or margin.is_relative:
        return ("a loss of twice the margin cannot be: it is more than all",)
    return (f"a loss of twice the margin cannot be: the baseline scores {percent(suite.score)}",)


def _warnings(test: _Test, harmless: float) -> tuple[str, ...]:
    found = []
    if not test.accepts_table(0, test.n if test.score is None else test.n - test.solved):
        found.append(f"can never accept: n={test.n} is too few, whatever is measured")
    elif not test.accepts_table(0, 0):
        found.append(
            "cannot accept a variant that answers exactly like the baseline: that takes "
            f"{test.without_flips} problems"
        )
    elif harmless < POWER:
        found.append(f"a harmless variant is accepted in {percent(harmless)} of runs only")
    if test.accepts_table(test.solved, 0):
        found.append(
            f"accepts even a variant that solves nothing: the baseline solves {test.solved} of {test.n}"
        )
    if not test.rejects_table(test.solved, 0):
        everything = (
            "everything breaks" if test.score is None else "all that the baseline solves is lost"
        )
        found.append(f"can never reject: not even when {everything}")
    return tuple(found)


def _what_more_buys(test: _Test, flips: float) -> tuple[str, ...]:
    """Say what more problems, and several completions of each, would do for an undecided rule."""
    found = [
        "with twice the problems (or a second suite like this one, pooled) a harmless variant is "
        f"accepted in {percent(test.accept(2 * test.n, flips))} of runs"
    ]
    # The mean of k completions varies by 1/k of what one does, where flips are noise.
    several = test.accept(test.n, flips / COMPLETIONS)
    if flips and several > test.accept(test.n, flips):
        found.append(
            f"with {COMPLETIONS} sampled completions of each problem, in about {percent(several)} of runs, if all "
            "flips are noise"
        )
    return tuple(found)


def _certifiable(test: _Test, flips: float) -> float:
    """Return the smallest margin accepted with the given power, in points; 1 for none."""
    n, alpha = test.n, test.alpha
    if n <= _SEARCH_LIMIT:
        rule: Method = test.method if n <= _EXACT_SEARCH_LIMIT else "tango"
        return certifiable_margin(n, flips, alpha, POWER, rule=rule)
    if n * flips >= _NORMAL_FLIPS:
        return certifiable_margin_approx(n, flips, alpha, POWER)
    fold = n / _SEARCH_LIMIT  # rare events: only n flips and n margin matter
    return certifiable_margin(_SEARCH_LIMIT, flips * fold, alpha, POWER) / fold


def _detectable(test: _Test, flips: float) -> float:
    """Return the smallest drop that is found with the given power, in points; 1 for none."""
    n, alpha = test.n, test.alpha
    if flips >= 1:
        return 1.0
    if n <= _SEARCH_LIMIT:
        return detectable_drop(n, flips, alpha, POWER)
    if n * flips < _NORMAL_FLIPS:
        fold = n / _SEARCH_LIMIT
        return detectable_drop(_SEARCH_LIMIT, flips * fold, alpha, POWER) / fold
    drop = 0.0
    for _ in range(20):  # drop sqrt(n) = z_alpha sqrt(f + drop) + z_power sqrt(f + drop - drop^2)
        spread = flips + drop
        drop = -float(ndtri(alpha)) * math.sqrt(spread) + float(ndtri(POWER)) * math.sqrt(
            spread - drop**2
        )
        drop /= math.sqrt(n)
    return drop


def _needed(test: _Test, flips: float) -> int:
    """Return from how many problems on a harmless variant is accepted with the given power, to about 2 %."""
    # A variant that is not accepted even without a flip is accepted in less than half of all runs.
    return max(_pairs(test.limit, flips, test.alpha, test.method), test.without_flips)


def _pairs(limit: float, flips: float, alpha: float, method: Method) -> int:
    fold = _RARE_MARGIN / limit
    if fold > 1 and flips * fold <= 0.3:
        return math.ceil(_pairs(_RARE_MARGIN, flips * fold, alpha, method) * fold)
    about = pairs_needed_approx(limit, flips, 0.0, alpha, POWER)
    if about > _SEARCH_LIMIT or about * flips > _NORMAL_FLIPS_NEEDED:
        return about
    needed = pairs_needed(limit, flips, 0.0, alpha, POWER)
    if method == "exact" and 10 <= needed <= _EXACT_SEARCH_LIMIT:
        return pairs_needed(limit, flips, 0.0, alpha, POWER, rule="exact")
    return needed

"""Error rates of the shipped gate: which evidence `decide` accepts, and how often such evidence comes about.

For 0/1 scores nothing is simulated: the tables of flips that the gate accepts are found by asking it, and their
probabilities are summed here without the package's statistics. Fractions and documents are drawn from seeded
populations whose loss is known. `python benchmarks/gate_grid.py` prints all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import special, stats

from quanteval.evidence import RuleContext, ScoreSet, SuiteFacts
from quanteval.gate import decide
from quanteval.policy import Policy, load_policy
from tests.gate import evidence as make

SIZES = (20, 50, 164, 500, 1319)
MARGINS = (1, 2, 5)
"""In points."""
FLIPS = (0.01, 0.02, 0.05, 0.10, 0.20)
LEFT_OUT = 1e-9
"""Probability of more fixed pairs than are enumerated, at most."""
LIMIT = 0.06
"""What a simulated rate of wrong acceptance may be: the level of 5 % and a point for approximations."""


def code_policy(points: float) -> Policy:
    """Return a policy with one required rule on 0/1 or fractional scores, everything else by default."""
    return _policy(
        "quanteval.rules.non_inferiority.NonInferiority", kind="code", margin=f"{points:g} points"
    )


def perplexity_policy(max_ratio: float) -> Policy:
    """Return a policy with one required rule on perplexity."""
    return _policy(
        "quanteval.rules.perplexity.PerplexityRatio", kind="perplexity", max_ratio=max_ratio
    )


def _policy(target: str, **fields: object) -> Policy:
    return load_policy(
        {"version": 1, "name": "one", "rules": {"only": {"_target_": target, **fields}}}
    )


def verdict(policy: Policy, base: ScoreSet, cand: ScoreSet) -> str:
    """Return the gate's outcome on one task."""
    task = base.record.task
    return decide(
        policy, make.variant("base", base), make.variant("cand", cand), tasks=(task,)
    ).outcome


# --------------------------------------------------------------------------- 0/1 scores, exactly


class Enumeration:
    """All outcomes of the gate on n pairs of 0/1 scores, asked one table of flips at a time and remembered."""

    def __init__(self, n: int, points: float) -> None:
        self.n, self.points, self.margin = n, points, points / 100
        self.policy = code_policy(points)
        self.outcome = lru_cache(maxsize=None)(self._outcome)
        self._largest: list[int] = []

    def _outcome(self, broken: int, fixed: int) -> str:
        base, cand = np.zeros(self.n), np.zeros(self.n)
        base[:broken] = 1
        cand[broken : broken + fixed] = 1
        kept = (self.n - broken - fixed) // 2
        base[self.n - kept :] = cand[self.n - kept :] = 1
        return verdict(self.policy, make.scores(values=base), make.scores(values=cand))

    @property
    def calls(self) -> int:
        """How many tables the gate was asked about."""
        return self.outcome.cache_info().misses

    def accepted(self, most_fixed: int) -> list[int]:
        """Return, for each number of fixed pairs up to the given one, the most broken pairs accepted (-1: none).

        Bisection, begun next to the answer for one fixed pair less; needs acceptance to end once in each row.
        """
        while len(self._largest) <= most_fixed:
            fixed = len(self._largest)
            guess = self._largest[-1] + 1 if self._largest else 0
            self._largest.append(
                last_true(lambda b, c=fixed: self.outcome(b, c) == "accept", guess, self.n - fixed)
            )
        return self._largest[: most_fixed + 1]

    def probability(self, flips: float, drop: float) -> float:
        """Return the probability that the gate accepts at a true flip rate and drop."""
        region = self.accepted(most_fixed(self.n, (flips - drop) / 2))
        return trinomial(region, self.n, (flips + drop) / 2, (flips - drop) / 2)

    def harmless(self, flips: float) -> float | None:
        """Return what the rule itself foretells of a variant without loss."""
        suite = SuiteFacts("code", "code", self.n, flip_rate=flips)
        (forecast,) = self.policy.rules["only"].forecast("only", {"code": suite}, RuleContext())
        return forecast.accept_harmless


def last_true(holds: Callable[[int], bool], guess: int, top: int) -> int:
    """Return the largest k <= top for which something holds, -1 for none, if it holds up to there and not beyond."""
    inside, outside = -1, top + 1
    at, step = min(max(guess, 0), top), 1
    while outside - inside > 1:
        if holds(at):
            inside, at = at, at + step
        else:
            outside, at = at, at - step
        step *= 2
        if not inside < at < outside:
            at = (inside + outside) // 2
    return inside


def most_fixed(n: int, probability: float) -> int:
    """Return a number of fixed pairs that is exceeded with negligible probability."""
    return int(stats.binom.isf(LEFT_OUT, n, probability)) if probability > 0 else 0


def trinomial(region: Sequence[int], n: int, broken: float, fixed: float) -> float:
    """Return the probability of the tables with at most region[c] broken pairs beside c fixed ones, term by term."""
    total = 0.0
    for c, largest in enumerate(region):
        b = np.arange(largest + 1)
        same = n - b - c
        log = special.gammaln(n + 1) - special.gammaln(c + 1)
        log = log - special.gammaln(b + 1) - special.gammaln(same + 1)
        log = log + special.xlogy(b, broken) + special.xlogy(c, fixed)
        total += float(np.exp(log + special.xlogy(same, max(0.0, 1 - broken - fixed))).sum())
    return total


def point_rule(n: int, margin: float, rows: int) -> list[int]:
    """Return what "accept when the loss seen is within the margin" accepts."""
    slack = int(np.floor(n * margin + 1e-9))
    return [min(c + slack, n - c) for c in range(rows)]


def not_significant(n: int, rows: int, alpha: float = 0.05) -> list[int]:
    """Return what "accept unless significantly worse" accepts, by the one-sided exact McNemar test."""

    def harmless(c: int) -> Callable[[int], bool]:
        return lambda b: b == 0 or stats.binom.sf(b - 1, b + c, 0.5) >= alpha

    return [last_true(harmless(c), c, n - c) for c in range(rows)]


@dataclass(frozen=True)
class Rates:
    """Probabilities of acceptance: three ways of deciding at a loss of exactly the margin, the gate also at no loss."""

    n: int
    points: int
    flips: float
    gate: float
    point: float
    not_worse: float
    power: float


def rates(found: Enumeration, flips: float) -> Rates:
    """Return the rates of one cell of the grid."""
    n, margin = found.n, found.margin
    broken, fixed = (flips + margin) / 2, (flips - margin) / 2
    rows = most_fixed(n, fixed) + 1
    return Rates(
        n=n,
        points=int(found.points),
        flips=flips,
        gate=found.probability(flips, margin),
        point=trinomial(point_rule(n, margin, rows), n, broken, fixed),
        not_worse=trinomial(not_significant(n, rows), n, broken, fixed),
        power=found.probability(flips, 0.0),
    )


def cells(
    sizes: Sequence[int] = SIZES, flips: Sequence[float] = FLIPS
) -> list[tuple[int, int, float]]:
    """Return n, margin in points and flip rate of the grid; the lowest flip rate is the margin, all flips losses."""
    return [(n, m, f) for n in sizes for m in MARGINS for f in flips if f >= m / 100]


# --------------------------------------------------------------------------- fractions, by simulation

Samples = np.ndarray
"""[problems, samples a problem], 0 or 1; or [problems, 1] with partial credit."""
Draw = Callable[[np.random.Generator, int, int, float], tuple[Samples, Samples]]
SOLVED = (1.0, 0.6)
"""Beta distribution of the baseline's pass rates, most of them near 0 or 1 as models' are."""


def _passes(rng, before, after, samples):
    shape = (len(before), samples)
    return (rng.random(shape) < before[:, None]) * 1.0, (rng.random(shape) < after[:, None]) * 1.0


def even(rng, problems, samples, loss):
    """Every problem loses the same share of its passes."""
    mean = SOLVED[0] / sum(SOLVED)
    before = rng.beta(*SOLVED, problems)
    return _passes(rng, before, before * (1 - loss / mean), samples)


def both_ways(rng, problems, samples, loss):
    """Some problems are lost altogether and 3 % are solved altogether."""
    mean, gained = SOLVED[0] / sum(SOLVED), 0.03
    before, u = rng.beta(*SOLVED, problems), rng.random(problems)
    lost = (loss + gained * (1 - mean)) / mean
    after = np.where(u < lost, 0.0, np.where(u > 1 - gained, 1.0, before))
    return _passes(rng, before, after, samples)


def halved(rng, problems, samples, loss):
    """All is solved; a few problems lose half of their passes, the others nothing."""
    hit = rng.random(problems) < 2 * loss
    return _passes(rng, np.ones(problems), np.where(hit, 0.5, 1.0), samples)


def partial_credit(rng, problems, samples, loss):
    """Nine of ten problems are solved and one gets half credit; what is lost is lost whole."""
    hit, half = rng.random(problems) < loss, rng.random(problems) < 0.1
    return np.where(half, 0.5, 1.0)[:, None], np.where(hit, 0.0, np.where(half, 0.5, 1.0))[:, None]


@dataclass(frozen=True)
class Cell:
    """A suite of problems with several samples each, and how its loss is spread over them."""

    draw: Draw
    problems: int
    samples: int
    points: float

    def fractions(self, x: Samples) -> ScoreSet:
        """Return the pass rates, one row a problem."""
        return make.scores(values=x.mean(axis=1))

    def rows(self, x: Samples) -> ScoreSet:
        """Return one row a sample, which the rule has to average by problem."""
        problems = tuple(f"problem {i}" for i in range(len(x)) for _ in range(x.shape[1]))
        return make.scores(values=x.ravel(), problem_ids=problems)

    def pooled(self, x: Samples) -> ScoreSet:
        """Return one row a sample, wrongly, as if each were a problem of its own."""
        return make.scores(values=x.ravel())

    def replicates(self, count: int, loss: float, seed: int):
        """Yield the samples of baseline and candidate, drawn anew with their problems."""
        rng = np.random.default_rng(seed)
        for _ in range(count):
            yield self.draw(rng, self.problems, self.samples, loss)

    def accepted(self, count: int, loss: float, seed: int) -> float:
        """Return the share of replicates that the gate accepts; every other one goes in as rows of samples."""
        policy, accepted = code_policy(self.points), 0
        for k, (x, y) in enumerate(self.replicates(count, loss, seed)):
            form = self.rows if k % 2 and self.samples > 1 else self.fractions
            accepted += verdict(policy, form(x), form(y)) == "accept"
        return accepted / count

    def within(self, count: int, loss: float, seed: int) -> float:
        """Return the share of replicates whose loss seen is within the margin."""
        drawn = self.replicates(count, loss, seed)
        return sum((x - y).mean() <= self.points / 100 + 1e-12 for x, y in drawn) / count


FRACTIONS = (
    Cell(even, 50, 5, 5),
    Cell(even, 164, 5, 2),
    Cell(even, 164, 5, 5),
    Cell(even, 164, 10, 2),
    Cell(even, 164, 10, 5),
    Cell(both_ways, 50, 5, 5),
    Cell(both_ways, 164, 5, 2),
    Cell(both_ways, 164, 5, 5),
    Cell(both_ways, 164, 10, 2),
    Cell(both_ways, 164, 10, 5),
    Cell(halved, 50, 5, 5),
    Cell(halved, 164, 5, 2),
    Cell(halved, 164, 10, 2),
    Cell(halved, 500, 5, 2),
    Cell(partial_credit, 52, 1, 5),
    Cell(partial_credit, 164, 1, 2),
)


# --------------------------------------------------------------------------- documents, by simulation


def normal(rng, n):
    """Effects of documents that scatter evenly."""
    return rng.standard_normal(n)


def skewed(rng, n):
    """Effects of documents with a tail of a few that suffer most: exponential."""
    return rng.exponential(1.0, n) - 1.0


def mildly_skewed(rng, n):
    """Effects of documents with a short tail: gamma with shape 4, skewness 1."""
    return (rng.gamma(4.0, 1.0, n) - 4.0) / 2.0


@dataclass(frozen=True)
class Documents:
    """Documents whose log-likelihoods all change by the margin and an effect of their own."""

    effect: Callable[[np.random.Generator, int], np.ndarray]
    documents: int
    uneven: float
    """Standard deviation of ln(tokens)."""
    max_ratio: float = 1.05
    spread: float = 0.03
    """Standard deviation of the effects, nats a token."""

    def accepted(self, count: int, ratio: float, seed: int) -> tuple[float, float]:
        """Return the shares of replicates accepted by the gate, and with a ratio seen within the margin."""
        rng, policy = np.random.default_rng(seed), perplexity_policy(self.max_ratio)
        accepted = within = 0
        for _ in range(count):
            tokens = np.ceil(400 * np.exp(self.uneven * rng.standard_normal(self.documents)))
            change = np.log(ratio) + self.spread * self.effect(rng, self.documents)
            base = tokens * rng.normal(2.7, 0.3, self.documents)
            cand = base + tokens * change
            first, second = (make.perplexity(v, weight=tokens) for v in (base, cand))
            accepted += verdict(policy, first, second) == "accept"
            within += (cand - base).sum() <= np.log(self.max_ratio) * tokens.sum()
        return accepted / count, within / count


DOCUMENTS = tuple(
    Documents(effect, n, uneven)
    for effect, uneven in ((normal, 0.0), (normal, 0.7), (mildly_skewed, 0.7), (skewed, 0.7))
    for n in (10, 20, 60)
)


def standard_error(share: float, count: int) -> float:
    """Return the standard error of a simulated share."""
    return float(np.sqrt(share * (1 - share) / count))

"""Distributions of prompt and output lengths in tokens, and the buckets that reports name.

A distribution is a map from a number in [0, 1) to a length (its inverse distribution function).
Draws are stratified: in every BLOCK of requests each twentieth of the distribution occurs exactly
once, so that two draws of one size are nearly alike in work and differ in their order.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist

from quanteval.bench.logs import read_numbers
from quanteval.errors import ConfigError

BLOCK = 20
EDGES = (199, 1000)
"""Ends of the reported buckets where a workload names none: short, middle and long prompts."""


def _refuse_range(low: int, high: int) -> None:
    if not 1 <= low <= high:
        raise ValueError(f'lengths "{low}-{high}" must be 1 <= low <= high')


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths; `at` is all that a kind of it has to say."""

    def at(self, u: float) -> int:
        """Return the length at the share `u` of the distribution, 0 <= u < 1."""
        raise NotImplementedError

    def pair_at(self, u: float) -> tuple[int, int] | None:
        """Return a prompt length and the output length that came with it; None where there are no pairs."""
        return None

    @property
    def longest(self) -> int:
        """The longest length there is."""
        return self.at(math.nextafter(1.0, 0.0))


@dataclass(frozen=True)
class Fixed(Lengths):
    """Always the same length."""

    tokens: int

    def __post_init__(self) -> None:
        _refuse_range(self.tokens, self.tokens)

    def at(self, u: float) -> int:
        """The length."""
        return self.tokens


@dataclass(frozen=True)
class Uniform(Lengths):
    """Every length from `low` to `high`, both included, equally often."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _refuse_range(self.low, self.high)

    def at(self, u: float) -> int:
        """Linear in u."""
        return min(self.high, self.low + int(u * (self.high - self.low + 1)))


@dataclass(frozen=True)
class Lognormal(Lengths):
    """A long tail: the logarithm is normal around that of `median` with deviation `sigma`, cut off at `low` and `high`.

    The distribution is truncated, not clamped: no length piles up at an end.
    """

    median: float
    sigma: float
    low: int = 1
    high: int = 8192

    def __post_init__(self) -> None:
        _refuse_range(self.low, self.high)
        if not (self.low <= self.median <= self.high and 0 < self.sigma < math.inf):
            raise ValueError(
                f'median "{self.median}" must lie between low and high, and sigma "{self.sigma}" be positive'
            )

    def at(self, u: float) -> int:
        """By the inverse of the normal distribution."""
        normal = NormalDist(math.log(self.median), self.sigma)
        low, high = normal.cdf(math.log(self.low - 0.5)), normal.cdf(math.log(self.high + 0.5))
        share = min(max(low + u * (high - low), 1e-12), 1 - 1e-12)
        return min(max(round(math.exp(normal.inv_cdf(share))), self.low), self.high)


@dataclass(frozen=True)
class Range:
    """A range of lengths, both ends included, and its share of the requests."""

    low: int
    high: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        _refuse_range(self.low, self.high)
        if not 0 < self.weight < math.inf:
            raise ValueError(f'weight "{self.weight}" of "{self.low}-{self.high}" must be positive')


@dataclass(frozen=True)
class Mixture(Lengths):
    """Ranges in the shares of their weights, each log-uniform (as many from 10 to 100 as from 100 to 1000).

    Without ranges the stated default: 70 % under 200 tokens, 20 % from 200 to 1000, 10 % above 1000.
    """

    ranges: tuple[Range, ...] = (Range(16, 199, 0.7), Range(200, 1000, 0.2), Range(1001, 4096, 0.1))

    def __post_init__(self) -> None:
        if not self.ranges:
            raise ValueError("a mixture needs at least one range")

    def at(self, u: float) -> int:
        """The range that holds u, then log-uniform within it."""
        total = sum(part.weight for part in self.ranges)
        left = u * total
        for part in self.ranges:
            # The tolerance keeps a stratum's end out of the next range: 0.7 + 0.2 is not 0.9.
            if left < part.weight - 1e-9 * total or part is self.ranges[-1]:
                share = min(max(left / part.weight, 0.0), 1.0)
                low, high = math.log(part.low - 0.5), math.log(part.high + 0.5)
                return min(max(round(math.exp(low + share * (high - low))), part.low), part.high)
            left = max(0.0, left - part.weight)
        raise AssertionError("unreachable: the last range takes the rest")


@dataclass(frozen=True)
class Empirical(Lengths):
    """Lengths as they occurred: from JSONL or CSV records with a prompt field, or a plain file of numbers.

    With an `output_field`, outputs are drawn together with their prompts, so that what belongs
    together stays together. `skip_zero` leaves out records of length 0 instead of refusing them.
    """

    file: str
    prompt_field: str = "prompt_tokens"
    output_field: str | None = None
    skip_zero: bool = False

    def at(self, u: float) -> int:
        """The recorded prompt length at u."""
        rows = self._rows()
        return rows[min(int(u * len(rows)), len(rows) - 1)][0]

    def pair_at(self, u: float) -> tuple[int, int] | None:
        """The record at u in the order of prompt lengths."""
        if self.output_field is None:
            return None
        rows = self._rows()
        return rows[min(int(u * len(rows)), len(rows) - 1)]

    def _rows(self) -> tuple[tuple[int, int], ...]:
        return _recorded(self.file, self.prompt_field, self.output_field, self.skip_zero)


@cache
def _recorded(
    file: str, prompt_field: str, output_field: str | None, skip_zero: bool
) -> tuple[tuple[int, int], ...]:
    """Return the recorded pairs in order of prompt length; ConfigError for a length that is none."""
    fields = (prompt_field,) if output_field is None else (prompt_field, output_field)
    rows = []
    for line, values in read_numbers(Path(file), fields):
        if skip_zero and any(value == 0 for value in values):
            continue
        for name, value in zip(fields, values, strict=True):
            if value < 1 or value != int(value):
                raise ConfigError(
                    f'"{file}" line {line}: {name} "{value:g}" is no length: it must be a whole number of '
                    "at least 1 (skip_zero: true leaves out records of length 0)"
                )
        rows.append((int(values[0]), int(values[-1])))
    if not rows:
        raise ConfigError(f'"{file}" holds no record with a length above 0')
    return tuple(sorted(rows))


def stratified(seed: int | str) -> Iterator[float]:
    """Yield numbers in [0, 1) without end, one of each twentieth in every BLOCK, in random order."""
    rng = random.Random(f"{seed}/lengths")
    while True:
        block = [
            min((i + rng.random()) / BLOCK, math.nextafter((i + 1) / BLOCK, 0))
            for i in range(BLOCK)
        ]
        rng.shuffle(block)
        yield from block


def draw(prompts: Lengths, outputs: Lengths, seed: int | str) -> Iterator[tuple[int, int]]:
    """Yield prompt and output lengths without end; recorded pairs stay together."""
    of_outputs = stratified(f"{seed}/outputs")
    for u in stratified(f"{seed}/prompts"):
        pair = prompts.pair_at(u)
        yield (prompts.at(u), outputs.at(next(of_outputs))) if pair is None else pair


def bucket_name(tokens: int, edges: Sequence[int]) -> str:
    """Return the bucket of a length: '1-199', '200-1000', '1001+' for edges 199 and 1000."""
    i = bisect_right(edges, tokens - 1)
    low = edges[i - 1] + 1 if i else 1
    return f"{low}-{edges[i]}" if i < len(edges) else f"{low}+"

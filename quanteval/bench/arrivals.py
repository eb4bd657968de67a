"""When the requests of an open loop arrive: endless iterators of seconds since the load point began.

The same seed gives the same trace whatever is served, and the traces of two rates differ in their
scale alone, so that variants and loads meet the same bursts.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quanteval.bench.logs import read_numbers
from quanteval.errors import ConfigError

Process = Literal["closed", "constant", "poisson", "gamma", "replay"]


def constant(rate: float) -> Iterator[float]:
    """Yield times at equal distances, the first at 0."""
    _refuse_rate(rate)
    return (i / rate for i in itertools.count())


def poisson(rate: float, seed: int | str) -> Iterator[float]:
    """Yield times with independent exponential gaps of mean 1/rate."""
    _refuse_rate(rate)
    rng = random.Random(f"{seed}/poisson")
    return (t / rate for t in itertools.accumulate(-math.log1p(-rng.random()) for _ in _forever()))


def gamma(rate: float, cv: float, seed: int | str) -> Iterator[float]:
    """Yield times with independent gamma gaps of mean 1/rate and coefficient of variation `cv`.

    1 is Poisson, above 1 are bursts, below 1 is smoother than Poisson.
    """
    _refuse_rate(rate)
    if not 0 < cv < math.inf:
        raise ConfigError(f'cv "{cv}" of the arrivals must be positive and finite')
    rng = random.Random(f"{seed}/gamma")
    shape = 1 / cv**2
    return (
        t / rate
        for t in itertools.accumulate(rng.gammavariate(shape, 1 / shape) for _ in _forever())
    )


def replay(times: Sequence[float], rate: float | None = None) -> Iterator[float]:
    """Yield recorded times, moved to begin at 0, over and over; with a `rate`, stretched to that mean rate.

    Between two passes lies the mean gap. ConfigError for fewer than two times, or none apart.
    """
    ordered = sorted(times)
    span = ordered[-1] - ordered[0] if ordered else 0.0
    if not 0 < span < math.inf:
        raise ConfigError(
            f"{len(ordered)} recorded times without a span: at least two times apart are needed"
        )
    own_rate = (len(ordered) - 1) / span
    if rate is not None:
        _refuse_rate(rate)
    scale = 1.0 if rate is None else own_rate / rate
    lap = span + 1 / own_rate
    return (
        (t - ordered[0] + i * lap) * scale for i in itertools.count() for t in ordered
    )  # fmt: skip


@dataclass(frozen=True)
class Arrivals:
    """The arrival process of a workload.

    `process`: closed (slots kept full, no schedule), constant, poisson, gamma (with `cv`), or replay of the times in
    `file` (JSONL or CSV with `time_field`, or one number a line; seconds).
    """

    process: Process = "poisson"
    cv: float = 1.0
    file: str | None = None
    time_field: str = "time"

    def __post_init__(self) -> None:
        if not 0 < self.cv < math.inf:
            raise ValueError(f'cv "{self.cv}" must be positive and finite')
        if (self.file is not None) != (self.process == "replay"):
            raise ValueError(
                f'process "{self.process}": a file belongs to replay, and replay to a file'
            )

    def times(self, rate: float, seed: int | str) -> Iterator[float]:
        """Yield arrival times at a rate in requests/s. ConfigError for a closed loop, which has none."""
        if self.process == "constant":
            return constant(rate)
        if self.process == "poisson":
            return poisson(rate, seed)
        if self.process == "gamma":
            return gamma(rate, self.cv, seed)
        if self.process == "replay":
            return replay(self._recorded(), rate)
        raise ConfigError(
            'arrivals "closed" have no times: choose poisson, constant, gamma or replay'
        )

    def _recorded(self) -> list[float]:
        assert self.file is not None
        return [values[0] for _, values in read_numbers(Path(self.file), (self.time_field,))]


def _forever() -> Iterator[None]:
    return itertools.repeat(None)


def _refuse_rate(rate: float) -> None:
    if not 0 < rate < math.inf:
        raise ConfigError(f'rate "{rate}" of the arrivals must be positive and finite')

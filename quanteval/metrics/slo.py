"""Service-level objectives: what share of requests must be served how fast, and what one request must meet.

A term such as "ttft p99 0.5" means: at least 99 % of the requests see their first token within 0.5 s. Goodput counts
requests one by one, so it needs a limit for a single request: that of a metric's highest percentile, unless
`per_request` sets another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from quanteval.metrics.latency import e2e_s, ended_well, itl_s, tpot_s, ttft_s
from quanteval.records import RequestTrace

Metric = Literal["ttft", "itl", "tpot", "e2e"]
METRICS: tuple[Metric, ...] = ("ttft", "itl", "tpot", "e2e")
PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")


@dataclass(frozen=True)
class Term:
    """One promise: the `q` quantile of a latency is at most `limit_s`."""

    metric: Metric
    q: float
    limit_s: float

    @property
    def name(self) -> str:
        """'ttft p99'."""
        return f"{self.metric} p{100 * self.q:g}"

    @property
    def text(self) -> str:
        """'ttft p99 <= 0.5 s'."""
        return f"{self.name} <= {self.limit_s:g} s"

    def values(self, trace: RequestTrace) -> list[float]:
        """Return what a request that ended well adds to this latency's distribution; an ITL adds every gap."""
        if self.metric == "itl":
            return itl_s(trace)
        value = {"ttft": ttft_s, "tpot": tpot_s, "e2e": e2e_s}[self.metric](trace)
        return [] if value is None else [value]

    def misses(self, trace: RequestTrace) -> tuple[int, int]:
        """Return how many of a request's values are above the limit, and how many it has.

        A request that did not end well counts as one value, which misses.
        """
        if not ended_well(trace):
            return 1, 1
        values = self.values(trace)
        return sum(value > self.limit_s for value in values), len(values)


@dataclass(frozen=True)
class Slo:
    """Limits in seconds by percentile, e.g. ttft={"p99": 0.5}; without any, every request that ends well is good.

    `per_request` overrides what a single request must meet, e.g. {"e2e": 20}. There is none for ITL: a request
    has many, and its mean is its TPOT.
    """

    ttft: Mapping[str, float] = field(default_factory=dict)
    itl: Mapping[str, float] = field(default_factory=dict)
    tpot: Mapping[str, float] = field(default_factory=dict)
    e2e: Mapping[str, float] = field(default_factory=dict)
    per_request: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for metric in METRICS:
            for key, limit in getattr(self, metric).items():
                found = PERCENTILE.fullmatch(str(key))
                if found is None or float(found[1]) <= 0:
                    raise ValueError(f'slo.{metric} "{key}" must be a percentile such as p99')
                _check_limit(f"slo.{metric}.{key}", limit)
        for name, limit in self.per_request.items():
            if name not in METRICS or name == "itl":
                raise ValueError(f'slo.per_request "{name}" must be ttft, tpot or e2e')
            _check_limit(f"slo.per_request.{name}", limit)

    @property
    def terms(self) -> tuple[Term, ...]:
        """Every promise, by metric and rising percentile."""
        found = [
            Term(metric, round(float(key[1:]) / 100, 12), float(limit))
            for metric in METRICS
            for key, limit in getattr(self, metric).items()
        ]
        return tuple(sorted(found, key=lambda term: (METRICS.index(term.metric), term.q)))

    @property
    def limits(self) -> dict[str, float]:
        """What one request must meet, in seconds by metric."""
        highest: dict[str, float] = {
            term.metric: term.limit_s for term in self.terms if term.metric != "itl"
        }
        return {**highest, **{name: float(limit) for name, limit in self.per_request.items()}}

    @property
    def text(self) -> str:
        """Every promise in one line."""
        return ", ".join(term.text for term in self.terms) or "none"

    def met_by(self, trace: RequestTrace) -> bool:
        """Whether a request ended well within every limit; one without a TPOT cannot miss its limit."""
        if not ended_well(trace):
            return False
        limits = self.limits
        seen = {"ttft": ttft_s(trace), "tpot": tpot_s(trace), "e2e": e2e_s(trace)}
        return all(
            value is None or value <= limits.get(metric, math.inf) for metric, value in seen.items()
        )


def _check_limit(where: str, limit: float) -> None:
    if isinstance(limit, bool) or not 0 < limit < math.inf:
        raise ValueError(f'{where} "{limit}" must be a positive number of seconds')

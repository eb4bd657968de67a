"""Budgets: memory, latency and throughput against the baseline's, or against an absolute limit.

Bytes are counted and compared as they are. Timings of two variants that were measured one after the
other share no conditions but the machine, so such a finding says that it is indicative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from quanteval.evidence import RuleContext, VariantEvidence
from quanteval.metrics.latency import Distribution, LoadPointSummary, best_point, point, summarize
from quanteval.records import Finding, Outcome
from quanteval.rules._common import bare, beside

BYTES = ("weight_memory_bytes", "peak_memory_bytes", "artifact_bytes")
Metric = Literal[
    "weight_memory_bytes", "peak_memory_bytes", "artifact_bytes", "ttft_p50_s", "ttft_p95_s",
    "tpot_p50_s", "tpot_p95_s", "single_stream_tps", "best_output_tps",
]  # fmt: skip


@dataclass(frozen=True)
class Budget:
    """Limit a cost: exactly one of `max_ratio` (to the baseline), `min_ratio` and `max_value`."""

    metric: Metric
    max_ratio: float | None = None
    min_ratio: float | None = None
    max_value: float | None = None
    required: bool = False

    is_quality = False

    def __post_init__(self) -> None:
        given = [x for x in (self.max_ratio, self.min_ratio, self.max_value) if x is not None]
        if len(given) != 1:
            raise ValueError(f'"{given}": give exactly one of max_ratio, min_ratio, max_value')
        if not 0 < given[0] < math.inf:
            raise ValueError(f'limit "{given[0]}" must be positive')

    def check(
        self,
        name: str,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        context: RuleContext,
    ) -> list[Finding]:
        """Return one finding."""
        before, after = measure(self.metric, baseline), measure(self.metric, candidate)
        if before is None or after is None:
            side = baseline.name if before is None else candidate.name
            outcome: Outcome = "invalid" if self.required else "skipped"
            sentence = f"{self.metric} of {side} was not measured"
            return [bare(name, required=self.required, outcome=outcome, sentence=sentence)]
        for evidence, found in ((baseline, before), (candidate, after)):
            if problem := found.problem:
                sentence = f"{self.metric} of {evidence.name} says nothing: {problem}"
                return [bare(name, required=self.required, outcome="invalid", sentence=sentence)]
        ratio = after.value / before.value
        limit = self.max_ratio or self.min_ratio or self.max_value or 0.0
        seen = after.value if self.max_value is not None else ratio
        kept = seen >= limit if self.min_ratio is not None else seen <= limit
        indicative = self.metric not in BYTES
        unit = _unit(self.metric)
        shown = _shown(self.metric, before.value), _shown(self.metric, after.value)
        near = limit if self.max_value is None else ratio
        what = f"{self.metric} {shown[0]} -> {shown[1]} {unit} ({beside(ratio, near, 2)}x"
        what += f", n={before.n} and {after.n})" if indicative else ")"
        side = "at least" if self.min_ratio is not None else "at most"
        wanted = f"{limit:g}x" if self.max_value is None else f"{_shown(self.metric, limit)} {unit}"
        sentence = f"{what}: {'meets' if kept else 'misses'} {side} {wanted}"
        if indicative:
            sentence += " (indicative: one run each, not interleaved)"
        return [
            Finding(
                rule=name,
                required=self.required,
                outcome="accept" if kept else "reject",
                sentence=sentence,
                metric=self.metric,
                unit=unit if self.max_value is not None else "ratio",
                method="indicative comparison of single runs" if indicative else "counted bytes",
                n=after.n,
                baseline_value=before.value,
                candidate_value=after.value,
                estimate=seen,
                margin=limit,
            )
        ]


@dataclass(frozen=True)
class Measured:
    """A cost, how many observations it rests on, and how many requests failed while it was measured."""

    value: float
    n: int = 1
    failed: int = 0

    @property
    def problem(self) -> str:
        """Why this cost must not be compared, '' when it may: survivors of a failing server look fast."""
        if self.failed:
            return f"{self.failed} of its requests failed"
        return "" if 0 < self.value < math.inf else f"it is {self.value:g}"


def measure(metric: str, evidence: VariantEvidence) -> Measured | None:
    """Return a variant's cost by the name a budget uses, None when it was not measured."""
    return _bytes(metric, evidence) if metric in BYTES else _timing(metric, evidence)


def _bytes(metric: str, evidence: VariantEvidence) -> Measured | None:
    if metric == "artifact_bytes":
        return None if evidence.artifact is None else Measured(evidence.artifact.bytes_on_disk)
    memory = evidence.memory
    if memory is None:
        return None
    weights = metric == "weight_memory_bytes"
    return Measured(memory.weights_bytes if weights else memory.process_peak_bytes)


def _timing(metric: str, evidence: VariantEvidence) -> Measured | None:
    summaries = summarize(evidence.traces)
    at = best_point(summaries) if metric == "best_output_tps" else point(summaries, "single_stream")
    if at is None:
        return None
    if metric.endswith("_tps"):
        rate = at.output_tps if metric == "best_output_tps" else at.stream_tps
        return None if rate is None else Measured(rate, at.steady_requests, at.failed)
    return _quantile(metric, at)


def _quantile(metric: str, single: LoadPointSummary) -> Measured | None:
    name, quantile, _ = metric.split("_")
    pick: dict[str, Callable[[LoadPointSummary], Distribution]] = {
        "ttft": lambda s: s.ttft,
        "tpot": lambda s: s.tpot,
    }
    found = pick[name](single).at(int(quantile[1:]) / 100)
    return None if found is None else Measured(found.value, found.n, single.failed)


def _shown(metric: str, value: float) -> str:
    """Return bytes to the last one: a budget can be missed by a few, and an exponent hides which."""
    return f"{value:.0f}" if metric in BYTES else f"{value:.6g}"


def _unit(metric: str) -> str:
    if metric in BYTES:
        return "bytes"
    return "tokens/s" if metric.endswith("_tps") else "s"

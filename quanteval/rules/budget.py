"""Budgets: bytes of a variant against the baseline's, or against an absolute limit.

Bytes are counted and compared as they are: no test, no confidence. Timings are for `speed`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from quanteval.evidence import RuleContext, VariantEvidence
from quanteval.records import Finding, Outcome
from quanteval.rules._common import bare, beside

ByteMetric = Literal["weight_memory_bytes", "peak_memory_bytes", "artifact_bytes"]


@dataclass(frozen=True)
class Budget:
    """Limit bytes: exactly one of `max_ratio` (to the baseline) and `max_value`."""

    metric: ByteMetric
    max_ratio: float | None = None
    max_value: float | None = None
    required: bool = False

    is_quality = False

    def __post_init__(self) -> None:
        given = [x for x in (self.max_ratio, self.max_value) if x is not None]
        if len(given) != 1:
            raise ValueError(f'"{given}": give exactly one of max_ratio, max_value')
        if not 0 < given[0] < math.inf:
            raise ValueError(f'limit "{given[0]}" must be positive')

    def check(
        self,
        name: str,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        context: RuleContext,
    ) -> list[Finding]:
        """Return one finding: accept or reject; without the bytes invalid (skipped where not required)."""
        before, after = measure(self.metric, baseline), measure(self.metric, candidate)
        if before is None or after is None:
            side = baseline.name if before is None else candidate.name
            outcome: Outcome = "invalid" if self.required else "skipped"
            sentence = f"{self.metric} of {side} was not measured"
            return [bare(name, required=self.required, outcome=outcome, sentence=sentence)]
        for evidence, found in ((baseline, before), (candidate, after)):
            if found <= 0:
                sentence = f"{self.metric} of {evidence.name} says nothing: it is {found}"
                return [bare(name, required=self.required, outcome="invalid", sentence=sentence)]
        ratio = after / before
        relative = self.max_ratio is not None
        limit = (self.max_ratio if relative else self.max_value) or 0.0
        seen = ratio if relative else after
        kept = seen <= limit
        # To the last byte: a budget can be missed by a few, and an exponent would hide which.
        what = f"{self.metric} {before} -> {after} bytes ({beside(ratio, limit if relative else ratio, 2)}x)"
        wanted = f"{limit:g}x" if relative else f"{limit:.0f} bytes"
        return [
            Finding(
                rule=name,
                required=self.required,
                outcome="accept" if kept else "reject",
                sentence=f"{what}: {'meets' if kept else 'misses'} at most {wanted}",
                metric=self.metric,
                unit="ratio" if relative else "bytes",
                method="counted bytes",
                n=1,
                baseline_value=before,
                candidate_value=after,
                estimate=seen,
                margin=limit,
            )
        ]


def measure(metric: ByteMetric, evidence: VariantEvidence) -> int | None:
    """Return a variant's bytes by the name a budget uses, None when they were not measured."""
    if metric == "artifact_bytes":
        return None if evidence.artifact is None else evidence.artifact.bytes_on_disk
    if evidence.memory is None:
        return None
    if metric == "weight_memory_bytes":
        return evidence.memory.weights_bytes
    return evidence.memory.process_peak_bytes

"""A run's results as OpenMetrics text (version 1.0), for a collector that reads files.

Every value has its sample size and its bounds as metrics of their own (`_samples`, `_lower`, `_upper`), since the
format has no place for them. Values that are not known are absent, never 0. Units are base units and end the names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from quanteval.errors import EvidenceError
from quanteval.evidence import VariantEvidence
from quanteval.metrics.capacity import Estimate, capacities, slo_of
from quanteval.metrics.latency import Distribution
from quanteval.metrics.load import Latencies, Load, loads_of
from quanteval.metrics.quality import metrics_of
from quanteval.records import MemoryUse, Verdict, VerdictOutcome
from quanteval.records.base import VariantStatus
from quanteval.report.text import line

MEDIA_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PREFIX = "quanteval"
Labels = tuple[tuple[str, str], ...]


@dataclass
class Family:
    """One metric family; `unit` is the end of its name."""

    name: str
    kind: str
    help: str
    unit: str = ""
    samples: dict[Labels, float] = field(default_factory=dict)


class Families:
    """Families in order of first use, each sample once."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def add(
        self, name: str, help_text: str, labels: Labels, value: float | None, *, kind: str = "gauge",
        unit: str = "",
    ) -> None:  # fmt: skip
        """Add a sample unless its value is not known."""
        if value is None or math.isnan(value):
            return
        full = f"{PREFIX}_{name}" + (f"_{unit}" if unit else "")
        family = self._families.setdefault(full, Family(full, kind, help_text, unit))
        family.samples.setdefault(labels, float(value))

    def bounded(
        self, name: str, help_text: str, labels: Labels, found: Bounded, *, unit: str = ""
    ) -> None:
        """Add a value, its bounds and what it rests on."""
        if found.value is None or math.isnan(found.value):
            return
        self.add(name, help_text, labels, found.value, unit=unit)
        what = f"{help_text}:"
        self.add(f"{name}_lower", f"{what} lower bound", labels, found.lower, unit=unit)
        self.add(f"{name}_upper", f"{what} upper bound", labels, found.upper, unit=unit)
        self.add(f"{name}_samples", f"{what} how many it rests on", labels, found.n)

    def text(self) -> str:
        """Return the exposition, its end mark included."""
        out: list[str] = []
        for family in self._families.values():
            out.append(f"# TYPE {family.name} {family.kind}")
            out += [f"# UNIT {family.name} {family.unit}"] if family.unit else []
            out.append(f"# HELP {family.name} {_escape(family.help)}")
            suffix = "_info" if family.kind == "info" else ""
            out += [
                f"{family.name}{suffix}{_labels(labels)} {_number(value)}"
                for labels, value in family.samples.items()
            ]
        return "\n".join([*out, "# EOF"]) + "\n"


@dataclass(frozen=True)
class Bounded:
    """A value with bounds and n, each None where there is none."""

    value: float | None
    lower: float | None = None
    upper: float | None = None
    n: float | None = None


def _escape(text: str) -> str:
    return line(text).replace("\\", "\\\\").replace('"', '\\"')


def _labels(labels: Labels) -> str:
    inside = ",".join(f'{_label_name(name)}="{_escape(value)}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""


def _label_name(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


# --------------------------------------------------------------------------- a run


def openmetrics_text(
    variants: Sequence[VariantEvidence],
    verdicts: Sequence[Verdict] = (),
    *,
    run_id: str = "",
    baseline: str | None = None,
) -> str:
    """Return every result of a run: status, quality, latency and load, memory, capacity and verdicts."""
    out = Families()
    for variant in variants:
        _state(out, "variant_status", "How the variant ended", variant, get_args(VariantStatus))
        scheme = variant.artifact.scheme if variant.artifact is not None else ""
        told = (("variant", variant.name), ("run", run_id), ("scheme", scheme))
        out.add("variant", "What a variant was", told, 1, kind="info")
        _quality(out, variant)
        _load(out, variant)
        if variant.memory is not None:
            _memory(out, variant.name, variant.memory)
    _capacity(out, variants, baseline)
    for verdict in verdicts:
        for outcome in get_args(VerdictOutcome):
            labels = (("variant", verdict.candidate), ("quanteval_verdict", outcome))
            out.add(
                "verdict", "Verdict on the candidate", labels, outcome == verdict.outcome,
                kind="stateset",
            )  # fmt: skip
    return out.text()


def _state(
    out: Families, name: str, help_text: str, variant: VariantEvidence, states: Sequence[str]
) -> None:
    for state in states:
        labels = (("variant", variant.name), (f"{PREFIX}_{name}", state))
        out.add(name, help_text, labels, state == variant.result.status, kind="stateset")


def _quality(out: Families, variant: VariantEvidence) -> None:
    for task, scores in variant.scores.items():
        try:
            found = metrics_of(scores)
        except EvidenceError:
            continue
        for metric in found:
            labels = (("variant", variant.name), ("task", task), ("metric", metric.name))
            value = Bounded(metric.value, metric.lower, metric.upper, metric.n)
            if metric.unit == "share":
                out.bounded("score", "Score, two-sided 95 % bounds", labels, value, unit="ratio")
            else:
                told = (*labels, ("unit", metric.unit))
                out.bounded("score_value", "Score in its own unit, 95 % bounds", told, value)


LATENCIES = (
    ("ttft", "ttft", "Time to first token"), ("itl", "itl", "Inter-token latency"),
    ("tpot", "tpot", "Time per output token after the first"), ("e2e", "e2e", "End-to-end latency"),
)  # fmt: skip


def _load(out: Families, variant: VariantEvidence) -> None:
    slo = slo_of(variant)
    for load in loads_of(variant.traces, variant.load_points, slo):
        base = (("variant", variant.name), ("load_point", load.name))
        for bucket, found in (("all", load.all), *load.buckets.items()):
            _latency(out, (*base, ("bucket", bucket)), found)
        _rates(out, base, load, has_slo=bool(slo.limits))


def _latency(out: Families, labels: Labels, found: Latencies) -> None:
    for name, attribute, text in LATENCIES:
        distribution: Distribution = getattr(found, attribute)
        for item in distribution.quantiles:
            out.bounded(
                name, f"{text}, one-sided 95 % bounds", (*labels, ("quantile", f"{item.q:g}")),
                Bounded(item.value, item.lower, item.upper, item.n), unit="seconds",
            )  # fmt: skip


def _rates(out: Families, labels: Labels, load: Load, *, has_slo: bool) -> None:
    n = load.requests
    per_s = (
        ("offered", "Requests that arrived", load.offered_rate),
        ("achieved", "Requests that ended well", load.achieved_rate),
        ("goodput", "Requests that met every limit", load.goodput if has_slo else None),
    )
    for name, text, value in per_s:
        help_text = f"{text} a second of the steady window"
        out.add(name, help_text, labels, value, unit="requests_per_second")
    out.add(
        "output", "Output tokens a second", labels, load.output_tps, unit="tokens_per_second"
    )  # fmt: skip
    out.add("in_flight_requests", "Mean requests under way", labels, load.in_flight)
    out.add("over_saturated", "1: more than can be served", labels, bool(load.over_saturated))
    if load.error_rate is not None:
        rate = load.error_rate
        share = Bounded(rate.point, rate.lower, rate.upper, n)
        out.bounded("failed", "Share of failed requests, 95 % bounds", labels, share, unit="ratio")


def _memory(out: Families, variant: str, memory: MemoryUse) -> None:
    parts = {**memory.parts, "unaccounted": memory.unaccounted_bytes}
    for part, size in parts.items():
        labels = (("variant", variant), ("part", part))
        out.add("memory", "Memory by part; they add up to the peak", labels, size, unit="bytes")
    own = (("variant", variant),)
    peak = memory.process_peak_bytes
    out.add("memory_peak", "Peak while serving", own, peak, unit="bytes")
    if memory.kv_pool_tokens:
        tokens = memory.kv_pool_tokens
        out.add("kv_pool", "Tokens that the KV cache can hold", own, tokens, unit="tokens")


def _capacity(out: Families, variants: Sequence[VariantEvidence], baseline: str | None) -> None:
    for one in capacities(variants, baseline):
        labels = (("variant", one.variant), ("limit", one.limit), ("device", one.device))
        figures = (
            ("capacity", "Requests a second at the limit, 90 % bounds", one.request_rate,
             "requests_per_second"),
            ("capacity_output", "Output tokens a second at the limit, 90 % bounds", one.output_tps,
             "tokens_per_second"),
            ("capacity_to_baseline", "Capacity over the baseline's, 80 % bounds", one.ratio, "ratio"),
        )  # fmt: skip
        for name, text, found, unit in figures:
            if found is not None:
                out.bounded(name, text, labels, _bounded(found, one.n), unit=unit)


def _bounded(found: Estimate, n: int) -> Bounded:
    return Bounded(found.value, found.lower, found.upper, n or None)

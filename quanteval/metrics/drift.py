"""One variant in two runs: which metrics left their noise band, so that a schedule can watch a deployment.

The change of every metric has an interval, and all of these hold together with probability 1 - `alpha` (Bonferroni
over the metrics that have one). A metric drifted when its interval excludes "no change" and the change is larger than a
smallest one that matters. Without repetitions there is no interval, and the smallest change alone is the band.
Conditions that differ are named, and what changed under them is no drift. docs/metrics.md has the methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from quanteval.comparability import differences
from quanteval.evidence import VariantEvidence
from quanteval.metrics.capacity import slo_of
from quanteval.metrics.drift_bands import (
    SMALLEST,
    Change,
    failed_share,
    quality_change,
    quantile_change,
    rate_change,
)
from quanteval.metrics.latency import tokens_in
from quanteval.metrics.load import Load, loads_of
from quanteval.records import Artifact, RequestTrace

ALPHA = 0.05
QUANTILES = (0.5, 0.95, 0.99)
Flag = Literal["within", "drift", "better", "unlike", "unknown", "missing"]
"""missing: the stored run has it and the fresh one has not."""


@dataclass(frozen=True)
class Smallest:
    """The smallest change of each kind that counts as one: relative, of shares absolute."""

    latency: float = 0.1
    rate: float = 0.05
    memory: float = 0.05
    weights: float = 0.01
    """Of weights, KV cache and bytes on disk: they do not depend on chance."""
    quality: float = 0.0
    errors: float = 0.0


@dataclass(frozen=True)
class DriftRow:
    """One metric of both runs; `flag` says what became of it."""

    metric: str
    where: str
    """Load point, task, or '' for the whole variant."""
    unit: str
    stored: float | None
    fresh: float | None
    change: float | None
    """fresh/stored - 1; of shares and metrics that can be 0, fresh - stored."""
    relative: bool
    lower: float | None
    upper: float | None
    """Interval of the change; with all other rows' it holds with probability 1 - alpha."""
    band: tuple[float, float] | None
    """Values of the fresh run that count as noise."""
    n_stored: int
    n_fresh: int
    units: str
    """What n counts."""
    flag: Flag
    method: str
    reason: str = ""


@dataclass(frozen=True)
class DriftReport:
    """Every metric of a fresh run beside the stored one's."""

    stored: str
    fresh: str
    alpha: float
    rows: tuple[DriftRow, ...]
    conditions: tuple[str, ...]
    """Conditions that differ, each with both values; '' when both runs were made alike."""
    smallest: Smallest
    compared: int
    """Metrics with an interval, over which the level is shared."""

    @property
    def drifted(self) -> tuple[DriftRow, ...]:
        """Rows that left their band for the worse."""
        return tuple(row for row in self.rows if row.flag == "drift")

    @property
    def better(self) -> tuple[DriftRow, ...]:
        """Rows that left their band for the better."""
        return tuple(row for row in self.rows if row.flag == "better")

    @property
    def exit_code(self) -> int:
        """0 nothing drifted, 3 something did, 4 something is missing or nothing was judged, 5 unlike conditions."""
        if self.conditions:
            return 5
        if self.drifted:
            return 3
        flags = {row.flag for row in self.rows}
        return 0 if flags & {"within", "better"} and "missing" not in flags else 4


@dataclass(frozen=True)
class Metric:
    """A metric as both runs have it: how its change is found at a level, and which change is small."""

    metric: str
    where: str
    unit: str
    smallest: float
    higher_is_better: bool
    change: Callable[[float], Change]
    """The change with its interval, each end at the level given."""


def drift(
    stored: VariantEvidence,
    fresh: VariantEvidence,
    *,
    alpha: float = ALPHA,
    smallest: Smallest | None = None,
) -> DriftReport:
    """Compare a fresh run of a variant with a stored one."""
    small = smallest or Smallest()
    metrics = list(_metrics(stored, fresh, small))
    bounded = sum(metric.change(0.25).has_interval for metric in metrics)
    level = alpha / (2 * max(bounded, 1))
    rows = [_row(metric, metric.change(level)) for metric in metrics]
    rows += _missing(stored, fresh)
    conditions = unlike(stored, fresh)
    if conditions:
        rows = [
            replace(row, flag="unlike") if row.flag in ("drift", "better") else row for row in rows
        ]
    return DriftReport(
        stored.name, fresh.name, alpha, tuple(rows), conditions, small, bounded
    )  # fmt: skip


def unlike(stored: VariantEvidence, fresh: VariantEvidence) -> tuple[str, ...]:
    """Return every condition that differs between two runs of a variant, with both values."""
    found = [
        text for _, text in differences(stored.result.comparable, fresh.result.comparable)
    ]  # fmt: skip
    if stored.artifact is not None and fresh.artifact is not None:
        found += [text for _, text in differences(_built(stored.artifact), _built(fresh.artifact))]
    for side in (stored, fresh):
        if not side.result.comparable:
            found.append(f"the conditions of {side.name} were not recorded")
    return tuple(found)


def _built(artifact: Artifact) -> dict[str, Any]:
    return {
        "scheme": artifact.scheme,
        "scheme_config": artifact.scheme_config,
        "weights": artifact.weights_digest,
    }


def _missing(stored: VariantEvidence, fresh: VariantEvidence) -> list[DriftRow]:
    """Return a row for whatever the fresh run lacks: absence is never "no drift"."""
    lacking = []
    if fresh.result.status != "ok":
        lacking.append(("status", "", f"it ended as {fresh.result.status}: {fresh.result.reason}"))
    points = [
        {trace.load_point: None for trace in side.traces if not trace.warmup}
        for side in (stored, fresh)
    ]
    lacking += [("load point", name, "not measured") for name in points[0] if name not in points[1]]
    lacking += [("task", t, "not evaluated") for t in stored.scores if t not in fresh.scores]
    if stored.memory is not None and fresh.memory is None:
        lacking.append(("memory", "", "not measured"))
    return [
        DriftRow(
            metric, where, "", None, None, None, False, None, None, None, 0, 0, "", "missing",
            "none", f"in the fresh run {why}",
        )
        for metric, where, why in lacking
    ]  # fmt: skip


def _row(metric: Metric, change: Change) -> DriftRow:
    row = DriftRow(
        metric=metric.metric,
        where=metric.where,
        unit=metric.unit,
        stored=change.stored,
        fresh=change.fresh,
        change=change.value,
        relative=change.relative,
        lower=_known(change.lower),
        upper=_known(change.upper),
        band=None,
        n_stored=change.n[0],
        n_fresh=change.n[1],
        units=change.units,
        flag="unknown",
        method=change.method,
        reason=change.reason,
    )
    if change.value is None or math.isnan(change.value):
        return row
    low, high = _band(change, metric.smallest)
    if metric.unit == "share":
        low, high = max(low, 0.0), min(high, 1.0)
    row = replace(row, band=(low, high))
    if not change.has_interval and change.reason:
        return row
    if math.isinf(low) and math.isinf(high):
        return replace(
            row, band=None, reason=row.reason or "too little was measured for an interval"
        )
    lower = change.value if change.lower is None else change.lower
    upper = change.value if change.upper is None else change.upper
    if lower <= 0 <= upper or abs(change.value) <= metric.smallest:
        return replace(row, flag="within")
    better = (change.value > 0) == metric.higher_is_better
    return replace(row, flag="better" if better else "drift")


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _band(change: Change, smallest: float) -> tuple[float, float]:
    """Return the fresh values that are noise: those for which the interval would reach "no change", or small ones."""
    stored, value = change.stored or 0.0, change.value or 0.0
    lower = value if change.lower is None else change.lower
    upper = value if change.upper is None else change.upper
    if not change.relative:
        return stored - max(smallest, upper - value), stored + max(smallest, value - lower)
    # As factors: the interval [a, b] of the ratio r excludes 1 when r is above r/a or below r/b.
    ratio, a, b = 1 + value, 1 + lower, 1 + upper
    low = 0.0 if math.isinf(b) else min(1 - smallest, ratio / b if b > 0 else 1.0)
    high = math.inf if a <= 0 else max(1 + smallest, ratio / a)
    return (-math.inf if math.isinf(b) and a <= 0 else stored * low), stored * high


# --------------------------------------------------------------------------- what is compared


def _metrics(stored: VariantEvidence, fresh: VariantEvidence, small: Smallest) -> Iterator[Metric]:
    pairs = _loads(stored, fresh)
    for a, b in pairs:
        yield from _latency_metrics(a, b, small)
        yield from _rate_metrics(a, b, small)
        yield Metric(
            "error rate", a.name, "share", small.errors, False,
            lambda level, a=a, b=b: failed_share(a, b, level),  # type: ignore[misc]
        )  # fmt: skip
    yield from _memory_metrics(stored, fresh, small)
    for task in sorted(set(stored.scores) & set(fresh.scores)):
        x, y = stored.scores[task], fresh.scores[task]
        found = quality_change(x, y)
        for name, unit, higher, change in found:
            yield Metric(name, task, unit, small.quality, higher, change)


def _loads(stored: VariantEvidence, fresh: VariantEvidence) -> list[tuple[Load, Load]]:
    sides = [
        {load.name: load for load in loads_of(v.traces, v.load_points, slo_of(stored))}
        for v in (stored, fresh)
    ]
    return [(load, sides[1][name]) for name, load in sides[0].items() if name in sides[1]]


def _latency_metrics(a: Load, b: Load, small: Smallest) -> Iterator[Metric]:
    for kind in ("ttft", "itl", "tpot", "e2e"):
        for q in QUANTILES:
            yield Metric(
                f"{kind.upper()} p{100 * q:g}", a.name, "s", small.latency, False,
                lambda level, kind=kind, q=q: quantile_change(a, b, kind, q, level),  # type: ignore[misc]
            )  # fmt: skip


def _rate_metrics(a: Load, b: Load, small: Smallest) -> Iterator[Metric]:
    for name, count in (("output tokens/s", tokens_in), ("requests/s", _ended)):
        unit = name.replace("output ", "")
        yield Metric(
            name, a.name, unit, small.rate, True,
            lambda level, count=count: rate_change(a, b, count, level),  # type: ignore[misc]
        )  # fmt: skip


def _ended(trace: RequestTrace, begin: float, end: float) -> int:
    return int(trace.status == "ok" and begin < trace.end_s <= end)


PARTS = (
    ("weights", "weights_bytes"), ("KV cache", "kv_cache_bytes"),
    ("activations", "activation_peak_bytes"), ("before load", "before_load_bytes"),
    ("peak while serving", "process_peak_bytes"), ("driver total", "device_total_bytes"),
)  # fmt: skip
FIXED_PARTS = ("weights", "KV cache", "weight files")


def _memory_metrics(
    stored: VariantEvidence, fresh: VariantEvidence, small: Smallest
) -> Iterator[Metric]:
    values: list[tuple[str, float, float]] = []
    if stored.memory is not None and fresh.memory is not None:
        for name, key in PARTS:
            values.append((name, getattr(stored.memory, key), getattr(fresh.memory, key)))
    if stored.artifact is not None and fresh.artifact is not None:
        sizes = stored.artifact.bytes_on_disk, fresh.artifact.bytes_on_disk
        values.append(("weight files", *sizes))
    for name, before, after in values:
        if before > 0 or after > 0:
            least = small.weights if name in FIXED_PARTS else small.memory
            yield Metric(
                name, "", "bytes", least, False,
                lambda level, a=before, b=after: _once(a, b),  # type: ignore[misc]
            )  # fmt: skip


def _once(stored: float, fresh: float) -> Change:
    """Return the change of what was measured once: its band is the smallest change alone."""
    ratio = fresh / stored - 1 if stored else math.inf
    return Change(stored, fresh, ratio, True, None, None, (1, 1), "measurements", SMALLEST)


def summary(found: DriftReport) -> Sequence[str]:
    """Return how many rows carry each flag, as words, flags that none has left out."""
    words = {
        "drift": "drifted", "better": "improved", "unlike": "changed under other conditions",
        "within": "within their noise band", "missing": "missing in the fresh run",
        "unknown": "not judged",
    }  # fmt: skip
    counts = {flag: sum(row.flag == flag for row in found.rows) for flag in words}
    return [f"{counts[flag]} {text}" for flag, text in words.items() if counts[flag]]

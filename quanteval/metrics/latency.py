"""Latency and throughput from request traces; docs/metrics.md has the definitions.

TTFT runs from sending to the first chunk with tokens. A chunk of k tokens after a gap g counts as k
inter-token latencies of g/k; what the first chunk holds beyond its first token has no gap and counts
for none. TPOT is (E2E - TTFT) / (output tokens - 1). Warm-up and failed requests are in none of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quanteval.records import RequestTrace
from quanteval.stats.intervals import quantile_bounds

QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True)
class Quantile:
    """A quantile in seconds with one-sided 95 % bounds; a bound is None where n is too small for it."""

    q: float
    value: float
    lower: float | None
    upper: float | None
    n: int


@dataclass(frozen=True)
class Distribution:
    """Quantiles of one quantity; `quantiles` is empty when nothing was observed."""

    n: int
    quantiles: tuple[Quantile, ...]

    def at(self, q: float) -> Quantile | None:
        """Return the quantile q, None when there is none."""
        return next((item for item in self.quantiles if item.q == q), None)


@dataclass(frozen=True)
class LoadPointSummary:
    """One load point (or one prompt-length bucket of it). Rates are None when they cannot be known."""

    load_point: str
    concurrency: int
    bucket: str | None
    requests: int
    failed: int
    ttft: Distribution
    itl: Distribution
    tpot: Distribution
    e2e: Distribution
    request_rate: float | None
    """Requests per second."""
    output_tps: float | None
    """Output tokens per second over all streams."""
    stream_tps: float | None
    """Output tokens per second of the median stream, its TTFT left out."""
    steady_requests: int
    """Requests that ran with all slots full from their start to their end."""


def distribution(values: Iterable[float]) -> Distribution:
    """Return p50, p95 and p99 (linear interpolation) with order-statistic bounds."""
    array = np.sort(np.asarray(list(values), dtype=np.float64))
    n = int(array.size)
    if n == 0:
        return Distribution(0, ())
    return Distribution(n, tuple(_quantile(array, q) for q in QUANTILES))


def _quantile(array: NDArray[np.float64], q: float) -> Quantile:
    bounds = quantile_bounds(array, q, 0.05)
    lower = bounds.lower if math.isfinite(bounds.lower) else None
    upper = bounds.upper if math.isfinite(bounds.upper) else None
    return Quantile(q, float(np.quantile(array, q)), lower, upper, int(array.size))


def ttft_s(trace: RequestTrace) -> float:
    """Return the seconds from sending to the first token."""
    return trace.chunk_times_s[0] - trace.sent_s


def itl_s(trace: RequestTrace) -> list[float]:
    """Return the inter-token latencies."""
    times, tokens = trace.chunk_times_s, trace.chunk_tokens
    gaps = zip(times[1:], times[:-1], tokens[1:], strict=True)
    return [(now - before) / count for now, before, count in gaps for _ in range(count)]


def e2e_s(trace: RequestTrace) -> float:
    """Return the seconds from sending to the last token."""
    return trace.chunk_times_s[-1] - trace.sent_s


def tpot_s(trace: RequestTrace) -> float | None:
    """Return the seconds per output token after the first, None for a single token."""
    if trace.output_tokens < 2:
        return None
    return (e2e_s(trace) - ttft_s(trace)) / (trace.output_tokens - 1)


def cold_start_s(traces: Sequence[RequestTrace]) -> float | None:
    """Return the TTFT of the very first request, None without a warm-up that succeeded."""
    first = next((t for t in traces if t.warmup), None)
    return ttft_s(first) if first is not None and _ok(first) else None


def _ok(trace: RequestTrace) -> bool:
    return trace.status == "ok" and bool(trace.chunk_times_s)


def summarize(traces: Sequence[RequestTrace], *, by_bucket: bool = False) -> list[LoadPointSummary]:
    """Return a summary for each load point (and bucket) in order of appearance, the warm-up left out."""
    groups: dict[tuple[str, str | None], list[RequestTrace]] = {}
    for trace in traces:
        if not trace.warmup:
            key = (trace.load_point, trace.bucket if by_bucket else None)
            groups.setdefault(key, []).append(trace)
    return [_summary(bucket, group) for (_, bucket), group in groups.items()]


def _summary(bucket: str | None, group: Sequence[RequestTrace]) -> LoadPointSummary:
    good = [trace for trace in group if _ok(trace)]
    repetitions: dict[int, list[RequestTrace]] = {}
    for trace in group:
        repetitions.setdefault(trace.repetition, []).append(trace)
    steady = [trace for part in repetitions.values() for trace in _steady(part) if _ok(trace)]
    tpot = [value for trace in good if (value := tpot_s(trace)) is not None]
    median = float(np.median(tpot)) if tpot else 0.0
    rates = None if bucket is not None else _rates(repetitions.values())
    return LoadPointSummary(
        load_point=group[0].load_point,
        concurrency=group[0].concurrency,
        bucket=bucket,
        requests=len(group),
        failed=len(group) - len(good),
        ttft=distribution(ttft_s(trace) for trace in steady),
        itl=distribution(gap for trace in steady for gap in itl_s(trace)),
        tpot=distribution(value for trace in steady if (value := tpot_s(trace)) is not None),
        e2e=distribution(e2e_s(trace) for trace in steady),
        request_rate=rates[0] if rates else None,
        output_tps=rates[1] if rates else None,
        stream_tps=1 / median if median > 0 else None,
        steady_requests=len(steady),
    )


def steady_window(group: Sequence[RequestTrace]) -> tuple[float, float] | None:
    """Return when all slots of one repetition were full: from the last first request sent until the
    first slot found nothing left to send. None when that never was.
    """
    concurrency = group[0].concurrency
    if concurrency == 1:
        return (min(t.sent_s for t in group), max(t.end_s for t in group))
    sent = sorted(trace.sent_s for trace in group)
    if len(sent) < concurrency:
        return None
    full_from = sent[concurrency - 1]
    last_sent = sent[-1]
    ends = sorted(trace.end_s for trace in group if trace.end_s >= last_sent)
    if not ends or ends[0] <= full_from:
        return None
    return full_from, ends[0]


def _steady(group: Sequence[RequestTrace]) -> list[RequestTrace]:
    """Return the requests that count: in a closed loop those sent while all slots were full.

    The first request of each slot is left out (they start together, which no steady load does).
    Without enough requests for a steady state all of them count.
    """
    window = steady_window(group)
    if group[0].concurrency == 1 or window is None:
        return list(group)
    first = sorted(group, key=lambda t: t.sent_s)[: group[0].concurrency]
    inside = [trace for trace in group if trace not in first and trace.sent_s <= window[1]]
    return inside or list(group)


def _rates(repetitions: Iterable[Sequence[RequestTrace]]) -> tuple[float, float] | None:
    """Return requests/s and output tokens/s over the steady windows.

    A request counts for the share of its tokens that arrived inside the window.
    """
    seconds = tokens = requests = 0.0
    for group in repetitions:
        window = steady_window(group)
        if window is None or window[1] <= window[0]:
            continue
        seconds += window[1] - window[0]
        for trace in group:
            if not _ok(trace):
                continue
            inside = sum(
                count
                for at, count in zip(trace.chunk_times_s, trace.chunk_tokens, strict=True)
                if window[0] <= at <= window[1]
            )
            tokens += inside
            requests += inside / trace.output_tokens
    if seconds <= 0 or tokens <= 0:
        return None
    return requests / seconds, tokens / seconds


def best_point(summaries: Sequence[LoadPointSummary]) -> LoadPointSummary | None:
    """Return the load point with the highest output tokens/s, None when none has a rate."""
    known = [summary for summary in summaries if summary.output_tps is not None]
    return max(known, key=lambda s: s.output_tps or 0.0, default=None)


def point(summaries: Sequence[LoadPointSummary], name: str) -> LoadPointSummary | None:
    """Return a load point by name, None when it was not measured."""
    return next((summary for summary in summaries if summary.load_point == name), None)

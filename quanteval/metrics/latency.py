"""Latency and throughput from request traces; docs/metrics.md has the definitions.

TTFT runs from the request's start to the first chunk with tokens, E2E to the last. A request starts
when it is sent, in an open loop when it was scheduled, so that waiting for a stalled client or server
is counted. A chunk of k tokens after a gap g counts as k inter-token latencies of g/k; what the first
chunk holds beyond its first token has no gap and counts for none. TPOT is (E2E - TTFT) / (output
tokens - 1). Failed requests are in no latency. Steady figures of a closed loop leave out requests
marked as warm-up and those that did not run with all slots full from beginning to end, those of an
open loop what was scheduled outside its steady window. A figure that cannot be computed is None.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quanteval.records import RequestTrace
from quanteval.stats.intervals import quantile_bounds

if TYPE_CHECKING:
    from quanteval.metrics.slo import Slo

QUANTILES = (0.5, 0.95, 0.99)
ALPHA = 0.05
FULL_SHARE = 0.98
"""Least share of a steady request's life over which all slots must have been full."""


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
    rate: float
    """Requests/s that an open loop offers; 0 for a closed one."""
    bucket: str | None
    requests: int
    """Requests sent to be measured."""
    failed: int
    """Those of them that did not end well."""
    failures: Mapping[str, int]
    """Every failure by status, those of unmeasured requests too (fillers are cancelled by design)."""
    ttft: Distribution
    itl: Distribution
    """Its quantiles have no bounds: the gaps of one request depend on each other."""
    tpot: Distribution
    e2e: Distribution
    request_rate: float | None
    """Requests per second that ended well."""
    output_tps: float | None
    """Output tokens per second over all streams."""
    output_tps_runs: tuple[float, ...]
    """The same for each repetition that had a steady state."""
    stream_tps: float | None
    """Output tokens per second of the median stream, its TTFT left out."""
    steady_requests: int
    """Measured requests that ended well and ran with all slots full from their start to their end."""


# --------------------------------------------------------------------------- one request


def start_s(trace: RequestTrace) -> float:
    """Return when a request's latencies begin: as scheduled in an open loop, as sent in a closed one."""
    return trace.scheduled_s if trace.loop == "open" else trace.sent_s


def ttft_s(trace: RequestTrace) -> float:
    """Return the seconds from the start to the first token."""
    return trace.chunk_times_s[0] - start_s(trace)


def itl_s(trace: RequestTrace) -> list[float]:
    """Return the inter-token latencies."""
    times, tokens = trace.chunk_times_s, trace.chunk_tokens
    gaps = zip(times[1:], times[:-1], tokens[1:], strict=True)
    return [(now - before) / count for now, before, count in gaps for _ in range(count)]


def e2e_s(trace: RequestTrace) -> float:
    """Return the seconds from the start to the last token."""
    return trace.chunk_times_s[-1] - start_s(trace)


def tpot_s(trace: RequestTrace) -> float | None:
    """Return the seconds per output token after the first, None for a single token or a single chunk.

    One chunk of many tokens says nothing about the time between them.
    """
    if len(trace.chunk_times_s) < 2:
        return None
    return (e2e_s(trace) - ttft_s(trace)) / (trace.output_tokens - 1)


def cold_start_s(traces: Sequence[RequestTrace]) -> float | None:
    """Return the TTFT of the very first request, None when that was no warm-up or did not end well."""
    first = next(iter(traces), None)
    if first is None or not first.warmup or not ended_well(first):
        return None
    return ttft_s(first)


def ended_well(trace: RequestTrace) -> bool:
    """Whether a request gave its tokens and ended as it should."""
    return trace.status == "ok" and bool(trace.chunk_times_s)


# --------------------------------------------------------------------------- many requests


def distribution(values: Iterable[float], *, independent: bool = True) -> Distribution:
    """Return p50, p95 and p99 (linear interpolation), for independent values with order-statistic bounds."""
    array = np.fromiter(values, dtype=np.float64)
    if array.size == 0:
        return Distribution(0, ())
    quantiles = []
    for q in QUANTILES:
        found = quantile_bounds(array, q, ALPHA)
        lower, upper = (
            bound if independent and math.isfinite(bound) else None
            for bound in (found.lower, found.upper)
        )
        quantiles.append(Quantile(q, found.point, lower, upper, found.n))
    return Distribution(int(array.size), tuple(quantiles))


def summarize(traces: Sequence[RequestTrace], *, by_bucket: bool = False) -> list[LoadPointSummary]:
    """Return a summary for each load point (and bucket) in order of appearance, the warm-up left out."""
    groups: dict[str, list[RequestTrace]] = {}
    for trace in traces:
        groups.setdefault(trace.load_point, []).append(trace)
    found = []
    for group in groups.values():
        measured = [trace for trace in group if not trace.warmup]
        buckets = dict.fromkeys(trace.bucket if by_bucket else None for trace in measured)
        found += [_summary(bucket, group) for bucket in buckets]
    return found


def _summary(bucket: str | None, group: Sequence[RequestTrace]) -> LoadPointSummary:
    mine = [trace for trace in group if bucket in (None, trace.bucket)]
    measured = [trace for trace in mine if not trace.warmup]
    runs = _by_repetition(group)
    steady = [
        trace
        for run in runs
        for trace in steady_requests(run)
        if ended_well(trace) and bucket in (None, trace.bucket)
    ]
    tpot = [value for trace in steady if (value := tpot_s(trace)) is not None]
    tps_runs = [] if bucket is not None else [r for run in runs if (r := _rate([run], tokens_in))]
    median = float(np.median(tpot)) if tpot else 0.0
    return LoadPointSummary(
        load_point=group[0].load_point,
        concurrency=group[0].concurrency,
        rate=group[0].rate,
        bucket=bucket,
        requests=len(measured),
        failed=sum(not ended_well(trace) for trace in measured),
        failures=Counter(
            trace.status if trace.status != "ok" else "error"
            for trace in mine
            if not ended_well(trace) and not (trace.warmup and trace.status == "cancelled")
        ),
        ttft=distribution(ttft_s(trace) for trace in steady),
        itl=distribution((gap for t in steady for gap in itl_s(t)), independent=False),
        tpot=distribution(tpot),
        e2e=distribution(e2e_s(trace) for trace in steady),
        request_rate=None if bucket is not None else _rate(runs, ended_in(ended_well)),
        output_tps=None if bucket is not None else _rate(runs, tokens_in),
        output_tps_runs=tuple(tps_runs),
        stream_tps=1 / median if median > 0 else None,
        steady_requests=len(steady),
    )


def goodput(traces: Sequence[RequestTrace], slo: Slo) -> dict[str, float | None]:
    """Return requests/s that met every limit, by load point; None where there was no steady state."""
    points = dict.fromkeys(trace.load_point for trace in traces if not trace.warmup)
    return {
        name: _rate(
            _by_repetition([t for t in traces if t.load_point == name]), ended_in(slo.met_by), zero=True
        )
        for name in points
    }  # fmt: skip


def _by_repetition(group: Sequence[RequestTrace]) -> list[list[RequestTrace]]:
    runs: dict[tuple[int, int], list[RequestTrace]] = {}
    for trace in group:
        runs.setdefault((trace.round, trace.repetition), []).append(trace)
    return [runs[key] for key in sorted(runs)]


# --------------------------------------------------------------------------- the steady state


def full_interval(run: Sequence[RequestTrace]) -> tuple[float, float] | None:
    """Return from when until when all slots of one repetition were full, None when they never were.

    It begins when the last slot sends its first request and ends with the first request that no
    other follows: of N requests in c slots the (N - c + 1)-th to end, or a filler that failed. An
    open loop has no slots: it is the time over which its measured requests were scheduled.
    """
    if run[0].loop == "open":
        times = [trace.scheduled_s for trace in run if not trace.warmup]
        return (min(times), max(times)) if times else None
    slots = run[0].concurrency
    if len(run) < slots:
        return None
    first = min((trace.sent_s for trace in run if not trace.warmup), default=math.inf)
    failed_fillers = [
        trace.end_s
        for trace in run
        if trace.warmup and trace.sent_s > first and trace.status in ("error", "out_of_memory")
    ]
    begin = sorted(trace.sent_s for trace in run)[slots - 1]
    end = min([sorted(trace.end_s for trace in run)[len(run) - slots], *failed_fillers])
    return begin, end


def steady_requests(run: Sequence[RequestTrace]) -> list[RequestTrace]:
    """Return one repetition's measured requests that began when all slots were full and ended while they were.

    FULL_SHARE instead of all of a life allows for requests that end together, in one step of the engine. Failed
    requests are among them. Of an open loop: all that were scheduled in the steady window, however they ended.
    """
    if run and run[0].loop == "open":
        return [trace for trace in run if not trace.warmup]
    full = full_interval(run)
    if full is None:
        return []
    begin, end = full
    alone = run[0].concurrency == 1
    return [
        trace
        for trace in run
        if not trace.warmup
        and (trace.sent_s > begin or alone)
        and trace.sent_s + FULL_SHARE * (trace.end_s - trace.sent_s) <= end
    ]


def steady_window(run: Sequence[RequestTrace]) -> tuple[float, float] | None:
    """Return the interval over which one repetition's rates are taken, None without a steady state.

    It begins when every slot has finished what it sent before the first measured request, and ends
    with the last request of the steady state. Of an open loop: from the first to the last measured arrival.
    """
    full, steady = full_interval(run), steady_requests(run)
    if full is None or not steady:
        return None
    if run[0].loop == "open":
        return full if full[1] > full[0] else None
    first = min(trace.sent_s for trace in run if not trace.warmup)
    ramp = [trace.end_s for trace in run if trace.warmup and trace.sent_s < first]
    begin, end = max([full[0], *ramp]), max(trace.end_s for trace in steady)
    return (begin, end) if end > begin else None


Count = Callable[[RequestTrace, float, float], int]


def tokens_in(trace: RequestTrace, begin: float, end: float) -> int:
    """Return the tokens that arrived in (begin, end]; a failed request's are not output, a cancelled filler's are."""
    if not ended_well(trace) and not (trace.warmup and trace.status == "cancelled"):
        return 0
    arrivals = zip(trace.chunk_times_s, trace.chunk_tokens, strict=True)
    return sum(count for at, count in arrivals if begin < at <= end)


def ended_in(good: Callable[[RequestTrace], bool]) -> Count:
    """Return a count of the good requests that ended in (begin, end]."""

    def count(trace: RequestTrace, begin: float, end: float) -> int:
        return int(begin < trace.end_s <= end and good(trace))

    return count


def _rate(
    runs: Iterable[Sequence[RequestTrace]], count: Count, *, zero: bool = False
) -> float | None:
    """Return counts per second over the steady windows; None for none at all unless `zero` is an answer."""
    seconds = total = 0.0
    for run in runs:
        window = steady_window(run)
        if window is not None:
            seconds += window[1] - window[0]
            total += sum(count(trace, *window) for trace in run)
    if seconds <= 0 or (total == 0 and not zero):
        return None
    return total / seconds


def best_point(summaries: Sequence[LoadPointSummary]) -> LoadPointSummary | None:
    """Return the load point with the highest output tokens/s, None when none has a rate."""
    known = [summary for summary in summaries if summary.output_tps is not None]
    return max(known, key=lambda s: s.output_tps or 0.0, default=None)


def point(summaries: Sequence[LoadPointSummary], name: str) -> LoadPointSummary | None:
    """Return a load point by name, None when it was not measured."""
    return next((summary for summary in summaries if summary.load_point == name), None)

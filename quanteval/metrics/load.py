"""Load points: what was offered, what came back and how fast, in the steady window and by prompt length.

Latencies are those of `metrics.latency`: an open loop's begin when a request was scheduled. Rates count what ended
within the steady window, goodput those of them that met every limit of the SLO; a failed, timed-out or cancelled
request meets none. Runs in which the client itself was the bottleneck are left out and named. Where the loads stop
being served well is in `metrics.knee`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quanteval.metrics.latency import (
    Distribution,
    distribution,
    e2e_s,
    ended_in,
    ended_well,
    itl_s,
    start_s,
    steady_requests,
    steady_window,
    tokens_in,
    tpot_s,
    ttft_s,
)
from quanteval.metrics.slo import Slo
from quanteval.records import LoadPointRecord, RequestTrace
from quanteval.stats.intervals import Interval, wilson_interval

LEVEL = 0.95
GROWTH_SHARE = 0.1
"""Least share of a window's arrivals by which the backlog must have grown to count as over-saturated."""
GROWTH_SIGMAS = 3.0
"""The same in standard deviations of the difference of as many Poisson arrivals and departures."""


@dataclass(frozen=True)
class Latencies:
    """Distributions over the steady requests of a load point, or of one prompt-length bucket of it."""

    requests: int
    """Steady requests, failed ones included."""
    ttft: Distribution
    itl: Distribution
    tpot: Distribution
    e2e: Distribution


@dataclass(frozen=True)
class Run:
    """One repetition of a load point in one round: its steady window and what happened in it."""

    round: int
    repetition: int
    window: tuple[float, float]
    traces: tuple[RequestTrace, ...]
    """Every request, those outside the window too."""
    steady: tuple[RequestTrace, ...]
    """Requests that latencies are taken from, in order of their start; failed ones are among them."""
    started_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Length of the steady window."""
        return self.window[1] - self.window[0]


@dataclass(frozen=True)
class Load:
    """One load point over its repetitions and rounds. What cannot be known is None."""

    name: str
    loop: Literal["closed", "open"]
    stage: str
    concurrency: int
    offered_rate: float | None
    """Requests/s that arrived in the steady window; None for a closed loop, which offers what is taken."""
    achieved_rate: float | None
    """Requests/s that ended well in it."""
    goodput: float | None
    """Those of them that met every limit."""
    output_tps: float | None
    in_flight: float | None
    """Mean number of requests under way in the steady window."""
    little: float | None
    """What Little's law makes of it: rate of all that ended x mean time under way. Far from `in_flight`, the window was
    not steady."""
    all: Latencies
    buckets: Mapping[str, Latencies]
    failed: int
    failures: Mapping[str, int]
    error_rate: Interval | None
    """Share of the steady requests that failed, with its Wilson interval; those that the client cancelled at the end of
    an over-saturated point count as missing every limit, and not as errors of the server."""
    over_saturated: str
    """Why the load counts as more than the server can take, '' when it does not."""
    excluded: tuple[str, ...]
    """Runs that are in no figure, with the reason."""
    runs: tuple[Run, ...]
    rate: float = 0.0
    """Requests/s asked for: the nominal load of an open loop."""

    @property
    def load(self) -> float:
        """What is varied: slots of a closed loop, requests/s of an open one."""
        return float(self.concurrency) if self.loop == "closed" else self.rate

    @property
    def seconds(self) -> float:
        """Steady seconds over all runs."""
        return sum(run.seconds for run in self.runs)

    @property
    def requests(self) -> int:
        """Steady requests over all runs."""
        return self.all.requests


def loads_of(
    traces: Sequence[RequestTrace], records: Sequence[LoadPointRecord] = (), slo: Slo | None = None
) -> list[Load]:
    """Return every load point in order of appearance, the warm-up left out.

    Traces without a record (of a bench that leaves none) are taken as they are marked.
    """
    slo = slo or Slo()
    by_key = {(r.round, r.name, r.repetition): r for r in records}
    groups: dict[str, dict[tuple[int, int], list[RequestTrace]]] = {}
    for trace in traces:
        runs = groups.setdefault(trace.load_point, {})
        runs.setdefault((trace.round, trace.repetition), []).append(trace)
    found = []
    for name, grouped in groups.items():
        if all(trace.warmup for run in grouped.values() for trace in run):
            continue
        told = {key: by_key.get((key[0], name, key[1])) for key in grouped}
        found.append(_load(name, grouped, told, slo))
    return found


def _load(
    name: str,
    grouped: Mapping[tuple[int, int], list[RequestTrace]],
    told: Mapping[tuple[int, int], LoadPointRecord | None],
    slo: Slo,
) -> Load:
    first = next(iter(grouped.values()))[0]
    records = [record for record in told.values() if record is not None]
    excluded, runs, saturated = [], [], ""
    for key in sorted(grouped):
        record = told[key]
        which = f"round {key[0]}, repetition {key[1]}" if key[0] else f"repetition {key[1]}"
        if record is not None and record.client.saturated:
            excluded.append(f"{which}: client saturated ({record.client.reason or 'no reason'})")
            continue
        if record is not None and record.over_saturated:
            saturated = saturated or record.note or "the queue grew without end"
        run = _run(key, grouped[key], record)
        if run is None:
            excluded.append(f"{which}: no steady state")
            continue
        runs.append(run)
        saturated = saturated or backlog_growth(run)
    steady = [trace for run in runs for trace in run.steady]
    failed = [trace for trace in steady if not ended_well(trace)]
    errors = sum(trace.status != "cancelled" for trace in failed)
    seconds = sum(run.seconds for run in runs)

    def per_second(counts: Iterable[float]) -> float | None:
        return sum(counts) / seconds if seconds > 0 else None

    return Load(
        name=name,
        loop=first.loop,
        stage=records[0].stage if records else "rising",
        concurrency=first.concurrency,
        rate=first.rate,
        offered_rate=per_second(len(run.steady) for run in runs) if first.loop == "open" else None,
        achieved_rate=per_second(_count(run, ended_in(ended_well)) for run in runs),
        goodput=per_second(_count(run, ended_in(slo.met_by)) for run in runs),
        output_tps=per_second(_count(run, tokens_in) for run in runs),
        in_flight=per_second(_time_in_flight(run) for run in runs),
        little=per_second(_little(run) * run.seconds for run in runs),
        all=latencies(steady),
        buckets={
            bucket: latencies([t for t in steady if t.bucket == bucket])
            for bucket in sorted({t.bucket for t in steady}, key=_lengths)
        },
        failed=len(failed),
        failures=Counter(t.status if t.status != "ok" else "error" for t in failed),
        error_rate=wilson_interval(errors, len(steady), LEVEL) if steady else None,
        over_saturated=saturated,
        excluded=tuple(excluded),
        runs=tuple(runs),
    )


def _lengths(bucket: str) -> tuple[float, str]:
    """Order buckets by their lengths and not as text."""
    low = bucket.partition("-")[0].rstrip("+")
    return (float(low), "") if low.isdecimal() else (math.inf, bucket)


def _run(
    key: tuple[int, int], traces: Sequence[RequestTrace], record: LoadPointRecord | None
) -> Run | None:
    window, steady = steady_window(traces), steady_requests(traces)
    if traces[0].loop == "open" and record is not None:
        begin, end = record.measured_from_s, record.measured_to_s
        window = (begin, end) if begin < end < math.inf else window
        steady = [t for t in traces if begin <= t.scheduled_s <= end]
    if window is None:
        return None
    ordered = tuple(sorted(steady, key=start_s))
    started = record.started_s if record is not None else 0.0
    return Run(*key, window, tuple(traces), ordered, started)


def latencies(steady: Sequence[RequestTrace]) -> Latencies:
    """Return the distributions over those of the requests that ended well."""
    good = [trace for trace in steady if ended_well(trace)]
    return Latencies(
        requests=len(steady),
        ttft=distribution(ttft_s(trace) for trace in good),
        itl=distribution((gap for t in good for gap in itl_s(t)), independent=False),
        tpot=distribution(value for t in good if (value := tpot_s(t)) is not None),
        e2e=distribution(e2e_s(trace) for trace in good),
    )


def _count(run: Run, count: object) -> float:
    return float(sum(count(trace, *run.window) for trace in run.traces))  # type: ignore[operator]


# --------------------------------------------------------------------------- what is under way


def in_flight_at(run: Run, at_s: float) -> int:
    """Return how many requests had begun and not ended at a moment."""
    return sum(start_s(trace) <= at_s < trace.end_s for trace in run.traces)


def _time_in_flight(run: Run) -> float:
    """Return the request-seconds within the window."""
    begin, end = run.window
    return sum(max(0.0, min(t.end_s, end) - max(start_s(t), begin)) for t in run.traces)


def _little(run: Run) -> float:
    """Return L = lambda W over what ended in the window (Little, Operations Research 9, 1961)."""
    begin, end = run.window
    ended = [t.end_s - start_s(t) for t in run.traces if begin < t.end_s <= end]
    return len(ended) / run.seconds * float(np.mean(ended)) if ended else 0.0


def backlog_growth(run: Run) -> str:
    """Say that the backlog of an open loop grew over the window, '' when it did not.

    Of n arrivals at a server that takes the share 1 - g of them, the backlog grows by g n; in a steady state it only
    wanders. It must grow by more than GROWTH_SHARE of the arrivals and GROWTH_SIGMAS x sqrt(2 n).
    """
    if not run.traces or run.traces[0].loop != "open":
        return ""
    begin, end = run.window
    arrived = sum(begin <= start_s(trace) <= end for trace in run.traces)
    growth = in_flight_at(run, end) - in_flight_at(run, begin)
    if growth <= max(GROWTH_SHARE * arrived, GROWTH_SIGMAS * math.sqrt(2 * max(arrived, 1))):
        return ""
    return f"the backlog grew by {growth} of {arrived} arrivals in {run.seconds:.3g} s"

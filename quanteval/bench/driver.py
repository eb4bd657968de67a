"""Load points as they are driven: closed loops that keep slots full, open loops that send on schedule.

Each runs an event loop on a thread of its own and hands over traces as requests end, then one
LoadPointRecord. Closing the iterator, or Ctrl-C, cancels what runs and ends the thread.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager

from quanteval.bench.client import LoadPoint
from quanteval.bench.loops import ClosedLoop, OpenLoop, OpenState
from quanteval.bench.prompts import PlannedRequest, PromptMaker
from quanteval.bench.running import LoopRun
from quanteval.interfaces import Request, Session, WatchesDevice
from quanteval.records import LoadPointRecord, RequestTrace, UtilizationSample

__all__ = ["OpenState", "Sampler", "drive_closed", "drive_open"]

Sampler = Callable[[], AbstractContextManager[Callable[[], UtilizationSample]]]
"""What watches the device during a load point: entered before it, the yielded function is called once at its end."""
COUNTERS = ("_total", "_sum", "_count", "_bucket")
"""How names of counters end, by the conventions of Prometheus; all else are gauges."""
CUT_TOKENS = 2_000_000
"""Prompts of an open loop that are cut before the clock starts, at most so many tokens."""
CUT_REQUESTS = 64
"""The same in requests, where it is not known how long the loop will be."""


def drive_closed(
    session: Session,
    maker: PromptMaker,
    point: LoadPoint,
    requests: Sequence[PlannedRequest],
    fillers: Iterator[PlannedRequest],
    timeout_s: float,
    *,
    sampler: Sampler | None = None,
) -> Generator[RequestTrace | LoadPointRecord, None, None]:
    """Keep `point.concurrency` slots full; yield each trace as its request ends, then the record.

    The slots take `requests` in order, then `fillers`, which keep the load up until the last
    measured request has ended and are then cancelled. Raises EngineError when a stream gives
    nothing for twice `timeout_s`: it cannot be cancelled, and every later figure would be taken
    beside a request that may still run.
    """
    # Prompts are cut before the clock starts; fillers when they are needed.
    jobs = [(planned, maker.request(planned)) for planned in requests]
    more = ((planned, maker.request(planned)) for planned in fillers)
    loop = ClosedLoop(session, point, timeout_s, jobs, more)
    return _drive(session, point, loop, sampler)


def drive_open(
    session: Session,
    maker: PromptMaker,
    point: LoadPoint,
    arrivals: Iterator[tuple[PlannedRequest, float]],
    timeout_s: float,
    stop: Callable[[OpenState], str] | None = None,
    *,
    sampler: Sampler | None = None,
) -> Generator[RequestTrace | LoadPointRecord, None, None]:
    """Send each request at its scheduled time; yield each trace as its request ends, then the record.

    `arrivals` gives requests in the order of their times, in seconds since the point began. What the
    server does changes nothing about when the next one is sent. Arrivals that are not measured go
    on until the last measured request has ended, and the rest is then cancelled; no measured one
    comes any more after `point.measured_to_s` (where that is not finite: once a filler has come).
    `stop` is asked about once a second; when its answer is not empty, the point ends as
    over-saturated with that note, and the requests in flight are cancelled. Raises EngineError
    as `drive_closed` does.
    """
    cut: deque[tuple[PlannedRequest, Request, float]] = deque()
    tokens = 0
    for planned, at_s in arrivals:
        cut.append((planned, maker.request(planned), at_s))
        tokens += planned.prompt_tokens
        if tokens > CUT_TOKENS or at_s > point.measured_to_s or (
            len(cut) >= CUT_REQUESTS and math.isinf(point.measured_to_s)
        ):  # fmt: skip
            break
    more = ((planned, maker.request(planned), at_s) for planned, at_s in arrivals)
    return _drive(session, point, OpenLoop(session, point, timeout_s, cut, more, stop), sampler)


def _drive(
    session: Session, point: LoadPoint, loop: LoopRun, sampler: Sampler | None
) -> Generator[RequestTrace | LoadPointRecord, None, None]:
    before = loop.server_metrics()
    if sampler is None and isinstance(session, WatchesDevice):
        sampler = session.device_sampler
    utilization: UtilizationSample | None = None
    with contextlib.ExitStack() as stack:
        read = stack.enter_context(sampler()) if sampler is not None else None
        try:
            loop.start()
            yield from loop.traces()
        finally:
            loop.close()
        if read is not None:
            utilization = read()
    health = loop.health
    assert health is not None, "a load point that ended has seen its own health"
    yield LoadPointRecord(
        name=point.name,
        loop=point.loop,
        stage=point.stage,
        concurrency=point.concurrency,
        rate=point.rate,
        repetition=point.repetition,
        started_s=loop.started_s,
        measured_from_s=min(loop.measured_from_s, loop.duration_s),
        measured_to_s=_window_end(loop),
        duration_s=loop.duration_s,
        client=health,
        server=_risen(before, loop.metrics),
        utilization=utilization,
        rss_bytes=loop.rss_bytes,
        over_saturated=bool(loop.note),
        note=loop.note,
    )


def _window_end(loop: LoopRun) -> float:
    """Return the end of the steady window: as planned, though its last request may have ended before it."""
    planned = loop.measured_to_s
    return min(planned, loop.duration_s) if loop.note or math.isinf(planned) else planned


def _risen(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return what counters rose by and where gauges stand; a counter that fell was reset, and counts from zero."""
    risen = {}
    for name, value in after.items():
        if name.partition("{")[0].endswith(COUNTERS):
            start = before.get(name, 0.0)
            risen[name] = value - start if value >= start else value
        else:
            risen[name] = value
    return risen

"""Both kinds of load: a closed loop that keeps its slots full, an open one that sends on schedule."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quanteval.bench.client import LoadPoint
from quanteval.bench.prompts import PlannedRequest
from quanteval.bench.running import Ahead, LoopRun
from quanteval.interfaces import Request, Session

ASK_S = 1.0
AHEAD = 32
"""How many prompts of an open loop are cut ahead once those cut before the start run out."""
Job = tuple[PlannedRequest, Request]
Arrival = tuple[PlannedRequest, Request, float]

TIMER_S = 1e-3


@dataclass(frozen=True)
class OpenState:
    """An open loop as it stands, about once a second; times in seconds since the point began."""

    now_s: float
    sent: int
    ended: int
    in_flight: int
    in_flight_history: tuple[tuple[float, int], ...]
    """(now_s, in_flight) of every question so far, this one included."""
    oldest_s: float
    """How long the oldest request in flight has been running; 0 without one."""


class ClosedLoop(LoopRun):
    """A fixed number of slots, each sending its next request when its last one has ended."""

    def __init__(
        self,
        session: Session,
        point: LoadPoint,
        timeout_s: float,
        jobs: Sequence[Job],
        fillers: Iterator[Job],
    ) -> None:
        super().__init__(session, point, timeout_s)
        self._jobs = deque(jobs)
        self._fillers = fillers
        self._measured_left = sum(planned.role == "measured" for planned, _ in jobs)
        self._slots = point.concurrency
        self.measured_from_s = math.inf

    async def load(self) -> None:
        """Fill every slot, and wait for the last measured request or the last slot."""
        if not self._measured_left:
            self._fillers = iter(())
        self._more = Ahead(self._fillers, self._slots)
        try:
            for _ in range(self.point.concurrency):
                self.spawn(self._slot())
            if self.point.concurrency:
                await self.over.wait()
        finally:
            self.ending = True
            self._more.close()

    async def _slot(self) -> None:
        free_s: float | None = None
        try:
            while not self.ending and (job := await self._next()) is not None:
                planned, request = job
                trace = await self.one(planned, request, None, free_s)
                free_s = trace.end_s
                if planned.role == "measured":
                    self.measured_from_s = min(self.measured_from_s, trace.sent_s)
                    self._measured_left -= 1
                    if not self._measured_left:
                        self.ending = True
                        self.over.set()
                elif planned.role == "filler" and trace.status in ("error", "out_of_memory"):
                    # Fillers that fail at once would follow each other without end.
                    break
        finally:
            self._slots -= 1
            if not self._slots:
                self.over.set()

    async def _next(self) -> Job | None:
        return self._jobs.popleft() if self._jobs else await self._more.next()


class OpenLoop(LoopRun):
    """Requests sent at their scheduled times, whatever the server does."""

    def __init__(
        self,
        session: Session,
        point: LoadPoint,
        timeout_s: float,
        cut: deque[Arrival],
        more: Iterator[Arrival],
        stop: Callable[[OpenState], str] | None,
    ) -> None:
        super().__init__(session, point, timeout_s)
        self._cut = cut
        self._source = more
        self._stop = stop
        self._measured_in_flight = 0
        self._more_measured = True
        self._ended_count = 0
        self._history: list[tuple[float, int]] = []

    async def load(self) -> None:
        """Send on schedule until the last measured request has ended, or `stop` says so."""
        self._more = Ahead(self._source, AHEAD)
        asker = asyncio.ensure_future(self._ask()) if self._stop is not None else None
        try:
            while not self.over.is_set() and (arrival := await self._next()) is not None:
                planned, request, at_s = arrival
                if planned.role != "measured" and self._is_past(planned, at_s):
                    self._no_more_measured()
                if not await self._wait_until(at_s):
                    break
                self._measured_in_flight += planned.role == "measured"
                self.spawn(self._send(planned, request, at_s))
            self._no_more_measured()
            await self.over.wait()
        finally:
            self._more.close()
            if asker is not None:
                asker.cancel()
        if asker is not None and asker.done() and not asker.cancelled():
            asker.result()

    def _is_past(self, planned: PlannedRequest, at_s: float) -> bool:
        if math.isfinite(self.point.measured_to_s):
            return at_s >= self.point.measured_to_s
        return planned.role == "filler"

    def _no_more_measured(self) -> None:
        self._more_measured = False
        if not self._measured_in_flight:
            self.over.set()

    async def _wait_until(self, at_s: float) -> bool:
        """Wait for the scheduled time; False when the point is over before it."""
        due = self.origin_s + at_s
        if due <= time.perf_counter():
            # Behind schedule: let what was sent begin all the same.
            await asyncio.sleep(0)
        # Timers round to a millisecond and may ring early, which would shorten a latency.
        while not self.over.is_set() and (delay := due - time.perf_counter()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(delay, TIMER_S)):
                    await self.over.wait()
        return not self.over.is_set()

    async def _send(self, planned: PlannedRequest, request: Request, at_s: float) -> None:
        try:
            await self.one(planned, request, at_s, None)
        finally:
            self._ended_count += 1
            if planned.role == "measured":
                self._measured_in_flight -= 1
                if not self._measured_in_flight and not self._more_measured:
                    self.over.set()

    async def _next(self) -> Arrival | None:
        if len(self._cut) <= AHEAD:
            self._more.begin()
        return self._cut.popleft() if self._cut else await self._more.next()

    async def _ask(self) -> None:
        assert self._stop is not None
        try:
            while not self.note:
                await asyncio.sleep(ASK_S)
                now_s = time.perf_counter() - self.origin_s
                # Those that wait for a thread of the client are in flight as well.
                in_flight = self.sent - self._ended_count
                self._history.append((now_s, in_flight))
                self.note = self._stop(
                    OpenState(
                        now_s=now_s,
                        sent=self.sent,
                        ended=self._ended_count,
                        in_flight=in_flight,
                        in_flight_history=tuple(self._history),
                        oldest_s=self.oldest_s(),
                    )
                )
        finally:
            self.over.set()

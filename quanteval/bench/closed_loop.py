"""A closed loop: a fixed number of slots, each sending its next request when its last one ended."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import chain

from quanteval.bench.client import LoadPoint, follow
from quanteval.bench.workload import PlannedRequest, PromptMaker
from quanteval.errors import EngineError
from quanteval.interfaces import Request, Session
from quanteval.records import RequestTrace

JOIN_S = 5.0
"""How long the slots may take to let go of their streams once nobody wants their traces."""

Job = tuple[PlannedRequest, Request]


def closed_loop(
    session: Session,
    maker: PromptMaker,
    point: LoadPoint,
    requests: Sequence[PlannedRequest],
    fillers: Iterator[PlannedRequest],
    timeout_s: float,
) -> Iterator[RequestTrace]:
    """Yield the trace of each request as it ends.

    The slots take `requests` in order, then `fillers`, which keep the load up until the last
    measured request has ended and are then cancelled. Closing the iterator (or Ctrl-C) ends the
    slots. Raises EngineError when a stream gives nothing for twice `timeout_s`: it cannot be
    cancelled, and every later figure would be taken beside a request that may still run.
    """
    # Prompts are cut before the clock starts; fillers when they are needed.
    jobs = [(planned, maker.request(planned)) for planned in requests]
    more = ((planned, maker.request(planned)) for planned in fillers)
    measured = sum(planned.role == "measured" for planned in requests)
    slots = _Slots(session, point, chain(jobs, more), measured, timeout_s)
    threads = [
        threading.Thread(target=slots.fill, args=(i,), name=f"{point.name}-{i}", daemon=True)
        for i in range(point.concurrency)
    ]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        yield from slots.traces()
    finally:
        slots.stop.set()
        deadline = time.monotonic() + JOIN_S
        for thread in started:
            thread.join(max(0.0, deadline - time.monotonic()))


class _Slots:
    """What the threads of one load point share."""

    def __init__(
        self,
        session: Session,
        point: LoadPoint,
        jobs: Iterator[Job],
        measured: int,
        timeout_s: float,
    ) -> None:
        self.stop = threading.Event()
        self._session = session
        self._point = point
        self._jobs = jobs
        self._measured_left = measured
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._running: dict[int, tuple[str, float]] = {}
        self._done: queue.SimpleQueue[RequestTrace | BaseException | None] = queue.SimpleQueue()
        self._origin_s = time.perf_counter()

    def fill(self, slot: int) -> None:
        """Run one request after another; a trace, a failure, or None at the end goes to `traces`."""
        try:
            while (job := self._next(slot)) is not None:
                planned, request = job
                trace = follow(
                    self._session, planned, request, self._point,
                    origin_s=self._origin_s, timeout_s=self._timeout_s, stop=self.stop,
                )  # fmt: skip
                self._ended(slot, planned)
                self._done.put(trace)
                if planned.role == "filler" and trace.status in ("error", "out_of_memory"):
                    # Fillers that fail at once would follow each other without end.
                    break
        except BaseException as failure:
            self._done.put(failure)
        self._done.put(None)

    def _next(self, slot: int) -> Job | None:
        with self._lock:
            job = None if self.stop.is_set() else next(self._jobs, None)
            if job is not None:
                self._running[slot] = (job[0].request_id, time.perf_counter())
            return job

    def _ended(self, slot: int, planned: PlannedRequest) -> None:
        with self._lock:
            del self._running[slot]
            self._measured_left -= planned.role == "measured"
            if self._measured_left == 0:
                self.stop.set()

    def traces(self) -> Iterator[RequestTrace]:
        """Yield traces until every slot has ended."""
        open_slots = self._point.concurrency
        while open_slots:
            try:
                item = self._done.get(timeout=min(self._timeout_s, 1.0))
            except queue.Empty:
                self._refuse_hung_streams()
                continue
            if item is None:
                open_slots -= 1
            elif isinstance(item, RequestTrace):
                yield item
            else:
                raise item
            self._refuse_hung_streams()

    def _refuse_hung_streams(self) -> None:
        now = time.perf_counter()
        with self._lock:
            running = list(self._running.values())
        for request_id, since in running:
            if now - since > 2 * self._timeout_s:
                raise EngineError(
                    f'request "{request_id}" has not ended after {now - since:.0f} s, twice the timeout, '
                    "and cannot be cancelled: the engine hangs (or set a longer bench.timeout_s)"
                )

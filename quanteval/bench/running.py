"""One load point on an event loop of a thread of its own: what closed and open loops share.

That is the thread, the requests that run, the watch for streams that hang, and an end that leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import queue
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from typing import Any, Generic, TypeVar

from quanteval.bench.client import LoadPoint, follow
from quanteval.bench.health import HealthMeter
from quanteval.bench.prompts import PlannedRequest
from quanteval.bench.streams import THREADS, served_elsewhere, streams_by_itself
from quanteval.errors import EngineError
from quanteval.interfaces import Request, Session, TellsMetrics
from quanteval.records import ClientHealth, RequestTrace

JOIN_S = 5.0
"""How long requests may take to let go of their streams once nobody wants their traces."""
METRICS_S = 10.0
"""How long the server may take to tell its metrics while the load goes on."""
T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop: uvloop's where it is installed, it carries about twice the chunks."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class Ahead(Generic[T]):
    """Draws from an iterator on a thread, a few items ahead, so that cutting prompts never blocks the loop."""

    def __init__(self, items: Iterator[T], limit: int) -> None:
        self._items = items
        self._limit = limit
        self._ready: deque[T | BaseException | None] = deque()
        self._wake = asyncio.Event()
        self._room = threading.Semaphore(limit)
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._started = False

    def begin(self) -> None:
        """Start to draw; otherwise the first call of `next` does."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._draw, name="prompts", daemon=True).start()

    async def next(self) -> T | None:
        """Return the next item, None after the last; raises what the iterator raised."""
        self.begin()
        while not self._ready:
            self._wake.clear()
            await self._wake.wait()
        item = self._ready[0]
        if item is None:
            return None
        if isinstance(item, BaseException):
            raise item
        self._ready.popleft()
        self._room.release()
        return item

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._room.release()

    def _draw(self) -> None:
        try:
            for item in self._items:
                self._room.acquire()
                if self._closed:
                    break
                self._put(item)
        except BaseException as failure:
            self._put(failure)
        self._put(None)

    def _put(self, item: T | BaseException | None) -> None:
        self._ready.append(item)
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
            self._loop.call_soon_threadsafe(self._wake.set)


class LoopRun:
    """One load point: an event loop on a thread, whose traces another thread reads."""

    def __init__(self, session: Session, point: LoadPoint, timeout_s: float) -> None:
        self.session = session
        self.point = point
        self.timeout_s = timeout_s
        self.note = ""
        self.health: ClientHealth | None = None
        self.metrics: dict[str, float] = {}
        self.rss_bytes = 0
        self.started_s = 0.0
        self.duration_s = 0.0
        self.origin_s = 0.0
        self.measured_from_s = point.measured_from_s
        self.measured_to_s = point.measured_to_s
        self.sent = 0
        self.ending = False
        self._by_itself = streams_by_itself(session)
        self._meter = HealthMeter(on_loop=served_elsewhere(session))
        self._lock = threading.Lock()
        self._running: dict[str, float] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._done: queue.SimpleQueue[RequestTrace | BaseException | None] = queue.SimpleQueue()
        self._main_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=point.name, daemon=True)

    # ---- on the caller's thread

    def start(self) -> None:
        """Begin the load."""
        # The collector would walk the whole heap, a model's modules included, in the middle of it.
        gc.freeze()
        self._thread.start()

    def traces(self) -> Iterator[RequestTrace]:
        """Yield traces until the load point has ended; raises what went wrong in it."""
        checked = time.perf_counter()
        while True:
            try:
                item = self._done.get(timeout=min(self.timeout_s, 1.0))
            except queue.Empty:
                self._refuse_hung_streams()
                continue
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
            if time.perf_counter() - checked > min(self.timeout_s, 1.0):
                self._refuse_hung_streams()
                checked = time.perf_counter()

    def close(self) -> None:
        """Cancel what runs and end the thread; it is left behind when a stream cannot be cancelled."""
        with self._lock:
            self._closed = True
            loop, main = self._loop, self._main_task
        if loop is not None and main is not None:
            with contextlib.suppress(RuntimeError):  # The loop has ended by itself.
                loop.call_soon_threadsafe(main.cancel)
        if self._thread.ident is not None:
            self._thread.join(JOIN_S + 1.0)
            gc.unfreeze()

    def server_metrics(self) -> dict[str, float]:
        """Return what the server counts, {} when it does not tell."""
        if not isinstance(self.session, TellsMetrics):
            return {}
        try:
            return dict(self.session.server_metrics())
        except Exception:
            # The requests' own statuses say what is wrong with the server.
            return {}

    def _refuse_hung_streams(self) -> None:
        now = time.perf_counter()
        with self._lock:
            running = list(self._running.items())
        for request_id, since in running:
            if now - since > 2 * self.timeout_s:
                raise EngineError(
                    f'request "{request_id}" has not ended after {now - since:.0f} s, twice the timeout, '
                    "and cannot be cancelled: the engine hangs (or set a longer bench.timeout_s)"
                )

    # ---- on the thread of the event loop

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(self._main())
        except BaseException as failure:
            self._done.put(failure)
        self._done.put(None)

    async def _main(self) -> None:
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._main_task = asyncio.current_task()
            if self._closed:
                return
        self.over = asyncio.Event()
        self._threads = asyncio.Semaphore(THREADS)
        ticker = asyncio.ensure_future(self._meter.tick())
        self.started_s = time.time()
        self.origin_s = time.perf_counter()
        self._meter.start()
        try:
            await self.load()
            self.duration_s = time.perf_counter() - self.origin_s
            self.health = self._meter.health()
            if self._failure is None:
                # Gauges are read while the load still stands.
                await self._read_server()
            await self._cancel_all()
        except BaseException as failure:
            self._done.put(self._failure or failure)
            raise
        finally:
            ticker.cancel()
            await self._cancel_all(JOIN_S)
            if self._failure is not None:
                self._done.put(self._failure)
            self._done.put(None)

    async def load(self) -> None:
        """Put the load on, and return when the last measured request has ended."""
        raise NotImplementedError

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task that is cancelled when the point ends; a failure of it ends the point."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = self._failure or failure
            self.over.set()

    async def _cancel_all(self, wait_s: float | None = None) -> None:
        self.ending = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=wait_s)

    async def one(
        self,
        planned: PlannedRequest,
        request: Request,
        scheduled_s: float | None,
        free_s: float | None,
    ) -> RequestTrace:
        """Follow a request; `free_s` is when its slot became free, `scheduled_s` when it was to be sent."""
        self.sent += 1
        if not self._by_itself:
            await self._threads.acquire()
        with self._lock:
            self._running[planned.request_id] = time.perf_counter()
        try:
            trace = await follow(
                self.session, planned, request, self.point,
                origin_s=self.origin_s, timeout_s=self.timeout_s, scheduled_s=scheduled_s,
            )  # fmt: skip
        finally:
            with self._lock:
                del self._running[planned.request_id]
            if not self._by_itself:
                self._threads.release()
        due = free_s if scheduled_s is None else scheduled_s
        self._meter.saw(trace, None if due is None else trace.sent_s - due)
        self._done.put(trace)
        return trace

    async def _read_server(self) -> None:
        found: asyncio.Future[tuple[dict[str, float], int]] = asyncio.Future()
        loop = asyncio.get_running_loop()

        def read() -> None:
            result = (self.server_metrics(), self._rss())
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(tell, result)

        def tell(result: tuple[dict[str, float], int]) -> None:
            if not found.done():
                found.set_result(result)

        if not isinstance(self.session, TellsMetrics) and not hasattr(self.session, "rss_bytes"):
            return
        # A daemon thread, not the loop's executor: a server that says nothing must not hold up the end.
        threading.Thread(target=read, name="server-metrics", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            self.metrics, self.rss_bytes = await asyncio.wait_for(found, METRICS_S)

    def _rss(self) -> int:
        read = getattr(self.session, "rss_bytes", None)
        try:
            return int(read() or 0) if callable(read) else 0
        except Exception:
            return 0

    def oldest_s(self) -> float:
        """Return for how long the oldest request has been running, 0 without one."""
        since = min(self._running.values(), default=None)
        return 0.0 if since is None else time.perf_counter() - since

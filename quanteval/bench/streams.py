"""Chunks of one request on an event loop: from a session that streams there itself, or through a thread."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from quanteval.interfaces import Chunk, OwnsProcesses, Request, Session, TellsMetrics

THREADS = 512
"""Most threads that read blocking streams at a time; further requests wait, which counts as the client's lag."""


def streams_by_itself(session: Session) -> bool:
    """Whether a session streams on the event loop (see `interfaces.StreamsAsync`), so that no thread is needed."""
    return callable(getattr(session, "astream", None))


def served_elsewhere(session: Session) -> bool:
    """Whether other processes compute for a session: this one's CPU time and memory are then the client's alone."""
    return isinstance(session, TellsMetrics | OwnsProcesses)


def astream(session: Session, request: Request) -> AsyncIterator[Chunk]:
    """Return the chunks of a request; closing the iterator, or cancelling its task, cancels the request.

    A session without `astream` is read by a daemon thread of its own for this request. It is told
    to close the blocking stream, and does so at the next chunk; until then closing waits.
    """
    own = getattr(session, "astream", None)
    return own(request) if callable(own) else _pumped(session, request)


async def _pumped(session: Session, request: Request) -> AsyncIterator[Chunk]:
    pump = _Pump(session, request, asyncio.get_running_loop())
    pump.thread.start()
    try:
        while True:
            await pump.wake.wait()
            pump.wake.clear()
            while pump.items:
                item = pump.items.popleft()
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
    finally:
        pump.stop.set()
        await pump.ended.wait()
        if pump.closing is not None:
            raise pump.closing


class _Pump:
    """A thread that reads one blocking stream and hands what it gives to an event loop."""

    def __init__(self, session: Session, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.items: deque[Chunk | BaseException | None] = deque()
        self.wake = asyncio.Event()
        self.ended = asyncio.Event()
        self.stop = threading.Event()
        self.closing: Exception | None = None
        self.thread = threading.Thread(
            target=self._read,
            args=(session, request),
            name=f"stream-{request.request_id}",
            daemon=True,
        )
        self._loop = loop

    def _read(self, session: Session, request: Request) -> None:
        stream: Any = None
        try:
            stream = session.stream(request)
            for chunk in stream:
                self._hand(chunk)
                if self.stop.is_set() or chunk.finish_reason is not None or chunk.error is not None:
                    break
        except BaseException as failure:
            self._hand(failure)
        try:
            if (close := getattr(stream, "close", None)) is not None:
                close()
        except Exception as failure:
            self.closing = failure
        self._hand(None)
        self._call(self.ended.set)

    def _hand(self, item: Chunk | BaseException | None) -> None:
        self.items.append(item)
        self._call(self.wake.set)

    def _call(self, what: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:
            # The loop is closed: nobody waits for this stream any more.
            self.stop.set()

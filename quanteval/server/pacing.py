"""Waking at absolute times: a timer finer than an event loop's milliseconds, and a clock that can stand still.

Times are `time.perf_counter()`, which on Linux is CLOCK_MONOTONIC and the same in every process.
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import os
import struct
import sys
from time import perf_counter

CLOCK_MONOTONIC = 1
NONBLOCKING_CLOEXEC = 0o2004000
ABSOLUTE = 1


class Ticker:
    """Wakes tasks of one event loop at their times, through one kernel timer where there is one.

    The loops' own timers round to a millisecond, which would show in every gap between tokens.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[float, int, asyncio.Future[None]]] = []
        self._number = 0
        self._armed = float("inf")
        self._libc = self._fd = None
        if sys.platform == "linux":
            libc = ctypes.CDLL(None, use_errno=True)
            fd = libc.timerfd_create(CLOCK_MONOTONIC, NONBLOCKING_CLOEXEC)
            if fd >= 0:
                self._libc, self._fd = libc, fd
                loop.add_reader(fd, self._on_timer)

    async def until(self, at_s: float) -> None:
        """Return at `at_s` or as soon after as the loop gets to it; at once when it has passed."""
        if at_s <= perf_counter():
            return
        self._number += 1
        woken: asyncio.Future[None] = self._loop.create_future()
        heapq.heappush(self._heap, (at_s, self._number, woken))
        if at_s < self._armed:
            self._arm(at_s)
        await woken

    def _arm(self, at_s: float) -> None:
        self._armed = at_s
        if self._fd is None or self._libc is None:
            self._loop.call_later(max(at_s - perf_counter(), 0), self._wake)
            return
        seconds = int(at_s)
        spec = struct.pack("qqqq", 0, 0, seconds, int((at_s - seconds) * 1e9) or 1)
        self._libc.timerfd_settime(self._fd, ABSOLUTE, spec, None)

    def _on_timer(self) -> None:
        try:
            os.read(self._fd or 0, 8)
        except BlockingIOError:
            return
        self._wake()

    def _wake(self) -> None:
        now = perf_counter()
        heap = self._heap
        while heap and (heap[0][0] <= now or heap[0][2].done()):
            woken = heapq.heappop(heap)[2]
            if not woken.done():
                woken.set_result(None)
        self._armed = float("inf")
        if heap:
            self._arm(heap[0][0])

    def close(self) -> None:
        """Give the timer back."""
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None


class StallingClock:
    """Turns work into time: what is worked during a stall takes as much longer as it overlaps it."""

    def __init__(self) -> None:
        self._stalls: list[tuple[float, float]] = []

    def stall(self, begin_s: float, length_s: float) -> None:
        """Let nothing progress from `begin_s` on for `length_s` seconds."""
        if length_s > 0:
            self._stalls = sorted([*self._stalls, (begin_s, begin_s + length_s)])

    def clear(self) -> None:
        """Forget all stalls."""
        self._stalls = []

    def after(self, begin_s: float, work_s: float) -> float:
        """Return when work begun at `begin_s` is done; never within a stall."""
        now = begin_s
        for start, end in self._stalls:
            if end <= now:
                continue
            if now + work_s < start:
                break
            work_s -= max(start - now, 0.0)
            now = end
        return now + work_s

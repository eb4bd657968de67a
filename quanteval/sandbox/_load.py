"""What keeps the machine's load out of the outcomes: limits stretched on a slow machine, and timeouts retried alone."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator

NOMINAL_CPU_S = 0.005
"""CPU seconds of the reference program on the machine that the limits were chosen for."""
LARGEST_FACTOR = 4.0
REPEATS = 3


def reference_cpu_s() -> float:
    """Run a small fixed program and return the CPU seconds it took this thread."""
    started = time.thread_time()
    table: dict[int, int] = {}
    value = 1
    for i in range(20_000):
        value = (value * 1103515245 + 12345) & 0x7FFFFFFF
        table[value & 1023] = value ^ i
    return time.thread_time() - started


def slowness(measure: Callable[[], float] = reference_cpu_s) -> float:
    """Return by how much the limits are stretched here: measured over nominal, from 1 to LARGEST_FACTOR."""
    measured = statistics.median(measure() for _ in range(REPEATS))
    return min(max(measured / NOMINAL_CPU_S, 1.0), LARGEST_FACTOR)


class Turnstile:
    """Lets any number through together, or one alone: who asks to be alone waits for the others to leave."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._alone = 0

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Be inside with others; new ones wait for those who want to be alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._inside += 1
        try:
            yield
        finally:
            self._leave()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only one inside."""
        with self._changed:
            self._alone += 1
            self._changed.wait_for(lambda: not self._inside)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._alone -= 1
            self._leave()

    def _leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

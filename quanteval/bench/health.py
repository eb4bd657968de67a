"""How well the load client kept up: when its own lag or CPU share is part of what it measured.

A point is saturated when requests were sent late, when the event loop that takes the timestamps woke
late, or when the client used up a core. Late means at the 99th percentile (of fewer than FEW: at the
90th, one hiccup of the machine is no bottleneck) by more than LAG_SHARE of the median TTFT and more
than LAG_FLOOR_S.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from quanteval.records import ClientHealth, RequestTrace

LAG_FLOOR_S = 0.02
LAG_SHARE = 0.1
CPU_LIMIT = 0.9
TICK_S = 0.01
FEW = 100


class HealthMeter:
    """Collects what `ClientHealth` is made of, on the event loop of one load point.

    `on_loop` says whether arrivals are timed by the event loop; where the engine computes in this
    process they are not, and the CPU time is not the client's alone: the loop's lag then says
    nothing about the figures, and the CPU share is NaN.
    """

    def __init__(self, *, on_loop: bool) -> None:
        self._on_loop = on_loop
        self._lags: list[float] = []
        self._loop_lags: list[float] = []
        self._ttfts: list[float] = []
        self._cpu_s = time.process_time()
        self._since_s = time.perf_counter()

    def start(self) -> None:
        """Begin to count CPU time."""
        self._cpu_s = time.process_time()
        self._since_s = time.perf_counter()

    async def tick(self) -> None:
        """Sleep and note how late the loop woke, until cancelled."""
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self._loop_lags.append(max(0.0, time.perf_counter() - due))

    def saw(self, trace: RequestTrace, lag_s: float | None) -> None:
        """Note a request that has ended, and how late it was sent (None: it had no schedule)."""
        if lag_s is not None:
            self._lags.append(lag_s)
        if trace.chunk_times_s:
            self._ttfts.append(trace.chunk_times_s[0] - trace.sent_s)

    def health(self) -> ClientHealth:
        """Return the client's health up to now."""
        elapsed = time.perf_counter() - self._since_s
        cpu = (time.process_time() - self._cpu_s) / elapsed if elapsed > 0 else math.nan
        lag = _quantile(self._lags, 0.99)
        loop_lag = _quantile(self._loop_lags, 0.99)
        reason = self._reason(cpu)
        return ClientHealth(
            lag_p50_s=_quantile(self._lags, 0.5),
            lag_p99_s=lag,
            loop_lag_p99_s=loop_lag,
            cpu_share=cpu if self._on_loop else math.nan,
            saturated=bool(reason),
            reason=reason,
        )

    def _reason(self, cpu: float) -> str:
        ttft = median(self._ttfts) if self._ttfts else 0.0
        limit = max(LAG_FLOOR_S, LAG_SHARE * ttft)
        q, lag = _late(self._lags)
        if lag > limit:
            return f"requests were sent {lag:.3f} s late at p{q:.0f}, more than {limit:.3f} s"
        q, lag = _late(self._loop_lags)
        if self._on_loop and lag > limit:
            return f"the event loop woke {lag:.3f} s late at p{q:.0f}, more than {limit:.3f} s"
        if self._on_loop and cpu > CPU_LIMIT:
            return f"the client used {cpu:.0%} of a core, more than {CPU_LIMIT:.0%}"
        return ""


def _late(lags: Sequence[float]) -> tuple[float, float]:
    """Return which percentile tells of lateness, and its value."""
    q = 99.0 if len(lags) >= FEW else 90.0
    return q, _quantile(lags, q / 100)


def _quantile(values: Sequence[float], q: float) -> float:
    return float(np.quantile(values, q, method="higher")) if values else 0.0

"""What this machine can do at best: copy bandwidth and matrix-product rate, measured in this process.

The denominators of MBU and MFU. Measured with the threads that torch uses here, best of several: a loaded machine
lowers them, so that utilizations come out too high rather than too low.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from quanteval.records import MachinePeaks

BUDGET_S = 0.35
"""Time for each figure, after one call that warms up."""
COPY_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
"""Size of the array that is copied: beyond the last-level cache of all but the largest servers."""
SIDE = {"cpu": 1024, "cuda": 8192}
FORMATS = ("float32", "bfloat16", "int8")


@functools.cache
def measure_peaks(device: str = "cpu") -> MachinePeaks:
    """Measure once a process; formats that the device or this torch refuses are left out.

    The copy counts bytes read and bytes written. An int8 product counts a multiplication and an addition as two
    operations, like a float one. Takes about two seconds on a CPU, and a few hundred MB while it runs: not to be called
    while a phase's memory is watched.
    """
    import torch

    copied = _attempt(lambda: _copy_bytes_per_s(device))
    flops = {}
    for name in FORMATS:
        rate = _attempt(functools.partial(_flops_per_s, name, device))
        if rate is not None:
            flops[name] = rate
    where = (
        torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    )
    return MachinePeaks(
        device=device,
        copy_bytes_per_s=copied,
        matmul_flops_per_s=flops,
        how=f"best of several on {where}: copy of {COPY_BYTES[device] >> 20} MiB, read and written; "
        f"products of {SIDE[device]} x {SIDE[device]} matrices",
    )


def _attempt(measure: Callable[[], float]) -> float | None:
    """Return None for what this device or build cannot do (also for want of memory)."""
    try:
        return measure()
    except (RuntimeError, MemoryError, AttributeError, AssertionError):
        return None


def _copy_bytes_per_s(device: str) -> float:
    import torch

    size = COPY_BYTES[device]
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best_s(lambda: target.copy_(source), device)


def _flops_per_s(name: str, device: str) -> float:
    import torch

    side = SIDE[device]
    if name == "int8":
        left = torch.randint(-8, 8, (side, side), dtype=torch.int8, device=device)
        right = torch.randint(-8, 8, (side, side), dtype=torch.int8, device=device).t()
        step: Callable[[], Any] = functools.partial(torch._int_mm, left, right)
    else:
        a = torch.randn(side, side, device=device).to(getattr(torch, name))
        b = torch.randn(side, side, device=device).to(getattr(torch, name))
        step = functools.partial(torch.mm, a, b)
    with torch.no_grad():
        return 2 * side**3 / _best_s(step, device)


def _best_s(step: Callable[[], Any], device: str) -> float:
    """Return the shortest time of a call within the budget, at least three calls."""
    import torch

    def timed() -> float:
        started = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    timed()
    best, calls, end = float("inf"), 0, time.perf_counter() + BUDGET_S
    while calls < 3 or time.perf_counter() < end:
        best = min(best, timed())
        calls += 1
    return best

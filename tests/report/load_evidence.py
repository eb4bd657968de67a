"""Load evidence made by hand: requests through a simulated queue whose service time is known, and their records."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from quanteval.records import ClientHealth, LoadPointRecord, RequestTrace, UtilizationSample
from tests.gate import evidence as make

SLO = {"ttft": {"p99": 0.5}}


def health(*, saturated=False, reason="", lag=0.001) -> ClientHealth:
    """Return the health of a client that kept up, or did not."""
    return ClientHealth(
        lag_p50_s=lag / 2, lag_p99_s=lag, loop_lag_p99_s=0.0005, cpu_share=0.2,
        saturated=saturated, reason=reason,
    )  # fmt: skip


def record(name, **more) -> LoadPointRecord:
    """Return the record of one run of a load point."""
    fields = {
        "name": name, "loop": "open", "stage": "rising", "concurrency": 0, "rate": 1.0, "repetition": 0,
        "started_s": 1.7e9, "measured_from_s": 0.0, "measured_to_s": 100.0, "duration_s": 110.0, "client": health(),
    }  # fmt: skip
    return LoadPointRecord(**{**fields, **more})


def request(name, at_s, wait_s, first_s, gap_s, tokens, **more) -> RequestTrace:
    """Return a request scheduled at `at_s` that waits, sees its first token `first_s` later, then one every `gap_s`."""
    times = [at_s + wait_s + first_s + gap_s * k for k in range(tokens)]
    layers = {"queue": wait_s, "prefill": first_s * 0.9, "decode": gap_s * (tokens - 1)}
    fields = {
        "load_point": name, "loop": "open", "concurrency": 0, "rate": 1.0, "repetition": 0, "warmup": False,
        "request_id": f"{name}-{at_s:.6f}", "bucket": "1-128", "scheduled_s": at_s, "sent_s": at_s,
        "chunk_times_s": times, "chunk_tokens": [1] * tokens, "end_s": times[-1], "prompt_tokens": 100,
        "output_tokens": tokens, "layers": layers, "status": "ok",
    }  # fmt: skip
    return RequestTrace(**{**fields, **more})


def open_point(
    rate,
    *,
    service_s=0.2,
    seconds=100.0,
    first_s=0.05,
    gap_s=0.01,
    tokens=11,
    seed=0,
    long_share=0.3,
    layers=True,
    stage="rising",
    name=None,
    **more,
) -> tuple[list[RequestTrace], LoadPointRecord]:
    """Return an open load point: Poisson arrivals at one server that begins a request every `service_s` at most.

    It can take 1/service_s requests/s; above, the wait grows without end.
    """
    rng = random.Random(seed * 1000 + round(1000 * rate))
    name = name or f"open_loop_{rate:g}"
    at = free = 0.0
    traces = []
    while True:
        at += rng.expovariate(rate)
        if at > seconds:
            break
        begin = max(at, free)
        free = begin + service_s
        bucket = "129-512" if rng.random() < long_share else "1-128"
        extra = {} if layers else {"layers": {}}
        traces.append(
            request(
                name, at, begin - at, first_s, gap_s, tokens,
                rate=rate, bucket=bucket, request_id=f"{name}-{len(traces)}", **extra,
            )
        )  # fmt: skip
    told = {
        "rate": rate,
        "stage": stage,
        "measured_to_s": seconds,
        "duration_s": seconds + 10,
        **more,
    }
    return traces, record(name, **told)


def loaded_variant(
    name,
    *,
    service_s=0.2,
    rates: Sequence[float] = (0.5, 1, 2, 3, 4, 6),
    seconds=100.0,
    slo: Mapping[str, object] | None = SLO,
    points=(),
    comparable=None,
    **more,
):
    """Return a variant whose load was raised over `rates`; `points` are further (traces, record) pairs."""
    found = [open_point(rate, service_s=service_s, seconds=seconds) for rate in rates]
    found += list(points)
    sets = more.pop("sets", ())
    bench = {} if slo is None else {"slo": slo}
    conditions = {**make.CONDITIONS, "cpu": "A CPU", "bench": bench, **(comparable or {})}
    return make.variant(
        name,
        *sets,
        comparable=conditions,
        traces=[trace for traces, _ in found for trace in traces],
        load_points=[told for _, told in found],
        **more,
    )


def device_sample(**more) -> UtilizationSample:
    """Return what a device did during a load point."""
    fields = {"source": "none", "reason": "no NVIDIA device"}
    return UtilizationSample(**{**fields, **more})


def finite(values) -> bool:
    """Whether every value is a number."""
    return all(math.isfinite(value) for value in values)

"""What a bench leaves: request traces, load points, what the machine can do at best."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from quanteval.records.base import Part, Record


class RequestTrace(Part):
    """One request as the load client saw it; times in seconds since its load point began."""

    round: int = 0
    """Which of the interleaved rounds; each round is served by a process of its own."""
    load_point: str
    """Name, e.g. 'single_stream', 'closed_loop_4' or 'open_loop_2.5'."""
    loop: Literal["closed", "open"] = "closed"
    """closed: slots kept full; open: sent on schedule, whatever the server does."""
    concurrency: int
    """Slots of a closed loop; 0 for an open one."""
    rate: float = 0.0
    """Requests/s that an open loop offers; 0 for a closed one."""
    repetition: int
    warmup: bool
    """True for requests that steady-state figures leave out."""
    request_id: str
    bucket: str
    """Prompt-length bucket, e.g. '0-128'."""
    scheduled_s: float
    sent_s: float
    chunk_times_s: list[float]
    """Arrival of each chunk that carried tokens."""
    chunk_tokens: list[int]
    """Tokens in each of those chunks."""
    end_s: float
    prompt_tokens: int
    output_tokens: int
    cached_prompt_tokens: int | None = None
    """Prompt tokens that the server took from a prefix cache; None where it does not tell."""
    layers: dict[str, float] = Field(default_factory=dict)
    """Seconds spent in each layer that can be told apart: queue, tokenize, prefill, decode, detokenize, network."""
    status: Literal["ok", "error", "timeout", "cancelled", "out_of_memory"]
    error: str = ""


class ClientHealth(Part):
    """How well the load client kept up during a load point: its own share in the figures."""

    lag_p50_s: float
    lag_p99_s: float
    """How much later than scheduled requests were sent (open loop) or slots refilled (closed loop)."""
    loop_lag_p99_s: float
    """How late the client's event loop woke from a timer."""
    cpu_share: float
    """CPU seconds of the client process over the point's seconds: near 1 means one core is used up. NaN where the
    served model computes in the client's process."""
    saturated: bool
    """Whether the client itself was the bottleneck: the point's latencies then say nothing about the server."""
    reason: str = ""


class UtilizationSample(Part):
    """What the device did during a load point, averaged over it; None with a reason where it cannot be read."""

    source: str
    """'nvml', 'nvml-gpm', 'none', ...: where the figures come from."""
    sm_occupancy: float | None = None
    sm_active: float | None = None
    tensor_active: float | None = None
    memory_bandwidth: float | None = None
    """Share of the peak, 0 to 1, as the three above."""
    power_w: float | None = None
    reason: str = ""
    """Why what is None is None."""


class LoadPointRecord(Part):
    """One load point as it was driven: a line of load_points.jsonl. Latencies are in the traces."""

    name: str
    loop: Literal["closed", "open"]
    stage: Literal["single", "rising", "search", "capacity", "head_of_line", "soak"] = "rising"
    concurrency: int
    rate: float
    repetition: int
    round: int = 0
    started_s: float
    """Unix time of the point's origin: trace times are relative to it."""
    measured_from_s: float = 0.0
    measured_to_s: float = 0.0
    """Steady window, relative to the origin: requests scheduled in it count as measured."""
    duration_s: float
    client: ClientHealth
    server: dict[str, float] = Field(default_factory=dict)
    """What the server's own metrics rose by (counters) or stood at (gauges) at the end; names in docs/metrics.md."""
    utilization: UtilizationSample | None = None
    rss_bytes: int = 0
    """Resident memory of the serving process at the end of the point; 0 where unknown."""
    over_saturated: bool = False
    """Whether the queue grew without end: higher loads were not tried."""
    note: str = ""
    """What the search concluded from this point, e.g. 'ttft p99 0.61 s breaks the SLO of 0.5 s'."""


class MachinePeaks(Record):
    """What the machine can do at best, measured here: the denominators of MBU and MFU."""

    device: str
    copy_bytes_per_s: float | None
    matmul_flops_per_s: dict[str, float] = Field(default_factory=dict)
    """By format of the operands, e.g. {'bfloat16': 3.1e11}."""
    how: str

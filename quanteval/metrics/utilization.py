"""MFU and MBU of prefill and decode, and what bounds them: from shapes, times and the machine's measured peaks.

MFU (model FLOP/s utilization, Chowdhery et al., "PaLM", 2022) and MBU (model bandwidth utilization) are the work a
pass must do, over its time, over what the machine does at best. The bound is the roofline's (Williams et al., 2009):
a pass whose operations a byte lie below the machine's is memory-bound. A share above 1 means that the peak was
measured on a slower moment, or that the work fits a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quanteval.modelwork import Work, decode_work, prefill_work
from quanteval.records import MachinePeaks
from quanteval.records.variants import Effective, ModelShape

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Utilization:
    """One phase at one size; None with a reason for what cannot be known."""

    phase: Phase
    tokens: int
    """Prompt tokens of a prefill; tokens in the cache of one sequence for a decode step."""
    batch: float
    seconds: float
    intensity: float | None = None
    """Operations a byte."""
    ridge: float | None = None
    """The machine's: above it a pass is compute-bound."""
    mfu: float | None = None
    mbu: float | None = None
    bound: Literal["memory", "compute"] | None = None
    compute_format: str = ""
    """Format whose measured product rate is the denominator of `mfu`."""
    reason: str = ""

    @property
    def statement(self) -> str:
        """One line: 'decode is memory-bound: MBU 61 %, MFU 3 %'; or why that is not known."""
        if self.bound is None:
            return f"{self.phase}: not known ({self.reason})"
        shares = [
            f"{name} {100 * value:.0f} %"
            for name, value in (("MBU", self.mbu), ("MFU", self.mfu))
            if value is not None
        ]
        return f"{self.phase} is {self.bound}-bound: {', '.join(shares)}"


def prefill_utilization(
    shape: ModelShape | None,
    served: Effective | None,
    peaks: MachinePeaks | None,
    prompt_tokens: int,
    ttft_s: float,
    kv_element_bytes: float = 2,
) -> Utilization:
    """Return the utilization while one prompt is read; `ttft_s` is that of a single stream, queueing excluded.

    TTFT also holds tokenization and one sampling step, so the shares are lower bounds.
    """
    blank = Utilization("prefill", prompt_tokens, 1, ttft_s)
    if shape is None or served is None:
        return _unknown(blank, "the model's shape or what was served is not known")
    work = prefill_work(shape, prompt_tokens, served.resident_weight_bytes, kv_element_bytes)
    return _against(blank, work, served, peaks)


def decode_utilization(
    shape: ModelShape | None,
    served: Effective | None,
    peaks: MachinePeaks | None,
    concurrency: float,
    context_tokens: int,
    tpot_s: float,
    kv_element_bytes: float = 2,
) -> Utilization:
    """Return the utilization of decode steps: `concurrency` sequences that each get a token every `tpot_s`.

    `context_tokens` is the mean number of tokens in the cache of a sequence while it decodes: prompt and half the
    output. Prefills that share the steps are not counted, so the shares are lower bounds under mixed load.
    """
    blank = Utilization("decode", context_tokens, concurrency, tpot_s)
    if shape is None or served is None:
        return _unknown(blank, "the model's shape or what was served is not known")
    if concurrency <= 0:
        return _unknown(blank, "an open loop has no fixed number of sequences")
    work = decode_work(
        shape, concurrency, context_tokens, served.resident_weight_bytes, kv_element_bytes
    )
    return _against(blank, work, served, peaks)


def _unknown(blank: Utilization, reason: str) -> Utilization:
    return Utilization(blank.phase, blank.tokens, blank.batch, blank.seconds, reason=reason)


def compute_format(served: Effective, rates: Mapping[str, float]) -> str:
    """Return the format of the products' operands: int8 where activations are, else the compute dtype."""
    wanted = "int8" if served.activation_bits <= 8 and not served.emulated else served.compute_dtype
    if wanted in rates:
        return wanted
    # float16 and bfloat16 run at one rate wherever both have units of their own.
    return "bfloat16" if wanted == "float16" and "bfloat16" in rates else ""


def _against(
    blank: Utilization, work: Work, served: Effective, peaks: MachinePeaks | None
) -> Utilization:
    if not blank.seconds > 0:
        return _unknown(blank, "no time was measured")
    if peaks is None:
        return _unknown(blank, "the machine's peaks were not measured")
    name = compute_format(served, peaks.matmul_flops_per_s)
    flops, bandwidth = peaks.matmul_flops_per_s.get(name), peaks.copy_bytes_per_s
    reasons = []
    if not flops:
        reasons.append(f'no product rate of format "{served.compute_dtype}" was measured')
    if not bandwidth:
        reasons.append("no copy bandwidth was measured")
    ridge = flops / bandwidth if flops and bandwidth else None
    bound: Literal["memory", "compute"] | None = None
    if ridge is not None:
        bound = "memory" if work.intensity < ridge else "compute"
    return Utilization(
        phase=blank.phase,
        tokens=blank.tokens,
        batch=blank.batch,
        seconds=blank.seconds,
        intensity=work.intensity,
        ridge=ridge,
        mfu=work.flops / blank.seconds / flops if flops else None,
        mbu=work.bytes / blank.seconds / bandwidth if bandwidth else None,
        bound=bound,
        compute_format=name,
        reason="; ".join(reasons),
    )

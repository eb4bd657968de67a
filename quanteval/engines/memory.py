"""Where a served model's bytes are, by part; the remainder is stated, so that the account adds up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quanteval.environment import peak_rss_bytes
from quanteval.records import MemoryUse


@dataclass(frozen=True)
class ActivationPeak:
    """Most bytes allocated at once during a forward pass, beyond what was there before it."""

    bytes: int
    how: str


def kv_bytes_per_token(config: Any, element_bytes: int) -> float:
    """Return 2 x layers x key-value heads x head dimension x element bytes (grouped heads counted once)."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return float(2 * config.num_hidden_layers * heads * head_dim * element_bytes)


def activation_peak(forward: Callable[[], Any], device: str, tokens: int) -> ActivationPeak:
    """Run `forward` once and return its allocation peak."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        forward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        return ActivationPeak(
            peak, f"peak of torch.cuda's allocator over one prefill of {tokens} tokens"
        )
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        forward()
    events = [
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    held = highest = 0
    for _, change in sorted(events):
        held += change
        highest = max(highest, held)
    return ActivationPeak(
        highest, f"peak of torch's CPU allocations over one prefill of {tokens} tokens"
    )


def measure(
    *,
    device: str,
    before_load_bytes: int,
    weights_bytes: int,
    kv_cache_bytes: int,
    kv_cache_tokens: int,
    kv_formula: float,
    activation: ActivationPeak,
) -> MemoryUse:
    """Put the parts together with the process's peak."""
    peak, total = _process_peak(device)
    before = 0 if device == "cuda" else before_load_bytes
    parts = before + weights_bytes + kv_cache_bytes + activation.bytes
    return MemoryUse(
        device=device,
        before_load_bytes=before,
        weights_bytes=weights_bytes,
        kv_cache_bytes=kv_cache_bytes,
        kv_cache_tokens=kv_cache_tokens,
        kv_bytes_per_token_formula=kv_formula,
        kv_bytes_per_token_measured=kv_cache_bytes / kv_cache_tokens if kv_cache_tokens else 0.0,
        activation_peak_bytes=activation.bytes,
        activation_peak_how=activation.how,
        process_peak_bytes=peak,
        unaccounted_bytes=peak - parts,
        device_total_bytes=total,
    )


def _process_peak(device: str) -> tuple[int, int]:
    """Return the peak of the process (CPU) or of the allocator's reservation (CUDA), and the driver's total."""
    if device != "cuda":
        return peak_rss_bytes(), 0
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(torch.cuda.max_memory_reserved()), int(total - free)

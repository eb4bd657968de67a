"""Where a served model's bytes are, by part; the remainder is stated, so that the account adds up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quanteval.engines import census
from quanteval.environment import peak_rss_bytes
from quanteval.process_memory import mapped_bytes
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


def mapped_weight_bytes(model: Any) -> int | None:
    """Return how much of a torch model's weights lies in mapped weight files; None where that is not told."""
    return mapped_bytes(census.model_storages(model))


def measure(
    *,
    device: str,
    before_load_bytes: int,
    weights_bytes: int,
    kv_cache_bytes: int,
    kv_cache_tokens: int,
    kv_formula: float,
    activation: ActivationPeak,
    kv_pool_tokens: int = 0,
    weights_mapped_bytes: int | None = None,
) -> MemoryUse:
    """Put the parts known from tensors together with the process's peak.

    On a CPU `process_memory.explain_peak` adds the parts that only the kernel and the allocator know.
    """
    use = MemoryUse(
        device=device,
        before_load_bytes=before_load_bytes,
        weights_bytes=weights_bytes,
        kv_cache_bytes=kv_cache_bytes,
        kv_cache_tokens=kv_cache_tokens,
        kv_bytes_per_token_formula=kv_formula,
        kv_bytes_per_token_measured=kv_cache_bytes / kv_cache_tokens if kv_cache_tokens else 0.0,
        activation_peak_bytes=activation.bytes,
        activation_peak_how=activation.how,
        process_peak_bytes=0,
        unaccounted_bytes=0,
        kv_pool_tokens=kv_pool_tokens,
        weights_mapped_bytes=weights_mapped_bytes,
    )
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        return with_cuda_stats(use, torch.cuda.memory_stats(), int(total - free))
    peak = peak_rss_bytes()
    return use.model_copy(
        update={"process_peak_bytes": peak, "unaccounted_bytes": peak - sum(use.parts.values())}
    )


def with_cuda_stats(use: MemoryUse, stats: Mapping[str, int], in_use_bytes: int) -> MemoryUse:
    """Add what torch's CUDA allocator and the driver tell to the parts known from tensors.

    `stats` is `torch.cuda.memory_stats()`, `in_use_bytes` the driver's total less its free memory. The
    peak is the allocator's largest reservation; the part of it that was allocated at no moment is
    `allocator_bytes`. Of that `inactive_split_bytes` is fragmentation: free pieces of blocks that are
    partly in use, unlike whole free blocks, which the allocator can hand out again or release.
    """
    reserved_peak = int(stats.get("reserved_bytes.all.peak", 0))
    allocated_peak = int(stats.get("allocated_bytes.all.peak", 0))
    filled = use.model_copy(
        update={
            "before_load_bytes": 0,
            "allocated_peak_bytes": allocated_peak,
            "allocator_bytes": max(0, reserved_peak - allocated_peak),
            "fragmentation_bytes": int(stats.get("inactive_split_bytes.all.current", 0)),
            "process_peak_bytes": reserved_peak,
            "device_total_bytes": in_use_bytes,
            "driver_other_bytes": max(
                0, in_use_bytes - int(stats.get("reserved_bytes.all.current", 0))
            ),
            "account_phase": "serving",
        }
    )
    return filled.model_copy(
        update={"unaccounted_bytes": reserved_peak - sum(filled.parts.values())}
    )

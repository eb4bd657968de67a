"""A session on a vLLM server that was started here: what it says of itself, and where its memory is.

Weights are read from the checkpoint's headers, kernels and the KV cache from the server's log, memory from the
kernel's view of the process tree. `vllm` starts and ends the server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quanteval.engines.checkpoint_census import read_config, take_census
from quanteval.engines.http_session import HTTPSession
from quanteval.engines.http_wire import Remote
from quanteval.engines.process import ServerProcess
from quanteval.engines.prometheus import parse
from quanteval.engines.vllm_log import VLLMFacts, read_log
from quanteval.errors import ConfigError, EngineError
from quanteval.interfaces import Tokenizer
from quanteval.modelshape import read_shape
from quanteval.records import Artifact, Effective, MemoryUse

if TYPE_CHECKING:
    from quanteval.engines.vllm import VLLMEngine

KEPT_BUCKETS = ("queue_time", "prefill_time", "decode_time", "e2e_request_latency")
"""Histograms whose buckets are kept: the layers of a request."""
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Served:
    """A server that is up."""

    engine: VLLMEngine
    artifact: Artifact
    process: ServerProcess
    before_load_bytes: int
    """Resident in its processes just before the weights were loaded; 0 when that moment was missed."""
    block_tokens: int | None = None
    """Tokens of one block of its KV cache, where it tells."""


class VLLMSession(HTTPSession):
    """A session on a server whose log and processes are at hand; implements OwnsProcesses."""

    def __init__(self, remote: Remote, tokenizer: Tokenizer, served: Served) -> None:
        self._served = served
        self.facts = read_log(served.process.log_text())
        super().__init__(
            remote,
            tokenizer,
            max_in_flight=served.engine.max_in_flight,
            batch_policy=policy_line(self.facts, served.engine, served.block_tokens),
            describe=self._read_back,
            memory=self._measure,
        )
        # From here on the peak is that of serving: loading, compiling and warming up had theirs.
        self._loading_peak = served.process.peak_rss_bytes()
        served.process.reset_peak_rss()
        self._serving_peak = 0
        self._at_rest_bytes = served.process.rss_bytes()

    def rss_bytes(self) -> int:
        """Return the resident memory of the server's processes."""
        return self._served.process.rss_bytes()

    def take_peak_bytes(self) -> int:
        """Return their highest resident memory since the last call, loading included at the first; begin anew."""
        peak = self._served.process.peak_rss_bytes()
        self._served.process.reset_peak_rss()
        self._serving_peak = max(self._serving_peak, peak)
        loading, self._loading_peak = self._loading_peak, 0
        return max(peak, loading)

    def gone(self) -> str:
        """Return why the server ended, '' while it is there."""
        reason = self.remote.alive() if self.remote.alive is not None else None
        return reason or ""

    def server_metrics(self) -> dict[str, float]:
        """Return vLLM's own counters and gauges, with the buckets of a request's layers; {} when it does not tell."""
        try:
            raw = self._call(self._wire.get(f"{self.remote.root}/metrics", timeout_s=5.0))
        except EngineError:
            return {}
        return own_metrics(raw.decode("utf-8", "replace"))

    def _read_back(self) -> Effective:
        engine, facts = self._served.engine, self.facts
        kernels = "; ".join(facts.kernels) or facts.quantization or "not told by the log"
        return take_census(
            Path(self._served.artifact.path),
            dtype=facts.dtype or None,
            kernel=f"vLLM {facts.version} on {engine.device}: {kernels}",
            emulation=facts.emulated,
        )

    def _measure(self) -> MemoryUse:
        served, facts = self._served, self.facts
        return account(
            device=served.engine.device,
            before_load_bytes=served.before_load_bytes,
            weights_bytes=facts.weights_bytes or self._read_back().resident_weight_bytes,
            facts=facts,
            config=read_config(Path(served.artifact.path)),
            at_rest_bytes=self._at_rest_bytes,
            peak_bytes=max(self._serving_peak, served.process.peak_rss_bytes()),
        )


def policy_line(facts: VLLMFacts, engine: VLLMEngine, block: int | None = None) -> str:
    """Return how vLLM batches, in one line that is the same for every variant served with the same settings."""
    tokens = facts.max_num_batched_tokens or engine.max_num_batched_tokens
    parts = [
        f"vLLM {facts.version or 'of unknown version'} continuous, at most {engine.max_num_seqs} rows"
    ]
    parts += [f"{tokens} tokens a step"] if tokens else []
    parts += [f"blocks of {block}"] if block else []
    parts.append("chunked prefill" if facts.chunked_prefill else "whole prefill")
    parts.append("prefix cache" if facts.prefix_caching else "no prefix cache")
    return ", ".join(parts)


def block_tokens(page: str) -> int | None:
    """Return the tokens of one KV-cache block, from a metrics page; None when it does not tell."""
    match = re.search(r'^vllm:cache_config_info\{(?:.*,)?block_size="(\d+)"', page, re.MULTILINE)
    return int(match[1]) if match else None


def own_metrics(text: str) -> dict[str, float]:
    """Return the `vllm:` samples of a metrics page; buckets only of the histograms in `KEPT_BUCKETS`.

    The label with the model's name is left out: it is drawn anew at each start, and samples are compared by name.
    """
    return {
        name: value
        for name, value in parse(text, buckets=True, without=("model_name",)).items()
        if name.startswith("vllm:")
        and "_info{" not in name
        and ("_bucket{" not in name or any(kept in name for kept in KEPT_BUCKETS))
    }


def account(
    *,
    device: str,
    before_load_bytes: int,
    weights_bytes: int,
    facts: VLLMFacts,
    config: Mapping[str, Any],
    at_rest_bytes: int,
    peak_bytes: int,
) -> MemoryUse:
    """Put the parts together. On CUDA the device's memory is not the processes', so only what the log says is told.

    On a CPU: `runtime` is what was resident at rest beyond libraries, weights and the KV cache, and the activation
    peak what serving added to it. A KV cache whose pages were not touched yet is not resident: runtime is then 0,
    and the remainder says by how much the parts are more than was there.
    """
    kv_bytes = facts.kv_cache_bytes or 0
    tokens = facts.kv_cache_tokens or 0
    on_cpu = device == "cpu"
    before = before_load_bytes if on_cpu else 0
    runtime = max(at_rest_bytes - before - weights_bytes - kv_bytes, 0) if on_cpu else 0
    activation = max(peak_bytes - at_rest_bytes, 0) if on_cpu else 0
    parts = before + weights_bytes + kv_bytes + runtime + activation
    peak = peak_bytes if on_cpu else parts
    how = (
        "resident beyond the state at rest, over the server's processes"
        if on_cpu
        else "not told by the server"
    )
    measured = kv_bytes / tokens if tokens else 0.0
    return MemoryUse(
        device=device,
        before_load_bytes=before,
        weights_bytes=weights_bytes,
        kv_cache_bytes=kv_bytes,
        kv_cache_tokens=tokens,
        kv_pool_tokens=tokens,
        kv_bytes_per_token_formula=kv_formula(config, facts.dtype) or measured,
        kv_bytes_per_token_measured=measured,
        activation_peak_bytes=activation,
        activation_peak_how=how,
        runtime_bytes=runtime,
        process_peak_bytes=peak,
        unaccounted_bytes=peak - parts,
    )


def kv_formula(config: Mapping[str, Any], dtype: str) -> float | None:
    """Return 2 x layers x key-value heads x head dimension x element bytes; None for caches of another kind."""
    try:
        shape = read_shape(config)
    except (ConfigError, KeyError):
        return None
    return float(2 * shape.layers * shape.kv_heads * shape.head_dim * ELEMENT_BYTES.get(dtype, 2))

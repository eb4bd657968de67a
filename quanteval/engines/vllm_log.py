"""What a vLLM server says of itself in its log: pure functions of the log's text.

Tried with the logs of version 0.32 on a CPU; the lines that only a GPU's worker writes are read as its source has
them. What the log does not say is None or empty, never guessed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class VLLMFacts:
    """What one start of a server logged."""

    version: str = ""
    dtype: str = ""
    """Of the computation, e.g. 'bfloat16'."""
    quantization: str = ""
    """vLLM's name of the method, e.g. 'compressed-tensors'; empty for none."""
    kernels: tuple[str, ...] = ()
    """Linear kernels in order of choice, e.g. 'CPUInt8ScaledMMLinearKernel for CompressedTensorsW8A8Int8'."""
    attention: str = ""
    """Attention backend, as far as it is logged."""
    weights_bytes: int | None = None
    """What loading the model took from the device's memory; CPU workers do not log it."""
    load_s: float | None = None
    kv_cache_bytes: int | None = None
    kv_cache_tokens: int | None = None
    max_model_len: int | None = None
    max_concurrency: float | None = None
    """Requests of the longest length that the KV cache holds."""
    compile_s: float | None = None
    """Compilation alone, where it is told apart."""
    warmup_s: float | None = None
    """Profiling, the KV cache's making and the warm-up run, compilation included."""
    chunked_prefill: bool | None = None
    max_num_batched_tokens: int | None = None
    prefix_caching: bool | None = None
    enforce_eager: bool | None = None
    threads: int | None = None
    """OpenMP threads of a CPU worker."""
    emulated: str = ""
    """The line that says that weights are dequantized or products simulated; empty when none does."""


_VERSION = re.compile(r"LLM engine \(v([^)\s]+)\)")
_CONFIG_LINE = re.compile(r"Initializing a V1 LLM engine .*")
_SELECTED = re.compile(r"(?:Selected|Using) (\w*Kernel\w*) (?:for|with) (\w+)")
_ATTENTION = (
    re.compile(r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend"),
    re.compile(r"Using (\w+) attention"),
)
_LOADED = re.compile(r"Model loading took ([\d.]+) GiB(?: memory)? and ([\d.]+) seconds")
_LOADING = re.compile(r"Loading weights took ([\d.]+) seconds")
_AVAILABLE = re.compile(r"Available KV cache memory: ([\d.]+) GiB")
_SET_SPACE = re.compile(r"set \(([\d.]+)/[\d.]+\) GiB for KV cache")
_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
_CONCURRENCY = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")
_COMPILED = re.compile(
    r"torch\.compile (?:takes|took|and initial profiling/warmup run together took) ([\d.]+) s"
)
_WARMED = re.compile(r"init engine \(.*?\) took ([\d.]+) s")
_CHUNKED = re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)")
_CORES = re.compile(r"local_rank=\d+, core ids=\[([\d, ]*)\]")
_EMULATED = re.compile(
    r"emulat|simulated weight|dequantiz(?:ed|ing) (?:weights )?to", re.IGNORECASE
)
_PREFIX = re.compile(r"^\([^)]*\) (?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] )?")


def read_log(text: str) -> VLLMFacts:
    """Read all facts from a log."""
    config = _first(_CONFIG_LINE, text, group=0) or ""
    loaded = _LOADED.search(text)
    concurrency = _CONCURRENCY.search(text)
    quantization = _setting(config, "quantization")
    return VLLMFacts(
        version=_first(_VERSION, text) or "",
        dtype=_setting(config, "dtype").removeprefix("torch."),
        quantization="" if quantization == "None" else quantization,
        kernels=tuple(dict.fromkeys(f"{m[1]} for {m[2]}" for m in _SELECTED.finditer(text))),
        attention=_attention(text),
        weights_bytes=round(float(loaded[1]) * GIB) if loaded else None,
        load_s=float(loaded[2]) if loaded else _number(_LOADING, text),
        kv_cache_bytes=_gib(text),
        kv_cache_tokens=_whole(_first(_TOKENS, text)),
        max_model_len=_whole(concurrency[1] if concurrency else _setting(config, "max_seq_len")),
        max_concurrency=float(concurrency[2]) if concurrency else None,
        compile_s=_number(_COMPILED, text),
        warmup_s=_number(_WARMED, text),
        chunked_prefill=_flag(config, "enable_chunked_prefill"),
        max_num_batched_tokens=_whole(_first(_CHUNKED, text)),
        prefix_caching=_flag(config, "enable_prefix_caching"),
        enforce_eager=_flag(config, "enforce_eager"),
        threads=_threads(text),
        emulated=_emulation(text),
    )  # fmt: skip


def loading_began(text: str) -> bool:
    """Whether libraries are imported and the model's weights come next: what is resident then is not the model's."""
    return "Starting to load model" in text


def _first(pattern: re.Pattern[str], text: str, group: int = 1) -> str | None:
    match = pattern.search(text)
    return match[group] if match else None


def _number(pattern: re.Pattern[str], text: str) -> float | None:
    found = _first(pattern, text)
    return None if found is None else float(found)


def _whole(text: str | None) -> int | None:
    digits = (text or "").replace(",", "")
    return int(digits) if digits.isdigit() else None


def _setting(config: str, name: str) -> str:
    """Return a value of the line in which the engine shows its configuration; '' when it is not there."""
    return _first(re.compile(rf"[\s,]{name}=([^,\s]+)"), config) or ""


def _flag(config: str, name: str) -> bool | None:
    return {"True": True, "False": False}.get(_setting(config, name))


def _gib(text: str) -> int | None:
    value = _number(_AVAILABLE, text)
    if value is None:
        value = _number(_SET_SPACE, text)
    return None if value is None else round(value * GIB)


def _attention(text: str) -> str:
    for pattern in _ATTENTION:
        for match in pattern.finditer(text):
            if match[1].isupper() or "Attention" in match[1]:
                return match[1]
    return ""


def _threads(text: str) -> int | None:
    cores = _first(_CORES, text)
    return len(cores.split(",")) if cores else None


def _emulation(text: str) -> str:
    for line in text.splitlines():
        # The configuration names every option of every kernel, "emulation" among them.
        if (
            _EMULATED.search(line)
            and not _CONFIG_LINE.search(line)
            and "config=" not in line.lower()
        ):
            return _PREFIX.sub("", line).strip()[:240]
    return ""

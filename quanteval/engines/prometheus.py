"""Reads what servers count of themselves: Prometheus and OpenMetrics text, with nothing but the standard library.

A sample becomes `name{label="value",...}`, its labels in order of their names. Lines that are no samples are
left out rather than refused: one odd line must not cost a measurement.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,|(?=\}))')
_ESCAPED = re.compile(r"\\(.)")
_COUNTER = re.compile(r"_(?:total|sum|count|bucket)(?:\{|$)")

NEUTRAL: Mapping[str, tuple[str, ...]] = {
    "queue_s_sum": (
        "quanteval:request_queue_time_seconds_sum",
        "vllm:request_queue_time_seconds_sum",
    ),
    "queue_s_count": (
        "quanteval:request_queue_time_seconds_count",
        "vllm:request_queue_time_seconds_count",
    ),
    "prefill_s_sum": (
        "quanteval:request_prefill_time_seconds_sum",
        "vllm:request_prefill_time_seconds_sum",
        "llamacpp:prompt_seconds_total",
    ),
    "prefill_s_count": (
        "quanteval:request_prefill_time_seconds_count",
        "vllm:request_prefill_time_seconds_count",
    ),
    "decode_s_sum": (
        "quanteval:request_decode_time_seconds_sum",
        "vllm:request_decode_time_seconds_sum",
        "llamacpp:tokens_predicted_seconds_total",
    ),
    "decode_s_count": (
        "quanteval:request_decode_time_seconds_count",
        "vllm:request_decode_time_seconds_count",
    ),
    "ttft_s_sum": (
        "quanteval:time_to_first_token_seconds_sum",
        "vllm:time_to_first_token_seconds_sum",
    ),
    "ttft_s_count": (
        "quanteval:time_to_first_token_seconds_count",
        "vllm:time_to_first_token_seconds_count",
    ),
    "itl_s_sum": (
        "vllm:inter_token_latency_seconds_sum",
        "vllm:time_per_output_token_seconds_sum",
    ),
    "itl_s_count": (
        "vllm:inter_token_latency_seconds_count",
        "vllm:time_per_output_token_seconds_count",
    ),
    "e2e_s_sum": (
        "quanteval:e2e_request_latency_seconds_sum",
        "vllm:e2e_request_latency_seconds_sum",
    ),
    "e2e_s_count": (
        "quanteval:e2e_request_latency_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
    ),
    "requests_total": ("quanteval:request_success_total", "vllm:request_success_total"),
    "prompt_tokens_total": (
        "quanteval:prompt_tokens_total",
        "vllm:prompt_tokens_total",
        "llamacpp:prompt_tokens_total",
    ),
    "output_tokens_total": (
        "quanteval:generation_tokens_total",
        "vllm:generation_tokens_total",
        "llamacpp:tokens_predicted_total",
    ),
    "prefix_cache_queries_total": (
        "vllm:prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_queries_total",
    ),
    "prefix_cache_hits_total": (
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits_total",
    ),
    "preemptions_total": ("vllm:num_preemptions_total",),
    "kv_cache_usage": (
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "llamacpp:kv_cache_usage_ratio",
    ),
    "requests_running": (
        "quanteval:num_requests_running",
        "vllm:num_requests_running",
        "llamacpp:requests_processing",
    ),
    "requests_waiting": (
        "quanteval:num_requests_waiting",
        "vllm:num_requests_waiting",
        "llamacpp:requests_deferred",
    ),
}
"""Our name: the names that servers give it, a server's newest first. Seconds, tokens, requests; usage a share of 1."""
AVERAGED = frozenset({"kv_cache_usage"})
"""Shares: several engines behind one address have their mean, where everything else has its sum."""
LAYERS = ("queue", "prefill", "decode")


def parse(text: str, *, buckets: bool = False, without: Collection[str] = ()) -> dict[str, float]:
    """Return every finite sample by name and labels; the buckets of histograms only when asked for.

    Labels named in `without` are left out; samples that only they told apart are summed.
    Time stamps, exemplars, `_created` samples and comments are left out; samples of the same name and labels
    are a server's mistake, and the last one counts.
    """
    found: dict[str, float] = {}
    dropped: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        sample = _sample(line.strip())
        if sample is None:
            continue
        name, labels, value = sample
        if name.endswith("_created") or (
            not buckets and name.endswith("_bucket") and "le" in labels
        ):
            continue
        kept = _key(name, {label: labels[label] for label in labels if label not in without})
        same = dropped.setdefault(kept, {})
        same[_key(name, labels)] = value
        found[kept] = math.fsum(same.values())
    return found


def _key(name: str, labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{label}="{_quoted(labels[label])}"' for label in sorted(labels))
    return f"{name}{{{inside}}}" if inside else name


def _sample(line: str) -> tuple[str, dict[str, str], float] | None:
    match = _NAME.match(line)
    if match is None:
        return None
    at = match.end()
    labels: dict[str, str] = {}
    rest = line[at:].lstrip()
    if rest.startswith("{"):
        read = _labels(rest[1:])
        if read is None:
            return None
        labels, rest = read
    words = rest.split()
    if not words:
        return None
    try:
        value = float(words[0])
    except ValueError:
        return None
    return (match[0], labels, value) if math.isfinite(value) else None


def _labels(text: str) -> tuple[dict[str, str], str] | None:
    """Read labels up to the closing brace; return them and what follows, None when they are malformed."""
    labels: dict[str, str] = {}
    while not text.lstrip().startswith("}"):
        match = _LABEL.match(text)
        if match is None:
            return None
        labels[match[1]] = _ESCAPED.sub(lambda m: "\n" if m[1] == "n" else m[1], match[2])
        text = text[match.end() :]
    return labels, text.lstrip()[1:]


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def is_counter(name: str) -> bool:
    """Whether a sample only ever grows, by its name: `_total`, or a part of a histogram or summary."""
    return name.endswith(("_total", "_sum", "_count", "_bucket")) or bool(_COUNTER.search(name))


def delta(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return what counters rose by, and gauges as they stand in `after`.

    A counter that fell was started anew: what it shows now is what it rose by. One that was not there before
    began at 0.
    """
    return {
        name: value - before.get(name, 0.0)
        if is_counter(name) and value >= before.get(name, 0.0)
        else value
        for name, value in after.items()
    }


def neutral(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return what is known under the names of `NEUTRAL`, whatever server it came from, labels summed over."""
    by_name: dict[str, list[float]] = {}
    for name, value in metrics.items():
        by_name.setdefault(name.partition("{")[0], []).append(value)
    found = {}
    for ours, theirs in NEUTRAL.items():
        values = next((by_name[name] for name in (ours, *theirs) if name in by_name), None)
        if values is not None:
            found[ours] = sum(values) / (len(values) if ours in AVERAGED else 1)
    return found


def mean_layers(rise: Mapping[str, float], layers: Iterable[str] = LAYERS) -> dict[str, float]:
    """Return the mean seconds a request spent in each layer, from a `delta` under either kind of names."""
    known = neutral(rise)
    means = {}
    for layer in layers:
        count = known.get(f"{layer}_s_count", 0.0)
        if count > 0 and f"{layer}_s_sum" in known:
            means[layer] = known[f"{layer}_s_sum"] / count
    return means


def prefix_hit_share(rise: Mapping[str, float]) -> float | None:
    """Return the share of prompt tokens that came from a prefix cache; None where none was asked for."""
    known = neutral(rise)
    asked = known.get("prefix_cache_queries_total", 0.0)
    return known.get("prefix_cache_hits_total", 0.0) / asked if asked > 0 else None

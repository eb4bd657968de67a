"""What the main table leaves out: every load point and prompt-length bucket, cold start, memory by part."""

from __future__ import annotations

from collections.abc import Sequence

from quanteval.evidence import VariantEvidence
from quanteval.metrics.latency import Distribution, LoadPointSummary, cold_start_s, summarize
from quanteval.report.text import markdown, megabytes, milliseconds, number

LATENCY_HEAD = (
    "variant", "load point", "prompt tokens", "requests", "failed",
    "TTFT p50/p95/p99 ms", "ITL p50/p95/p99 ms", "TPOT p50/p95/p99 ms", "requests/s", "output tok/s",
)  # fmt: skip
MEMORY_HEAD = (
    "variant", "before load", "weights", "KV cache", "activations", "unaccounted", "peak while serving",
    "KV bytes/token formula", "KV bytes/token measured", "peaks by phase",
)  # fmt: skip


def details_markdown(variants: Sequence[VariantEvidence]) -> str:
    """Return the sections on latency and memory as Markdown; '' when neither was measured."""
    parts = []
    latency = [row for variant in variants for row in latency_rows(variant)]
    if latency:
        parts.append(
            _section(
                "Latency and throughput by load point and prompt length", LATENCY_HEAD, latency
            )
        )
        cold = [(v.name, c) for v in variants if (c := cold_start_s(v.traces)) is not None]
        starts = ", ".join(f"{markdown(name)} {milliseconds(value)} ms" for name, value in cold)
        parts.append(
            "A quantile in brackets has too few requests for its 95 % upper bound. Rates are those of the time in "
            "which all slots were full; a bucket has none of its own.\n"
            f"Cold start (TTFT of the very first request, not in any figure above): {starts or 'not measured'}.\n"
        )
    memory = [memory_row(variant) for variant in variants if variant.memory is not None]
    if memory:
        parts.append(_section("Memory by part, MB (10^6 bytes)", MEMORY_HEAD, memory))
        parts.append(
            "before load + weights + KV cache + activations + unaccounted = peak while serving. Before load is the "
            "interpreter with its libraries; unaccounted is mostly the allocator's, the tokenizer's and libraries' "
            "own. Peaks by phase include what scoring a task needs beyond serving.\n"
        )
    return "\n".join(parts)


def _section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"## {title}", "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(markdown(text) for text in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def latency_rows(variant: VariantEvidence) -> list[tuple[str, ...]]:
    """Return a row for each load point, followed by one for each of its buckets."""
    by_bucket = summarize(variant.traces, by_bucket=True)
    rows = []
    for summary in summarize(variant.traces):
        rows.append(_latency_row(variant.name, summary))
        inside = [s for s in by_bucket if s.load_point == summary.load_point]
        if len(inside) > 1:
            rows += [_latency_row(variant.name, s) for s in inside]
    return rows


def _latency_row(name: str, summary: LoadPointSummary) -> tuple[str, ...]:
    return (
        name,
        summary.load_point,
        summary.bucket or "all",
        str(summary.requests),
        str(summary.failed),
        _quantiles(summary.ttft),
        _quantiles(summary.itl, bounded=False),
        _quantiles(summary.tpot),
        "-" if summary.request_rate is None else number(summary.request_rate),
        "-" if summary.output_tps is None else number(summary.output_tps),
    )


def _quantiles(found: Distribution, *, bounded: bool = True) -> str:
    """Return 'p50/p95/p99 n=...'; in brackets what has too few requests for an upper bound.

    Gaps within a request depend on each other, so ITL quantiles have no bounds at any n.
    """
    if not found.quantiles:
        return "-"
    texts = [
        milliseconds(q.value)
        if q.upper is not None or not bounded
        else f"({milliseconds(q.value)})"
        for q in found.quantiles
    ]
    return f"{'/'.join(texts)} n={found.n}"


def memory_row(variant: VariantEvidence) -> tuple[str, ...]:
    """Return the parts of a variant's memory, which add up to its peak."""
    memory = variant.memory
    if memory is None:
        return (variant.name, *["-"] * (len(MEMORY_HEAD) - 1))
    phases = ", ".join(
        f"{name} {megabytes(peak)}" for name, peak in memory.phase_peak_bytes.items()
    )
    return (
        variant.name,
        megabytes(memory.before_load_bytes),
        megabytes(memory.weights_bytes),
        megabytes(memory.kv_cache_bytes),
        megabytes(memory.activation_peak_bytes),
        megabytes(memory.unaccounted_bytes),
        megabytes(memory.process_peak_bytes),
        number(memory.kv_bytes_per_token_formula, 6),
        number(memory.kv_bytes_per_token_measured, 6),
        phases or "-",
    )

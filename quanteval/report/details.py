"""What the main table leaves out: load points and buckets, the knee, capacity, memory by part, utilization, a soak."""

from __future__ import annotations

from collections.abc import Sequence

from quanteval.evidence import VariantEvidence
from quanteval.metrics.latency import Distribution, LoadPointSummary, cold_start_s, summarize
from quanteval.report.load import load_markdown, load_sheets
from quanteval.report.memory import fit_sheet, memory_sheet
from quanteval.report.sheet import sheets_markdown, sheets_text
from quanteval.report.text import markdown, milliseconds, number
from quanteval.report.trend import trend_sheets
from quanteval.report.utilization import device_sheet, utilization_sheet

LATENCY_HEAD = (
    "variant", "load point", "prompt tokens", "requests", "failed",
    "TTFT p50/p95/p99 ms", "ITL p50/p95/p99 ms", "TPOT p50/p95/p99 ms", "requests/s", "output tok/s",
)  # fmt: skip


def details_markdown(variants: Sequence[VariantEvidence], baseline: str | None = None) -> str:
    """Return the sections on latency, load, memory and utilization as Markdown; '' when nothing was measured."""
    measured = any(variant.load_points for variant in variants)
    parts = [load_markdown(variants, baseline) if measured else _latency(variants), _cold(variants)]
    sheets = (
        memory_sheet(variants),
        fit_sheet(variants),
        utilization_sheet(variants),
        device_sheet(variants),
        *trend_sheets(variants),
    )
    parts.append(sheets_markdown(sheets))
    return "\n".join(part for part in parts if part)


def details_text(variants: Sequence[VariantEvidence], baseline: str | None = None) -> str:
    """Return the sections on load, memory and utilization for a terminal of 100 columns."""
    sheets = (
        *load_sheets(variants, baseline),
        memory_sheet(variants),
        fit_sheet(variants),
        utilization_sheet(variants),
        device_sheet(variants),
        *trend_sheets(variants),
    )
    return sheets_text(sheets)


def _latency(variants: Sequence[VariantEvidence]) -> str:
    """Return the load points of a bench that drives a few fixed concurrencies."""
    rows = [row for variant in variants for row in latency_rows(variant)]
    if not rows:
        return ""
    title = "Latency and throughput by load point and prompt length"
    return _section(title, LATENCY_HEAD, rows) + (
        "\nA quantile in brackets has too few requests for its 95 % upper bound. Rates are those of the time in "
        "which all slots were full; a bucket has none of its own.\n"
    )


def _cold(variants: Sequence[VariantEvidence]) -> str:
    if not any(variant.traces for variant in variants):
        return ""
    cold = [(v.name, c) for v in variants if (c := cold_start_s(v.traces)) is not None]
    starts = ", ".join(f"{markdown(name)} {milliseconds(value)} ms" for name, value in cold)
    return f"Cold start (TTFT of the very first request, not in any figure above): {starts or 'not measured'}.\n"


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

"""Latency and throughput against load, the knee and the break of each SLO, and what the load client itself did."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quanteval.evidence import VariantEvidence
from quanteval.metrics.capacity import capacities, slo_of
from quanteval.metrics.fit import PREFIX
from quanteval.metrics.knee import Break, knee, slo_break
from quanteval.metrics.latency import Distribution, Quantile
from quanteval.metrics.load import Latencies, Load, loads_of
from quanteval.metrics.operating import HeadOfLine, head_of_line
from quanteval.report.capacity import capacity_sheet
from quanteval.report.layers import layer_sheet
from quanteval.report.sheet import (
    Field,
    Sheet,
    sheet_csv,
    sheets_json,
    sheets_markdown,
    sheets_text,
)
from quanteval.report.table import Cell, timing_text
from quanteval.report.text import number
from quanteval.report.trend import slopes_csv, trend_csv

LOAD_UNITS = {"closed": "in flight", "open": "requests/s"}
LOAD_FIELDS = (
    Field("variant", "variant"),
    Field("load_point", "load point"),
    Field("bucket", "prompt tokens"),
    Field("offered", "offered", "rate"),
    Field("request_rate", "requests/s", "rate"),
    Field("output_tps", "output tok/s", "rate"),
    Field("ttft_p50", "TTFT p50 ms", "seconds"),
    Field("ttft_p99", "TTFT p99 ms", "seconds"),
    Field("itl_p50", "ITL p50 ms", "seconds"),
    Field("itl_p99", "ITL p99 ms", "seconds"),
    Field("tpot_p50", "TPOT p50 ms", "seconds"),
    Field("e2e_p99", "E2E p99 ms", "seconds"),
    Field("goodput", "goodput requests/s", "rate"),
    Field("in_flight", "in flight", "rate"),
    Field("failed", "failed", "share"),
    Field("cached", "cached prompt tokens", "share"),
    Field("notes", "notes"),
)
QUANTILES = (
    ("ttft", 0.5), ("ttft", 0.99), ("itl", 0.5), ("itl", 0.99), ("tpot", 0.5), ("e2e", 0.99),
)  # fmt: skip
LOAD_NOTES = (
    "n are the steady requests (of ITL: the gaps between their tokens). A quantile's brackets are two one-sided 95 % "
    "bounds for independent requests, left out where n is too small; under load requests wait for each other and "
    "the bounds are too narrow to some degree. An ITL has none. Rates are those of the steady window, goodput the "
    "requests/s that met every limit; a bucket has no rates of its own. Failed: share of the steady requests, Wilson.",
)
BREAK_FIELDS = (
    Field("variant", "variant"),
    Field("loop", "loop"),
    Field("target", "target"),
    Field("load", "breaks at", "rate"),
    Field("unit", "unit"),
    Field("reason", "seen"),
)
TAIL_FIELDS = (
    Field("variant", "variant"),
    Field("quantity", "quantity"),
    Field("bucket", "prompt tokens"),
    Field("without", "without long requests, ms", "seconds"),
    Field("with", "with them, ms", "seconds"),
    Field("ratio", "ratio", "ratio"),
    Field("failed", "failed without/with"),
    Field("method", "method"),
)
CLIENT_FIELDS = (
    Field("variant", "variant"),
    Field("load_point", "load point"),
    Field("run", "run"),
    Field("lag_p50", "lag p50 ms", "seconds"),
    Field("lag_p99", "lag p99 ms", "seconds"),
    Field("loop_lag_p99", "loop lag p99 ms", "seconds"),
    Field("cpu", "CPU share of a core", "share"),
    Field("state", "client"),
)


def load_sheets(
    variants: Sequence[VariantEvidence], baseline: str | None = None
) -> tuple[Sheet, ...]:
    """Return every section on load; those that nothing was measured for are empty.

    `baseline` names the variant that ratios refer to; by default the one that is marked so.
    """
    loads = {v.name: loads_of(v.traces, v.load_points, slo_of(v)) for v in variants}
    found = capacities(variants, baseline, loads)
    return (
        load_sheet(variants, loads),
        break_sheet(variants, loads),
        capacity_sheet(found, timing_text(variants)),
        tail_sheet(variants, loads),
        layer_sheet(variants),
        client_sheet(variants),
    )


def load_markdown(variants: Sequence[VariantEvidence], baseline: str | None = None) -> str:
    """Return what `load.md` holds, '' when no load was measured."""
    return sheets_markdown(_measured(variants, baseline))


def load_text(variants: Sequence[VariantEvidence], baseline: str | None = None) -> str:
    """Return the same for a terminal of 100 columns."""
    return sheets_text(_measured(variants, baseline))


def load_csv(variants: Sequence[VariantEvidence]) -> str:
    """Return a line for each load point and bucket, raw values in seconds and shares."""
    loads = {v.name: loads_of(v.traces, v.load_points, slo_of(v)) for v in variants}
    return sheet_csv(load_sheet(variants, loads))


def load_json(variants: Sequence[VariantEvidence], baseline: str | None = None) -> str:
    """Return every section with its values, bounds and n."""
    return _json(variants, load_sheets(variants, baseline))


def _json(variants: Sequence[VariantEvidence], sheets: Sequence[Sheet]) -> str:
    return sheets_json(sheets, slo={v.name: slo_of(v).text for v in variants})


def load_files(variants: Sequence[VariantEvidence], baseline: str | None = None) -> dict[str, str]:
    """Return the contents of load.md, load.csv and load.json by file name; {} when no load was measured.

    With a soak, trend.csv and trend_slopes.csv are among them.
    """
    sheets = _measured(variants, baseline)
    if not sheets:
        return {}
    files = {
        "load.md": sheets_markdown(sheets),
        "load.csv": sheet_csv(sheets[0]),
        "load.json": _json(variants, sheets),
    }
    if any(record.stage == "soak" for v in variants for record in v.load_points):
        files |= {"trend.csv": trend_csv(variants), "trend_slopes.csv": slopes_csv(variants)}
    return files


def _measured(variants: Sequence[VariantEvidence], baseline: str | None) -> tuple[Sheet, ...]:
    """Return the sections, none at all where no variant has a load point."""
    sheets = load_sheets(variants, baseline)
    return sheets if sheets[0].rows else ()


# --------------------------------------------------------------------------- load points


def load_sheet(variants: Sequence[VariantEvidence], loads: Mapping[str, Sequence[Load]]) -> Sheet:
    """Return a row for each load point in order of load, each followed by its buckets."""
    rows: list[dict[str, Cell]] = []
    for variant in variants:
        mine = [load for load in loads[variant.name] if not load.name.startswith(PREFIX)]
        for load in sorted(mine, key=lambda one: (one.loop, one.stage, one.load)):
            rows.append(_row(variant.name, load, "all", load.all, slo=bool(slo_of(variant).limits)))
            if len(load.buckets) > 1:
                rows += [_row(variant.name, load, b, found) for b, found in load.buckets.items()]
    texts = dict.fromkeys(text for v in variants if (text := slo_of(v).text) != "none")
    statements = tuple(f"SLO: {text}" for text in texts)
    return Sheet(
        "load", "Latency and throughput against load", LOAD_FIELDS, tuple(rows), statements, LOAD_NOTES, 3
    )  # fmt: skip


def _row(
    variant: str, load: Load, bucket: str, found: Latencies, *, slo: bool = False
) -> dict[str, Cell]:
    row = {
        "variant": Cell(variant),
        "load_point": Cell(load.name),
        "bucket": Cell(bucket),
        **dict(_quantile_cells(found)),
    }
    steady = [trace for run in load.runs for trace in run.steady if bucket in ("all", trace.bucket)]
    row["cached"] = cached_cell(steady)
    if bucket != "all":
        return row
    offered = load.offered_rate if load.loop == "open" else float(load.concurrency)
    row["offered"] = Cell(offered, note=LOAD_UNITS[load.loop])
    row["request_rate"] = Cell(load.achieved_rate, n=load.requests)
    row["output_tps"] = Cell(load.output_tps)
    row["goodput"] = Cell(load.goodput if slo else None)
    row["in_flight"] = Cell(load.in_flight)
    rate = load.error_rate
    if rate is not None:
        row["failed"] = Cell(rate.point, rate.lower, rate.upper, load.requests)
    notes = [f"over-saturated: {load.over_saturated}"] if load.over_saturated else []
    notes += [f"left out: {text}" for text in load.excluded]
    notes += [f"{count} {status}" for status, count in sorted(load.failures.items())]
    row["notes"] = Cell("; ".join(notes) or None)
    return row


def _quantile_cells(found: Latencies) -> Iterator[tuple[str, Cell]]:
    for metric, q in QUANTILES:
        distribution: Distribution = getattr(found, metric)
        yield f"{metric}_p{100 * q:g}", quantile_cell(distribution.at(q))


def quantile_cell(quantile: Quantile | None) -> Cell:
    """Return a quantile with its bounds and n, an empty cell for none."""
    if quantile is None:
        return Cell(None)
    return Cell(quantile.value, quantile.lower, quantile.upper, quantile.n)


def cached_cell(traces: Sequence[Any]) -> Cell:
    """Return the share of prompt tokens that came from a prefix cache, of the requests that tell."""
    told = [trace for trace in traces if trace.cached_prompt_tokens is not None]
    prompts = sum(trace.prompt_tokens for trace in told)
    if not prompts:
        return Cell(None)
    return Cell(sum(trace.cached_prompt_tokens for trace in told) / prompts, n=len(told))


# --------------------------------------------------------------------------- knee and SLOs


def break_sheet(variants: Sequence[VariantEvidence], loads: Mapping[str, Sequence[Load]]) -> Sheet:
    """Return a row for the knee and for each promise of the SLO, by variant and kind of loop.

    A single load point of a kind has no knee and breaks nothing: it is left out.
    """
    rows = []
    for variant in variants:
        for loop in ("closed", "open"):
            mine = [load for load in loads[variant.name] if load.loop == loop]
            rising = [load for load in mine if load.stage in ("rising", "search")]
            if len(rising) < 2:
                continue
            found = [knee(mine), *(slo_break(mine, term) for term in slo_of(variant).terms)]
            rows += [_break_row(variant.name, loop, one) for one in found]
    notes = (
        "In brackets the highest load that surely holds and the lowest that surely does not, a 90 % interval; an end "
        "that is not known is '?'. Load is the number of requests in flight of a closed loop, requests/s of an open "
        "one.",
    )
    return Sheet("breaks", "Knee and SLOs", BREAK_FIELDS, tuple(rows), (), notes, 3)


def _break_row(variant: str, loop: str, found: Break) -> dict[str, Cell]:
    known = found.lower is not None and found.upper is not None
    half = "" if known else _half_open(found)
    value: Cell = Cell(
        found.load, found.lower, found.upper, note=half if found.load is not None else ""
    )
    if found.load is None and half:
        value = Cell(half)
    n = sum(item.n for item in found.judged)
    return {
        "variant": Cell(variant),
        "loop": Cell(loop),
        "target": Cell(found.target),
        "load": Cell(value.value, value.lower, value.upper, n or None, value.note),
        "unit": Cell(LOAD_UNITS[loop]),
        "reason": Cell(found.reason),
    }


def _half_open(found: Break) -> str:
    """Return an interval of which an end is missing as text, '' when both are."""
    if found.lower is None and found.upper is None:
        return ""
    low, high = ("?" if end is None else number(end) for end in (found.lower, found.upper))
    return f"[{low}, {high}]"


# --------------------------------------------------------------------------- head-of-line blocking


def tail_sheet(variants: Sequence[VariantEvidence], loads: Mapping[str, Sequence[Load]]) -> Sheet:
    """Return what long requests do to the short ones' latencies, a row a quantity."""
    rows, statements = [], []
    for variant in variants:
        for metric in ("ttft", "e2e"):
            found = head_of_line(loads[variant.name], metric)
            if found is not None:
                rows.append(_tail_row(variant.name, found))
                statements += [_tail_sentence(variant.name, found)] if metric == "ttft" else []
    notes = (
        "The same short requests at the same times, with and without the long ones among them; bounds of the ratio are "
        "one-sided, 95 % each.",
    )
    return Sheet(
        "head_of_line", "Long requests before short ones", TAIL_FIELDS, tuple(rows), tuple(statements), notes, 2
    )  # fmt: skip


def _tail_row(variant: str, found: HeadOfLine) -> dict[str, Cell]:
    return {
        "variant": Cell(variant),
        "quantity": Cell(f"{found.metric.upper()} p{100 * found.q:g}"),
        "bucket": Cell(found.bucket),
        "without": Cell(found.without_tail_s, n=found.requests[1]),
        "with": Cell(found.with_tail_s, n=found.requests[0]),
        "ratio": Cell(found.ratio, found.lower, found.upper, min(found.requests)),
        "failed": Cell(f"{found.failed[1]}/{found.failed[0]}"),
        "method": Cell(found.method),
    }


def _tail_sentence(variant: str, found: HeadOfLine) -> str:
    low, high = ("?" if end is None else f"{end:.2f}" for end in (found.lower, found.upper))
    return (
        f"{variant}: long requests change the {found.metric.upper()} p{100 * found.q:g} of short ones from "
        f"{number(found.without_tail_s)} to {number(found.with_tail_s)} s, {found.ratio:.2f}x [{low}, {high}] "
        f"(n={found.requests[1]} and {found.requests[0]} requests)"
    )


# --------------------------------------------------------------------------- the client


def client_sheet(variants: Sequence[VariantEvidence]) -> Sheet:
    """Return a row for each run of a load point: how late the client was, and whether it was the bottleneck."""
    rows = []
    for variant in variants:
        for record in variant.load_points:
            if record.name.startswith(PREFIX):
                continue
            health = record.client
            share = None if math.isnan(health.cpu_share) else health.cpu_share
            state = f"saturated: {health.reason}" if health.saturated else "kept up"
            run = f"round {record.round}, " if record.round else ""
            rows.append(
                {
                    "variant": Cell(variant.name),
                    "load_point": Cell(record.name),
                    "run": Cell(f"{run}repetition {record.repetition}"),
                    "lag_p50": Cell(health.lag_p50_s),
                    "lag_p99": Cell(health.lag_p99_s),
                    "loop_lag_p99": Cell(health.loop_lag_p99_s),
                    "cpu": Cell(share),
                    "state": Cell(state),
                }
            )
    notes = (
        "Lag is how late requests were sent (open loop) or slots refilled (closed loop); loop lag how late the "
        "client's event loop woke. Where the client was saturated its latencies say nothing about the server, "
        "and are in no figure above.",
    )
    return Sheet("client", "The load client itself", CLIENT_FIELDS, tuple(rows), (), notes, 3)

"""Memory by part as rows that add up to the peak, the peaks by phase, the KV cache, and what a device holds besides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quanteval.evidence import VariantEvidence
from quanteval.metrics.fit import fit_rows
from quanteval.records import MemoryUse
from quanteval.report.sheet import Field, Sheet
from quanteval.report.table import Cell
from quanteval.report.text import megabytes, number

NAMES = {
    "before_load": "interpreter and libraries before the load",
    "library": "libraries and files mapped since",
    "weights": "weights",
    "weight_file": "weight files beside the weights",
    "kv_cache": "KV cache",
    "activation_peak": "activations at their peak",
    "runtime": "runtime: tokenizer, objects, threads",
    "allocator": "allocator: reserved and not in use",
}
UNACCOUNTED = "unaccounted"
PEAK = "= peak while serving"
FIELDS = (
    Field("variant", "variant"),
    Field("part", "part"),
    Field("bytes", "MB", "bytes"),
    Field("share", "share of peak", "share"),
    Field("remark", "remark"),
)
NOTES = (
    "MB are 10^6 bytes, measured once: there is no interval. The parts and the unaccounted remainder add up to the "
    "peak while serving; a negative remainder means that parts never coincided. Peaks by phase include what "
    "scoring a task needs beyond serving. Rows marked 'within' or 'besides' are not added.",
)


def memory_sheet(variants: Sequence[VariantEvidence]) -> Sheet:
    """Return the rows of each variant: parts, remainder and peak, then what is not added."""
    rows = [
        {"variant": Cell(variant.name), **row}
        for variant in variants
        if variant.memory is not None
        for row in memory_rows(variant.memory)
    ]
    return Sheet("memory", "Memory by part", FIELDS, tuple(rows), (), NOTES if rows else (), 2)


def memory_rows(memory: MemoryUse) -> Iterator[dict[str, Cell]]:
    """Yield one account's rows; the first ones up to `PEAK` add up to it."""
    peak = memory.process_peak_bytes
    remarks = {
        "activation_peak": memory.activation_peak_how,
        "kv_cache": _kv_remark(memory),
        "weights": _mapped_remark(memory),
    }
    for name, size in memory.parts.items():
        if size:
            yield _row(NAMES.get(name, name), size, peak, remarks.get(name, ""))
    yield _row(UNACCOUNTED, memory.unaccounted_bytes, peak)
    phase = f"of phase {memory.account_phase}" if memory.account_phase else ""
    yield _row(PEAK, peak, peak, phase)
    for name, size in memory.phase_peak_bytes.items():
        yield _row(f"peak in {name}", size, 0)
    within = (
        ("within weights: in mapped files", memory.weights_mapped_bytes or 0),
        ("within allocator: split blocks (fragmentation)", memory.fragmentation_bytes),
        ("within: kept by libraries for products", memory.workspace_bytes),
        ("within: most in live tensors at once", memory.allocated_peak_bytes),
        ("besides: in use on the device, not reserved here", memory.driver_other_bytes),
        ("besides: driver's total on the device", memory.device_total_bytes),
    )
    for name, size in within:
        if size:
            yield _row(name, size, 0)
    share = fragmentation(memory)
    if share is not None:
        yield {
            "part": Cell("within: reserved and not allocated"),
            "share": Cell(share, note="of reserved"),
        }


def fragmentation(memory: MemoryUse) -> float | None:
    """Return the share of the allocator's reserve that live tensors never filled; None off a CUDA device."""
    reserved = memory.process_peak_bytes
    if not memory.device.startswith("cuda") or not memory.allocated_peak_bytes or reserved <= 0:
        return None
    return 1 - memory.allocated_peak_bytes / reserved


FIT_FIELDS = (
    Field("variant", "variant"),
    Field("length", "tokens a sequence", "number"),
    Field("largest", "largest batch", "number"),
    Field("failing", "smallest that failed", "number"),
    Field("limit", "limit"),
    Field("note", "remark"),
)


def fit_sheet(variants: Sequence[VariantEvidence]) -> Sheet:
    """Return the largest batch of each length that was held at once, where that was searched for."""
    rows = [
        {
            "variant": Cell(variant.name),
            "length": Cell(str(row.length)),
            "largest": Cell(str(row.largest)),
            "failing": Cell(None if row.smallest_failing is None else str(row.smallest_failing)),
            "limit": Cell(row.limit),
            "note": Cell(row.note or None),
        }
        for variant in variants
        for row in fit_rows(variant.load_points)
    ]
    notes = ("Lengths are prompt and output together; found by doubling and bisection.",)
    return Sheet("fit", "What fits", FIT_FIELDS, tuple(rows), (), notes if rows else (), 2)


def _row(part: str, size: int, peak: int, remark: str = "") -> dict[str, Cell]:
    share = size / peak if peak > 0 else None
    return {
        "part": Cell(part), "bytes": Cell(size), "share": Cell(share), "remark": Cell(remark or None)
    }  # fmt: skip


def _kv_remark(memory: MemoryUse) -> str:
    measured, formula = memory.kv_bytes_per_token_measured, memory.kv_bytes_per_token_formula
    parts = [f"holds {memory.kv_cache_tokens} tokens"] if memory.kv_cache_tokens else []
    if memory.kv_pool_tokens:
        parts.append(f"pool of {memory.kv_pool_tokens} tokens")
    if measured or formula:
        parts.append(f"{number(measured, 6)} bytes/token measured, {number(formula, 6)} by formula")
    return ", ".join(parts)


def _mapped_remark(memory: MemoryUse) -> str:
    mapped = memory.weights_mapped_bytes
    return f"{megabytes(mapped)} MB of them in mapped files" if mapped else ""

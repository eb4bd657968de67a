"""How much of the machine is used: MFU and MBU of prefill and decode, what bounds them, and what the device says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from quanteval.evidence import VariantEvidence
from quanteval.metrics.capacity import slo_of
from quanteval.metrics.latency import ended_well
from quanteval.metrics.load import Load, loads_of
from quanteval.metrics.utilization import Utilization, decode_utilization, prefill_utilization
from quanteval.records import RequestTrace, UtilizationSample
from quanteval.records.variants import ModelShape
from quanteval.report.sheet import Field, Sheet
from quanteval.report.table import Cell

FIELDS = (
    Field("variant", "variant"),
    Field("load_point", "load point"),
    Field("phase", "phase"),
    Field("tokens", "tokens", "number"),
    Field("seconds", "median ms", "seconds"),
    Field("mbu", "MBU", "share"),
    Field("mfu", "MFU", "share"),
    Field("intensity", "operations/byte", "number"),
    Field("ridge", "machine's", "number"),
    Field("bound", "bound by"),
    Field("reason", "remark"),
)
NOTES = (
    "MBU and MFU are the bytes and operations that a pass needs at least, over its median time, over what was "
    "measured to be this machine's best: lower bounds, since a time holds more than the pass. Tokens are those of the "
    "prompt, or of a sequence in the cache. n are requests.",
)
DEVICE_FIELDS = (
    Field("variant", "variant"),
    Field("load_point", "load point"),
    Field("run", "run"),
    Field("sm_active", "SM active", "share"),
    Field("sm_occupancy", "SM occupancy", "share"),
    Field("tensor_active", "tensor cores active", "share"),
    Field("memory_bandwidth", "memory bandwidth", "share"),
    Field("power", "power W", "rate"),
    Field("source", "source"),
    Field("reason", "why not more"),
)


def shape_of(variant: VariantEvidence) -> ModelShape | None:
    """Return the served model's shape where the artifact tells it."""
    found = getattr(variant.artifact, "shape", None)
    return found if isinstance(found, ModelShape) else None


def utilization_sheet(
    variants: Sequence[VariantEvidence], shapes: Mapping[str, ModelShape] | None = None
) -> Sheet:
    """Return prefill and decode of each closed load point; prefill of single streams alone, which do not queue.

    `shapes` are the models' shapes by variant, where the artifact does not tell. Empty without measured peaks.
    """
    rows: list[dict[str, Cell]] = []
    statements: list[str] = []
    for variant in variants:
        if variant.peaks is None:
            continue
        shape = (shapes or {}).get(variant.name) or shape_of(variant)
        for load in loads_of(variant.traces, variant.load_points, slo_of(variant)):
            if load.loop == "closed" and load.runs:
                for found, n in _phases(variant, load, shape):
                    rows.append(_row(variant.name, load.name, found, n))
                    if load.concurrency == 1 and found.bound is not None:
                        statements.append(f"{variant.name}, {load.name}: {found.statement}")
    notes = NOTES if rows else ()
    return Sheet("utilization", "Utilization", FIELDS, tuple(rows), tuple(statements), notes, 3)


def _phases(
    variant: VariantEvidence, load: Load, shape: ModelShape | None
) -> Iterator[tuple[Utilization, int]]:
    served = variant.artifact.effective if variant.artifact is not None else None
    steady = [t for run in load.runs for t in run.steady if ended_well(t)]
    ttft, tpot = load.all.ttft.at(0.5), load.all.tpot.at(0.5)
    if load.concurrency == 1 and ttft is not None:
        found = prefill_utilization(shape, served, variant.peaks, _median(steady), ttft.value)
        yield found, ttft.n
    if tpot is not None:
        held = round(float(np.median([t.prompt_tokens + t.output_tokens / 2 for t in steady])))
        found = decode_utilization(
            shape, served, variant.peaks, load.concurrency, held, tpot.value
        )  # fmt: skip
        yield found, tpot.n


def _median(steady: Sequence[RequestTrace]) -> int:
    return round(float(np.median([trace.prompt_tokens for trace in steady])))


def _row(variant: str, load_point: str, found: Utilization, n: int) -> dict[str, Cell]:
    return {
        "variant": Cell(variant),
        "load_point": Cell(load_point),
        "phase": Cell(found.phase),
        "tokens": Cell(found.tokens),
        "seconds": Cell(found.seconds, n=n),
        "mbu": Cell(found.mbu),
        "mfu": Cell(found.mfu),
        "intensity": Cell(found.intensity),
        "ridge": Cell(found.ridge),
        "bound": Cell(f"{found.bound}-bound" if found.bound else None),
        "reason": Cell(found.reason or None),
    }


def _tells(seen: UtilizationSample | None) -> bool:
    figures = ("sm_active", "sm_occupancy", "tensor_active", "memory_bandwidth", "power_w")
    return seen is not None and any(getattr(seen, name) is not None for name in figures)


def device_sheet(variants: Sequence[VariantEvidence]) -> Sheet:
    """Return what the device's own counters said of each run of a load point, or why they said nothing."""
    rows = []
    for variant in variants:
        silent = {r.utilization.reason for r in variant.load_points if r.utilization is not None}
        told = any(_tells(r.utilization) for r in variant.load_points)
        if silent and not told and len(silent) == 1:
            # One row says it for all load points.
            rows.append(
                {
                    "variant": Cell(variant.name),
                    "load_point": Cell("all"),
                    "source": Cell("none"),
                    "reason": Cell(silent.pop()),
                }
            )
            continue
        for record in variant.load_points:
            seen = record.utilization
            if seen is not None:
                run = f"round {record.round}, " if record.round else ""
                rows.append(
                    {
                        "variant": Cell(variant.name),
                        "load_point": Cell(record.name),
                        "run": Cell(f"{run}repetition {record.repetition}"),
                        "sm_active": Cell(seen.sm_active),
                        "sm_occupancy": Cell(seen.sm_occupancy),
                        "tensor_active": Cell(seen.tensor_active),
                        "memory_bandwidth": Cell(seen.memory_bandwidth),
                        "power": Cell(seen.power_w),
                        "source": Cell(seen.source),
                        "reason": Cell(seen.reason or None),
                    }
                )
    notes = ("Averages over the load point; shares of the device's peak.",) if rows else ()
    return Sheet("device", "What the device did", DEVICE_FIELDS, tuple(rows), (), notes, 3)

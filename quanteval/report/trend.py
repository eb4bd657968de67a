"""A soak over its hours: a row an hour, and the slope of every quantity with its interval, as text and CSV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from quanteval.evidence import VariantEvidence
from quanteval.metrics.capacity import slo_of
from quanteval.metrics.soak import LEVEL, Drift, TrendRow, drifts, hourly, soak_windows
from quanteval.report.render import cell_text
from quanteval.report.sheet import Field, Sheet, sheet_csv, sheets_json, sheets_text
from quanteval.report.table import Cell

LABELS = {
    "hour": ("hour", "number"),
    "requests": ("requests", "number"),
    "failed": ("failed", "number"),
    "error_rate": ("error rate", "share"),
    "achieved_rate": ("requests/s", "rate"),
    "output_tps": ("output tok/s", "rate"),
    "ttft_p50_s": ("TTFT p50 ms", "seconds"),
    "ttft_p99_s": ("TTFT p99 ms", "seconds"),
    "tpot_p50_s": ("TPOT p50 ms", "seconds"),
    "e2e_p50_s": ("E2E p50 ms", "seconds"),
    "e2e_p99_s": ("E2E p99 ms", "seconds"),
    "rss_bytes": ("resident MB", "bytes"),
    "fragmentation": ("fragmentation", "share"),
}
TREND_FIELDS = (
    Field("variant", "variant"),
    *(Field(f.name, *LABELS.get(f.name, (f.name, "number"))) for f in fields(TrendRow)),
)
SLOPE_FIELDS = (
    Field("variant", "variant"),
    Field("quantity", "quantity"),
    Field("start", "at the start"),
    Field("per_hour", "per hour"),
    Field("drifts", "drift"),
    Field("reason", "remark"),
)
RAW_SLOPE_FIELDS = (
    Field("variant", "variant"),
    Field("quantity", "quantity"),
    Field("start", "start", "number"),
    Field("per_hour", "per_hour", "number"),
    Field("drifts", "drifts"),
    Field("reason", "reason"),
)


def trend_sheets(variants: Sequence[VariantEvidence]) -> tuple[Sheet, Sheet]:
    """Return the hours and the slopes of every variant that had a soak; both empty without one."""
    hours: list[dict[str, Cell]] = []
    slopes: list[dict[str, Cell]] = []
    for variant, windows in _soaks(variants):
        hours += [_hour(variant, row) for row in hourly(windows)]
        slopes += [_slope(variant, found) for found in drifts(windows)]
    notes = (
        "Hours are from the start of the soak, at their middle; counts are summed, all else are medians of the hour's "
        "windows.",
    )
    slope_notes = (
        f"Slopes are Theil and Sen's over windows (n), intervals {100 * LEVEL:.0f} % and corrected for windows that "
        "resemble their neighbours.",
    )
    return (
        Sheet("hours", "Soak by hour", TREND_FIELDS, tuple(hours), (), notes if hours else (), 2),
        Sheet(
            "slopes", "Drift over the soak", SLOPE_FIELDS, tuple(slopes), (),
            slope_notes if slopes else (), 2,
        ),
    )  # fmt: skip


def _soaks(variants: Sequence[VariantEvidence]) -> list[tuple[str, list[TrendRow]]]:
    found = [(v.name, soak_windows(v.traces, v.load_points, slo_of(v))) for v in variants]
    return [(name, windows) for name, windows in found if windows]


def _hour(variant: str, row: TrendRow) -> dict[str, Cell]:
    cells = {f.name: Cell(getattr(row, f.name)) for f in fields(TrendRow)}
    return {"variant": Cell(variant), **cells}


def _slope(variant: str, found: Drift) -> dict[str, Cell]:
    label, kind = LABELS.get(found.quantity, (found.quantity, "number"))
    return {
        "variant": Cell(variant),
        "quantity": Cell(label),
        "start": Cell(cell_text(Cell(found.start), kind) if found.start is not None else None),
        "per_hour": Cell(
            cell_text(Cell(found.per_hour, found.lower, found.upper, found.windows), kind)
            if found.per_hour is not None
            else None
        ),
        "drifts": Cell(_word(found)),
        "reason": Cell(found.reason or None),
    }


def _word(found: Drift) -> str:
    if found.lower is None or found.upper is None:
        return "not known"
    return "drifts" if found.drifts else "none shown"


def trend_text(variants: Sequence[VariantEvidence]) -> str:
    """Return hours and slopes for a terminal of 100 columns, '' without a soak."""
    return sheets_text(trend_sheets(variants))


def trend_csv(variants: Sequence[VariantEvidence]) -> str:
    """Return a line an hour, values in seconds, bytes and shares."""
    return sheet_csv(trend_sheets(variants)[0])


def slopes_csv(variants: Sequence[VariantEvidence]) -> str:
    """Return a line a quantity with its slope per hour, bounds and number of windows, in the units of records."""
    rows = [
        {
            "variant": Cell(name),
            "quantity": Cell(found.quantity),
            "start": Cell(found.start),
            "per_hour": Cell(found.per_hour, found.lower, found.upper, found.windows),
            "drifts": Cell(_word(found)),
            "reason": Cell(found.reason or None),
        }
        for name, windows in _soaks(variants)
        for found in drifts(windows)
    ]
    return sheet_csv(Sheet("slopes", "", RAW_SLOPE_FIELDS, tuple(rows)))


def trend_json(variants: Sequence[VariantEvidence]) -> str:
    """Return hours and slopes as JSON."""
    return sheets_json(trend_sheets(variants))

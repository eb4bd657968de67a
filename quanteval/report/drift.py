"""What drifted between two runs of a variant: rows with their noise bands, one summary line, and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from quanteval.metrics.drift import DriftReport, DriftRow, summary
from quanteval.report.render import finite
from quanteval.report.sheet import Field, Sheet, sheet_csv, sheets_markdown, sheets_text
from quanteval.report.table import Cell
from quanteval.report.text import line, megabytes, milliseconds, number, wrap

FIELDS = (
    Field("metric", "metric"),
    Field("where", "where"),
    Field("stored", "stored"),
    Field("fresh", "fresh"),
    Field("change", "change"),
    Field("band", "noise band"),
    Field("n", "n stored/fresh"),
    Field("flag", "flag"),
    Field("reason", "remark"),
)
FLAGS = {
    "within": "-", "drift": "DRIFT", "better": "better", "unlike": "other conditions",
    "unknown": "not judged", "missing": "MISSING",
}  # fmt: skip
UNITS = {"s": "ms", "bytes": "MB", "share": ""}


def drift_summary(found: DriftReport) -> str:
    """Return the outcome as one line."""
    counts = ", ".join(summary(found)) or "nothing to compare"
    verdict = {0: "no drift", 3: "drift", 4: "undecided", 5: "not comparable"}[found.exit_code]
    return line(f"{verdict}: {found.fresh} against stored {found.stored}: {counts}")


def drift_text(found: DriftReport, *, every: bool = False) -> str:
    """Return the summary, the conditions that differ, and the rows that are not within their band (or all)."""
    out = wrap(drift_summary(found))
    out += [part for text in found.conditions for part in wrap(f"  unlike: {line(text)}", 4)]
    shown = [row for row in found.rows if every or row.flag not in ("within", "unknown")]
    sheet = _sheet(found, shown)
    return "\n".join(out) + "\n" + sheets_text([sheet]) + "\n"


def drift_markdown(found: DriftReport) -> str:
    """Return every row, with the summary above."""
    return sheets_markdown([_sheet(found, list(found.rows), told=True)])


def drift_csv(found: DriftReport) -> str:
    """Return a line a metric in the units of records: seconds, bytes, shares."""
    return sheet_csv(
        Sheet("drift", "", RAW, tuple(_raw(row) for row in found.rows))
    )  # fmt: skip


def drift_json(found: DriftReport) -> str:
    """Return the whole comparison, the exit code and the summary with it."""
    whole: dict[str, Any] = asdict(found)
    whole |= {"exit_code": found.exit_code, "summary": drift_summary(found)}
    return json.dumps(finite(whole), indent=1, allow_nan=False) + "\n"


def _sheet(found: DriftReport, rows: list[DriftRow], *, told: bool = False) -> Sheet:
    head = (drift_summary(found), *(f"unlike: {text}" for text in found.conditions)) if told else ()
    notes = (
        f"The band holds the fresh values that noise explains, all {found.compared} intervals together with "
        f"{100 * (1 - found.alpha):g} % confidence, or that are within the smallest change that counts. n are "
        "requests of latencies, runs or stretches of rates, pairs of samples of scores.",
    )
    return Sheet(
        "drift", "Metrics beside the stored run's", FIELDS, tuple(_cells(r) for r in rows), head,
        notes if rows else (), 2,
    )  # fmt: skip


def _cells(row: DriftRow) -> dict[str, Cell]:
    low, high = row.band or (None, None)
    band = f"{_value(low, row.unit)} to {_value(high, row.unit)}" if row.band else None
    unit = UNITS.get(row.unit, row.unit)
    of_unit = unit if unit and unit not in row.metric else ""
    return {
        "metric": Cell(f"{row.metric} {of_unit}".strip()),
        "where": Cell(row.where or "variant"),
        "stored": Cell(_value(row.stored, row.unit)),
        "fresh": Cell(_value(row.fresh, row.unit)),
        "change": Cell(_change(row)),
        "band": Cell(band),
        "n": Cell(f"{row.n_stored}/{row.n_fresh}" if row.n_stored or row.n_fresh else None),
        "flag": Cell(FLAGS[row.flag]),
        "reason": Cell(row.reason or None),
    }


def _change(row: DriftRow) -> str | None:
    if row.change is None:
        return None
    return f"{_moved(row, row.change)}{_interval(row)}"


def _interval(row: DriftRow) -> str:
    if row.lower is None and row.upper is None:
        return ""
    ends = ("?" if end is None else _moved(row, end) for end in (row.lower, row.upper))
    return f" [{', '.join(ends)}]"


def _moved(row: DriftRow, value: float) -> str:
    if row.relative:
        return f"{100 * value:+.1f} %"
    if row.unit == "share":
        return f"{100 * value:+.1f} points"
    return f"{'+' if value >= 0 else '-'}{number(abs(value))}"


def _value(value: float | None, unit: str) -> str | None:
    if value is None:
        return None
    if unit == "s":
        return milliseconds(value)
    if unit == "bytes":
        return megabytes(value)
    return f"{100 * value:.1f} %" if unit == "share" else number(value, 4)


RAW = tuple(
    Field(key, key)
    for key in (
        "metric", "where", "unit", "stored", "fresh", "change", "relative", "lower", "upper", "band_low", "band_high",
        "n_stored", "n_fresh", "units", "flag", "method", "reason",
    )
)  # fmt: skip


def _raw(row: DriftRow) -> dict[str, Cell]:
    values = {**asdict(row), "relative": str(row.relative).lower()}
    values["band_low"], values["band_high"] = row.band or (None, None)
    return {f.key: Cell(values[f.key]) for f in RAW}

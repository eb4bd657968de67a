"""A table as Markdown, CSV, JSON, or for a terminal of 100 columns."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from quanteval.report.table import QUALITY, SIZE, SPEED, VERDICT, Cell, Column, Row, Table
from quanteval.report.text import WIDTH, line, markdown, megabytes, milliseconds, number, wrap


def cell_text(cell: Cell | None, kind: str, *, detail: bool = True) -> str:
    """Return a value with, when `detail`, its interval, n and note."""
    if cell is None or cell.value is None:
        return line(cell.note) if cell is not None and cell.note else "-"
    text = _value(cell.value, kind)
    if detail and cell.lower is not None and cell.upper is not None:
        text += f" [{_value(cell.lower, kind)}, {_value(cell.upper, kind)}]"
    if detail and cell.n is not None:
        text += f" n={cell.n}"
    if cell.note:
        text += f" ({line(cell.note)})"
    return text


def _value(value: float | str, kind: str) -> str:
    if isinstance(value, str):
        return line(value)
    if kind == "bytes":
        return megabytes(value)
    if kind == "seconds":
        return milliseconds(value)
    if kind == "share":
        return f"{100 * value:.1f} %"
    if kind == "ratio":
        return f"{value:.2f}x"
    return number(value, 4 if kind == "number" else 3)


def _columns(table: Table, section: str) -> list[Column]:
    return [column for column in table.columns if column.section == section]


# --------------------------------------------------------------------------- Markdown


def render_markdown(table: Table) -> str:
    """Return one wide table, what it was measured with, and a footnote for each column."""
    header = ["variant", *(column.label for column in table.columns)]
    rows = [
        [row.variant, *(_row_text(row, column) for column in table.columns)] for row in table.rows
    ]
    lines = [
        "| " + " | ".join(markdown(text) for text in header) + " |",
        "|" + " --- |" * len(header),
        *("| " + " | ".join(markdown(text) for text in row) + " |" for row in rows),
        "",
        *(f"- {markdown(key)}: {markdown(value)}" for key, value in table.facts.items()),
        "",
        *(f"- {markdown(c.label)}: {markdown(c.meaning)}." for c in table.columns if c.meaning),
        *(f"- {markdown(note)}" for note in table.footnotes),
    ]
    return "\n".join(lines) + "\n"


def _row_text(row: Row, column: Column) -> str:
    cell = row.cells.get(column.key)
    if cell is None and column.key == "scheme" and row.status != "ok":
        return f"{row.status}: {row.reason}"
    return cell_text(cell, column.kind)


# --------------------------------------------------------------------------- CSV and JSON


def render_csv(table: Table) -> str:
    """Return raw values (bytes, seconds, shares), with columns for bounds and n where there are any."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    header = ["variant", "is_baseline", "status", "status_reason"]
    for column in table.columns:
        header += [
            column.key,
            f"{column.key}.lower",
            f"{column.key}.upper",
            f"{column.key}.n",
            f"{column.key}.note",
        ]
    used = {
        name
        for row in table.rows
        for key, cell in row.cells.items()
        for name, value in _parts(key, cell).items()
        if value not in (None, "")
    }
    kept = [name for name in header if name in used or "." not in name]
    writer.writerow(kept)
    for row in table.rows:
        values: dict[str, object] = {
            "variant": spreadsheet(row.variant),
            "is_baseline": row.is_baseline,
            "status": row.status,
            "status_reason": spreadsheet(row.reason),
        }
        for key, cell in row.cells.items():
            values |= _parts(key, cell)
        writer.writerow(["" if values.get(name) is None else values[name] for name in kept])
    return out.getvalue()


def _parts(key: str, cell: Cell) -> dict[str, object]:
    value = spreadsheet(cell.value) if isinstance(cell.value, str) else cell.value
    return {
        key: value,
        f"{key}.lower": cell.lower,
        f"{key}.upper": cell.upper,
        f"{key}.n": cell.n,
        f"{key}.note": line(cell.note),
    }


def spreadsheet(text: str) -> str:
    """Return one line that a spreadsheet does not take for a formula."""
    safe = line(text)
    return "'" + safe if safe.startswith(("=", "@", "+", "-")) else safe


def render_json(table: Table) -> str:
    """Return the table as it is; NaN and infinities as strings, since JSON has no number for them."""
    return json.dumps(finite(asdict(table)), indent=1, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """Return a value for JSON: NaN and infinities as strings, tuples as lists."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# --------------------------------------------------------------------------- terminal


def render_terminal(table: Table) -> str:
    """Return narrow tables, one a section, no line longer than 100 characters."""
    out: list[str] = []
    out += _block("Size", _grid(table, SIZE))
    if any(column.key in row.cells for row in table.rows for column in _columns(table, SPEED)):
        out += _block(f"Speed ({table.facts.get('timing', 'one run each')})", _grid(table, SPEED))
        out += wrap(f"  {_requests(table)}; intervals are in the Markdown, CSV and JSON tables", 4)
    for column in _columns(table, QUALITY):
        rows = [
            (line(row.variant), cell_text(row.cells.get(column.key), column.kind))
            for row in table.rows
        ]
        out += _block(line(column.label), rows)
    rows = [(line(row.variant), cell_text(row.cells.get("verdict"), "text")) for row in table.rows]
    out += _block(VERDICT, rows)
    for row in table.rows:
        if row.status != "ok":
            out += wrap(f"{line(row.variant)} is {row.status}: {line(row.reason)}")
    out.append("")
    for key in ("model", "device", "threads", "batching"):
        if key in table.facts:
            out += wrap(f"{key}: {line(table.facts[key])}")
    return "\n".join(out)


def _requests(table: Table) -> str:
    """Return what the speed figures rest on: one statement when it is the same for all variants."""
    seen: dict[str, list[str]] = {}
    for row in table.rows:
        counts = [row.cells[key].n for key in ("tps_1", "tps_best") if key in row.cells]
        if counts:
            text = " and ".join(f"n={n}" for n in counts) + " requests"
            seen.setdefault(text, []).append(line(row.variant))
    if len(seen) == 1:
        return f"{next(iter(seen))} (one stream, best load) a variant"
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in seen.items())


def _grid(table: Table, section: str) -> list[tuple[str, ...]]:
    columns = _columns(table, section)
    used = [
        c
        for c in columns
        if any(row.cells.get(c.key, Cell(None)).value is not None for row in table.rows)
    ]
    header = ("", *(column.label for column in used))
    body = [
        (line(row.variant), *(cell_text(row.cells.get(c.key), c.kind, detail=False) for c in used))
        for row in table.rows
    ]
    return [header, *body]


def _block(title: str, rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lay rows out in columns; columns that do not fit the width go into a further block."""
    if not rows:
        return ["", title, "  none"]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    out = ["", title]
    start = 1
    while start < len(widths):
        end, total = start, 2 + widths[0]
        while end < len(widths) and (end == start or total + 2 + widths[end] <= WIDTH):
            total += 2 + widths[end]
            end += 1
        for row in rows:
            rest = row[start:end]
            if len(widths) > 2:
                rest = tuple(text.rjust(widths[start + i]) for i, text in enumerate(rest))
            cells = [row[0].ljust(widths[0]), *rest]
            out += wrap("  " + "  ".join(cells).rstrip(), indent=4 + widths[0])
        start = end
    return out

"""Long tables (a row a load point, a layer, a metric) as Markdown, CSV, JSON, or for a terminal of 100 columns."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quanteval.report.render import cell_text, finite, spreadsheet
from quanteval.report.table import Cell
from quanteval.report.text import WIDTH, line, markdown, wrap


@dataclass(frozen=True)
class Field:
    """A column: its key in records, its heading, and how its values are written (see `cell_text`)."""

    key: str
    label: str
    kind: str = "text"


@dataclass(frozen=True)
class Sheet:
    """Rows of cells by column key, with statements before and notes behind them."""

    key: str
    title: str
    fields: tuple[Field, ...]
    rows: tuple[Mapping[str, Cell], ...]
    statements: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    keys: int = 1
    """How many of the first columns say which row it is."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not self.rows and not self.statements

    @property
    def used(self) -> tuple[Field, ...]:
        """The columns that hold anything."""
        return tuple(f for f in self.fields if any(_filled(row.get(f.key)) for row in self.rows))


def _filled(cell: Cell | None) -> bool:
    return cell is not None and (cell.value is not None or bool(cell.note)) and cell.value != ""


def sheets_markdown(sheets: Sequence[Sheet]) -> str:
    """Return a section for each sheet that holds anything; '' when none does."""
    return "\n".join(_markdown(sheet) for sheet in sheets if not sheet.empty)


def _markdown(sheet: Sheet) -> str:
    lines = [f"## {markdown(sheet.title)}", ""]
    lines += [f"- {markdown(text)}" for text in sheet.statements]
    if sheet.rows:
        lines += [""] if sheet.statements else []
        fields = sheet.used
        lines += ["| " + " | ".join(markdown(f.label) for f in fields) + " |"]
        lines += ["|" + " --- |" * len(fields)]
        lines += [
            "| " + " | ".join(markdown(cell_text(row.get(f.key), f.kind)) for f in fields) + " |"
            for row in sheet.rows
        ]
    lines += ["", *(markdown(note) for note in sheet.notes)] if sheet.notes else []
    return "\n".join(lines) + "\n"


def sheets_text(sheets: Sequence[Sheet]) -> str:
    """Return the same for a terminal, no line longer than 100 characters."""
    out: list[str] = []
    for sheet in sheets:
        if sheet.empty:
            continue
        out += ["", line(sheet.title)]
        out += _grid(sheet) if sheet.rows else []
        out += [part for text in (*sheet.statements, *sheet.notes) for part in _indented(text)]
    return "\n".join(out).strip("\n")


def _grid(sheet: Sheet) -> list[str]:
    """Lay rows out in blocks of columns, each led by the columns that say which row it is."""
    keys = [f for f in sheet.used if f in sheet.fields[: sheet.keys]]
    rest = [f for f in sheet.used if f not in keys]
    texts = {
        f.key: [f.label, *(cell_text(row.get(f.key), f.kind) for row in sheet.rows)]
        for f in sheet.used
    }
    widths = {key: max(map(len, column)) for key, column in texts.items()}
    lead = sum(widths[f.key] + 2 for f in keys)
    out: list[str] = []
    while rest or not out:
        taken = [rest.pop(0)] if rest else []
        while rest and lead + sum(widths[f.key] + 2 for f in (*taken, rest[0])) <= WIDTH:
            taken.append(rest.pop(0))
        for at in range(len(sheet.rows) + 1):
            cells = [texts[f.key][at] for f in taken]
            if at and taken and all(cell == "-" for cell in cells):
                continue
            told = [texts[f.key][at].ljust(widths[f.key]) for f in keys]
            told += [_placed(f, cell, widths[f.key]) for f, cell in zip(taken, cells, strict=True)]
            out += wrap("  " + "  ".join(told).rstrip(), min(lead + 4, WIDTH // 2))
    return out


def _placed(field: Field, text: str, width: int) -> str:
    """Place numbers to the right, so that their digits stand below each other, and words to the left."""
    return text.ljust(width) if field.kind == "text" else text.rjust(width)


def _indented(text: str) -> list[str]:
    return wrap(f"  {line(text)}", 4)


def sheet_csv(sheet: Sheet) -> str:
    """Return raw values (seconds, bytes, shares), with columns for bounds, n and note where there are any."""
    rows = [_flat(row) for row in sheet.rows]
    filled = {name for row in rows for name, value in row.items() if value not in (None, "")}
    names = [
        name
        for f in sheet.fields
        for name in (f.key, *(f"{f.key}.{part}" for part in ("lower", "upper", "n", "note")))
        if name == f.key or name in filled
    ]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow(["" if row.get(name) is None else row[name] for name in names])
    return out.getvalue()


def _flat(row: Mapping[str, Cell]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, cell in row.items():
        flat[key] = spreadsheet(cell.value) if isinstance(cell.value, str) else cell.value
        flat[f"{key}.lower"], flat[f"{key}.upper"] = cell.lower, cell.upper
        flat[f"{key}.n"], flat[f"{key}.note"] = cell.n, spreadsheet(cell.note) if cell.note else ""
    return flat


def sheets_json(sheets: Sequence[Sheet], **facts: Any) -> str:
    """Return every sheet's rows, statements and notes by its key; NaN and infinities as strings."""
    found: dict[str, Any] = dict(facts)
    for sheet in sheets:
        rows = [{key: asdict(cell) for key, cell in row.items()} for row in sheet.rows]
        found[sheet.key] = {
            "rows": rows, "statements": list(sheet.statements), "notes": list(sheet.notes)
        }  # fmt: skip
    return json.dumps(finite(found), indent=1, allow_nan=False) + "\n"

"""Numbers out of production logs: JSONL, CSV with a header, or plain lines of numbers."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quanteval.errors import ConfigError


def read_numbers(path: Path, fields: Sequence[str]) -> list[tuple[int, tuple[float, ...]]]:
    """Return every record's line number and its named fields as numbers; empty lines are skipped.

    A JSONL field may be a path such as 'usage.prompt_tokens'. In a plain file the first number of a
    line is the first field, the second the second (separated by spaces, tabs, commas or semicolons).
    Raises ConfigError naming file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'"{path}" cannot be read: {error}') from None
    rows = list(_rows(path, lines, fields))
    if not rows:
        raise ConfigError(
            f'"{path}" holds no record: it needs at least one line with {_named(fields)}'
        )
    return rows


def _rows(
    path: Path, lines: Sequence[str], fields: Sequence[str]
) -> Iterator[tuple[int, tuple[float, ...]]]:
    kind = path.suffix.lower()
    header: list[str] | None = None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f'"{path}" line {number}'
        if kind in (".jsonl", ".json", ".ndjson"):
            yield number, _from_json(where, line, fields)
        elif kind in (".csv", ".tsv"):
            cells = next(csv.reader([line], delimiter="\t" if kind == ".tsv" else ","))
            if header is None:
                header = [cell.strip() for cell in cells]
                missing = [name for name in fields if name not in header]
                if missing:
                    raise ConfigError(
                        f'{where}: no column "{missing[0]}"; columns: {", ".join(header)}'
                    )
                continue
            yield number, _from_cells(where, dict(zip(header, cells, strict=False)), fields)
        else:
            cells = line.replace(",", " ").replace(";", " ").split()
            if len(cells) < len(fields):
                raise ConfigError(
                    f'{where}: "{line.strip()[:60]}" has fewer numbers than {_named(fields)}'
                )
            pairs = zip(fields, cells, strict=False)
            yield number, tuple(_number(where, name, cell) for name, cell in pairs)


def _from_json(where: str, line: str, fields: Sequence[str]) -> tuple[float, ...]:
    try:
        record = json.loads(line)
    except ValueError:
        raise ConfigError(f'{where}: "{line.strip()[:60]}" is not JSON') from None
    values = []
    for name in fields:
        value: Any = record
        for part in [name] if isinstance(record, dict) and name in record else name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            raise ConfigError(f'{where}: no field "{name}"')
        values.append(_number(where, name, value))
    return tuple(values)


def _from_cells(where: str, cells: dict[str, str], fields: Sequence[str]) -> tuple[float, ...]:
    for name in fields:
        if name not in cells:
            raise ConfigError(f'{where}: no value for column "{name}"')
    return tuple(_number(where, name, cells[name]) for name in fields)


def _number(where: str, name: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
        if not math.isfinite(number):
            raise ValueError
    except (TypeError, ValueError):
        raise ConfigError(f'{where}: {name} "{str(value)[:60]}" is not a number') from None
    return number


def _named(fields: Sequence[str]) -> str:
    return " and ".join(f'"{name}"' for name in fields)

"""Rows of a suite, whatever their source: a loader by dotted path, a local JSONL file, or a hub id."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quanteval.errors import ConfigError, QuantevalError
from quanteval.interfaces import Sample
from quanteval.store import file_sha256, fingerprint
from quanteval.targets import locate

Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Where rows come from: exactly one of `loader`, `jsonl` and `hub`.

    `loader` is the dotted path of a function that returns rows; `jsonl` a file, relative to the
    suite's folder; `hub` a data set id, with `name`, `split` and `revision` as `datasets` has them.
    """

    loader: str | None = None
    arguments: dict[str, Any] | None = None
    jsonl: str | None = None
    sha256: str | None = None
    hub: str | None = None
    name: str | None = None
    split: str = "test"
    revision: str | None = None

    def __post_init__(self) -> None:
        given = [key for key in ("loader", "jsonl", "hub") if getattr(self, key)]
        if len(given) != 1:
            raise ValueError(
                f'"{", ".join(given) or "nothing"}": give exactly one of loader, jsonl, hub'
            )


def load_rows(source: Source, folder: str) -> list[Row]:
    """Return all rows as plain dicts. ConfigError when there are none or they cannot be read."""
    if source.loader:
        rows = _from_loader(source.loader, source.arguments or {})
    elif source.jsonl:
        rows = _from_jsonl(source, folder)
    else:
        rows = _from_hub(source)
    if not rows:
        raise ConfigError(f'the source "{source.loader or source.jsonl or source.hub}" has no rows')
    return rows


def _from_loader(path: str, arguments: dict[str, Any]) -> list[Row]:
    function = locate(path)
    try:
        inspect.signature(function).bind(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f'loader "{path}": {error}') from None
    return list(function(**arguments))


def _from_jsonl(source: Source, folder: str) -> list[Row]:
    path = Path(folder) / str(source.jsonl)
    if not path.is_file():
        raise ConfigError(f'"{path}" does not exist')
    if source.sha256 and (found := file_sha256(path)) != source.sha256:
        raise ConfigError(f'"{path}" has sha256 "{found}", the suite says "{source.sha256}"')
    rows = []
    # Not the `json` builder: it takes strings that look like dates for dates, and the path for a pattern.
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                rows.append(_json_object(f'"{path}" line {number}', line))
    return rows


def _json_object(label: str, line: bytes) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{label} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{label} is no JSON object")
    return row


def _from_hub(source: Source) -> list[Row]:
    return _load_dataset(
        f'data set "{source.hub}"',
        source.hub,
        source.name,
        split=source.split,
        revision=source.revision,
    )


def _load_dataset(label: str, *arguments: Any, **keywords: Any) -> list[Row]:
    import datasets

    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        return [dict(row) for row in datasets.load_dataset(*arguments, **keywords)]
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        cause = error.__cause__ or error
        raise QuantevalError(f"cannot load {label}: {' '.join(str(cause).split())[:200]}") from None
    finally:
        if not bars:
            datasets.enable_progress_bars()


def make_samples(rows: Sequence[Row], id_field: str, limit: int | None) -> list[Sample]:
    """Turn rows into samples; the first `limit` of them. ConfigError for ids missing or used twice."""
    samples: list[Sample] = []
    seen: set[str] = set()
    for number, row in enumerate(rows if limit is None else rows[:limit]):
        if row.get(id_field) is None:
            raise ConfigError(f'row {number} has no "{id_field}", which should be its id')
        sample_id = str(row[id_field])
        if sample_id in seen:
            raise ConfigError(f'two rows have the id "{sample_id}"')
        seen.add(sample_id)
        samples.append(Sample(sample_id, row))
    return samples


def require_text(samples: Iterable[Sample], field: str) -> None:
    """Raise ConfigError unless every sample has a string, which may be empty, under `field`."""
    for sample in samples:
        if not isinstance(sample.data.get(field), str):
            raise ConfigError(f'sample "{sample.sample_id}" has no text under "{field}"')


def check_limit(limit: int | None) -> None:
    """Raise ValueError unless a limit is absent or at least 1."""
    if limit is not None and limit < 1:
        raise ValueError(f'limit "{limit}" must be at least 1, or null for all')


def check_name(name: str) -> None:
    """Raise ValueError unless a task's name can be a file's name."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ValueError(f'name "{name}" must be letters, digits, ".", "_" and "-"')


def data_digest(samples: Iterable[Sample]) -> str:
    """Return the sha256 over ids and contents, in order."""
    return fingerprint({"rows": [[sample.sample_id, dict(sample.data)] for sample in samples]})

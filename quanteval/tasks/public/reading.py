"""Rows of a public data set as somebody has them: JSON lines, JSON, CSV, TSV, Parquet, a saved data set, the hub."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from quanteval.errors import ConfigError, QuantevalError
from quanteval.tasks.loading import Row, Source, load_rows

ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
# What splits are called in the names of files.
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "dev": ("dev",),
    "test": ("test",),
}
SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.)")


def read_rows(
    path: str | None, hub: str, name: str | None, split: str, revision: str | None
) -> list[Row]:
    """Return a data set's rows from `path`, or from the hub where no path is given.

    Raises ConfigError when the path holds no such rows, and QuantevalError, which names `path` as the way
    out, when the hub cannot be read.
    """
    if path is not None:
        if is_saved(path):
            return _saved(Path(path), split)
        return [row for file in find_files(Path(path), name, split) for row in read_file(file)]
    try:
        with _quiet_hub():
            return load_rows(Source(hub=hub, name=name, split=split, revision=revision), "")
    except QuantevalError as error:
        raise type(error)(
            f"{error}; a local copy is read with source.arguments.path=FILE (a file or a folder)"
        ) from None


@contextlib.contextmanager
def _quiet_hub() -> Iterator[None]:
    """Keep the hub client from writing a line for every attempt; what it fails with is told once."""
    from huggingface_hub.utils import logging as hub

    before = hub.get_verbosity()
    hub.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hub.set_verbosity(before)


def is_saved(path: str) -> bool:
    """Return whether a folder was written by `datasets`' save_to_disk."""
    return any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _saved(path: Path, split: str) -> list[Row]:
    import datasets

    try:
        found = datasets.load_from_disk(str(path))
        rows = found[split] if isinstance(found, Mapping) else found
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f'"{path}" cannot be read: {" ".join(str(error).split())}') from None
    return [dict(row) for row in rows]


def find_files(path: Path, name: str | None, split: str) -> list[Path]:
    """Return the file meant by a path: itself, or the one of a folder that its name tells to be the split's.

    A sub-folder called like the configuration `name` is looked into first, as in copies of a hub repository,
    and the shards of one file count as one. Files named for another split are never taken. ConfigError when
    there is none, or more than one.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f'path "{path}" does not exist: give a file or a folder')
    folder = path / name if name and (path / name).is_dir() else path
    files = sorted(file for file in folder.rglob("*") if file.is_file() and _ending(file))
    known = {word for words in SPLITS.values() for word in words}
    wanted = SPLITS.get(split, (split,))
    files = [f for f in files if _words(f.name) & set(wanted) or not _words(f.name) & known]
    for words in ({split}, set(wanted)):
        files = [f for f in files if _words(f.name) & words] or files
    if name:
        files = [f for f in files if _words(name) <= _words(f.name)] or files
    if len({SHARD.sub("", file.name) for file in files}) != 1:
        listed = ", ".join(str(file.relative_to(path)) for file in files[:4])
        raise ConfigError(
            f'path "{path}" has {len(files)} files for the split "{split}"{": " if listed else ""}{listed}; '
            f"give one file ({', '.join(ENDINGS)}, also .gz)"
        )
    return files


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z]+", name.lower())) - {""}


def _ending(path: Path) -> str:
    ending = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    return ending.lower() if ending.lower() in ENDINGS else ""


def read_bytes(path: Path) -> bytes:
    """Return a file's contents, unpacked. ConfigError when it cannot be read."""
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError) as error:
        raise ConfigError(f'"{path}" cannot be read: {error}') from None


def read_text(path: Path) -> str:
    """Return a file's text, line ends as they are. ConfigError when it is not UTF-8."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f'"{path}" is not UTF-8: {error}') from None


def read_file(path: Path) -> list[Row]:
    """Return the rows of one file. ConfigError when it has none or cannot be understood."""
    readers: dict[str, Callable[[Path], list[Row]]] = {
        ".jsonl": _json_lines,
        ".json": _json,
        ".csv": lambda file: read_table(file, ","),
        ".tsv": lambda file: read_table(file, "\t"),
        ".parquet": _parquet,
    }
    if (ending := _ending(path)) not in readers:
        raise ConfigError(f'"{path}" is none of {", ".join(ENDINGS)} (also .gz)')
    rows = readers[ending](path)
    if not rows:
        raise ConfigError(f'"{path}" has no rows')
    return rows


def _json_lines(path: Path) -> list[Row]:
    rows = []
    # Not splitlines: JSON strings may hold the separators it also splits at.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            rows.append(_object(f'"{path}" line {number}', line))
    return rows


def _object(label: str, text: str) -> Row:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{label} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{label} is no JSON object")
    return row


def _json(path: Path) -> list[Row]:
    """A list of objects; files that are called .json often hold JSON lines."""
    try:
        found = json.loads(read_text(path))
    except ValueError:
        return _json_lines(path)
    if isinstance(found, dict):
        found = [found]
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise ConfigError(f'"{path}" holds no list of JSON objects')
    return found


def read_cells(path: Path, delimiter: str = ",") -> list[list[str]]:
    """Return the cells of a CSV or TSV file, empty lines left out."""
    # Texts of a benchmark may be longer than the csv module's default limit for a cell.
    csv.field_size_limit(1 << 30)
    text = io.StringIO(read_text(path), newline="")
    try:
        return [row for row in csv.reader(text, delimiter=delimiter) if row]
    except csv.Error as error:
        raise ConfigError(f'"{path}" is no table: {error}') from None


def read_table(path: Path, delimiter: str) -> list[Row]:
    """Return the rows of a table whose first line names the columns."""
    cells = read_cells(path, delimiter)
    return [dict(zip(cells[0], row, strict=False)) for row in cells[1:]]


def _parquet(path: Path) -> list[Row]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        return [dict(row) for row in parquet.read_table(path).to_pylist()]
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f'"{path}" cannot be read: {" ".join(str(error).split())}') from None


def need(row: Row, key: str, number: int, what: str) -> Any:
    """Return a field. ConfigError, naming the fields there are, when the row has another shape."""
    if row.get(key) is None:
        raise ConfigError(
            f'row {number} of {what} has no "{key}" (it has {", ".join(map(str, row)) or "nothing"}): '
            "this is not a layout that the loader knows"
        )
    return row[key]

"""A complete journal of scores as columns beside it, so that gating a large run again reads arrays and not text.

The columns are a copy: they are used only while the journal is the one they were made from, and made
again when it is not. Losing them loses nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from quanteval.errors import RecordError
from quanteval.evidence import ScoreSet
from quanteval.records import TaskRecord
from quanteval.store.files import write_atomic

VERSION = 1
_TEXTS = (
    "sample_ids", "prompt_sha256", "status", "finish_reason", "outcome", "problem_ids", "output_sha256",
)  # fmt: skip


def columns_path(journal: Path) -> Path:
    """Return scores/<task>.columns.npz."""
    return journal.with_suffix(".columns.npz")


def save_columns(journal: Path, scores: ScoreSet) -> None:
    """Write the columns of a complete journal; a folder that cannot be written is left alone."""
    head: dict[str, Any] = {
        "version": VERSION,
        "journal": _stamp(journal, scores.record),
        "texts": {name: list(getattr(scores, name)) for name in _TEXTS},
        "numbers": sorted(scores.numbers),
        "series": sorted(scores.series),
    }
    arrays: dict[str, NDArray[Any]] = {
        "head": np.frombuffer(json.dumps(head).encode(), dtype=np.uint8),
        "value": scores.value,
        "weight": scores.weight,
        "output_tokens": scores.output_tokens,
    }
    for i, name in enumerate(head["numbers"]):
        arrays[f"number{i}"] = scores.numbers[name]
    for i, name in enumerate(head["series"]):
        rows = scores.series[name]
        arrays[f"series{i}"] = np.concatenate(rows) if rows else np.zeros(0)
        arrays[f"lengths{i}"] = np.array([len(row) for row in rows], dtype=np.int64)
    buffer = io.BytesIO()
    # numpy's stubs take the keyword allow_pickle for one of the arrays.
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    with contextlib.suppress(RecordError):
        write_atomic(columns_path(journal), buffer.getvalue())


def load_columns(journal: Path, record: TaskRecord) -> ScoreSet | None:
    """Return the columns of exactly this journal, None when there are none to be trusted."""
    try:
        with np.load(columns_path(journal), allow_pickle=False) as file:
            head = from_json(file["head"].tobytes())
            if head["version"] != VERSION or head["journal"] != _stamp(journal, record):
                return None
            texts: dict[str, Any] = {name: tuple(head["texts"][name]) for name in _TEXTS}
            return ScoreSet(
                record=record,
                value=file["value"],
                weight=file["weight"],
                output_tokens=file["output_tokens"],
                numbers={name: file[f"number{i}"] for i, name in enumerate(head["numbers"])},
                series=_Series(columns_path(journal), tuple(head["series"])),
                **texts,
            )
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, EOFError):
        return None


class _Series(Mapping[str, tuple[NDArray[np.float64], ...]]):
    """Per-token values, read when they are asked for: most rules never do, and they are most of the bytes."""

    def __init__(self, path: Path, names: tuple[str, ...]) -> None:
        self._path = path
        self._names = names

    def __getitem__(self, name: str) -> tuple[NDArray[np.float64], ...]:
        i = self._names.index(name) if name in self._names else -1
        if i < 0:
            raise KeyError(name)
        try:
            with np.load(self._path, allow_pickle=False) as file:
                values, lengths = file[f"series{i}"], file[f"lengths{i}"]
        except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
            raise RecordError(
                f'"{self._path}" is damaged ({error}): remove it and try again'
            ) from None
        return tuple(np.split(values, np.cumsum(lengths)[:-1])) if len(lengths) else ()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _stamp(journal: Path, record: TaskRecord) -> list[Any]:
    """Identify a journal: its hash as recorded, and size and time of the file that was read."""
    stat = journal.stat()
    return [record.journal_sha256, stat.st_size, stat.st_mtime_ns]

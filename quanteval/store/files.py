"""Files that are whole or absent: atomic records, append-only journals, fingerprints and locks.

A record is written beside its place, flushed to disk and renamed. A journal line is whole or, after
a kill or a full disk, cut off and dropped on the next open: at most the sample in flight is lost.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ValidationError

from quanteval.errors import QuantevalError, RecordError

M = TypeVar("M", bound=BaseModel)


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def fingerprint(inputs: Mapping[str, Any]) -> str:
    """Return the sha256 of the canonical JSON of `inputs`."""
    return hashlib.sha256(canonical_json(inputs).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RecordError(
                f'no space left while writing "{path}": free some and run again'
            ) from None
        if error.errno in (errno.EACCES, errno.EROFS):
            raise RecordError(f'cannot write "{path}": {error.strerror}') from None
        raise


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part."""
    raw = data.encode() if isinstance(data, str) else data
    with _disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def write_record(path: Path, record: BaseModel) -> None:
    """Write a record as indented JSON, atomically."""
    write_atomic(path, record.model_dump_json(indent=1) + "\n")


def read_record(path: Path, kind: type[M]) -> M:
    """Read a record. RecordError when it is missing, torn or lacks a field."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise RecordError(f'"{path}" does not exist') from None
    except OSError as error:
        raise RecordError(f'cannot read "{path}": {error.strerror}') from None
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "content"
        raise RecordError(
            f'"{path}" is not a readable {kind.__name__}: {place}: {first["msg"]}'
        ) from None


class Journal:
    """An append-only JSONL file; opening it cuts off a line that a crash left unfinished."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Journal:
        with _disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
            end = _end_of_whole_lines(self._file)
            self._file.truncate(end)
            self._file.seek(end)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def append(self, line: BaseModel) -> None:
        """Append one line and flush it to disk; on a full disk the line is taken back whole."""
        if self._file is None:
            raise ValueError("the journal is not open")
        before = self._file.seek(0, os.SEEK_END)
        with _disk_errors(self.path):
            try:
                self._file.write(line.model_dump_json().encode() + b"\n")
                self._file.flush()
                os.fdatasync(self._file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.truncate(before)
                raise


def _end_of_whole_lines(file: IO[bytes]) -> int:
    """Return the offset after the last newline."""
    position = file.seek(0, os.SEEK_END)
    block = 1 << 16
    while position > 0:
        start = max(0, position - block)
        file.seek(start)
        cut = file.read(position - start).rfind(b"\n")
        if cut >= 0:
            return start + cut + 1
        position = start
    return 0


def read_journal(path: Path, kind: type[M]) -> list[M]:
    """Read all whole lines of a journal; an unfinished last line is left out.

    RecordError when a whole line is not a valid `kind`.
    """
    if not path.exists():
        return []
    raw = path.read_bytes()
    lines = raw[: raw.rfind(b"\n") + 1].splitlines()
    out: list[M] = []
    for number, line in enumerate(lines, 1):
        try:
            out.append(kind.model_validate_json(line))
        except ValidationError as error:
            message = error.errors(include_url=False)[0]["msg"]
            raise RecordError(
                f'"{path}" line {number} is not a {kind.__name__}: {message}'
            ) from None
    return out


@contextlib.contextmanager
def file_lock(path: Path, *, wait: bool, busy: str) -> Iterator[None]:
    """Hold an exclusive lock that the system drops when the process ends, however it ends.

    Raises QuantevalError with the message `busy` when it is taken and `wait` is False.
    """
    with _disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise QuantevalError(busy) from None
        yield
    finally:
        os.close(handle)


def device_lock(device: str) -> contextlib.AbstractContextManager[None]:
    """Wait for, then hold, the machine-wide lock under which latency is measured on a device."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower())
    path = Path(tempfile.gettempdir()) / f"quanteval-bench-{name}-{os.getuid()}.lock"
    return file_lock(path, wait=True, busy="")

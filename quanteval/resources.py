"""Where conf/ and tasks/ lie: at the top of a checkout, or inside the installed package."""

from __future__ import annotations

import os
from pathlib import Path

from quanteval.errors import ConfigError
from quanteval.targets import near

TASK_PATH_VARIABLE = "QUANTEVAL_TASK_PATH"

# What `ls` lists, and the conf/ group behind each ('task' and 'run' lie elsewhere).
GROUPS = {
    "models": "models",
    "schemes": "scheme",
    "engines": "engine",
    "tasks": "task",
    "suites": "suite",
    "benches": "bench",
    "workloads": "workload",
    "policies": "gate",
    "experiments": "experiment",
    "runs": "run",
}


def resource_dir(name: str) -> Path:
    """Return the folder `name` ('conf' or 'tasks'). ConfigError when the installation lacks it."""
    package = Path(__file__).parent
    for folder in (package / "_data" / name, package.parent / name):
        if folder.is_dir():
            return folder.resolve()
    raise ConfigError(f'this installation has no "{name}" folder: reinstall quanteval')


def presets(group: str) -> dict[str, Path]:
    """Return the YAML presets of a conf/ group by name, e.g. presets('scheme')."""
    return {path.stem: path for path in sorted((resource_dir("conf") / group).glob("*.yaml"))}


def preset(group: str, name: str) -> Path:
    """Return one preset's file. ConfigError naming near matches."""
    known = presets(group)
    if name not in known:
        raise ConfigError(f'no {group} "{name}"; {near(name, known)}')
    return known[name]


def task_folders() -> dict[str, Path]:
    """Return every tasks/<name>/ that has a task.yaml, by name.

    Folders named in QUANTEVAL_TASK_PATH (separated like PATH) come first, so that a user's own
    suite can stand in for a shipped one of the same name.
    """
    roots = [
        Path(part) for part in os.environ.get(TASK_PATH_VARIABLE, "").split(os.pathsep) if part
    ]
    found: dict[str, Path] = {}
    for root in [*roots, resource_dir("tasks")]:
        for path in sorted(root.glob("*/task.yaml")):
            found.setdefault(path.parent.name, path.parent.resolve())
    return found

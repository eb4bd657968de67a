"""What this machine and installation can do, checked one by one; nothing is changed."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement

from quanteval.environment import cpu_model, package_version, usable_cores
from quanteval.errors import QuantevalError

MINIMUM_FREE_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Check:
    """One finding: 'ok', 'warn' (something is limited) or 'fail' (runs will not work)."""

    name: str
    status: Literal["ok", "warn", "fail"]
    text: str


def diagnose() -> list[Check]:
    """Run all checks; one that itself breaks is reported as a failure, not raised."""
    checks: list[Check] = []
    for probe in (_python, _packages, _machine, _device, _sandbox, _folders, _hub):
        try:
            checks.extend(probe())
        except Exception as error:
            checks.append(
                Check(probe.__name__.strip("_"), "fail", f"{type(error).__name__}: {error}")
            )
    return checks


def _python() -> Iterator[Check]:
    ok = sys.version_info >= (3, 11)
    yield Check(
        "python", "ok" if ok else "fail", f"{platform.python_version()} (3.11 or newer needed)"
    )


def _packages() -> Iterator[Check]:
    """Compare what is installed with what quanteval itself declares."""
    try:
        declared = [Requirement(text) for text in requires("quanteval") or []]
    except PackageNotFoundError:
        yield Check(
            "quanteval", "warn", "runs from a folder and is not installed: pip install -e ."
        )
        return
    for requirement in declared:
        extra = _extra_of(requirement)
        if extra in ("dev", "all"):
            continue
        found = package_version(requirement.name)
        wanted = str(requirement.specifier) or "any version"
        if found is None:
            hint = f"missing ({wanted} needed)"
            if extra:
                yield Check(requirement.name, "warn", f"{hint}; pip install 'quanteval[{extra}]'")
            else:
                yield Check(requirement.name, "fail", hint)
        elif not requirement.specifier.contains(found, prereleases=True):
            yield Check(requirement.name, "fail", f"{found} is installed, {wanted} is needed")
        else:
            yield Check(requirement.name, "ok", found)


def _extra_of(requirement: Requirement) -> str:
    marker = str(requirement.marker or "")
    return marker.split('extra == "')[1].split('"', maxsplit=1)[0] if 'extra == "' in marker else ""


def _machine() -> Iterator[Check]:
    memory = psutil.virtual_memory()
    yield Check("cpu", "ok", f"{cpu_model()}, {usable_cores()} usable cores")
    low = memory.available < 3 * 10**9
    yield Check(
        "memory",
        "warn" if low else "ok",
        f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB available"
        + (": too little for more than the smallest models" if low else ""),
    )


def _device() -> Iterator[Check]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield Check("gpu", "ok", "none found; everything runs on the CPU")
        return
    query = [tool, "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    if said.returncode:
        yield Check(
            "gpu", "warn", f"nvidia-smi fails: {said.stderr.strip() or said.stdout.strip()}"
        )
    for line in said.stdout.splitlines():
        yield Check("gpu", "ok", line.strip())


def _sandbox() -> Iterator[Check]:
    from quanteval.sandbox import probe

    level = probe()
    weak = not (level.filesystem_isolated and level.network_isolated and level.processes_contained)
    notes = "; ".join(level.notes)
    yield Check("sandbox", "warn" if weak else "ok", f"{level.name}{': ' + notes if notes else ''}")


def _folders() -> Iterator[Check]:
    from quanteval.models.cache import cache_dir

    places: list[tuple[str, Callable[[], Path]]] = [
        ("cache", cache_dir),
        ("outputs", lambda: Path("outputs")),
    ]
    for name, find in places:
        try:
            folder = find().absolute()
        except (OSError, QuantevalError) as error:
            yield Check(name, "fail", str(error))
            continue
        existing = next(p for p in (folder, *folder.parents) if p.exists())
        free = shutil.disk_usage(existing).free
        if not os.access(existing, os.W_OK):
            yield Check(name, "fail", f'"{folder}" cannot be written')
        else:
            status: Literal["ok", "warn"] = "ok" if free >= MINIMUM_FREE_BYTES else "warn"
            yield Check(name, status, f"{folder} ({free / 1e9:.0f} GB free)")


def _hub() -> Iterator[Check]:
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        yield Check(
            "hub", "warn", "HF_HUB_OFFLINE is set: only cached and local models can be used"
        )
    token = "set" if os.environ.get("HF_TOKEN") else "not set (needed for gated models only)"
    yield Check("hub token", "ok", f"HF_TOKEN is {token}")

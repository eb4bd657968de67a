"""Schemes whose library lives in an environment of its own: finding its interpreter, asking it, running a worker there.

Some libraries pin other versions than this project. A scheme then names an interpreter, and a script of
`schemes/workers` does the work in it: an order as JSON goes in, an answer as JSON and a folder of weights come out.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from quanteval.environment import package_version
from quanteval.errors import QuantevalError, UnsupportedError

WORKERS = Path(__file__).parent / "workers"
ASK_VERSION = (
    "import importlib.metadata as m, sys\n"
    "try: print(m.version(sys.argv[1]))\n"
    "except m.PackageNotFoundError: print('')\n"
)


def find_interpreter(named: str, variable: str, folder: str, package: str, how: str) -> Path:
    """Return the interpreter of the environment in which `package` is to be found.

    In this order: the one named (an interpreter or an environment's folder), the one that the environment variable
    names, the environment `folder` below the working directory, this interpreter where it has the package.
    UnsupportedError, ending with `how`, when there is none.
    """
    for place, said_by in ((named, "environment"), (os.environ.get(variable, ""), f"${variable}")):
        if place:
            found = _interpreter_in(Path(place).expanduser())
            if found is None:
                raise UnsupportedError(f'{said_by} "{place}" is no Python environment: {how}')
            return found
    found = _interpreter_in(Path(folder))
    if found is not None:
        return found
    if package_version(package) is not None:
        return Path(sys.executable)
    raise UnsupportedError(f"needs {package} in an environment of its own: {how}")


def _interpreter_in(place: Path) -> Path | None:
    """Return a folder's interpreter, or the interpreter that the path itself is; its links are kept, they matter."""
    candidates = [place / "bin" / "python", place / "python"] if place.is_dir() else [place]
    return next((p.absolute() for p in candidates if p.is_file() and os.access(p, os.X_OK)), None)


def require_in(interpreter: Path, package: str, minimum: str, how: str) -> str:
    """Return a package's version there. UnsupportedError, ending with `how`, when it is missing or too old."""
    found = _version_in(interpreter, package)
    if not found:
        raise UnsupportedError(
            f'needs {package} >= {minimum}, which "{interpreter}" does not have: {how}'
        )
    if Version(found) < Version(minimum):
        raise UnsupportedError(f'needs {package} >= {minimum}, "{interpreter}" has {found}: {how}')
    return found


@lru_cache(maxsize=64)
def _version_in(interpreter: Path, package: str) -> str:
    if interpreter == Path(sys.executable):
        return package_version(package) or ""
    done = subprocess.run(
        [str(interpreter), "-c", ASK_VERSION, package],
        capture_output=True, text=True, check=False, env=clean_variables(), timeout=60,
    )  # fmt: skip
    return done.stdout.strip() if done.returncode == 0 else ""


def clean_variables() -> dict[str, str]:
    """Return this process's variables without those that would lead another interpreter to this one's packages."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "PYTHONNOUSERSITE": "1"}


def run_worker(
    interpreter: Path,
    script: str,
    order: Mapping[str, Any],
    folder: Path,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run `workers/<script>` in an interpreter and return its answer (see workers/_protocol.py).

    `folder` is where order and answer lie; they are removed afterwards. UnsupportedError or QuantevalError with the
    worker's own line when it fails; a worker never outlives this call.
    """
    order_path, answer_path = folder / ".order.json", folder / ".answer.json"
    order_path.write_text(json.dumps({**order, "parent_pid": os.getpid()}), encoding="utf-8")
    command = [str(interpreter), str(WORKERS / script), str(order_path), str(answer_path)]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env={**clean_variables(), **(variables or {})}
        )
        try:
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        return _read_answer(answer_path, script, code)
    finally:
        for path in (order_path, answer_path, answer_path.with_suffix(".tmp")):
            path.unlink(missing_ok=True)


def _read_answer(path: Path, script: str, code: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        found = dict(json.loads(path.read_text(encoding="utf-8")))
    status = found.get("status")
    if status == "ok":
        return found
    if status == "unsupported":
        raise UnsupportedError(found["reason"])
    if code == -9:
        raise QuantevalError(
            f"{script} was killed by signal 9, usually the system's out-of-memory killer"
        )
    raise QuantevalError(f"{script} failed: {found.get('reason') or f'it exited with {code}'}")

"""How a worker script takes its order and gives its answer; imported by the scripts beside it, from their folder.

A script is started as `INTERPRETER SCRIPT ORDER ANSWER`: ORDER is a JSON file, ANSWER the one to write. What libraries
print goes wherever the caller's output goes. Needs nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
Work = Callable[[dict[str, Any]], dict[str, Any]]


class NotSupportedError(Exception):
    """What the order asks for cannot be done here; the message is one line that says what would help."""


def answer(work: Work, packages: Iterable[str]) -> int:
    """Do the work that the order asks for, write the answer, return the exit code.

    The answer holds 'status' (ok, unsupported or failed), 'reason' (one line), 'packages', 'peak_bytes', 'build_s',
    and whatever `work` returns.
    """
    order_path, answer_path = Path(sys.argv[1]), Path(sys.argv[2])
    order = json.loads(order_path.read_text(encoding="utf-8"))
    _die_with_parent(order["parent_pid"])
    started = time.perf_counter()
    found: dict[str, Any] = {"status": "ok", "reason": ""}
    try:
        found |= work(order)
    except NotSupportedError as error:
        found |= {"status": "unsupported", "reason": one_line(error)}
    except Exception as error:
        traceback.print_exc()
        found |= {"status": "failed", "reason": f"{type(error).__name__}: {one_line(error)}"}
    found |= {
        "packages": {name: v for name in packages if (v := _version(name))},
        "peak_bytes": peak_bytes(),
        "build_s": time.perf_counter() - started,
    }
    unfinished = answer_path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(found), encoding="utf-8")
    unfinished.replace(answer_path)
    return 0 if found["status"] == "ok" else 1


def one_line(error: BaseException) -> str:
    """Return an error's first line that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def peak_bytes() -> int:
    """Return this process's highest resident memory, 0 where the system does not tell."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _die_with_parent(parent: int) -> None:
    """Ask the system to end this process when its parent ends; where it cannot, nothing is lost but tidiness."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)

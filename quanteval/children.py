"""Child processes as their parent sees them: started with a spec, waited for, and why they failed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quanteval.environment import set_thread_variables
from quanteval.errors import QuantevalError
from quanteval.records import VariantStatus
from quanteval.store import VariantDirectory, write_atomic


class ChildFailedError(QuantevalError):
    """How a child ended: a status for its variant, one line, and its exit code."""

    def __init__(self, message: str, status: VariantStatus, child_exit_code: int) -> None:
        super().__init__(message)
        self.status = status
        self.exit_code = child_exit_code


def run_child(spec: Mapping[str, Any], folder: VariantDirectory, threads: int) -> None:
    """Run one child (see `child`) to its end. ChildFailedError says how it failed."""
    write_atomic(folder.spec, json.dumps(spec, indent=1))
    outcome = folder.path / "child.json"
    outcome.unlink(missing_ok=True)
    env = dict(os.environ)
    set_thread_variables(threads, env)
    process = subprocess.Popen(
        [sys.executable, "-m", "quanteval.child", str(folder.spec)],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        code = process.wait()
    except BaseException:
        _stop(process)
        raise
    if code == 0:
        return
    raise _child_failure(code, outcome, folder.log)


def _child_failure(code: int, outcome: Path, log: Path) -> ChildFailedError:
    """Say why a child ended: its own words where it left any, else the signal."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        said = json.loads(outcome.read_text(encoding="utf-8"))
        return ChildFailedError(said["reason"], said["status"], code)
    if code == -signal.SIGKILL:
        reason = "killed by signal 9, usually the system's out-of-memory killer: use a smaller model or batch"
        return ChildFailedError(reason, "out_of_memory", code)
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        return ChildFailedError(f"the child process died of {name}; see {log}", "failed", code)
    return ChildFailedError(f"the child process exited with {code}; see {log}", "failed", code)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a child to stop, then make it."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(timeout=15)
            return
        process.kill()
        process.wait()

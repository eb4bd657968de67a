"""The sandbox as its users see it: problems in, outcomes out."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quanteval.errors import QuantevalError, UnsupportedError

OutcomeStatus = Literal["passed", "wrong", "timeout", "memory", "crashed", "unparsable", "error"]
GRACE_S = 15.0


@dataclass(frozen=True)
class Limits:
    """What one candidate may use: CPU time (whole seconds), wall time, address space.

    It can start no process, write no file and open no socket at all. The wall limit is generous, so
    that on a busy machine the CPU limit decides and scores do not depend on the load.
    """

    cpu_s: int = 5
    wall_s: float = 20.0
    memory_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.cpu_s < 1 or self.wall_s <= 0:
            raise ValueError(
                f'cpu_s "{self.cpu_s}" and wall_s "{self.wall_s}" must be at least 1 and positive'
            )
        if self.memory_bytes < 64 << 20:
            raise ValueError(f'memory_bytes "{self.memory_bytes}" must be at least 64 MiB')


@dataclass(frozen=True)
class Problem:
    """A candidate program and the tests for one of its functions.

    `test` defines check(candidate); `context` is trusted text whose helpers the tests may use.
    """

    problem_id: str
    code: str
    entry_point: str
    test: str
    context: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a candidate did. 'error' means that the tests or the sandbox failed, not the candidate."""

    problem_id: str
    status: OutcomeStatus
    detail: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Level:
    """What this system really keeps in, found by trying."""

    name: str
    filesystem_isolated: bool
    network_isolated: bool
    processes_contained: bool
    notes: tuple[str, ...] = ()


class Sandbox:
    """A context manager; `check` may be called from as many threads as there are `workers`.

    Raises UnsupportedError on entry when this system cannot isolate a candidate, unless `allow_weak`.
    """

    def __init__(
        self, limits: Limits | None = None, *, workers: int = 1, allow_weak: bool = False
    ) -> None:
        self._limits = limits or Limits()
        self._workers = workers
        self._allow_weak = allow_weak
        self._idle: queue.Queue[_Zygote] = queue.Queue()
        self._all: list[_Zygote] = []

    def __enter__(self) -> Sandbox:
        if not self._allow_weak:
            level = probe()
            if not (
                level.filesystem_isolated and level.processes_contained and level.network_isolated
            ):
                raise UnsupportedError(
                    f"generated code cannot be isolated here ({level.name}: {'; '.join(level.notes)}); "
                    "a Linux kernel with Landlock and seccomp is needed"
                )
        for _ in range(self._workers):
            zygote = _Zygote()
            self._all.append(zygote)
            self._idle.put(zygote)
        return self

    def __exit__(self, *exc: object) -> None:
        for zygote in self._all:
            zygote.close()
        self._all.clear()

    def check(self, problem: Problem) -> Outcome:
        """Run one candidate to its end."""
        job = {
            "code": problem.code,
            "entry_point": problem.entry_point,
            "test": problem.test,
            "context": problem.context,
            "limits": vars(self._limits),
            "allow_weak": self._allow_weak,
        }
        zygote = self._idle.get()
        try:
            result = zygote.run(job, self._limits.wall_s + GRACE_S)
        finally:
            self._idle.put(zygote)
        return Outcome(
            problem.problem_id,
            result["status"],
            result.get("detail", ""),
            result.get("wall_s", 0.0),
            result.get("cpu_s", 0.0),
        )

    def check_all(self, problems: Iterable[Problem]) -> Iterator[Outcome]:
        """Yield the outcomes as they end, in any order."""
        with ThreadPoolExecutor(self._workers) as pool:
            futures = [pool.submit(self.check, problem) for problem in problems]
            for future in as_completed(futures):
                yield future.result()


class _Zygote:
    """One forking process, made again when it had to be killed."""

    def __init__(self) -> None:
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        package = Path(__file__).parent
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(package / "_zygote.py"), str(package.parent.parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0"},
            start_new_session=True,
        )

    def run(self, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
            line = self._read_line(timeout_s)
        except (BrokenPipeError, ValueError) as error:
            line = b""
            if isinstance(error, ValueError):
                raise
        if not line:
            self.close()
            self._process = self._start()
            return {"status": "error", "detail": "the sandbox's process ended or did not answer"}
        result: dict[str, Any] = json.loads(line)
        return result

    def _read_line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        data = b""
        while not data.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([handle], [], [], left)[0]:
                return b""
            part = os.read(handle, 1 << 16)
            if not part:
                return b""
            data += part
        return data

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


_ATTEMPT = "def f():\n    import os, socket\n    try:\n        {}\n    except OSError:\n        return True\n"
_PROBES = {
    "files": _ATTEMPT.format("open('/proc/self/status').read()"),
    "network": _ATTEMPT.format("socket.socket().close()"),
    "processes": _ATTEMPT.format("os.fork() or os._exit(0)"),
}
_NOTES = {
    "files": "candidates can read this user's files (no Landlock)",
    "network": "candidates can open sockets (no seccomp)",
    "processes": "candidates can start processes (no seccomp)",
}


@functools.cache
def probe() -> Level:
    """Return what candidates are really kept from, by letting a few of them try."""
    try:
        with Sandbox(Limits(), allow_weak=True) as sandbox:
            test = "def check(f):\n    assert f() is True\n"
            outcomes = {
                name: sandbox.check(Problem(name, code, "f", test))
                for name, code in _PROBES.items()
            }
    except OSError as error:
        raise QuantevalError(f"the sandbox does not start: {error}") from None
    held = {name: outcome.status == "passed" for name, outcome in outcomes.items()}
    name = (
        "landlock+seccomp" if all(held.values()) else "seccomp" if held["processes"] else "rlimits"
    )
    return Level(
        name=name,
        filesystem_isolated=held["files"],
        network_isolated=held["network"],
        processes_contained=held["processes"],
        notes=tuple(_NOTES[key] for key, ok in held.items() if not ok),
    )

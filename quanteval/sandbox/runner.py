"""The sandbox as its users see it: problems in, outcomes out."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from quanteval.errors import QuantevalError, UnsupportedError
from quanteval.sandbox._load import Turnstile, slowness

OutcomeStatus = Literal["passed", "wrong", "timeout", "memory", "crashed", "unparsable", "error"]
LAYERS = ("namespaces", "landlock", "seccomp")
DETAIL_LENGTH = 200
ANSWER_GRACE_S = 15.0
END_GRACE_S = 3.0


@dataclass(frozen=True)
class Limits:
    """What one candidate may use: CPU and wall time, address space, bytes of one encoded answer.

    It can start no process, write no file and reach no network at all. The wall limit is generous, so
    that on a busy machine the CPU limit decides and scores do not depend on the load.
    """

    cpu_s: float = 5.0
    wall_s: float = 20.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        # Written so that a NaN fails too.
        if not (0 < self.cpu_s < 1e6 and 0 < self.wall_s < 1e6):
            raise ValueError(
                f'cpu_s "{self.cpu_s}" and wall_s "{self.wall_s}" must be between 0 and 1e6 seconds'
            )
        if self.memory_bytes < 64 << 20:
            raise ValueError(f'memory_bytes "{self.memory_bytes}" must be at least 64 MiB')
        if not 1 << 16 <= self.output_bytes <= 1 << 28:
            raise ValueError(
                f'output_bytes "{self.output_bytes}" must be between 64 KiB and 256 MiB'
            )


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
    """How a candidate did. 'error' means that the tests or the sandbox failed, not the candidate.

    `detail` is one printable line; `cpu_s` is the candidate's alone.
    """

    problem_id: str
    status: OutcomeStatus
    detail: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0


class Sandbox:
    """A context manager; `check` may be called from any threads, `workers` checks run at once.

    Both time limits are stretched by `factor`, which `measure_factor` finds on entry, and a check that
    timed out is repeated once while no other check runs. `nice` lowers the priority of all processes.
    `layers` is there to measure and test each measure apart. Raises UnsupportedError on entry when
    this system cannot isolate a candidate, unless `allow_weak`.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        workers: int = 1,
        allow_weak: bool = False,
        layers: Collection[str] = LAYERS,
        nice: int = 0,
        measure_factor: Callable[[], float] = slowness,
        retry_timeouts: bool = True,
    ) -> None:
        if workers < 1:
            raise ValueError(f'workers "{workers}" must be at least 1')
        if nice < 0:
            raise ValueError(f'nice "{nice}" must be at least 0')
        self.factor = 1.0
        self._nice = nice
        self._measure_factor = measure_factor
        self._retry_timeouts = retry_timeouts
        self._turnstile = Turnstile()
        self._limits = self._stretched = limits or Limits()
        self._workers = workers
        self._allow_weak = allow_weak
        self._layers = tuple(layers)
        self._idle: queue.Queue[_Zygote] = queue.Queue()
        self._all: list[_Zygote] = []

    def __enter__(self) -> Sandbox:
        if not self._allow_weak:
            from quanteval.sandbox.probing import probe

            level = probe(self._layers)
            if not level.isolated:
                raise UnsupportedError(
                    f'generated code cannot be isolated here ("{level.name}": '
                    f"{'; '.join(level.notes)}); run on Linux with seccomp, and Landlock or user namespaces"
                )
        self._idle = queue.Queue()
        self.factor = self._measure_factor()
        self._stretched = replace(
            self._limits,
            cpu_s=self._limits.cpu_s * self.factor,
            wall_s=self._limits.wall_s * self.factor,
        )
        settings = {"layers": self._layers, "nice": self._nice, **asdict(self._stretched)}
        self._all = [_Zygote(settings) for _ in range(self._workers)]
        for zygote in self._all:
            self._idle.put(zygote)
        return self

    def __exit__(self, *exc: object) -> None:
        zygotes, self._all = self._all, []
        for zygote in zygotes:
            zygote.close()

    def check(self, problem: Problem) -> Outcome:
        """Run one candidate to its end, and once more, alone, if that took it too long."""
        with self._turnstile.together():
            result = self.run(problem)
        if result["status"] == "timeout" and self._retry_timeouts:
            with self._turnstile.alone():
                result = self.run(problem)
        return Outcome(
            problem.problem_id,
            result["status"],
            one_line(result["detail"]),
            result.get("wall_s", 0.0),
            result.get("cpu_s", 0.0),
        )

    def run(self, problem: Problem) -> dict[str, Any]:
        """Run one candidate and return the raw result: with `held`, what kept it in."""
        if not self._all:
            raise QuantevalError('the sandbox is not open: use it in a "with" statement')
        job = {
            "code": problem.code,
            "entry_point": problem.entry_point,
            "test": problem.test,
            "context": problem.context,
            "limits": asdict(self._stretched),
            "strict": not self._allow_weak,
        }
        idle = self._idle
        zygote = idle.get()
        try:
            return zygote.run(job, self._stretched.wall_s + ANSWER_GRACE_S)
        finally:
            idle.put(zygote)

    def check_all(self, problems: Iterable[Problem]) -> Iterator[tuple[int, Outcome]]:
        """Yield (position of the problem, outcome) as they end, in any order.

        Problems that have not begun when the iterator is closed are not run.
        """
        pool = ThreadPoolExecutor(self._workers)
        try:
            futures = {pool.submit(self.check, one): i for i, one in enumerate(problems)}
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class _Zygote:
    """One forking process, started when it is needed and again when it had to be killed."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._changing = threading.Lock()
        self._in_use = threading.Lock()

    def run(self, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        with self._in_use:
            process = self._alive()
            line = _exchange(process, json.dumps(job).encode() + b"\n", timeout_s)
            if not line:
                _end(process)
                _close_pipes(process)
                with self._changing:
                    self._process = None
                return {
                    "status": "error",
                    "detail": "the sandbox's process ended, or did not answer",
                }
        result: dict[str, Any] = json.loads(line)
        return result

    def close(self) -> None:
        """End the process, also while another thread waits for it."""
        with self._changing:
            self._closed = True
            process = self._process
        if process is not None:
            _end(process)
            with self._in_use:
                _close_pipes(process)

    def _alive(self) -> subprocess.Popen[bytes]:
        with self._changing:
            if self._closed:
                raise QuantevalError("the sandbox was closed while a check was waiting")
            if self._process is None:
                self._process = _start(self._settings)
            return self._process


def _start(settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    package = Path(__file__).resolve().parent
    # No site packages, no user's PYTHON* variables, and the same order of sets everywhere: -I would
    # ignore PYTHONHASHSEED.
    command = [sys.executable, "-P", "-s", "-S", "-B", str(package / "_zygote.py")]
    return subprocess.Popen(
        [*command, str(package.parent.parent), json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONHASHSEED": "0",
            "TMPDIR": tempfile.gettempdir(),
        },
        # Ctrl-C goes to the terminal's processes: it is for the one that waits here to pass it on.
        start_new_session=True,
    )


def _exchange(process: subprocess.Popen[bytes], message: bytes, timeout_s: float) -> bytes:
    """Send a message and return the line that answers it; empty when none comes."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(message)
        process.stdin.flush()
    except OSError:
        return b""
    handle = process.stdout.fileno()
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


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its descendants: it is asked first, so that it can clean up."""
    process.terminate()
    try:
        process.wait(END_GRACE_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def one_line(text: str) -> str:
    """Return a text as one printable line: control characters escaped, cut to DETAIL_LENGTH."""
    # Words first, so that a line break reads as a space; what then does not print is escaped.
    line = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
        for c in " ".join(text.split())
    )
    return line if len(line) <= DETAIL_LENGTH else line[: DETAIL_LENGTH - 1] + "…"

"""A server process that never outlives its owner, not even one that was killed.

A small supervisor (`_supervise`) stands between: it ends the server and all its descendants when the owner asks,
or is gone. On Linux that includes daemons, which it adopts; elsewhere, processes that left the server's tree may
stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from quanteval.engines import _supervise
from quanteval.errors import EngineError

TAIL_BYTES = 1 << 16
LINE_LIMIT = 240
STOP_SLACK_S = 30.0
"""What the supervisor gets beyond the grace, to kill what did not end by itself."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RAISED = re.compile(
    r"(?:^|[\s:\])])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b(?:: .*)?)$"
)
_COMPLAINT = re.compile(
    r"\b(error|fatal|failed|cannot|killed|abort|out of memory)\b", re.IGNORECASE
)
_POINTER = re.compile(r"root cause|see (?:the )?(?:stack trace|log)", re.IGNORECASE)


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def telling_line(log: str) -> str:
    """Return the line of a log that best says why a program ended; '' for an empty log.

    The last exception that does not merely point at another one, else the last line that complains, else the
    last line at all.
    """
    lines = [_printable(line) for line in log.splitlines()]
    lines = [line for line in lines if line]
    for line in reversed(lines):
        raised = _RAISED.search(line)
        if raised and not _POINTER.search(line):
            return raised[1][:LINE_LIMIT]
    for line in reversed(lines):
        if _COMPLAINT.search(line):
            return line[:LINE_LIMIT]
    return lines[-1][:LINE_LIMIT] if lines else ""


def _printable(line: str) -> str:
    plain = _COLOUR.sub("", line)
    return "".join(c if c.isprintable() else " " for c in plain).strip()


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the kernel does so when memory runs out)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


class ServerProcess:
    """A server, started on entry and ended on exit with everything it started.

    Its output is appended to `log`. `env` is added to this process's environment. The server gets `grace_s`
    seconds between SIGTERM and SIGKILL. Methods may be called from several threads.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        *,
        grace_s: float = 10.0,
    ) -> None:
        self._command = [str(part) for part in command]
        self._log = log
        self._env = dict(env or {})
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._unread = b""
        self._pid = 0
        self._death = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server; EngineError when it cannot be executed. A second call does nothing."""
        if self._supervisor is not None:
            return
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", str(Path(_supervise.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the owner, who then stops the server
            )
        spec = {
            "command": self._command,
            "log": str(self._log.absolute()),
            "env": {**os.environ, **self._env},
            "owner": os.getpid(),
            "grace_s": self._grace_s,
        }
        try:
            self._say(json.dumps(spec))
            self._read(blocking=True)
        except BaseException:
            self.stop()
            raise
        if not self._pid:
            reason = self._death
            self.stop()
            raise EngineError(f'"{self._command[0]}" {reason}')

    def _say(self, line: str) -> None:
        assert self._supervisor is not None and self._supervisor.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._supervisor.stdin.write(line.encode() + b"\n")
            self._supervisor.stdin.flush()

    def _read(self, *, blocking: bool = False) -> None:
        """Take in what the supervisor said: the process id, the failure to start, the end."""
        assert self._supervisor is not None and self._supervisor.stdout is not None
        with self._lock, contextlib.suppress(ValueError):  # closed by a stop in between
            handle = self._supervisor.stdout.fileno()
            os.set_blocking(handle, blocking)
            while not (blocking and (self._pid or self._death)):
                try:
                    piece = os.read(handle, 4096)
                except BlockingIOError:
                    return
                if not piece:
                    self._death = self._death or "lost its supervisor"
                    return
                *lines, self._unread = (self._unread + piece).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        if "pid" in message:
            self._pid = int(message["pid"])
        elif "failed" in message:
            self._death = f"could not be started: {message['failed']}"
        elif "exit" in message:
            self._death = _ending(int(message["exit"]))

    @property
    def pid(self) -> int:
        """The server's process id; 0 before it was started."""
        return self._pid

    @property
    def log(self) -> Path:
        """Where the server's output goes."""
        return self._log

    def log_text(self, tail_bytes: int | None = None) -> str:
        """Return what the server has written since this start, or the last `tail_bytes` of it."""
        try:
            with self._log.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                start = self._log_start if tail_bytes is None else max(end - tail_bytes, 0)
                log.seek(max(start, self._log_start))
                return log.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def alive(self) -> str | None:
        """Return None while the server runs, else one line: how it ended, and its log's last telling line."""
        if self._supervisor is None:
            return "the server was not started"
        if not self._death:
            self._read()
        if not self._death:
            return None
        line = telling_line(self.log_text(TAIL_BYTES))
        return f"the server {self._death}" + (f": {line}" if line else "")

    def wait_until(
        self, ready: Callable[[], bool], timeout_s: float, *, interval_s: float = 0.1
    ) -> None:
        """Return as soon as `ready()` is true. EngineError when the server ends before, or time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            if reason := self.alive():
                raise EngineError(f"{reason} (log: {self._log})")
            if ready():
                return
            if time.monotonic() >= deadline:
                lines = self.log_text(TAIL_BYTES).split("\n")
                line = next((text for raw in reversed(lines) if (text := _printable(raw))), "")
                raise EngineError(
                    f"the server was not ready after {timeout_s:g} s: its log ends with '{line[:LINE_LIMIT]}' "
                    f"(log: {self._log})"
                )
            time.sleep(interval_s)

    def stop(self) -> None:
        """End the server and all its descendants; wait until they are gone. A second call does nothing."""
        supervisor = self._supervisor
        if supervisor is None or supervisor.stdin is None or supervisor.stdin.closed:
            return
        was_alive = self.alive() is None
        try:
            # The word as well as the end of the pipe, of which another child may hold a copy.
            self._say("stop")
            with contextlib.suppress(BrokenPipeError):
                supervisor.stdin.close()
            supervisor.wait(self._grace_s + STOP_SLACK_S)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.wait()
        finally:
            self._read()
            self._death = "was stopped" if was_alive else self._death
            self._kill_session()
            if supervisor.stdout is not None:
                with self._lock:
                    supervisor.stdout.close()

    def _kill_session(self) -> None:
        """Kill what is left of the server's session: only when the supervisor itself was killed."""
        assert self._supervisor is not None
        if self._supervisor.returncode == 0 or not self._pid or not _supervise.LINUX:
            return
        for pid, (_, session) in _supervise.parents_of_all().items():
            if session == self._pid:
                _supervise.send(pid, signal.SIGKILL)

    # ---- memory

    def processes(self) -> list[int]:
        """Return the ids of the server and all its descendants, daemons included."""
        supervisor = self._supervisor
        if supervisor is None or supervisor.returncode is not None:
            return []
        return _supervise.descendants(supervisor.pid)

    def rss_bytes(self) -> int:
        """Return the resident memory of the whole tree, pages shared within it counted once where the kernel tells."""
        return sum(memory.shared_out for memory in self._memory())

    def peak_rss_bytes(self) -> int:
        """Return the tree's highest resident memory since its start or `reset_peak_rss`; 0 where it is not known.

        The sum of each process's peak, less what they share now: too high when the peaks did not coincide, and
        processes that have ended are not in it.
        """
        return sum(memory.peak - (memory.resident - memory.shared_out) for memory in self._memory())

    def reset_peak_rss(self) -> None:
        """Let `peak_rss_bytes` count from here on; does nothing where the kernel has no such switch."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")

    def _memory(self) -> Iterator[_Memory]:
        for pid in self.processes():
            with contextlib.suppress(OSError, psutil.Error, KeyError, ValueError):
                yield _Memory.of(pid)


class _Memory:
    """Resident bytes of one process now, its fair share of them, and its peak."""

    def __init__(self, resident: int, shared_out: int, peak: int) -> None:
        self.resident = resident
        self.shared_out = shared_out
        self.peak = max(peak, resident)

    @classmethod
    def of(cls, pid: int) -> _Memory:
        if not _supervise.LINUX:
            resident = int(psutil.Process(pid).memory_info().rss)
            return cls(resident, resident, resident)
        status = _kilobytes(Path(f"/proc/{pid}/status"))
        if "VmRSS" not in status:  # a zombie holds nothing
            return cls(0, 0, 0)
        try:
            # Two files read one after the other: a share is never more than the whole.
            share = min(_kilobytes(Path(f"/proc/{pid}/smaps_rollup"))["Pss"], status["VmRSS"])
        except (OSError, KeyError):
            share = status["VmRSS"]
        return cls(status["VmRSS"], share, status.get("VmHWM", 0))


def _kilobytes(path: Path) -> dict[str, int]:
    """Return the '<name>: <number> kB' lines of a file of /proc, in bytes."""
    found = {}
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found

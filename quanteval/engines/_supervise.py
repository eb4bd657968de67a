"""Runs one server so that it never outlives its owner: the other side of `process.ServerProcess`.

Started by file name in an isolated interpreter, with the standard library alone. It reads one line of JSON from
stdin, starts the server in a session of its own, and ends it with all its descendants as soon as the owner says
so, closes the pipe or dies by any means. On Linux it adopts descendants whose parent ended, so daemons are found
too; elsewhere those that left the server's process tree are not.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LEFTOVER_GRACE_S = 2.0
"""What descendants get between SIGTERM and SIGKILL once the server itself has ended."""
KILL_LIMIT_S = 20.0
"""How long processes that do not die even of SIGKILL (blocked in the kernel) are waited for."""


def parents_of_all() -> dict[int, tuple[int, int]]:
    """Return the parent and the session of every process, by process id (Linux)."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The name in parentheses may hold anything, parentheses and spaces included.
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                found[int(entry.name)] = (int(fields[1]), int(fields[3]))
    return found


def descendants(root: int) -> list[int]:
    """Return the ids of all processes below `root`, parents before their children, zombies included."""
    if not LINUX:
        import psutil

        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(root).children(recursive=True)]
        return []
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in parents_of_all().items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


class Supervisor:
    """One server, its descendants, and the pipe to its owner."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._server = 0
        self._exit: int | None = None
        self._wake, wake_write = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._asked = False

    def run(self) -> None:
        """Serve until the owner or the server ends; nothing below this process is left afterwards."""
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            # A handler rather than SIG_IGN: the latter would be inherited by the server.
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTERM, self._ask)
        if LINUX:
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            if self._start():
                self._watch()
        finally:
            self._end_all()

    def _ask(self, *_: object) -> None:
        self._asked = True

    def _start(self) -> bool:
        spec = self._spec
        me = os.getpid()

        def in_child() -> None:
            if LINUX:
                # Even when this supervisor is killed, the server is.
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != me:
                    os._exit(1)

        try:
            with Path(spec["log"]).open("ab") as log:
                process = subprocess.Popen(
                    spec["command"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=spec["env"],
                    start_new_session=True,
                    preexec_fn=in_child,  # noqa: PLW1509 - this process has one thread
                )
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self._tell({"failed": str(error)})
            return False
        process.returncode = 0  # its status is collected here, with that of every other child
        self._server = process.pid
        self._tell({"pid": process.pid})
        return True

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(message).encode() + b"\n")

    def _watch(self) -> None:
        """Return when the owner asks to stop or is gone, or when the server has ended."""
        owner = int(self._spec["owner"])
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            selector.register(0, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            if hasattr(os, "pidfd_open"):
                # Another child of the owner may hold a copy of the pipe, which then never ends. The kernel's signal
                # at a parent's death is no help: it comes when the thread that started this process ends.
                with contextlib.suppress(OSError):
                    handle = os.pidfd_open(owner)
                    stack.callback(os.close, handle)
                    selector.register(handle, selectors.EVENT_READ)
            while not self._asked and os.getppid() == owner and not self._reap():
                ready = {key.fd for key, _ in selector.select(timeout=1.0)}
                if self._wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                if ready - {self._wake}:
                    return

    def _reap(self) -> bool:
        """Collect children that ended; tell when the server was among them, and return whether it has ended."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == self._server:
                    self._exit = os.waitstatus_to_exitcode(status)
                    self._tell({"exit": self._exit})
        return self._exit is not None

    def _end_all(self) -> None:
        """End the server politely, then its leftovers, then whatever still lives by force."""
        if self._server and not self._reap():
            send(self._server, signal.SIGTERM)
            self._wait(float(self._spec["grace_s"]), lambda: self._exit is not None)
        left = self._left()
        for pid in left:
            # A server that had its time gets no second one.
            send(pid, signal.SIGTERM if pid != self._server else signal.SIGKILL)
        if left:
            self._wait(LEFTOVER_GRACE_S, lambda: not self._left())
        deadline = time.monotonic() + KILL_LIMIT_S
        while (left := self._left()) and time.monotonic() < deadline:
            for pid in left:
                send(pid, signal.SIGKILL)
            self._wait(0.1, lambda: not self._left())

    def _left(self) -> list[int]:
        self._reap()
        return descendants(os.getpid())

    def _wait(self, seconds: float, done: Any) -> None:
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.02)


def main() -> None:
    """Read what to run and run it."""
    with os.fdopen(0, "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline()
    if line.endswith(b"\n"):
        Supervisor(json.loads(line)).run()


if __name__ == "__main__":
    main()

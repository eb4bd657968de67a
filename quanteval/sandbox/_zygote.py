"""A small warm process that forks a referee for each job: python _zygote.py ROOT LAYERS.

Jobs come as JSON lines on standard input, results leave as JSON lines on standard output. It never
reads a job itself, so no candidate finds a trace of one. It ends, and all its descendants with it, when
its input does, that is, when the process that started it is gone, however that ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable

# What short programs import: loaded once here, so that a candidate finds it in memory.
WARM = (
    "abc", "array", "base64", "bisect", "calendar", "cmath", "collections", "collections.abc",
    "copy", "csv", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools",
    "hashlib", "heapq", "inspect", "io", "itertools", "json", "math", "numbers", "operator",
    "os", "pprint", "queue", "random", "re", "statistics", "string", "struct", "sys",
    "textwrap", "time", "typing", "unicodedata", "uuid", "warnings",
)  # fmt: skip
PARENT_CHECK_MS = 1000
# The result when the kernel's timer ended the referee (Referee._watch_from_outside).
STUCK = b'{"status": "timeout", "detail": "the tests do not end on an answer", "held": []}'


def main() -> None:
    """Fork and wait, one job after the other."""
    root, layers = sys.argv[1], sys.argv[2].split(",")
    parent = os.getppid()
    sys.path.insert(0, root)
    for name in WARM:
        __import__(name)
    from quanteval.sandbox import _isolate, _namespaces, _referee

    # Found now: from within the candidate's file system they could not be.
    _isolate.reading_rules()
    readable, hidden = _isolate.readable_paths(), _isolate.package_folders()
    sys.path.remove(root)
    sys.modules["candidate"] = type(sys)("candidate")
    out = os.dup(1)
    os.dup2(2, 1)
    _isolate.adopt_orphans()
    held = set()
    if "namespaces" in layers and _namespaces.leave_network():
        held.add("network")
        if _namespaces.leave_file_system(readable, hidden):
            held.add("files")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    base = tempfile.mkdtemp(prefix="quanteval-")
    me = os.getpid()
    try:
        while _one_job(parent, out, lambda: _referee.serve(me, out, base, layers, held)):
            _sweep()
            # The end of the result's line, once nothing of the candidate is left.
            os.write(out, b"\n")
    finally:
        _sweep()
        shutil.rmtree(base, ignore_errors=True)


def _one_job(parent: int, out: int, serve: Callable[[], int]) -> bool:
    """Fork a referee, which serves, once there is input. False when this process is to end."""
    if not _wait_for(0, select.POLLIN, parent):
        return False
    ended, keep = os.pipe()
    # A request to end must not come between the fork and the place that ends the referee, too.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    referee = os.fork()
    if referee == 0:
        status = 1
        try:
            status = serve()
        finally:
            os._exit(status)
    os.close(keep)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if not _wait_for(ended, 0, parent):
            return False
        _, status = os.waitpid(referee, 0)
        referee = 0
    finally:
        os.close(ended)
        if referee:
            with contextlib.suppress(ProcessLookupError):
                os.kill(referee, signal.SIGKILL)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        os.write(out, STUCK)
        return True
    return status == 0


def _wait_for(descriptor: int, events: int, parent: int) -> bool:
    """Wait for input or, without `events`, for the other end to close. False when the parent is gone."""
    poll = select.poll()
    poll.register(0, 0)
    poll.register(descriptor, events)
    while os.getppid() == parent:
        ready = dict(poll.poll(PARENT_CHECK_MS))
        if descriptor in ready and (descriptor != 0 or ready[0] & select.POLLIN):
            return True
        if 0 in ready:
            return False
    return False


def _sweep() -> None:
    """Kill and collect all descendants that are left; this process has adopted them."""
    while True:
        try:
            found, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if found == 0:
            for child in _descendants():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.001)


def _descendants() -> set[int]:
    """Return all descendants' ids. Empty without /proc: then they end with their namespace's first."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):  # noqa: PTH208
            if name.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    parent = int(file.read().rpartition(b")")[2].split()[1])
                    children.setdefault(parent, []).append(int(name))
    found: set[int] = set()
    new = {os.getpid()}
    while new:
        new = {child for one in new for child in children.get(one, ())} - found
        found |= new
    return found


if __name__ == "__main__":
    main()

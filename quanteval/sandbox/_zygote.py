"""A small warm process that forks referees: python _zygote.py ROOT SETTINGS, the latter in JSON.

Jobs come as JSON lines on standard input, results leave as JSON lines on standard output. It never
reads a job itself, so no candidate finds a trace of one; while one job is judged, the processes for the
next are made ready. It ends, and all its descendants with it, when its input does, that is, when the
process that started it is gone, however that ended.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

# What short programs import: loaded once here, so that a candidate finds it in memory.
WARM = (
    "abc", "bisect", "collections", "collections.abc", "copy", "functools", "heapq", "itertools", "json",
    "math", "operator", "os", "random", "re", "string", "struct", "sys", "time", "typing",
)  # fmt: skip
PARENT_CHECK_MS = 1000
# Exit statuses of a referee that has written its result (_referee.CLEAN, _referee.UNSURE).
FINISHED = (0, 5)
# The result when the kernel's timer ended the referee (Referee._watch_from_outside).
STUCK = b'{"status": "timeout", "detail": "the tests do not end on an answer", "held": []}'

_referees: set[int] = set()


def main() -> None:
    """Judge one job after the other."""
    root, settings = sys.argv[1], json.loads(sys.argv[2])
    parent = os.getppid()
    os.nice(settings["nice"])
    for name in WARM:
        __import__(name)
    _import_from(root)
    from quanteval.sandbox import _isolate, _namespaces, _referee, _seccomp

    # Found now: from within the candidate's file system they could not be.
    _isolate.reading_rules()
    readable, hidden = _isolate.readable_paths(), _isolate.package_folders()
    sys.modules["candidate"] = type(sys)("candidate")
    out = os.dup(1)
    os.dup2(2, 1)
    _isolate.adopt_orphans()
    layers, held = settings["layers"], set()
    if "namespaces" in layers and _namespaces.leave_network():
        held.add("network")
        if _namespaces.leave_file_system(readable, hidden):
            held.add("files")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    # In a file system of its own, the user's folder is not to be seen.
    temporary = os.environ["TMPDIR"]
    base = _new_folder(temporary if os.path.isdir(temporary) else "/tmp")  # noqa: PTH112
    os.environ.clear()
    calls = _seccomp.prepare() if "seccomp" in layers else None
    me = os.getpid()
    # What is here now is never looked at again, so that children share its memory.
    gc.collect()
    gc.freeze()

    def place() -> Any:
        folder = _new_folder(base)
        ruleset = _isolate.prepare_files(folder) if "landlock" in layers else None
        null = os.open("/dev/null", os.O_RDWR)
        limits = settings["cpu_s"], settings["memory_bytes"]
        return _isolate.Place(folder, ruleset, calls, null, *limits)

    def serve(place: Any, turn: int) -> int:
        return _referee.serve(me, turn, out, place, layers, held)

    try:
        _judge(parent, out, place, serve, _isolate.fork)
    finally:
        _sweep()
        _isolate.remove(base)


def _new_folder(place: str) -> str:
    folder = os.path.join(place, f"quanteval-{os.urandom(8).hex()}")  # noqa: PTH118
    os.mkdir(folder, 0o700)  # noqa: PTH102
    return folder


def _import_from(root: str) -> None:
    """Make the sandbox's modules importable, without its packages' own files and what these import."""
    for name in ("quanteval", "quanteval.sandbox"):
        package = type(sys)(name)
        package.__path__ = [os.path.join(root, *name.split("."))]  # noqa: PTH118
        sys.modules[name] = package


class _Waiting(NamedTuple):
    """A referee: its process, what closes when that ends, and what says that its turn has come."""

    process: int
    ended: int
    turn: int

    def close(self) -> None:
        os.close(self.ended)
        os.close(self.turn)


def _judge(
    parent: int,
    out: int,
    make_place: Callable[[], Any],
    serve: Callable[[Any, int], int],
    fork: Callable[[], int],
) -> None:
    """Have one job after the other judged, until there are no more.

    The next referee is made ready while one judges, unless something may be left of the candidate: then
    all processes are ended first, and the next one gets a folder of its own.
    """
    here = make_place()
    judging, ready = _start(here, serve, fork), None
    clean = False  # until one has been judged
    while True:
        os.write(judging.turn, b"\n")
        if clean:
            ready = _start(here, serve, fork)
        if not _wait_for(judging.ended, 0, parent):
            return
        _, status = os.waitpid(judging.process, 0)
        _referees.discard(judging.process)
        judging.close()
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            os.write(out, STUCK)
        elif os.waitstatus_to_exitcode(status) not in FINISHED:
            return
        clean = status == 0
        if not clean:
            _sweep()
            if ready is not None:
                ready.close()
                ready = None
            here.remove()
            here = make_place()
        # The end of the result's line, once nothing of the candidate is left.
        os.write(out, b"\n")
        judging, ready = ready or _start(here, serve, fork), None


def _start(place: Any, serve: Callable[[Any, int], int], fork: Callable[[], int]) -> _Waiting:
    """Fork a referee, which serves once it is its turn."""
    ended, keep = os.pipe()
    turn, give_turn = os.pipe()
    # Asked to end between the fork and its return, this process could not tell that there is a child.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    process = fork()
    if process == 0:
        status = 1
        try:
            os.close(give_turn)
            status = serve(place, turn)
        finally:
            os._exit(status)
    _referees.add(process)
    os.close(keep)
    os.close(turn)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return _Waiting(process, ended, give_turn)


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
    """Kill and collect all descendants; this process has adopted those of the candidates."""
    for referee in _referees:
        os.kill(referee, signal.SIGKILL)
    _referees.clear()
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

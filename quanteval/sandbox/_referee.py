"""The process that runs a problem's tests: the function under test is a proxy for one in another process."""

from __future__ import annotations

# Not `signal`, whose enumerations are memory that each process would have to copy.
import _signal  # type: ignore[import-not-found]
import builtins
import contextlib
import json
import os
import random
import resource
import select
import socket
import time
from collections.abc import Collection
from typing import Any, NoReturn

from quanteval.sandbox import _candidate, _codec, _isolate, _namespaces

# Exit statuses: nothing can be left of the candidate; something may be; there was no job.
CLEAN, UNSURE, NO_JOB = 0, 5, 7
WATCHDOG_GRACE_S = 1.0
# How often, at most, a candidate near its limit is looked at.
MINIMUM_PAUSE_S = 0.005
# The low bits of a process's clock id that ask for exact scheduler time (clock_getcpuclockid(3)).
_SCHEDULER_CLOCK = 2
# For what tests build out of an answer: a test may well multiply a list.
MEMORY_BYTES = 4 << 30


class _Over(BaseException):
    """The candidate is done for; tests that catch Exception do not catch this."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


class Referee:
    """Starts the process of a candidate, and then judges it by one job.

    `held` names what the processes of this sandbox are kept in already.
    """

    def __init__(
        self, place: _isolate.Place, layers: Collection[str], held: Collection[str]
    ) -> None:
        self.held = set(held)
        self.channel, theirs = socket.socketpair()
        if "namespaces" in layers and _namespaces.number_processes_apart():
            self.held.add("processes")
        me = os.getpid()
        self.child = _isolate.fork()
        if self.child == 0:
            try:
                self.channel.close()
                _candidate.run(theirs, me, place)
            finally:
                os._exit(3)
        theirs.close()
        self.cpu_s = 0.0
        self.verdict: _Over | None = None
        self.calls = 0
        self.loaded = False

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return status, detail, seconds, and the names of what held the candidate in."""
        self.job = job
        self.limits = job["limits"]
        started = time.monotonic()
        self.deadline = started + self.limits["wall_s"]
        self._watch()
        random.seed(0)
        try:
            status, detail = self._judge()
        except _Over as over:
            status, detail = over.status, over.detail
        finally:
            _signal.setitimer(_signal.ITIMER_REAL, 0)
            _signal.setitimer(_signal.ITIMER_PROF, 0)
        self.end()
        # It may have gone over the limit between two looks at its clock.
        if status in ("passed", "wrong") and self.cpu_s > self.limits["cpu_s"]:
            status, detail = "timeout", self._cpu_detail()
        return {
            "status": status,
            "detail": detail,
            "wall_s": time.monotonic() - started,
            "cpu_s": self.cpu_s,
            "held": sorted(self.held),
        }

    def end(self) -> None:
        """Kill the candidate."""
        if self.child > 0:
            os.kill(self.child, _signal.SIGKILL)
            self._wait()
        self.channel.close()

    # ---- the tests

    def _judge(self) -> tuple[str, str]:
        try:
            check = self._tests()
            self._await_load()
            check(self._call)
        except _Over:
            raise
        except BaseException as error:
            self._raise_verdict()
            if not self.calls:
                return "error", f"the tests themselves fail: {_describe(error)}"
            if isinstance(error, AssertionError):
                return "wrong", f"assertion failed {error}".strip()
            return "wrong", _describe(error)
        # A test may have caught what ended the candidate.
        self._raise_verdict()
        if not self.calls:
            return "error", "the tests never call the function"
        return "passed", ""

    def _raise_verdict(self) -> None:
        if self.verdict is not None:
            raise self.verdict

    def _tests(self) -> Any:
        """Run the trusted text: the prompt's helpers, then the tests; return check()."""
        namespace: dict[str, Any] = {"__name__": "tests"}
        tests = compile(self.job["test"], "<test>", "exec", dont_inherit=True)
        context = self.job["context"]
        for text in (context, context.rstrip() + "\n    pass\n"):
            with contextlib.suppress(SyntaxError):
                exec(compile(text, "<prompt>", "exec", dont_inherit=True), namespace)
                break
        namespace[self.job["entry_point"]] = self._call
        exec(tests, namespace)
        # Taken first: the function under test may be called check, too.
        check = namespace["check"]
        namespace[self.job["entry_point"]] = self._call
        return check

    def _watch(self) -> None:
        """Have tests that do not end interrupted, also while they work on an answer."""

        def interrupt(*_: object) -> NoReturn:
            status = "timeout" if self.calls else "error"
            raise self._over(status, f"the tests did not end within {self.limits['wall_s']:g} s")

        _signal.signal(_signal.SIGALRM, interrupt)
        # Again and again: tests may catch everything.
        _signal.setitimer(_signal.ITIMER_REAL, self.limits["wall_s"] + WATCHDOG_GRACE_S, 0.5)

    def _watch_from_outside(self) -> None:
        """Have the kernel end this process if the tests spend too long in one operation on an answer.

        Python runs no signal handler within one, such as the sum of an endless range.
        """
        left_s = max(self.deadline - time.monotonic(), 0.0)
        # Its signal, SIGPROF, is what the zygote knows this end by.
        _signal.setitimer(_signal.ITIMER_PROF, left_s + 2 * WATCHDOG_GRACE_S)

    # ---- the function under test

    def _await_load(self) -> None:
        """Give the program to the candidate's process and see that it was loaded there."""
        if self.loaded:
            return
        self.loaded = True
        program = {key: self.job[key] for key in ("code", "entry_point")}
        program["output_bytes"] = self.limits["output_bytes"]
        self._send(_codec.pack(program, 1 << 31))
        self.held |= set(self._receive()["held"])
        if self.job["strict"] and not contained(self.held):
            raise self._over("error", "this system cannot isolate the candidate")
        reply = self._receive()
        if "unparsable" in reply:
            raise self._over("unparsable", f"{reply.get('type')}: {reply['unparsable']}")
        if "raised" in reply:
            raise self._failed_to_load(str(reply["raised"]), str(reply.get("text", "")))
        if reply.get("loaded") is not True:
            what = "not a function" if reply.get("defined") is True else "not defined"
            raise self._over("wrong", f'"{self.job["entry_point"]}" is {what}')

    def _failed_to_load(self, name: str, text: str) -> _Over:
        if name == "MemoryError":
            return self._over("memory", "out of memory while loading")
        if name in ("SystemExit", "KeyboardInterrupt", "GeneratorExit"):
            return self._over("crashed", f"raised {name} while loading")
        return self._over("wrong", f"{name} while loading: {text}")

    def _call(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the function in the other process."""
        self._raise_verdict()
        self._await_load()
        self.calls += 1
        try:
            message = _codec.pack(_codec.encode((arguments, keywords)), 1 << 31)
        except (_codec.CannotCrossError, RecursionError) as error:
            raise self._over("error", f"the tests pass what cannot cross: {error}") from None
        self._send(message)
        reply = self._receive()
        self._watch_from_outside()
        if "value" in reply:
            try:
                return _codec.decode(reply["value"])
            except (ValueError, RecursionError, MemoryError):
                raise self._over("wrong", "returned malformed data") from None
        if "unfit" in reply:
            raise self._over("wrong", f"returned {reply['unfit']}")
        raise self._raised(str(reply.get("raised", "malformed data")), str(reply.get("text", "")))

    def _raised(self, name: str, text: str) -> BaseException:
        """Return the candidate's exception as one of the same builtin class."""
        if name == "MemoryError":
            return self._over("memory", "out of memory")
        if name in ("SystemExit", "KeyboardInterrupt", "GeneratorExit"):
            return self._over("crashed", f"raised {name}")
        found = getattr(builtins, name, None)
        if isinstance(found, type) and issubclass(found, Exception):
            with contextlib.suppress(TypeError):
                return found(text)
        return RuntimeError(f"{name}: {text}")

    # ---- the channel

    def _over(self, status: str, detail: str) -> _Over:
        """Note how the candidate ended; the first time counts."""
        if self.verdict is None:
            self.verdict = _Over(status, detail)
        return self.verdict

    def _send(self, message: bytes) -> None:
        self.channel.settimeout(max(self.deadline - time.monotonic(), 0.001))
        try:
            self.channel.sendall(message)
        except TimeoutError:
            raise self._out_of_time() from None
        except OSError:
            raise self._gone() from None

    def _receive(self) -> dict[str, Any]:
        length = int.from_bytes(self._exactly(4), "big")
        if length > self.limits["output_bytes"]:
            raise self._over("wrong", f"returned more than {self.limits['output_bytes']} bytes")
        try:
            data = json.loads(self._exactly(length))
        except (ValueError, RecursionError, MemoryError):
            raise self._over("wrong", "returned malformed data") from None
        if not isinstance(data, dict):
            raise self._over("wrong", "returned malformed data")
        return data

    def _exactly(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            self._await_data()
            try:
                part = self.channel.recv(min(count, 1 << 20))
            except OSError:
                part = b""
            if not part:
                raise self._gone()
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _await_data(self) -> None:
        """Wait for the candidate to write, for as long as it has time left of both kinds."""
        while True:
            left_s = self.deadline - time.monotonic()
            if left_s <= 0:
                raise self._out_of_time()
            cpu_left_s = self.limits["cpu_s"] - _cpu_s_of(self.child)
            if cpu_left_s <= 0:
                raise self._over("timeout", self._cpu_detail())
            pause_s = min(left_s, max(cpu_left_s, MINIMUM_PAUSE_S))
            if select.select([self.channel], [], [], pause_s)[0]:
                return

    def _out_of_time(self) -> _Over:
        return self._over("timeout", f"no answer within {self.limits['wall_s']:g} s")

    def _cpu_detail(self) -> str:
        return f"more than {self.limits['cpu_s']:g} s of CPU time"

    def _gone(self) -> _Over:
        """Return why the candidate's end of the channel is closed."""
        give_up = time.monotonic() + 1.0
        while (status := self._wait(os.WNOHANG)) is None:
            if time.monotonic() > give_up:
                return self._over("crashed", "closed its channel")
            time.sleep(0.005)
        if not os.WIFSIGNALED(status):
            return self._over("crashed", f"ended its process with {os.WEXITSTATUS(status)}")
        number = os.WTERMSIG(status)
        if number in (_signal.SIGXCPU, _signal.SIGKILL) and self.cpu_s > self.limits["cpu_s"]:
            return self._over("timeout", self._cpu_detail())
        return self._over("crashed", f"died of signal {number}")

    def _wait(self, options: int = 0) -> int | None:
        """Collect the candidate's status and CPU seconds; None while it runs."""
        found, status, usage = os.wait4(self.child, options)
        if found == 0:
            return None
        self.child = -1
        self.cpu_s = usage.ru_utime + usage.ru_stime
        return status


def _cpu_s_of(process: int) -> float:
    """Return the CPU seconds of all threads of a running child, from the kernel's clock for it.

    RLIMIT_CPU counts clock ticks, which on a busy machine can be far off.
    """
    clock = (~process << 3) | _SCHEDULER_CLOCK
    with contextlib.suppress(OSError):
        return time.clock_gettime(clock)
    return 0.0


def contained(held: Collection[str]) -> bool:
    """Return whether these layers keep a candidate from files, network, and outliving its limit."""
    names = set(held)
    return bool(
        names & {"landlock", "files"}
        and names & {"seccomp", "network"}
        and names & {"seccomp", "processes"}
    )


def _describe(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def leaves_nothing(held: Collection[str]) -> bool:
    """Return whether these layers let a candidate start no process that outlives it, and write no file."""
    names = set(held)
    return bool(names & {"seccomp", "processes"} and names & {"seccomp", "landlock"})


def serve(
    zygote: int,
    turn: int,
    out: int,
    place: _isolate.Place,
    layers: Collection[str],
    held: Collection[str],
) -> int:
    """Start a candidate; when it is this one's turn, judge the job that standard input brings.

    Writes the result and returns an exit status.
    """
    _isolate.die_with_parent(zygote)
    _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, {_signal.SIGTERM})
    referee = Referee(place, layers, held)
    line = bytearray()
    os.read(turn, 1)
    while not line.endswith(b"\n"):
        part = os.read(0, 1 << 20)
        if not part:
            referee.end()
            return NO_JOB
        line += part
    os.dup2(2, 0)
    _isolate.limit(resource.RLIMIT_AS, MEMORY_BYTES)
    result = referee.run(json.loads(line))
    result["detail"] = result["detail"][:400]
    os.write(out, json.dumps(result).encode())
    return CLEAN if leaves_nothing(referee.held) else UNSURE

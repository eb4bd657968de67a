"""The process that runs a problem's tests: the function under test is a proxy for one in another process."""

from __future__ import annotations

import builtins
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from typing import Any

from quanteval.sandbox import _candidate, _codec


class _Over(BaseException):
    """The candidate is done for; tests that catch Exception do not catch this."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


class Referee:
    """Runs one job and returns its result as plain data."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.deadline = time.monotonic() + job["limits"]["wall_s"]
        self.verdict: _Over | None = None
        self.held: dict[str, bool] = {}
        self.folder = tempfile.mkdtemp(prefix="quanteval-")
        self.channel, theirs = socket.socketpair()
        self.child = os.fork()
        if self.child == 0:
            self.channel.close()
            try:
                _candidate.run(theirs, job, self.folder)
            finally:
                os._exit(3)
        theirs.close()

    def run(self) -> dict[str, Any]:
        """Return status, detail, seconds, and what held the candidate in."""
        started = time.monotonic()
        try:
            status, detail = self._judge()
        except _Over as over:
            status, detail = over.status, over.detail
        usage_s = self._end()
        return {
            "status": status,
            "detail": detail,
            "wall_s": time.monotonic() - started,
            "cpu_s": usage_s,
            "held": self.held,
        }

    def _judge(self) -> tuple[str, str]:
        try:
            check = self._tests()
        except Exception as error:
            return "error", f"the tests themselves fail: {_describe(error)}"
        self.held = self._receive().get("held", {})
        if not self.job["allow_weak"] and not (self.held.get("files") and self.held.get("calls")):
            return "error", "this system cannot isolate the candidate"
        if not self._loaded():
            return "wrong", f'"{self.job["entry_point"]}" is not a function'
        try:
            check(self._call)
        except _Over:
            raise
        except AssertionError as error:
            outcome = ("wrong", f"assertion failed {_describe(error, bare=True)}".strip())
        except BaseException as error:
            outcome = ("wrong", _describe(error))
        else:
            outcome = ("passed", "")
        # A test may have caught what ended the candidate.
        if self.verdict is not None:
            raise self.verdict
        return outcome

    def _tests(self) -> Any:
        """Run the trusted text: the prompt's helpers, then the tests; return check()."""
        namespace: dict[str, Any] = {"__name__": "tests"}
        context = self.job["context"]
        for text in (context, context.rstrip() + "\n    pass\n"):
            try:
                exec(compile(text, "<prompt>", "exec", dont_inherit=True), namespace)
                break
            except SyntaxError:
                continue
        exec(compile(self.job["test"], "<test>", "exec", dont_inherit=True), namespace)
        namespace[self.job["entry_point"]] = self._call
        return namespace["check"]

    def _loaded(self) -> bool:
        reply = self._receive()
        if "raised" in reply:
            raise _failed_to_load(
                str(reply["raised"]), str(reply.get("text", "")), self.job["entry_point"]
            )
        return reply.get("loaded") is True

    def _call(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the function in the other process."""
        if self.verdict is not None:
            raise self.verdict
        try:
            message = _codec.pack(_codec.encode(((arguments), keywords)))
        except (_codec.CannotCrossError, ValueError) as error:
            raise self._over("error", f"the tests pass {error}, which cannot cross") from None
        try:
            self.channel.settimeout(max(self.deadline - time.monotonic(), 0.001))
            self.channel.sendall(message)
        except OSError:
            self._gone()
        reply = self._receive()
        if "value" in reply:
            try:
                return _codec.decode(reply["value"])
            except (ValueError, RecursionError, MemoryError):
                raise self._over("wrong", "returned malformed data") from None
        if "unfit" in reply:
            raise self._over("wrong", str(reply["unfit"]))
        raise self._raised(str(reply.get("raised", "malformed data")), str(reply.get("text", "")))

    def _raised(self, name: str, text: str) -> BaseException:
        """Return the candidate's exception as one of the same builtin class."""
        if name == "MemoryError":
            return self._over("memory", "out of memory")
        if name in ("SystemExit", "KeyboardInterrupt", "GeneratorExit"):
            return self._over("crashed", f"raised {name}")
        found = getattr(builtins, name, None)
        if isinstance(found, type) and issubclass(found, Exception):
            try:
                return found(text)
            except TypeError:
                pass
        return RuntimeError(f"{name}: {text}")

    # ---- the channel

    def _over(self, status: str, detail: str) -> _Over:
        self.verdict = _Over(status, detail)
        return self.verdict

    def _receive(self) -> dict[str, Any]:
        length = int.from_bytes(self._exactly(4), "big")
        if length > _codec.MAX_BYTES:
            raise self._over("wrong", f"returned more than {_codec.MAX_BYTES >> 20} MB")
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
            left = self.deadline - time.monotonic()
            if left <= 0 or not select.select([self.channel], [], [], left)[0]:
                raise self._over("timeout", f"no answer within {self.job['limits']['wall_s']:g} s")
            try:
                part = self.channel.recv(min(count, 1 << 16))
            except OSError:
                part = b""
            if not part:
                self._gone()
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _gone(self) -> None:
        """Say why the candidate's process ended."""
        _, status = os.waitpid(self.child, 0)
        self.child = -1
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            # The hard CPU limit ends a process that ignores SIGXCPU with SIGKILL.
            if number in (signal.SIGXCPU, signal.SIGKILL):
                raise self._over(
                    "timeout", f"more than {self.job['limits']['cpu_s']} s of CPU time"
                )
            raise self._over("crashed", f"died of {signal.Signals(number).name}")
        raise self._over("crashed", f"ended its process with {os.WEXITSTATUS(status)}")

    def _end(self) -> float:
        """Kill the candidate, remove its folder, return its CPU seconds."""
        if self.child > 0:
            os.kill(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)
        self.channel.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        times = os.times()
        return times.children_user + times.children_system


def _failed_to_load(name: str, text: str, entry_point: str) -> _Over:
    """Return how a program ended that raised before its function could be called."""
    if name in ("SyntaxError", "IndentationError", "TabError") or "null bytes" in text:
        return _Over("unparsable", f"{name}: {text}")
    if name == "MemoryError":
        return _Over("memory", "out of memory while loading")
    if name == "KeyError" and entry_point in text:
        return _Over("wrong", f'"{entry_point}" is not defined')
    if name in ("SystemExit", "KeyboardInterrupt", "GeneratorExit"):
        return _Over("crashed", f"raised {name} while loading")
    return _Over("wrong", f"{name} while loading: {text}")


def _describe(error: BaseException, *, bare: bool = False) -> str:
    text = " ".join(str(error).split())
    if bare:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def serve(job: dict[str, Any], out: int) -> None:
    """Run a job in this process and write its result as one line."""
    # Tests that never end, for whatever reason, end with this process.
    signal.setitimer(signal.ITIMER_REAL, job["limits"]["wall_s"] + 5)
    result = Referee(job).run()
    result["detail"] = result["detail"].encode("ascii", "backslashreplace").decode()[:400]
    os.write(out, json.dumps(result).encode() + b"\n")
    sys.stdout.flush()

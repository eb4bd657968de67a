"""The process that holds the function under test and nothing else: it answers calls until it is killed."""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import socket
from collections.abc import Callable
from typing import Any, NoReturn

from quanteval.sandbox import _codec, _isolate


def run(channel: socket.socket, job: dict[str, Any], folder: str) -> NoReturn:
    """Lock this process in, load the program, answer calls. Never returns."""
    _isolate.die_with_parent()
    keep = channel.fileno()
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(3, keep)
    os.closerange(keep + 1, 1024)
    os.chdir(folder)
    os.environ.clear()
    paths = [*_isolate.readable_paths(), folder]
    limits = job["limits"]
    _isolate.limit_resources(limits["cpu_s"], limits["memory_bytes"])
    held = {"privileges": _isolate.drop_privileges(), "files": _isolate.restrict_files(paths)}
    held["calls"] = _isolate.restrict_calls()
    _send(channel, {"held": held})
    # The code below belongs to the candidate: whatever it does to this process, what leaves it is data.
    try:
        function = _load(channel, job)
        while True:
            _answer(channel, function, _receive(channel))
    except BaseException as error:
        _send_failure(channel, error)
    os._exit(0)


def _load(channel: socket.socket, job: dict[str, Any]) -> Callable[..., Any]:
    code = compile(job["code"], "<candidate>", "exec", dont_inherit=True)
    namespace: dict[str, Any] = {"__name__": "candidate", "__builtins__": builtins}
    exec(code, namespace)
    function = namespace[job["entry_point"]]
    _send(channel, {"loaded": callable(function)})
    return function  # type: ignore[no-any-return]


def _answer(channel: socket.socket, function: Callable[..., Any], call: Any) -> None:
    arguments, keywords = _codec.decode(call)
    try:
        reply = {"value": _codec.encode(function(*arguments, **keywords))}
        message = _codec.pack(reply)
    except _codec.CannotCrossError as error:
        message = _codec.pack({"unfit": f"returned {error}"})
    except ValueError as error:
        message = _failure(error)
    except Exception as error:
        message = _failure(error)
    channel.sendall(message)


def _failure(error: BaseException) -> bytes:
    text = ""
    with contextlib.suppress(BaseException):
        text = str(error)[:200]
    return _codec.pack({"raised": type(error).__name__[:60], "text": text})


def _send_failure(channel: socket.socket, error: BaseException) -> None:
    with contextlib.suppress(BaseException):
        channel.sendall(_failure(error))


def _send(channel: socket.socket, data: Any) -> None:
    channel.sendall(_codec.pack(data))


def _receive(channel: socket.socket) -> Any:
    length = int.from_bytes(_exactly(channel, 4), "big")
    return json.loads(_exactly(channel, length))


def _exactly(channel: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = channel.recv(count - len(data))
        if not part:
            os._exit(0)
        data += part
    return data

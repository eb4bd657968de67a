"""The process that holds the function under test and nothing else: it answers calls until it is killed.

It is forked before the tests are read, so they are nowhere in its memory.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import random
import socket
from collections.abc import Callable
from typing import Any, NoReturn

from quanteval.sandbox import _codec, _isolate, _seccomp

FAILURE_BYTES = 1 << 16


def run(channel: socket.socket, referee: int, place: _isolate.Place) -> NoReturn:
    """Lock this process in, load the program that the channel brings, answer calls. Never returns."""
    _isolate.die_with_parent(referee)
    os.chdir(place.folder)
    privileges = _isolate.drop_privileges()
    landlock = _isolate.restrict_files(place.ruleset)
    keep = channel.fileno()
    for descriptor in (0, 1, 2):
        os.dup2(place.null, descriptor)
    os.closerange(3, keep)
    os.closerange(keep + 1, 1 << 16)
    _isolate.limit_resources(place.cpu_s, place.memory_bytes)
    seccomp = _seccomp.restrict_calls(place.filter)
    if not seccomp:
        _isolate.limit_processes()
    held = {"privileges": privileges, "landlock": landlock, "seccomp": seccomp}
    _send(channel, {"held": [name for name, ok in held.items() if ok]})
    # From here on this process has everything behind it that it may do, and the code is the candidate's:
    # whatever it does to this process, what leaves it is data.
    try:
        job = _receive(channel)
        function = _load(channel, job)
        while True:
            _answer(channel, function, _receive(channel), job["output_bytes"])
    except BaseException as error:
        _send(channel, _failure(error))
    os._exit(0)


def _load(channel: socket.socket, job: dict[str, Any]) -> Callable[..., Any]:
    try:
        code = compile(job["code"], "<candidate>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        # Surrogates and NUL characters are ValueErrors, too deep an expression is one of the last two.
        _send(channel, {"unparsable": _text(error), "type": type(error).__name__})
        os._exit(0)
    # The same random numbers for every candidate, on every machine; fork() has reseeded them.
    random.seed(0)
    namespace: dict[str, Any] = {"__name__": "candidate", "__builtins__": builtins}
    exec(code, namespace)
    function = namespace.get(job["entry_point"])
    _send(channel, {"loaded": callable(function), "defined": job["entry_point"] in namespace})
    return function  # type: ignore[return-value]


def _answer(
    channel: socket.socket, function: Callable[..., Any], call: Any, limit_bytes: int
) -> None:
    arguments, keywords = _codec.decode(call)
    try:
        value = function(*arguments, **keywords)
    except Exception as error:
        _send(channel, _failure(error))
        return
    try:
        message = _codec.pack({"value": _codec.encode(value)}, limit_bytes)
    except _codec.CannotCrossError as error:
        message = _codec.pack({"unfit": str(error)}, FAILURE_BYTES)
    except RecursionError:
        message = _codec.pack({"unfit": "a value nested too deeply"}, FAILURE_BYTES)
    channel.sendall(message)


def _failure(error: BaseException) -> dict[str, str]:
    return {"raised": type(error).__name__[:60], "text": _text(error)}


def _text(error: BaseException) -> str:
    with contextlib.suppress(BaseException):
        return str(error)[:200]
    return ""


def _send(channel: socket.socket, data: Any) -> None:
    channel.sendall(_codec.pack(data, FAILURE_BYTES))


def _receive(channel: socket.socket) -> Any:
    length = int.from_bytes(_exactly(channel, 4), "big")
    return json.loads(_exactly(channel, length))


def _exactly(channel: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = channel.recv(min(count - len(data), 1 << 20))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)

"""The little of HTTP that both servers need, on bare ASGI: bodies, JSON answers, event streams, errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BODY_BYTES = 64 << 20
JSON = b"application/json"
TEXT = b"text/plain; version=0.0.4; charset=utf-8"
EVENTS = b"text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
KINDS = {400: "invalid_request_error", 404: "not_found_error", 405: "invalid_request_error",
         413: "invalid_request_error", 429: "rate_limit_error", 503: "service_unavailable"}  # fmt: skip


class HTTPError(Exception):
    """An answer that is an OpenAI error object with a status; `param` names the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    def body(self) -> dict[str, Any]:
        """Return the error object."""
        return error_object(self.status, str(self), self.param)


class DisconnectedError(Exception):
    """The client went away before its request was read."""


def error_object(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Return an OpenAI error object."""
    kind = KINDS.get(status, "internal_server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def dump(value: Any) -> bytes:
    """Return compact JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )


def event(value: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + dump(value) + b"\n\n"


async def read_json(receive: Receive) -> dict[str, Any]:
    """Return the request's JSON object; HTTPError 400 or 413, DisconnectedError."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise DisconnectedError
        part = message.get("body", b"")
        size += len(part)
        if size > MOST_BODY_BYTES:
            raise HTTPError(413, f'the body is longer than "{MOST_BODY_BYTES}" bytes: send less')
        parts.append(part)
        if not message.get("more_body"):
            break
    try:
        body = json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise HTTPError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise HTTPError(400, f'the body is a "{type(body).__name__}", not a JSON object')
    return body


async def answer(send: Send, body: bytes, status: int = 200, content_type: bytes = JSON) -> None:
    """Send a whole answer."""
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def answer_json(send: Send, value: Any, status: int = 200) -> None:
    """Send a JSON answer."""
    await answer(send, dump(value), status)


async def begin_events(send: Send) -> None:
    """Send the head of an event stream."""
    headers = [(b"content-type", EVENTS), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_part(send: Send, body: bytes, *, more: bool = True) -> None:
    """Send a piece of an event stream."""
    await send({"type": "http.response.body", "body": body, "more_body": more})


@contextlib.asynccontextmanager
async def cancelled_with_client(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block when the client disconnects, and leave it quietly; its body has been read."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not gone:
            raise
        if task.uncancel() > 0:
            raise
    finally:
        watcher.cancel()

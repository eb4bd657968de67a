"""A plain HTTP client for the tests of our servers, and the thread that a server runs on."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from quanteval.server.running import bind, port_of, uvicorn_server


@dataclass
class Answer:
    """A status, and what came with it."""

    status: int
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]

    @property
    def events(self):
        """The events of a stream, without the [DONE] that must end it."""
        lines = [line for line in self.body.split(b"\n\n") if line]
        assert all(line.startswith(b"data: ") for line in lines), self.body
        assert lines[-1] == b"data: [DONE]", self.body
        return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]


def connect(url, timeout=60):
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)


def call(url, path, body=None, *, method=None, headers=None, timeout=60):
    """Send one request (POST with a body, else GET) and return the whole answer."""
    connection = connect(url, timeout)
    with contextlib.closing(connection):
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        method = method or ("GET" if body is None else "POST")
        connection.request(method, path, data, headers or {})
        response = connection.getresponse()
        return Answer(response.status, response.read())


def complete(url, prompt="hi", **fields):
    return call(url, "/v1/completions", {"prompt": prompt, **fields})


def chat(url, content="hi", **fields):
    messages = [{"role": "user", "content": content}]
    return call(url, "/v1/chat/completions", {"messages": messages, **fields})


@contextlib.contextmanager
def begun(url, path, body):
    """Send a request and yield the response before it is read; leaving the block disconnects."""
    connection = connect(url)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body).encode())
        yield connection


@dataclass
class Served:
    """An app that is served on a thread."""

    url: str
    server: object
    thread: threading.Thread

    def stop(self):
        self.server.should_exit = True


@contextlib.contextmanager
def served(app, on_stop=None):
    """Serve an ASGI app on a thread while the block runs."""
    ready = threading.Event()
    with bind("127.0.0.1", 0) as sock:
        server = uvicorn_server(app, ready.set, on_stop)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        assert ready.wait(30)
        yield Served(f"http://127.0.0.1:{port_of(sock)}", server, thread)
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def until(condition, seconds=30):
    """Wait for a condition, and return what it became."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def text_of(events, chat=False):
    """Join the pieces of text of a stream."""
    choices = [choice for event in events for choice in event["choices"]]
    if chat:
        return "".join(choice["delta"].get("content") or "" for choice in choices)
    return "".join(choice["text"] for choice in choices)

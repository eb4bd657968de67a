"""Runs an ASGI app under uvicorn on a socket bound beforehand, so that its port is known before it answers."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from quanteval.errors import ConfigError
from quanteval.server.http import App
from quanteval.store import write_atomic

BACKLOG = 4096
GRACE_S = 2


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 picks a free one. ConfigError when it is taken or not ours."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f'host "{host}" cannot be listened on: {error}') from None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f'"{host}:{port}" cannot be listened on ({error.strerror}): use port 0 for a free one'
        ) from None
    return sock


def port_of(sock: socket.socket) -> int:
    """Return the port a socket is bound to."""
    return int(sock.getsockname()[1])


def uvicorn_server(app: App, on_ready: Any = None, on_stop: Any = None) -> Any:
    """Return a uvicorn server for a bare ASGI app.

    `on_ready()` is called once it accepts connections, `on_stop()` when it begins to shut down.
    Requests still running GRACE_S seconds after that are cancelled.
    """
    try:
        import uvicorn
    except ModuleNotFoundError:
        raise ConfigError(
            'serving needs the package "uvicorn": pip install "quanteval[serve]"'
        ) from None

    class Server(uvicorn.Server):  # type: ignore[misc]
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets=sockets)
            if on_ready is not None and self.started:
                on_ready()

        async def shutdown(self, sockets: Any = None) -> None:
            if on_stop is not None:
                on_stop()
            await super().shutdown(sockets=sockets)

    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        access_log=False,
        log_level="critical",
        log_config=None,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_S,
        backlog=BACKLOG,
    )
    return Server(config)


def write_ready(path: Path | None, port: int) -> None:
    """Tell whoever waits for the file that the server answers, and where."""
    if path is not None:
        write_atomic(path, f'{{"port": {port}, "pid": {os.getpid()}}}\n')

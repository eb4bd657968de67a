"""One endpoint over HTTP: its addresses, connections and errors. What is sent is built in `http_bodies`.

Every failure becomes an EngineError of one line without the key.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
from aiohttp.client_proto import ResponseHandler

from quanteval.engines.http_chunks import error_text, one_line
from quanteval.errors import ConfigError, EngineError

API = Literal["completions", "chat"]
PATHS: dict[str, str] = {"completions": "/completions", "chat": "/chat/completions"}
NOTICE_S = 0.3
KEEP_ALIVE_S = 4.0
"""Shorter than the five seconds after which common servers close idle connections."""


class GoneError(EngineError):
    """Nothing listens at the server's address any more."""


class RefusedError(EngineError):
    """The server answered with an HTTP error; `status` is its code."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Remote:
    """Where an endpoint is and how it is spoken to.

    `alive` returns why the server's process is dead, None while it lives. `key` is sent as a bearer
    token and appears nowhere else.
    """

    base_url: str
    model: str = ""
    api: API = "completions"
    key: str = field(default="", repr=False)
    connect_timeout_s: float = 10.0
    silence_timeout_s: float = 900.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    alive: Callable[[], str | None] | None = field(default=None, repr=False)

    @property
    def root(self) -> str:
        """The server's address without the API's version."""
        return self.base_url.removesuffix("/v1")

    @property
    def is_local(self) -> bool:
        """Whether the server is on this machine, so that no proxy stands between."""
        host = urlsplit(self.base_url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def clean(self, text: str) -> str:
        """Return a text on one line, the key blotted out."""
        return one_line(text.replace(self.key, "***") if self.key else text)

    def why_dead(self) -> str:
        """Return ': reason' when the server's process is known to be dead, else ''."""
        reason = self.alive() if self.alive is not None else None
        return f": {reason}" if reason else ""

    async def explain(self, error: BaseException) -> EngineError:
        """Return what a failed exchange means; a process that has just died is given a moment to be noticed."""
        if self.alive is not None and not isinstance(error, EngineError | TimeoutError):
            deadline = perf_counter() + NOTICE_S
            while not self.alive() and perf_counter() < deadline:
                await asyncio.sleep(0.02)
        return self._meaning(error)

    def _meaning(self, error: BaseException) -> EngineError:
        if isinstance(error, EngineError):
            return error
        if isinstance(error, aiohttp.ClientConnectorError | ConnectionRefusedError):
            why = self.why_dead() or f" ({self.clean(str(error.strerror or error))})"
            return GoneError(f"the server at {self.base_url} is gone{why}")
        why = self.why_dead()
        if why:
            return GoneError(f"the server at {self.base_url} is gone{why}")
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return EngineError(
                f"the server at {self.base_url} took no connection for {self.connect_timeout_s:g} s"
            )
        if isinstance(error, TimeoutError):
            return EngineError(
                f"the server at {self.base_url} sent nothing for {self.silence_timeout_s:g} s"
            )
        what = self.clean(str(error)) or type(error).__name__
        return EngineError(f"the connection to {self.base_url} broke: {what}")


class _Stamping(ResponseHandler):  # type: ignore[misc]
    """A connection that notes when bytes came in, before the loop gets round to whoever reads them."""

    arrived_s = 0.0

    def data_received(self, data: bytes) -> None:
        if data:
            self.arrived_s = perf_counter()
        super().data_received(data)


def _connector() -> aiohttp.TCPConnector:
    """Return a connector without a limit; asyncio and aiohttp switch Nagle's algorithm off by themselves."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    if hasattr(connector, "_factory"):  # private: without it, times are taken after the read
        connector._factory = partial(_Stamping, loop=asyncio.get_running_loop())
    return connector


def arrival_clock(response: aiohttp.ClientResponse) -> Callable[[], float]:
    """Return what tells, after a read, when the last bytes of this answer came in (`time.perf_counter`)."""
    protocol = response.connection.protocol if response.connection is not None else None
    if not isinstance(protocol, _Stamping):
        return perf_counter
    return lambda: protocol.arrived_s


def base_url_of(text: str) -> str:
    """Return an endpoint's base URL, '/v1' added where it has no path. ConfigError when it is none."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f'base_url "{text}" is not an address such as http://127.0.0.1:8000/v1')
    if parts.username is not None or parts.password is not None or parts.query:
        host = f"{parts.scheme}://{parts.hostname}"
        raise ConfigError(
            f'base_url "{host}/..." must hold no name, password or query: name a variable in api_key_env'
        )
    return text.rstrip("/") if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1"


def key_from(variable: str) -> str:
    """Return the key that an environment variable holds, '' without a name. ConfigError when it is not set."""
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f'api_key_env "{variable}" is not set in the environment: export it')
    return key


class Wire:
    """Connections to one endpoint: a client for each event loop that asks, kept while the loop lives."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self._clients: dict[
            asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, AsyncGenerator[None, None]]
        ] = {}

    async def client(self) -> aiohttp.ClientSession:
        """Return the running loop's client."""
        loop = asyncio.get_running_loop()
        found = self._clients.get(loop)
        if found is not None:
            return found[0]
        for other in [other for other in self._clients if other.is_closed()]:
            del self._clients[other]
        remote = self.remote
        headers = {"Accept-Encoding": "identity"}  # a compressed stream arrives in lumps
        if remote.key:
            headers["Authorization"] = f"Bearer {remote.key}"
        client = aiohttp.ClientSession(
            connector=_connector(),
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=remote.connect_timeout_s,
                sock_read=remote.silence_timeout_s,
            ),
            headers=headers,
            trust_env=not remote.is_local,
        )
        # An open generator is closed by whoever runs the loop when it ends, and the client with it.
        keeper = self._close_at_the_end(client)
        await anext(keeper)
        self._clients[loop] = client, keeper
        return client

    async def _close_at_the_end(self, client: aiohttp.ClientSession) -> AsyncGenerator[None, None]:
        loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            self._clients.pop(loop, None)
            await client.close()

    async def close(self) -> None:
        """Close the running loop's client."""
        found = self._clients.get(asyncio.get_running_loop())
        if found is not None:
            await found[1].aclose()

    @contextlib.asynccontextmanager
    async def posted(
        self, body: Mapping[str, Any], api: API | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Post a request and hand over the open answer. Raises RefusedError for an HTTP error."""
        response = await self._post(body, api or self.remote.api)
        try:
            if response.status >= 300:
                raise await self._refusal(response)
            yield response
        finally:
            # A connection with an unread answer cannot be used again; closing it cancels the request.
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    async def _post(self, body: Mapping[str, Any], api: API) -> aiohttp.ClientResponse:
        client = await self.client()
        url = self.remote.base_url + PATHS[api]
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        for attempt in (1, 2):
            try:
                return await client.post(url, data=data, headers=headers, allow_redirects=False)
            except aiohttp.ServerDisconnectedError as error:
                # A kept connection that the server closed meanwhile: nothing was read of the answer.
                if attempt == 2 or self.remote.why_dead():
                    raise await self.remote.explain(error) from error
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise await self.remote.explain(error) from error
        raise AssertionError("unreachable")

    async def _refusal(self, response: aiohttp.ClientResponse) -> RefusedError:
        try:
            text = (await response.content.read(1 << 16)).decode("utf-8", "replace")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            text = str(error)
        with contextlib.suppress(ValueError):
            text = error_text(json.loads(text)) or text
        told = self.remote.clean(text) or response.reason or ""
        message = f'the server at {self.remote.base_url} answered {response.status}: "{told}"'
        return RefusedError(message, response.status)

    async def ask(self, body: Mapping[str, Any], api: API | None = None) -> dict[str, Any]:
        """Post a request and return the JSON answer. EngineError for whatever is not a good one."""
        async with self.posted(body, api) as response:
            return await self._json(response)

    async def get(self, url: str, timeout_s: float = 30.0) -> bytes:
        """Return what a GET answers. EngineError when it fails or is refused."""
        client = await self.client()
        try:
            async with (
                asyncio.timeout(timeout_s),
                client.get(url, allow_redirects=False) as response,
            ):
                if response.status >= 300:
                    raise await self._refusal(response)
                return bytes(await response.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise await self.remote.explain(error) from error

    async def _json(self, response: aiohttp.ClientResponse) -> dict[str, Any]:
        try:
            raw = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise await self.remote.explain(error) from error
        try:
            answer = json.loads(raw)
        except ValueError:
            shown = self.remote.clean(raw[:300].decode("utf-8", "replace"))
            raise EngineError(
                f'the server at {self.remote.base_url} answered no JSON: "{shown}"'
            ) from None
        if isinstance(answer, dict) and (failure := error_text(answer)):
            failure = self.remote.clean(failure)
            raise EngineError(
                f'the server at {self.remote.base_url} answered an error: "{failure}"'
            )
        if not isinstance(answer, dict):
            raise EngineError(
                f"the server at {self.remote.base_url} answered JSON that is no object"
            )
        return answer

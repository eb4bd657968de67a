"""Requests to llama.cpp's own completion endpoint, which takes and gives token ids: a thread each."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from quanteval.engines.gguf_census import GGUFCensus
from quanteval.engines.gguf_session import CacheUse, Deliver, Piece
from quanteval.errors import EngineError
from quanteval.interfaces import Request, ScoreRequest, TokenLogprobs
from quanteval.records import FinishReason

TIMEOUT_S = 600.0
CACHE_BITS = {
    "f32": 32.0,
    "f16": 16.0,
    "bf16": 16.0,
    "q8_0": 8.5,
    "q5_1": 6.0,
    "q5_0": 5.5,
    "q4_1": 5.0,
    "q4_0": 4.5,
}
"""Bits of one value in the KV cache, scales included."""
FORCED_BIAS = 1e4
"""Added to a token's logit so that it is chosen; reported log-probabilities are those before it."""


class Limits(Protocol):
    """The engine's fields that its requests need."""

    @property
    def n_parallel(self) -> int: ...  # noqa: D102
    @property
    def n_ctx(self) -> int: ...  # noqa: D102
    @property
    def n_batch(self) -> int: ...  # noqa: D102
    @property
    def cache_type_k(self) -> str: ...  # noqa: D102
    @property
    def cache_type_v(self) -> str: ...  # noqa: D102


class _Stream:
    """One request to the server: a connection of its own, broken off to end it early."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self.connection = connection
        self.cancelled = threading.Event()
        self._broken = False
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def connect(self) -> None:
        """Connect. OSError when it was broken off already."""
        self.connection.connect()
        with self._lock:
            # Kept here: the connection forgets its socket once a response has begun.
            self._socket = self.connection.sock
            if self._broken:
                raise ConnectionAbortedError("broken off")

    def break_off(self) -> None:
        """Shut the connection down, now or as soon as it is made."""
        with self._lock:
            self._broken = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def cancel(self) -> None:
        """Break off, and deliver nothing more."""
        self.cancelled.set()
        self.break_off()


class _Known:
    """The ids of one request as the server tells them, and those that it withholds.

    It holds text back until its bytes are whole characters, and then tells the last id only. The others
    are found by encoding the character again where that gives as many tokens; else they are counted.
    """

    def __init__(self, encode: Callable[[str], tuple[int, ...]], eos: frozenset[int]) -> None:
        self._encode = encode
        self._eos = eos
        self._told = 0
        self._last = -1

    def take(self, event: Mapping[str, Any], ended: bool) -> tuple[tuple[int, ...], int | None]:
        """Return the event's ids, and their number where some are missing."""
        ids = tuple(int(i) for i in event.get("tokens", ()))
        self._last = ids[-1] if ids else self._last
        count = int(event.get("tokens_predicted", self._told + len(ids))) - self._told
        if ended and not ids and self._last not in self._eos and count <= 1 and self._eos:
            ids, count = (min(self._eos),), 1
        self._told += max(count, len(ids))
        if count <= len(ids):
            return ids, None
        again = self._encode(str(event.get("content", "")))
        if len(again) == count and again[count - len(ids) :] == ids:
            return again, None
        return ids, count


class ServerBackend:
    """Requests to the completion endpoint, a thread each."""

    def __init__(
        self,
        server: Any,
        address: str,
        encode: Callable[[str], tuple[int, ...]],
        eos: frozenset[int],
        limits: Limits,
        census: GGUFCensus,
    ) -> None:
        self._server = server
        where = urlsplit(address)
        self._host, self._port = where.hostname or "127.0.0.1", where.port or 80
        self._encode = encode
        self._eos = eos
        self._limits = limits
        self._values_per_token = census.kv_values_per_token()
        self._numbers = itertools.count(1)
        self._open: dict[str, _Stream] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._scoring = threading.Lock()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def rows(self) -> int:
        """Requests computed together."""
        return self._limits.n_parallel

    @property
    def policy(self) -> str:
        """What runs, and its limits."""
        limits = self._limits
        return (
            f"continuous (llama.cpp), {limits.n_parallel} rows of {limits.n_ctx} tokens, "
            f"{limits.n_batch} tokens a step, no prompt cache"
        )

    def cache_use(self) -> CacheUse:
        """The cache is allocated whole; its size follows from its formats (the server tells none)."""
        limits = self._limits
        bits = CACHE_BITS[limits.cache_type_k] + CACHE_BITS[limits.cache_type_v]
        per_token = self._values_per_token * bits / 16
        tokens = limits.n_ctx * limits.n_parallel
        return CacheUse(int(per_token * tokens), tokens, per_token)

    # ---- generation

    def submit(self, request: Request, deliver: Deliver) -> str:
        """Send a request from a thread of its own."""
        name = str(next(self._numbers))
        stream = _Stream(http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S))
        thread = threading.Thread(
            target=self._run, args=(name, stream, request, deliver), name="llama.cpp", daemon=True
        )
        with self._lock:
            closed = self._closed
            if not closed:
                self._open[name] = stream
                self._threads[name] = thread
        if closed:
            deliver(Piece((), time.perf_counter(), "error", "the session was closed"))
        else:
            thread.start()
        return name

    def cancel(self, handle: str) -> None:
        """Close the request's connection; the server then frees its row."""
        with self._lock:
            stream = self._open.pop(handle, None)
        if stream is not None:
            stream.cancel()

    def _run(self, name: str, stream: _Stream, request: Request, deliver: Deliver) -> None:
        try:
            ended = False
            known = _Known(self._encode, self._eos)
            stream.connect()
            for event, at_s in self._events(stream.connection, self._body(request)):
                if stream.cancelled.is_set():
                    return
                piece = self._piece(event, at_s, known)
                ended = piece.finish_reason is not None
                deliver(piece)
                if ended:
                    break
            if not ended and not stream.cancelled.is_set():
                self._fail(deliver, "llama.cpp's server ended the stream before its end")
        except (OSError, http.client.HTTPException, ValueError, EngineError) as error:
            if not stream.cancelled.is_set():
                self._fail(deliver, f"llama.cpp: {error or type(error).__name__}")
        finally:
            stream.connection.close()
            with self._lock:
                self._open.pop(name, None)
                self._threads.pop(name, None)

    @staticmethod
    def _fail(deliver: Deliver, why: str) -> None:
        deliver(Piece((), time.perf_counter(), "error", why))

    def _body(self, request: Request) -> dict[str, Any]:
        """Every sampling parameter, with all of the server's own additions switched off."""
        sampling = request.sampling
        return {
            "prompt": list(request.prompt.token_ids),
            "n_predict": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "repeat_penalty": 1.0,
            "samplers": ["top_k", "top_p", "temperature"],
            "seed": sampling.seed,
            "ignore_eos": sampling.ignore_eos,
            "cache_prompt": False,
            "return_tokens": True,
            "stream": True,
        }

    def _piece(self, event: Mapping[str, Any], at_s: float, known: _Known) -> Piece:
        if "error" in event:
            problem = event["error"]
            why = problem.get("message", "") if isinstance(problem, dict) else str(problem)
            return Piece((), at_s, "error", f"llama.cpp: {why}")
        stopped = event.get("stop_type")
        ids, count = known.take(event, stopped == "eos")
        if not event.get("stop"):
            return Piece(ids, at_s, tokens=count)
        reason: FinishReason = "stop" if stopped in ("eos", "word") else "length"
        timings = event.get("timings", {})
        layers = {
            name: timings[key] / 1e3
            for name, key in (("prefill", "prompt_ms"), ("decode", "predicted_ms"))
            if key in timings
        }
        return Piece(ids, at_s, reason, None, layers, int(timings.get("cache_n", 0)), count)

    def _events(
        self, connection: http.client.HTTPConnection, body: Mapping[str, Any]
    ) -> Iterator[tuple[dict[str, Any], float]]:
        """Yield the server's events as they arrive."""
        response = self._post(connection, body)
        while line := response.readline():
            if line.startswith((b"data: ", b"error: ")):
                at_s = time.perf_counter()
                data = line.split(b": ", 1)[1].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                yield ({"error": event} if line.startswith(b"error") else event), at_s

    @staticmethod
    def _post(
        connection: http.client.HTTPConnection, body: Mapping[str, Any]
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/completion", json.dumps(body).encode(), headers)
        response = connection.getresponse()
        if response.status != 200:
            text = response.read(2000).decode("utf-8", "replace")
            raise EngineError(
                f'the server answered {response.status}: "{" ".join(text.split())[:300]}"'
            )
        return response

    # ---- scoring

    def score(self, request: ScoreRequest) -> TokenLogprobs:
        """One step a token: the server gives no log-probabilities of prompts, so each token is forced in turn.

        The context stays in one row's cache between the steps, so that each computes one token only.
        """
        logprobs, top = [], []
        ids = request.token_ids
        with self._scoring:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
            try:
                for position in range(request.first_scored, len(ids)):
                    value, best = self._step(connection, ids[:position], ids[position])
                    logprobs.append(value)
                    top.append(best == ids[position])
            except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as error:
                raise EngineError(
                    f'"{request.request_id}": llama.cpp gave no log-probability: {error}'
                ) from error
            finally:
                connection.close()
        return TokenLogprobs(
            request.request_id, np.array(logprobs, dtype=np.float64), np.array(top, dtype=np.bool_)
        )

    def _step(
        self, connection: http.client.HTTPConnection, before: tuple[int, ...], token: int
    ) -> tuple[float, int]:
        """Return the log-probability of `token` after `before`, and the most probable id there."""
        body = {
            "prompt": list(before),
            "n_predict": 1,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "n_probs": 1,
            "logit_bias": [[token, FORCED_BIAS]],
            "cache_prompt": True,
            "id_slot": 0,
            "return_tokens": True,
            "stream": False,
        }
        answer = json.loads(self._post(connection, body).read())
        entry = answer["completion_probabilities"][0]
        if entry["id"] != token:
            raise EngineError(f'llama.cpp chose "{entry["id"]}" where "{token}" was forced')
        return float(entry["logprob"]), int(entry["top_logprobs"][0]["id"])

    def close(self) -> None:
        """Cancel what runs; it ends with an error."""
        with self._lock:
            self._closed = True
            streams = list(self._open.values())
            threads = list(self._threads.values())
        for stream in streams:
            stream.break_off()
        for thread in threads:
            thread.join(10)

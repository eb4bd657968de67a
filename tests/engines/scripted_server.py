"""A small OpenAI-compatible server for tests: a bigram model over bytes, with every ability to be switched off."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from quanteval.engines.fake import ByteTokenizer
from quanteval.errors import EngineError

VOCABULARY = 258


def _table() -> np.ndarray:
    logits = np.random.default_rng(7).normal(size=(VOCABULARY, VOCABULARY)) * 3
    # Printable answers, which survive text and back.
    logits[:, :97] -= 30
    logits[:, 123:] -= 30
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


TABLE = _table()


@dataclass
class Script:
    """What the server can do and how it answers; `stream` replaces the events of a stream.

    Its parts are bytes to send, numbers of seconds to wait, or "reset" to cut the connection.
    """

    lists_models: bool = True
    max_model_len: int | None = 512
    model: str = "tiny"
    takes_ids: bool = True
    counts_prompt: int = 0
    fields: frozenset[str] = frozenset(
        {"return_token_ids", "ignore_eos", "top_k", "min_p", "repetition_penalty", "stream_options",
         "prompt_logprobs", "echo", "logprobs", "return_tokens_as_token_ids", "add_special_tokens",
         "max_tokens", "stop", "seed", "top_p"}
    )  # fmt: skip
    strict: bool = False
    tells_usage: bool = True
    continuous: bool = True
    ranks: bool = True
    shift: int = 0
    leak: float = 0.0
    chunk_tokens: int = 1
    gap_s: float = 0.0
    stream: list[Any] | None = None
    answer: Any = None
    status: int = 200
    metrics: str = "requests_total 3\n"
    slow_s: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    sent: list[tuple[float, int]] = field(default_factory=list)
    connections: set[Any] = field(default_factory=set)
    cancelled: int = 0

    def can(self, name: str) -> bool:
        return name in self.fields


class ScriptedServer:
    """Runs a `Script` on a thread of its own."""

    def __init__(self, script: Script | None = None, port: int = 0) -> None:
        self.script = script or Script()
        self.tokenizer = ByteTokenizer()
        self._port = port
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stopping.wait()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        if not self.script.lists_models:
            return web.Response(status=404)
        entry = {"id": self.script.model, "object": "model"}
        if self.script.max_model_len:
            entry["max_model_len"] = self.script.max_model_len
        return web.json_response({"object": "list", "data": [entry]})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.script.metrics)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._answer(request, body, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._answer(request, body, chat=True)

    async def _answer(self, request: web.Request, body: dict, *, chat: bool) -> web.StreamResponse:
        script = self.script
        script.bodies.append(body)
        script.headers.append(dict(request.headers))
        script.connections.add(request.transport)
        known = {"model", "prompt", "messages", "stream", "temperature"} | script.fields
        if script.strict and (extra := set(body) - known):
            error = {"error": {"message": f"unknown field {sorted(extra)[0]}"}}
            return web.json_response(error, status=422)
        if script.status != 200:
            return web.json_response({"error": {"message": "no such luck"}}, status=script.status)
        if script.answer is not None and not body.get("stream"):
            if isinstance(script.answer, bytes):
                return web.Response(body=script.answer)
            return web.json_response(script.answer)
        if chat:
            prompt = list(self.tokenizer.chat(body["messages"]).token_ids)
        elif isinstance(body["prompt"], str):
            prompt = list(self.tokenizer.raw(body["prompt"]).token_ids)
        elif script.takes_ids:
            prompt = body["prompt"]
        else:
            return web.json_response({"error": {"message": "prompt must be text"}}, status=400)
        ids = self._generate(prompt, body.get("max_tokens", 16))
        await asyncio.sleep(script.slow_s)
        if body.get("stream"):
            return await self._stream(request, body, prompt, ids, chat=chat)
        return web.json_response(self._whole(body, prompt, ids, chat=chat))

    def _generate(self, prompt: list[int], count: int) -> list[int]:
        ids, last = [], prompt[-1]
        for _ in range(count):
            last = int(TABLE[last].argmax())
            ids.append(last)
        return ids

    def _usage(self, prompt: list[int], count: int) -> dict[str, Any]:
        told = len(prompt) + self.script.counts_prompt
        return {
            "prompt_tokens": told, "completion_tokens": count, "total_tokens": told + count,
            "prompt_tokens_details": {"cached_tokens": 5},
        }  # fmt: skip

    def _whole(self, body: dict, prompt: list[int], ids: list[int], *, chat: bool) -> dict:
        script = self.script
        text = self.tokenizer.decode(ids)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        if chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        if body.get("return_token_ids") and script.can("return_token_ids"):
            choice["token_ids"] = ids
        if not chat and "logprobs" in body and script.can("logprobs"):
            echo = body.get("echo") and script.can("echo")
            whole = prompt + ids if echo else ids
            before = [None, *prompt, *ids][: len(whole)] if echo else [prompt[-1], *ids]
            choice["logprobs"] = self._logprobs(body, whole, before)
        if "prompt_logprobs" in body and script.can("prompt_logprobs"):
            choice["prompt_logprobs"] = self._prompt_logprobs(prompt, body["prompt_logprobs"])
        answer = {"object": "text_completion", "choices": [choice]}
        if script.tells_usage:
            answer["usage"] = self._usage(prompt, len(ids))
        return answer

    def _row(self, prompt: list[int], position: int) -> np.ndarray:
        before = prompt[max(position - 1 - self.script.shift, 0)]
        return TABLE[before] + self.script.leak * len(prompt)

    def _prompt_logprobs(self, prompt: list[int], k: int) -> list[Any]:
        told: list[Any] = [None]
        for position in range(1, len(prompt)):
            row = self._row(prompt, position)
            order = np.argsort(-row, kind="stable")
            entry = {}
            for i in {prompt[position], *map(int, order[:k])}:
                entry[str(i)] = {"logprob": float(row[i]), "decoded_token": chr(i)}
                if self.script.ranks:
                    entry[str(i)]["rank"] = int((row > row[i]).sum()) + 1
            told.append(entry)
        return told

    def _logprobs(self, body: dict, whole: list[int], before: list[Any]) -> dict:
        as_ids = body.get("return_tokens_as_token_ids") and self.script.can(
            "return_tokens_as_token_ids"
        )

        def name(i: int) -> str:
            return f"token_id:{i}" if as_ids else self.tokenizer.decode([i])

        values, tops = [], []
        for token, last in zip(whole, before, strict=False):
            if last is None:
                values.append(None)
                tops.append(None)
                continue
            row = TABLE[last]
            values.append(float(row[token]))
            best = np.argsort(-row, kind="stable")[: body["logprobs"]]
            tops.append({name(int(i)): float(row[i]) for i in {token, *best}})
        return {"tokens": [name(i) for i in whole], "token_logprobs": values, "top_logprobs": tops}

    # ---- streams

    async def _stream(self, request, body, prompt, ids, *, chat: bool) -> web.StreamResponse:
        script = self.script
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        parts = (
            self._events(body, prompt, ids, chat=chat) if script.stream is None else script.stream
        )
        script.sent.clear()
        try:
            for part in parts:
                if part == "reset":
                    request.transport.abort()
                    return response
                if isinstance(part, int | float):
                    await asyncio.sleep(part)
                    continue
                raw, count = part if isinstance(part, tuple) else (part, 0)
                script.sent.append((time.perf_counter(), count))
                await response.write(raw)
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionResetError):
            script.cancelled += 1
            raise
        return response

    def _events(self, body, prompt, ids, *, chat: bool):
        script = self.script
        options = (body.get("stream_options") or {}) if script.can("stream_options") else {}
        if chat:
            yield chat_event({"role": "assistant", "content": ""})
        step = script.chunk_tokens
        for start in range(0, len(ids), step):
            piece = ids[start : start + step]
            last = start + step >= len(ids)
            more: dict[str, Any] = {"finish_reason": "length" if last else None}
            if body.get("return_token_ids") and script.can("return_token_ids"):
                more["token_ids"] = piece
            extra = {}
            if options.get("continuous_usage_stats") and script.continuous:
                extra["usage"] = self._usage(prompt, start + len(piece))
            text = self.tokenizer.decode(piece)
            event = (
                chat_event({"content": text}, more, extra)
                if chat
                else text_event(text, more, extra)
            )
            yield event, len(piece)
            yield script.gap_s
        if options.get("include_usage") and script.tells_usage:
            yield data({"object": "chunk", "choices": [], "usage": self._usage(prompt, len(ids))})
        yield b"data: [DONE]\n\n"


def data(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text_event(text: str, more: dict | None = None, extra: dict | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": None, **(more or {})}
    return data({"object": "text_completion", "choices": [choice], **(extra or {})})


def chat_event(delta: dict, more: dict | None = None, extra: dict | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": None, **(more or {})}
    return data({"object": "chat.completion.chunk", "choices": [choice], **(extra or {})})


def usage_event(prompt: int, completion: int, cached: int | None = None) -> bytes:
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return data({"object": "chunk", "choices": [], "usage": usage})


@dataclass(frozen=True)
class Broken:
    """An engine that cannot load anything."""

    device: str = "cpu"

    def check(self, artifact):
        """Takes everything."""

    def serve(self, artifact):
        """Takes nothing."""
        raise EngineError("the weights are torn")

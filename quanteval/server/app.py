"""A thin OpenAI-compatible front on any session, so that every engine can be measured over HTTP.

Completions and chat, streamed or not, log-probabilities of prompts, health, metrics; unknown fields
are ignored. `/quanteval/{describe,memory,batch_policy}` give the session's records, so that a client
can account for the server's memory. Streams carry no log-probabilities.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from quanteval.bench.streams import astream
from quanteval.errors import QuantevalError
from quanteval.interfaces import Prompt, Request, Sampling, Session
from quanteval.records import FinishReason
from quanteval.server import http
from quanteval.server.counting import Counts
from quanteval.server.http import App, HTTPError, Receive, Scope, Send
from quanteval.server.logprobs import choice_logprobs
from quanteval.server.protocol import CHAT, COMPLETIONS, Ask, read_ask, usage_of
from quanteval.server.text import StopFilter, TextStream

CLOSING = "the server is shutting down"
SCORERS = 4
"""Threads for what blocks: scores and records."""


def make_app(session: Session, model_name: str) -> App:
    """Return an ASGI app that offers a session under a model's name; see `Front`."""
    return Front(session, model_name)


@dataclass
class Piece:
    """What one arrival adds to an answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass
class Generation:
    """One prompt on its way: what has come of it so far."""

    prompt: Prompt
    tokenize_s: float
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    cached: int | None = None
    layers: dict[str, float] = field(default_factory=dict)

    def usage(self) -> dict[str, Any]:
        """Return its usage, with seconds by layer under `layers` where they are known."""
        usage = usage_of(len(self.prompt.token_ids), len(self.token_ids), self.cached)
        return {**usage, "layers": self.layers} if self.layers else usage


class Front:
    """The ASGI app. `close()` makes it answer 503 to what comes after."""

    def __init__(self, session: Session, model_name: str) -> None:
        self._session = session
        self._model_name = model_name
        self._numbers = itertools.count()
        self._threads = ThreadPoolExecutor(SCORERS, "front")
        self._closing = False
        self.counts = Counts()

    def close(self) -> None:
        """Take no more requests; those that run go on."""
        self._closing = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        if scope["type"] != "http":
            return
        try:
            await self._route(scope, receive, send)
        except HTTPError as error:
            await http.answer_json(send, error.body(), error.status)
        except http.DisconnectedError:
            return
        except Exception as error:
            await http.answer_json(send, http.error_object(500, _said(error)), 500)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if path in (COMPLETIONS, CHAT):
            if method != "POST":
                raise HTTPError(405, f'"{path}" takes POST, not "{method}"')
            if self._closing:
                raise HTTPError(503, CLOSING)
            await self._complete(receive, send, path == CHAT)
        elif path == "/health":
            await http.answer(send, b"", 503 if self._closing else 200, http.TEXT)
        elif path == "/v1/models":
            await http.answer_json(send, self._models())
        elif path == "/metrics":
            await http.answer(send, self.counts.text(self._model_name).encode(), 200, http.TEXT)
        elif path == "/quanteval/describe":
            record = await self._in_thread(self._session.describe)
            await http.answer(send, record.model_dump_json().encode())
        elif path == "/quanteval/memory":
            memory = await self._in_thread(self._session.memory)
            await http.answer(send, memory.model_dump_json().encode())
        elif path == "/quanteval/batch_policy":
            await http.answer_json(send, {"batch_policy": self._session.batch_policy})
        else:
            raise HTTPError(404, f'there is no "{path}" here')

    def _models(self) -> dict[str, Any]:
        model = {
            "id": self._model_name,
            "object": "model",
            "created": 0,
            "owned_by": "quanteval",
            "max_model_len": self._session.max_context,
        }
        return {"object": "list", "data": [model]}

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    # ---- requests for text

    async def _complete(self, receive: Receive, send: Send, chat: bool) -> None:
        ask = read_ask(await http.read_json(receive), chat)
        if ask.model not in (None, "", self._model_name):
            raise HTTPError(
                404, f'model "{ask.model}" is not served, only "{self._model_name}"', "model"
            )
        async with http.cancelled_with_client(receive):
            generations = self._prepare(ask)
            try:
                if ask.stream:
                    await self._stream(ask, generations[0], send)
                else:
                    await self._whole(ask, generations, send)
            except asyncio.CancelledError:
                if not self._closing:
                    raise
                raise HTTPError(503, CLOSING) from None

    def _prepare(self, ask: Ask) -> list[Generation]:
        """Tokenize the prompts and refuse what cannot be served."""
        if ask.chat:
            started = perf_counter()
            try:
                prompt = self._session.tokenizer.chat(ask.messages)
            except QuantevalError as error:
                raise HTTPError(400, str(error), "messages") from None
            generations = [Generation(prompt, perf_counter() - started)]
        else:
            generations = [self._tokenized(text, ask) for text in ask.prompts]
        limit = self._session.max_context
        for generation in generations:
            length = len(generation.prompt.token_ids)
            if not length:
                raise HTTPError(400, "the prompt is empty", "prompt")
            # Of a prompt that is only scored, the last token needs no place.
            if length + (ask.max_tokens or 0) > limit + (ask.max_tokens == 0):
                raise HTTPError(
                    400,
                    f"{length} prompt and {ask.max_tokens or 0} output tokens are more than the "
                    f"context of {limit} tokens",
                    "max_tokens",
                )
            if ask.max_tokens is None and length == limit:
                raise HTTPError(400, f"{length} prompt tokens leave no room for an answer")
        return generations

    def _tokenized(self, prompt: str | tuple[int, ...], ask: Ask) -> Generation:
        tokenizer = self._session.tokenizer
        started = perf_counter()
        if isinstance(prompt, str):
            made = (
                tokenizer.raw(prompt)
                if ask.special_tokens
                else Prompt(prompt, tokenizer.encode(prompt))
            )
            return Generation(made, perf_counter() - started)
        if not all(0 <= i < tokenizer.vocab_size for i in prompt):
            raise HTTPError(
                400, f"a prompt's token ids must be from 0 to {tokenizer.vocab_size - 1}", "prompt"
            )
        return Generation(Prompt(tokenizer.decode(prompt), prompt), 0.0)

    def _request(self, ask: Ask, prompt: Prompt) -> Request:
        number = next(self._numbers)
        room = self._session.max_context - len(prompt.token_ids)
        seed = random.getrandbits(31) if ask.seed is None else ask.seed
        sampling = Sampling(
            max_tokens=room if ask.max_tokens is None else ask.max_tokens,
            temperature=ask.temperature,
            top_p=ask.top_p,
            top_k=ask.top_k,
            seed=seed,
            stop=ask.stop,
            ignore_eos=ask.ignore_eos,
        )
        return Request(f"http-{number}", prompt, sampling)

    async def _generate(self, ask: Ask, generation: Generation) -> AsyncIterator[Piece]:
        """Yield what arrives, text cut at a stop string; HTTPError 500 when the session fails."""
        request = self._request(ask, generation.prompt)
        text = TextStream(self._session.tokenizer.decode)
        stops = StopFilter(ask.stop)
        detokenize_s = 0.0
        with self.counts.following(len(generation.prompt.token_ids)) as seen:
            async with contextlib.aclosing(astream(self._session, request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    if chunk.error is not None or chunk.finish_reason in ("error", "cancelled"):
                        raise HTTPError(
                            500, chunk.error or f"the request was {chunk.finish_reason}"
                        )
                    seen.tokens(len(chunk.token_ids))
                    generation.token_ids += chunk.token_ids
                    started = perf_counter()
                    piece = stops.add(text.add(chunk.token_ids))
                    reason = chunk.finish_reason
                    if reason is not None and not stops.stopped:
                        piece += stops.add(text.end()) + stops.end()
                    detokenize_s += perf_counter() - started
                    if stops.stopped:
                        reason = "stop"
                    if reason is not None:
                        generation.cached = chunk.cached_prompt_tokens
                        generation.layers = _layers(
                            chunk.layers, generation.tokenize_s, detokenize_s
                        )
                        generation.finish_reason = reason
                        seen.end(generation.layers)
                    generation.texts.append(piece)
                    yield Piece(piece, chunk.token_ids, reason)
                    if reason is not None:
                        return
        raise HTTPError(500, "the session's stream ended without a finish reason")

    async def _stream(self, ask: Ask, generation: Generation, send: Send) -> None:
        chunk = _ChunkWriter(ask, generation, self._model_name, f"{next(self._numbers)}")
        begun = False
        try:
            async with contextlib.aclosing(self._generate(ask, generation)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    if not begun:
                        # Only now is it known that the session does not refuse.
                        await http.begin_events(send)
                    await http.send_part(send, chunk.render(piece, first=not begun))
                    begun = True
        except (Exception, asyncio.CancelledError) as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            if not begun or (cancelled and not self._closing):
                raise
            failure = (
                http.error_object(503, CLOSING)
                if cancelled
                else http.error_object(500, _said(error))
            )
            await http.send_part(send, http.event(failure) + http.DONE, more=False)
            return
        await http.send_part(send, chunk.usage() + http.DONE, more=False)

    async def _whole(self, ask: Ask, generations: list[Generation], send: Send) -> None:
        if ask.max_tokens != 0:
            await self._drain_all(ask, generations)
        logprobs: list[dict[str, Any] | None] = [None] * len(generations)
        if ask.logprobs is not None:
            sequences = [(g.prompt.token_ids, tuple(g.token_ids)) for g in generations]
            logprobs = await self._in_thread(choice_logprobs, self._session, ask, sequences)
        choices = [
            self._choice(ask, i, generation, logprobs[i])
            for i, generation in enumerate(generations)
        ]
        head = _head(ask, self._model_name, f"{next(self._numbers)}")
        usage = usage_of(
            sum(len(g.prompt.token_ids) for g in generations),
            sum(len(g.token_ids) for g in generations),
        )
        if len(generations) == 1:
            usage = generations[0].usage()
        body = {**head, "choices": choices, "usage": usage}
        if ask.chat and ask.token_ids:
            body["prompt_token_ids"] = list(generations[0].prompt.token_ids)
        await http.answer_json(send, body)

    async def _drain_all(self, ask: Ask, generations: list[Generation]) -> None:
        """Generate every answer; once one fails, the others are cancelled."""
        tasks = [asyncio.ensure_future(self._drain(ask, one)) for one in generations]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _drain(self, ask: Ask, generation: Generation) -> None:
        async with contextlib.aclosing(self._generate(ask, generation)) as pieces:  # type: ignore[type-var]
            async for _ in pieces:
                pass

    def _choice(
        self, ask: Ask, index: int, generation: Generation, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        text = "".join(generation.texts)
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": generation.finish_reason or "length",
            "logprobs": logprobs,
        }
        if ask.token_ids:
            choice["token_ids"] = list(generation.token_ids)
        if ask.chat:
            return {**choice, "message": {"role": "assistant", "content": text}}
        if ask.token_ids:
            choice["prompt_token_ids"] = list(generation.prompt.token_ids)
        return {**choice, "text": generation.prompt.text + text if ask.echo else text}


class _ChunkWriter:
    """Renders the chunks of one stream."""

    def __init__(self, ask: Ask, generation: Generation, model_name: str, number: str) -> None:
        self._ask = ask
        self._generation = generation
        self._head = _head(ask, model_name, number)
        self._open = http.dump(self._head)[:-1]

    def render(self, piece: Piece, *, first: bool) -> bytes:
        ask = self._ask
        choice: dict[str, Any] = {"index": 0}
        more: dict[str, Any] = {}
        if ask.chat:
            role = {"role": "assistant"} if first else {}
            choice["delta"] = {**role, "content": piece.text}
        else:
            choice["text"] = piece.text
        if ask.token_ids:
            choice["token_ids"] = list(piece.token_ids)
            if first:
                place = more if ask.chat else choice
                place["prompt_token_ids"] = list(self._generation.prompt.token_ids)
        choice["finish_reason"] = piece.finish_reason
        more = {"choices": [choice], **more}
        if ask.continuous_usage:
            more["usage"] = self._generation.usage()
        return b"data: " + self._open + b"," + http.dump(more)[1:] + b"\n\n"

    def usage(self) -> bytes:
        if not self._ask.include_usage:
            return b""
        return http.event({**self._head, "choices": [], "usage": self._generation.usage()})


def _head(ask: Ask, model_name: str, number: str) -> dict[str, Any]:
    kind = "chat.completion" if ask.chat else "text_completion"
    return {
        "id": f"{'chatcmpl' if ask.chat else 'cmpl'}-{number}",
        "object": f"{kind}.chunk" if ask.chat and ask.stream else kind,
        "created": int(time.time()),
        "model": model_name,
    }


def _said(error: BaseException) -> str:
    """Return an error's text, with its type where that is none of ours."""
    own = isinstance(error, HTTPError | QuantevalError)
    return str(error) if own else f"{type(error).__name__}: {error}"


def _layers(told: Any, tokenize_s: float, detokenize_s: float) -> dict[str, float]:
    """Return the session's layers and what this front adds to them."""
    layers = dict(told)
    layers["tokenize"] = layers.get("tokenize", 0.0) + tokenize_s
    layers["detokenize"] = layers.get("detokenize", 0.0) + detokenize_s
    return layers

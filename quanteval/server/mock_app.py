"""The mock server as an ASGI app: set timings, faults and answers, and the truth about what was sent when.

`/truth` lists, for each request for text, when it arrived, when it had a slot and when each chunk was
written, as `time.perf_counter()` of this machine; `/reset` (POST) forgets them and starts the stall's
clock anew; `/stall?seconds=2` (POST) lets everything stand still from now on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from time import perf_counter
from urllib.parse import parse_qs

from quanteval.server import http, mock_wire
from quanteval.server.http import HTTPError, Receive, Scope, Send
from quanteval.server.mock_script import TOKENIZER, MockSettings, Script, answer_of, pieces_of
from quanteval.server.pacing import StallingClock, Ticker
from quanteval.server.protocol import CHAT, COMPLETIONS, Ask, read_ask

KEPT = 200_000
"""Requests whose truth is kept."""


class DroppedError(Exception):
    """Raised through the server to cut the connection."""


@dataclass
class Truth:
    """One request as the server saw it, times by `time.perf_counter()`."""

    number: int
    request_id: str
    stream: bool
    received_s: float
    prompt_tokens: int = 0
    started_s: float | None = None
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    end_s: float | None = None
    status: str = "running"
    """running, ok, http_error, stream_error, dropped or cancelled."""


class MockApp:
    """Answers by a MockSettings; to be run on one event loop."""

    def __init__(self, settings: MockSettings, may_die: bool = False) -> None:
        self.settings = settings
        self.may_die = may_die
        self.truths: deque[Truth] = deque(maxlen=KEPT)
        self.counts: Counter[str] = Counter()
        self._arrived = 0
        self._numbers = 0
        self._active = 0
        self._queue: deque[asyncio.Future[None]] = deque()
        self._prefill_turn = asyncio.Lock()
        self._prefill_free_s = 0.0
        self._clock = StallingClock()
        self._clock_started = False
        self._ticker: Ticker | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request."""
        if scope["type"] != "http":
            return
        if self._ticker is None:
            self._ticker = Ticker(asyncio.get_running_loop())
        try:
            await self._route(scope, receive, send)
        except HTTPError as error:
            await http.answer_json(send, error.body(), error.status)
        except http.DisconnectedError:
            return

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if path in (COMPLETIONS, CHAT):
            if method != "POST":
                raise HTTPError(405, f'"{path}" takes POST, not "{method}"')
            await self._complete(scope, receive, send, path == CHAT)
        elif path == "/health":
            await http.answer(send, b"", content_type=http.TEXT)
        elif path == "/v1/models":
            await http.answer_json(send, mock_wire.models(self.settings))
        elif path == "/metrics":
            text = mock_wire.metrics(self.settings, self.counts, self._active, len(self._queue))
            await http.answer(send, text.encode(), content_type=http.TEXT)
        elif path == "/truth":
            await http.answer_json(send, [asdict(truth) for truth in self.truths])
        elif path == "/reset" and method == "POST":
            self._reset()
            await http.answer_json(send, {})
        elif path == "/stall" and method == "POST":
            seconds = parse_qs(scope["query_string"].decode()).get("seconds", ["1"])[0]
            try:
                self._clock.stall(perf_counter(), float(seconds))
            except ValueError:
                raise HTTPError(400, f'seconds "{seconds}" must be a number') from None
            await http.answer_json(send, {})
        else:
            raise HTTPError(404, f'there is no "{path}" here')

    def _reset(self) -> None:
        self.truths.clear()
        self._arrived = self._numbers = 0
        self._clock.clear()
        self._clock_started = False

    # ---- a request for text

    async def _complete(self, scope: Scope, receive: Receive, send: Send, chat: bool) -> None:
        received_s = perf_counter()
        self._arrived += 1
        limit = self.settings.die_after_requests
        if limit is not None and self._arrived > limit and self.may_die:
            os._exit(1)
        if not self._clock_started:
            self._clock_started = True
            if self.settings.stall_at_s is not None:
                self._clock.stall(received_s + self.settings.stall_at_s, self.settings.stall_s)
        script = Script(self.settings, self._numbers)
        self._numbers += 1
        truth = Truth(script.number, _request_id(scope), False, received_s)
        self.truths.append(truth)
        try:
            body = await http.read_json(receive)
            ask = read_ask(body, chat)
            truth.request_id = truth.request_id or str(body.get("request_id") or "")
            truth.stream = ask.stream
            prompts = self._prompts(ask, script)
            truth.prompt_tokens = sum(map(len, prompts))
        except BaseException:
            truth.status = "http_error"
            raise
        async with http.cancelled_with_client(receive):
            try:
                async with self._slot(truth):
                    await self._serve(ask, script, prompts, truth, send)
            except asyncio.CancelledError:
                truth.status, truth.end_s = "cancelled", perf_counter()
                raise

    def _prompts(self, ask: Ask, script: Script) -> list[tuple[int, ...]]:
        """Return the prompts' ids; HTTPError for what is refused."""
        settings = self.settings
        if script.http_error:
            raise HTTPError(settings.http_error_status, "scripted failure")
        if ask.model not in (None, settings.model_name):
            raise HTTPError(
                404, f'there is no model "{ask.model}", only "{settings.model_name}"', "model"
            )
        if ask.echo and ask.logprobs is not None and settings.prompt_logprobs == "refused":
            raise HTTPError(400, "echo with logprobs is not supported here", "echo")
        if settings.max_waiting and len(self._queue) >= settings.max_waiting:
            raise HTTPError(503, f'"{len(self._queue)}" requests wait already: try again later')
        prompts = (
            [TOKENIZER.chat(ask.messages).token_ids]
            if ask.chat
            else [TOKENIZER.encode(p) if isinstance(p, str) else p for p in ask.prompts]
        )
        for ids in prompts:
            if not ids or not all(0 <= i < TOKENIZER.vocab_size for i in ids):
                raise HTTPError(400, "a prompt must have tokens, from 0 to 257", "prompt")
            wanted = len(ids) + (ask.max_tokens or 0)
            if wanted > settings.max_context:
                raise HTTPError(
                    400,
                    f"{len(ids)} prompt and {ask.max_tokens} output tokens are more than the "
                    f"context of {settings.max_context}",
                    "max_tokens",
                )
        return prompts

    @contextlib.asynccontextmanager
    async def _slot(self, truth: Truth) -> AsyncIterator[None]:
        """Wait for a slot in the order of arrival and hold it."""
        slots = self.settings.slots
        if slots and (self._active >= slots or self._queue):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._leave()
                else:
                    self._queue.remove(turn)
                raise
        else:
            self._active += 1
        truth.started_s = perf_counter()
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        """Give a slot up, to the next that waits if there is one."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._active -= 1

    async def _prefilled(self, started_s: float, script: Script, prompt_tokens: int) -> float:
        """Wait until a prompt is read, and return when that was by the plan."""
        work_s = script.prefill_s(prompt_tokens)
        if not self.settings.exclusive_prefill:
            return await self._worked(started_s, work_s)
        async with self._prefill_turn:
            begin_s = max(started_s, self._prefill_free_s)
            try:
                self._prefill_free_s = await self._worked(begin_s, work_s)
            except asyncio.CancelledError:
                self._prefill_free_s = perf_counter()
                raise
            return self._prefill_free_s

    async def _worked(self, begin_s: float, work_s: float) -> float:
        """Wait until work that began at a moment is done, and return when that was by the plan.

        From one moment of the plan to the next: what a wake-up is late does not add up. A stall that
        begins meanwhile is waited for too.
        """
        assert self._ticker is not None
        while True:
            at_s = self._clock.after(begin_s, work_s)
            await self._ticker.until(at_s)
            if self._clock.after(begin_s, work_s) <= at_s:
                return at_s

    async def _serve(
        self, ask: Ask, script: Script, prompts: list[tuple[int, ...]], truth: Truth, send: Send
    ) -> None:
        wire = mock_wire.Wire(self.settings, ask, f"mock-{script.number}", int(time.time()))
        cached = min(self.settings.cached_prompt_tokens, truth.prompt_tokens)
        self._count("prompt_tokens", truth.prompt_tokens)
        self._count("prefix_cache_queries", truth.prompt_tokens)
        self._count("prefix_cache_hits", cached)
        if ask.stream:
            await self._stream(wire, script, prompts[0], truth, send)
        else:
            await self._whole(wire, script, prompts, truth, send)
        self._observe(truth)

    def _answer(self, ask: Ask, ids: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        if ask.max_tokens == 0:
            return (), "length"
        return answer_of(self.settings, TOKENIZER.decode(ids), ask.max_tokens, ask.ignore_eos)

    async def _stream(
        self, wire: mock_wire.Wire, script: Script, ids: tuple[int, ...], truth: Truth, send: Send
    ) -> None:
        await http.begin_events(send)
        if wire.ask.chat and self.settings.role_only_first_chunk:
            await http.send_part(send, wire.role())
        output, reason = self._answer(wire.ask, ids)
        assert truth.started_s is not None
        at_s = await self._prefilled(truth.started_s, script, len(ids))
        sent, gap_s = 0, 0.0
        for some, text in pieces_of(output, self.settings.tokens_per_chunk):
            if sent:
                at_s = await self._worked(at_s, gap_s)
            if await self._fault(script, sent, truth, send):
                return
            sent += len(some)
            part = wire.chunk(ids, some, text, sent, reason if sent == len(output) else None)
            truth.chunk_s.append(perf_counter())
            truth.chunk_tokens.append(len(some))
            await http.send_part(send, part)
            self._count("generation_tokens", len(some))
            gap_s = script.gap_s(self._active)
        if await self._fault(script, sent, truth, send):
            return
        truth.status, truth.end_s = "ok", perf_counter()
        await http.send_part(send, wire.end(len(ids), sent) + http.DONE, more=False)

    async def _fault(self, script: Script, sent: int, truth: Truth, send: Send) -> bool:
        """Do what the script says about failing once so many tokens are sent."""
        if (after := script.drop_after) is not None and sent >= after:
            truth.status, truth.end_s = "dropped", perf_counter()
            raise DroppedError
        if (after := script.error_after) is not None and sent >= after:
            truth.status, truth.end_s = "stream_error", perf_counter()
            failure = http.error_object(500, self.settings.stream_error_text)
            await http.send_part(send, http.event(failure) + http.DONE, more=False)
            return True
        return False

    async def _whole(
        self,
        wire: mock_wire.Wire,
        script: Script,
        prompts: list[tuple[int, ...]],
        truth: Truth,
        send: Send,
    ) -> None:
        outputs = [self._answer(wire.ask, ids) for ids in prompts]
        longest = max(len(output) for output, _ in outputs)
        assert truth.started_s is not None
        at_s = await self._prefilled(truth.started_s, script, truth.prompt_tokens)
        # The last step is the end: an error after the whole text is one too.
        for sent in (*range(0, longest, self.settings.tokens_per_chunk), longest):
            if 0 < sent < longest:
                at_s = await self._worked(at_s, script.gap_s(self._active))
            if longest:
                await self._whole_fault(script, sent, truth, send)
        tokens = sum(len(output) for output, _ in outputs)
        body = http.dump(wire.whole(prompts, outputs))
        truth.chunk_s.append(perf_counter())
        truth.chunk_tokens.append(tokens)
        truth.status, truth.end_s = "ok", perf_counter()
        self._count("generation_tokens", tokens)
        await http.answer(send, body)

    async def _whole_fault(self, script: Script, sent: int, truth: Truth, send: Send) -> None:
        """Fail an answer that is not streamed where a stream of it would have."""
        if (after := script.drop_after) is not None and sent >= after:
            truth.status, truth.end_s = "dropped", perf_counter()
            # Before its head is out, a failure of the app would be answered and not cut.
            head = [(b"content-type", http.JSON), (b"content-length", b"1")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            raise DroppedError
        if (after := script.error_after) is not None and sent >= after:
            truth.status, truth.end_s = "stream_error", perf_counter()
            raise HTTPError(500, self.settings.stream_error_text)

    # ---- counting

    def _count(self, name: str, by: int) -> None:
        self.counts[name] += by

    def _observe(self, truth: Truth) -> None:
        if truth.status != "ok" or truth.started_s is None or truth.end_s is None:
            return
        first = truth.chunk_s[0] if truth.chunk_s else truth.end_s
        mock_wire.observe(self.counts, "request_queue_time", truth.started_s - truth.received_s)
        mock_wire.observe(self.counts, "request_prefill_time", first - truth.started_s)
        mock_wire.observe(self.counts, "request_decode_time", truth.end_s - first)
        mock_wire.observe(self.counts, "time_to_first_token", first - truth.received_s)
        mock_wire.observe(self.counts, "e2e_request_latency", truth.end_s - truth.received_s)
        self._count("request_success", 1)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return str(value.decode("latin-1"))
    return ""

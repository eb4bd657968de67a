"""A session on any OpenAI-compatible endpoint: the same calls as in process, over HTTP.

What the endpoint can do is probed when the session opens. Nothing is read back from a remote
model: what `describe` returns is marked as declared. Engines that start the server themselves
hand in what they know instead.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from quanteval.engines.http_bodies import (
    Bodies,
    Capabilities,
    ChatPrompt,
    PromptScores,
    token_logprobs,
    top_of,
)
from quanteval.engines.http_calls import Calls
from quanteval.engines.http_probe import probe
from quanteval.engines.http_wire import Remote, Wire
from quanteval.errors import EngineError, UnsupportedError
from quanteval.interfaces import (
    Chunk,
    Completion,
    HiddenStates,
    Message,
    OutputHead,
    Prompt,
    Request,
    ScoreRequest,
    Tokenizer,
    TokenLogprobs,
    TopLogprobs,
)
from quanteval.records import Effective, MemoryUse

T = TypeVar("T")
NAN = float("nan")


class ChatTokenizer:
    """A tokenizer whose chat prompts remember their messages; all else is the inner tokenizer's."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def chat(self, messages: Any) -> Prompt:
        """Render the template here, to know the ids, and keep the messages for the server to render."""
        prompt = self._inner.chat(messages)
        kept: tuple[Message, ...] = tuple(messages)
        return ChatPrompt(prompt.text, prompt.token_ids, kept)


class HTTPSession:
    """One served model behind an address; implements Session, StreamsAsync, TellsMetrics and GivesTopLogprobs.

    The longest request is the endpoint's own, or `fallback_context` where it does not tell, and never
    more than `max_context`; it leaves room for scoring a sequence that is one longer, unless the server
    does so by itself (`scores_one_more`). `describe`, `memory` and `close` are of the engine
    that started the server, where one did. Use as a context manager.
    """

    def __init__(
        self,
        remote: Remote,
        tokenizer: Tokenizer,
        *,
        max_context: int | None = None,
        fallback_context: int | None = None,
        max_in_flight: int = 32,
        batch_policy: str = "the server's own",
        reasoning_in_text: bool = False,
        raw_as_user: bool = False,
        text_prompts: bool = False,
        describe: Callable[[], Effective] | None = None,
        memory: Callable[[], MemoryUse] | None = None,
        declared: str = "",
        scores_one_more: bool = False,
    ) -> None:
        self.remote = remote
        self._wire = Wire(remote)
        self._tokenizer: Any = ChatTokenizer(tokenizer) if remote.api == "chat" else tokenizer
        self._max_context = max_context
        self._fallback_context = fallback_context
        self._max_in_flight = max_in_flight
        self._batch_policy = batch_policy
        self._reasoning_in_text = reasoning_in_text
        self._raw_as_user = raw_as_user
        self._text_prompts = text_prompts
        self._describe = describe
        self._memory = memory
        self._declared = declared
        self._scores_one_more = scores_one_more
        self.capabilities = Capabilities()
        self._opened: Calls | None = None
        self._limit = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="http-session", daemon=True)

    # ---- life

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Probe the endpoint. EngineError when it does not answer, UnsupportedError when it tells too little."""
        self._loop = _new_event_loop()
        self._thread.start()
        try:
            found = self._call(probe(self._wire, self._tokenizer, text_only=self._text_prompts))
            self.capabilities = can = found.can
            self._limit = self._longest(found.max_model_len, can)
            bodies = Bodies(
                found.model,
                self.remote.api,
                can,
                self._tokenizer,
                self.remote.extra_body,
                raw_as_user=self._raw_as_user,
            )
            self._opened = Calls(
                self._wire,
                self._tokenizer,
                bodies,
                can,
                self._limit,
                reasoning_in_text=self._reasoning_in_text,
            )
            if not can.token_id_prompts and not can.usage:
                raise UnsupportedError(
                    f"the server at {self.remote.base_url} takes no token ids and tells no usage, so that "
                    f"nothing shows whether prompts arrive as they were made ({can})"
                )
        except BaseException:
            self.close()
            raise

    def _longest(self, served: int | None, can: Capabilities) -> int:
        served = self._fallback_context if served is None else served
        if served is not None and can.prompt_logprobs and not self._scores_one_more:
            served -= 1 + can.score_tokens
        limits = [limit for limit in (served, self._max_context) if limit is not None]
        if not limits or min(limits) < 1:
            raise UnsupportedError(
                f"the server at {self.remote.base_url} does not tell its longest context: set max_context"
            )
        return min(limits)

    def close(self) -> None:
        """Close the connections and end the session's thread; a second call does nothing."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        loop = self._running
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(self._wire.close())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    @property
    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._loop.is_closed():
            raise EngineError("the session is not open: use it as a context manager")
        return self._loop

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the session's own loop and wait for it; Ctrl-C cancels it."""
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._running)
        except BaseException:
            work.close()
            raise

    @property
    def _calls(self) -> Calls:
        if self._opened is None:
            raise EngineError("the session is not open: use it as a context manager")
        return self._opened

    # ---- what it is

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the artifact's folder."""
        tokenizer: Tokenizer = self._tokenizer
        return tokenizer

    @property
    def max_context(self) -> int:
        """Most tokens one request may hold."""
        return self._limit

    @property
    def batch_policy(self) -> str:
        """How requests are batched, as far as is known."""
        return self._batch_policy

    def describe(self) -> Effective:
        """What the engine knows that started the server; else what was declared, every measured field empty."""
        if self._describe is not None:
            return self._describe()
        declared = self._declared or "nothing"
        return Effective(
            linear_layers=[],
            dtype_bytes={},
            bits_per_weight=NAN,
            linear_bits_per_weight=NAN,
            quantized_fraction=NAN,
            left_alone=[],
            activation_bits=NAN,
            compute_dtype="not told",
            emulated=False,
            emulation=f"declared, not read back: {declared}; the endpoint {self.capabilities}",
            resident_weight_bytes=0,
            parameters=0,
        )

    def memory(self) -> MemoryUse:
        """What the engine knows that started the server; zeros where the model is somewhere else."""
        if self._memory is not None:
            return self._memory()
        return MemoryUse(
            device="remote",
            before_load_bytes=0,
            weights_bytes=0,
            kv_cache_bytes=0,
            kv_cache_tokens=0,
            kv_bytes_per_token_formula=0.0,
            kv_bytes_per_token_measured=0.0,
            activation_peak_bytes=0,
            activation_peak_how="not known: the model is behind an endpoint",
            process_peak_bytes=0,
            unaccounted_bytes=0,
        )

    def server_metrics(self) -> dict[str, float]:
        """Counters and gauges of the server's /metrics; {} when it has none."""
        from quanteval.engines.prometheus import parse

        try:
            raw = self._call(self._wire.get(f"{self.remote.root}/metrics", timeout_s=5.0))
            metrics: dict[str, float] = parse(raw.decode("utf-8", "replace"))
        except (EngineError, ValueError):
            return {}
        return metrics

    # ---- generation

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Keep `max_in_flight` going and yield completions as they end; EngineError when the server is gone."""
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        running: set[Any] = set()
        source = iter(requests)
        more = True
        try:
            while running or more:
                while more and len(running) < self._max_in_flight:
                    request = next(source, None)
                    if request is None:
                        more = False
                        break
                    future = self._submit(self._calls.complete(request))
                    running.add(future)
                    future.add_done_callback(ended.put)
                if running:
                    future = ended.get()
                    running.discard(future)
                    yield future.result()
        finally:
            for future in running:
                future.cancel()

    def stream(self, request: Request) -> Iterator[Chunk]:
        """Yield chunks as they arrive; closing the iterator cancels the request."""
        arrived: queue.SimpleQueue[Chunk | BaseException | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async for chunk in self.astream(request):
                    arrived.put(chunk)
                arrived.put(None)
            except BaseException as error:
                arrived.put(error)
                raise

        future = self._submit(pump())
        try:
            while (item := arrived.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            future.cancel()

    def astream(self, request: Request) -> AsyncIterator[Chunk]:
        """Yield chunks on the running loop; closing the iterator or cancelling its task cancels the request."""
        return self._calls.stream(request)

    # ---- scoring

    def _scored(
        self,
        requests: Iterable[ScoreRequest],
        k: int | None,
        read: Callable[[ScoreRequest, PromptScores], T],
    ) -> Iterator[T]:
        """Ask for sequences some way ahead and yield what is read of each, in the order asked."""

        async def one(request: ScoreRequest) -> T:
            return read(request, await self._calls.score(request, k))

        source = iter(requests)
        waiting: deque[Any] = deque()
        try:
            while True:
                while len(waiting) < self._max_in_flight:
                    request = next(source, None)
                    if request is None:
                        break
                    waiting.append(self._submit(one(request)))
                if not waiting:
                    return
                yield waiting[0].result()
                waiting.popleft()
        finally:
            for future in waiting:
                future.cancel()

    def loglikelihood(self, requests: Iterable[ScoreRequest]) -> Iterator[TokenLogprobs]:
        """Yield log-probabilities in the order asked. EngineError on failure, UnsupportedError without any."""
        return self._scored(requests, None, token_logprobs)

    def top_logprobs(self, requests: Iterable[ScoreRequest], k: int) -> Iterator[TopLogprobs]:
        """Yield the top `k` of each scored position; EngineError above the server's own limit."""
        return self._scored(requests, k, lambda request, scores: top_of(request, scores, k))

    def hidden_states(self, requests: Iterable[ScoreRequest]) -> Iterator[HiddenStates]:
        """There are none."""
        raise UnsupportedError("an endpoint gives no hidden states: top log-probabilities may do")

    def output_head(self) -> OutputHead:
        """There is none."""
        raise UnsupportedError("an endpoint gives no output head: top log-probabilities may do")


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop: uvloop's where it is installed, it carries about twice the chunks."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop

"""A session on an engine that computes outside torch, in this process: what openvino and llama_cpp share.

A `Backend` runs requests and scores sequences; here are refusals, stop strings, the window of requests
in work, and the account of memory.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from quanteval.engines.tokenizer import HFTokenizer
from quanteval.environment import peak_rss_bytes
from quanteval.errors import EngineError, UnsupportedError
from quanteval.interfaces import (
    Chunk,
    Completion,
    HiddenStates,
    OutputHead,
    Request,
    ScoreRequest,
    TokenLogprobs,
)
from quanteval.records import Effective, FinishReason, MemoryUse


@dataclass(frozen=True)
class Piece:
    """What a backend delivers: new tokens, or the end of a request, or both, at `at_s` (perf_counter)."""

    token_ids: tuple[int, ...]
    at_s: float
    finish_reason: FinishReason | None = None
    error: str | None = None
    layers: Mapping[str, float] = field(default_factory=dict)
    cached_prompt_tokens: int | None = None
    tokens: int | None = None
    """Number of tokens where some ids are not told; None: that of `token_ids`."""


Deliver = Callable[[Piece], None]


@dataclass(frozen=True)
class CacheUse:
    """The KV cache as allocated: its bytes, the tokens it holds, and what one should take by formula."""

    bytes: int
    tokens: int
    bytes_per_token: float


class Backend(Protocol):
    """Runs requests; `deliver` may be called from any thread and must be quick."""

    @property
    def policy(self) -> str:
        """One line that goes into the records."""
        ...

    @property
    def rows(self) -> int:
        """Requests computed together at most."""
        ...

    def submit(self, request: Request, deliver: Deliver) -> str:
        """Queue a request and return a handle; its end is always delivered, unless it is cancelled."""
        ...

    def cancel(self, handle: str) -> None:
        """Stop working on a request; nothing more is delivered for it."""
        ...

    def score(self, request: ScoreRequest) -> TokenLogprobs:
        """Score one sequence. EngineError on failure, UnsupportedError where it cannot be done."""
        ...

    def cache_use(self) -> CacheUse:
        """The KV cache now."""
        ...

    def close(self) -> None:
        """End all work; requests still running get an error."""
        ...


class _Generation:
    """Follows one request: its tokens, where a stop string ends its text, and its end."""

    def __init__(self, tokenizer: HFTokenizer, request: Request) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._started = time.perf_counter()
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self._text_end: int | None = None

    def take(self, piece: Piece) -> None:
        self.token_ids.extend(piece.token_ids)
        self.error = piece.error
        self.finish_reason = piece.finish_reason
        stops = self._request.sampling.stop
        if not stops or not piece.token_ids or piece.error is not None:
            return
        text = self._tokenizer.decode(self.token_ids)
        ends = [at for stop in stops if (at := text.find(stop)) >= 0]
        if ends:
            self._text_end = min(ends)
            self.finish_reason = "stop"

    def completion(self) -> Completion:
        failed = self.finish_reason in ("error", "cancelled")
        text = "" if failed else self._tokenizer.decode(self.token_ids)[: self._text_end]
        return Completion(
            request_id=self._request.request_id,
            text=text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason or "error",
            error=self.error,
            elapsed_s=time.perf_counter() - self._started,
        )


class InProcessSession:
    """One loaded model behind a backend; implements `interfaces.Session`."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: HFTokenizer,
        *,
        max_context: int,
        effective: Effective,
        before_load_bytes: int,
        loaded_bytes: int,
    ) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._max_context = max_context
        self._effective = effective
        self._before_load_bytes = before_load_bytes
        self._loaded_bytes = loaded_bytes

    @property
    def tokenizer(self) -> HFTokenizer:
        """The tokenizer of the served model."""
        return self._tokenizer

    @property
    def max_context(self) -> int:
        """Most tokens one request may hold."""
        return self._max_context

    @property
    def batch_policy(self) -> str:
        """How requests are batched."""
        return self._backend.policy

    def _refusal(self, request: Request) -> str | None:
        length, more = len(request.prompt.token_ids), request.sampling.max_tokens
        if length == 0:
            return "the prompt is empty"
        if more < 1:
            return f'max_tokens "{more}" must be at least 1'
        if length + more > self._max_context:
            return (
                f"{length} prompt and {more} output tokens are more than the {self._max_context} "
                "one request may hold"
            )
        return None

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Keep the backend full and yield completions as they finish."""
        pieces: queue.Queue[tuple[str, Piece]] = queue.Queue()
        running: dict[str, tuple[str, _Generation]] = {}
        source = iter(requests)
        exhausted = False
        try:
            while running or not exhausted:
                while not exhausted and len(running) < 2 * self._backend.rows:
                    request = next(source, None)
                    if request is None:
                        exhausted = True
                        break
                    if refusal := self._refusal(request):
                        yield Completion(request.request_id, "", (), "error", refusal)
                        continue
                    if request.request_id in running:
                        raise EngineError(f'request id "{request.request_id}" is in use')
                    running[request.request_id] = self._start(request, pieces)
                if not running:
                    continue
                request_id, piece = pieces.get()
                if request_id not in running:
                    continue
                handle, generation = running[request_id]
                generation.take(piece)
                if generation.finish_reason is not None:
                    self._backend.cancel(handle)
                    del running[request_id]
                    yield generation.completion()
        finally:
            for handle, _ in running.values():
                self._backend.cancel(handle)

    def _start(
        self, request: Request, pieces: queue.Queue[tuple[str, Piece]]
    ) -> tuple[str, _Generation]:
        generation = _Generation(self._tokenizer, request)
        name = request.request_id
        return self._backend.submit(request, lambda piece: pieces.put((name, piece))), generation

    def stream(self, request: Request) -> Iterator[Chunk]:
        """Yield chunks with the time at which the computing side delivered them."""
        if refusal := self._refusal(request):
            yield Chunk((), time.perf_counter(), "error", refusal)
            return
        arrivals: queue.Queue[Piece] = queue.Queue()
        generation = _Generation(self._tokenizer, request)
        handle = self._backend.submit(request, arrivals.put)
        try:
            while generation.finish_reason is None:
                piece = arrivals.get()
                generation.take(piece)
                yield Chunk(
                    piece.token_ids,
                    piece.at_s,
                    generation.finish_reason,
                    piece.error,
                    tokens=piece.tokens,
                    layers=piece.layers,
                    cached_prompt_tokens=piece.cached_prompt_tokens,
                )
        finally:
            self._backend.cancel(handle)

    def loglikelihood(self, requests: Iterable[ScoreRequest]) -> Iterator[TokenLogprobs]:
        """Score one sequence after the other."""
        for request in requests:
            length = len(request.token_ids)
            if not 1 <= request.first_scored < length:
                raise EngineError(
                    f'"{request.request_id}": of {length} tokens those from {request.first_scored} cannot be scored'
                )
            if length > self._max_context + 1:
                raise EngineError(
                    f'"{request.request_id}" has {length} tokens, more than the {self._max_context + 1} '
                    "that can be scored"
                )
            yield self._backend.score(request)

    def hidden_states(self, requests: Iterable[ScoreRequest]) -> Iterator[HiddenStates]:
        """There are none."""
        raise UnsupportedError("this engine gives no hidden states: use engine=transformers")

    def output_head(self) -> OutputHead:
        """There is none."""
        raise UnsupportedError("this engine gives no output head: use engine=transformers")

    def describe(self) -> Effective:
        """The file's census with what the engine makes of it."""
        return self._effective

    def memory(self) -> MemoryUse:
        """Weights as the file has them, the KV pool as allocated, the process's peak, and the remainder.

        What the process grew by while loading, beyond the weights, is the engine's own copies
        (repacked or widened weights, its vocabulary): it stays in the remainder.
        """
        cache = self._backend.cache_use()
        weights = self._effective.resident_weight_bytes
        peak = peak_rss_bytes()
        parts = self._before_load_bytes + weights + cache.bytes
        grown = self._loaded_bytes - self._before_load_bytes
        return MemoryUse(
            device="cpu",
            before_load_bytes=self._before_load_bytes,
            weights_bytes=weights,
            kv_cache_bytes=cache.bytes,
            kv_cache_tokens=cache.tokens,
            kv_bytes_per_token_formula=cache.bytes_per_token,
            kv_bytes_per_token_measured=cache.bytes / cache.tokens if cache.tokens else 0.0,
            activation_peak_bytes=0,
            activation_peak_how=(
                f"not told by this engine: in the remainder (loading grew the process by {grown} bytes, "
                f"the file holds {weights})"
            ),
            process_peak_bytes=peak,
            unaccounted_bytes=peak - parts,
        )

    def close(self) -> None:
        """End all work."""
        self._backend.close()

"""A session on one loaded torch model: generation through batchers, scoring by plain forwards.

Scoring is `scoring.Scorer`'s; generation goes through the batchers of `batching`.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from quanteval.engines import census, nvml
from quanteval.engines import memory as accounting
from quanteval.engines.batching import Batcher, ContinuousBatcher, Event
from quanteval.engines.generation import Generation
from quanteval.engines.padded import PaddedBatcher
from quanteval.engines.scoring import Head, Scorer
from quanteval.engines.tokenizer import HFTokenizer
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
from quanteval.records import Effective, MemoryUse, UtilizationSample

PROBE_TOKENS = 256


class Limits(Protocol):
    """The engine's fields that a session needs."""

    @property
    def device(self) -> str: ...  # noqa: D102
    @property
    def batching(self) -> Literal["auto", "continuous", "padded"]: ...  # noqa: D102
    @property
    def max_batch_rows(self) -> int: ...  # noqa: D102
    @property
    def kv_cache_tokens(self) -> int: ...  # noqa: D102
    @property
    def page_tokens(self) -> int: ...  # noqa: D102
    @property
    def step_tokens(self) -> int: ...  # noqa: D102
    @property
    def score_batch_tokens(self) -> int: ...  # noqa: D102
    @property
    def max_context(self) -> int | None: ...  # noqa: D102


class Batchers:
    """The batcher for greedy requests, and a padded one for sampled requests, made when needed."""

    def __init__(self, limits: Limits, model: Any, eos: frozenset[int]) -> None:
        self._limits = limits
        self._model = model
        self._eos = eos
        self.greedy: Batcher = self._make_greedy()
        self._sampled: Batcher | None = None
        self._lock = threading.Lock()

    def _make_greedy(self) -> Batcher:
        limits = self._limits
        if limits.batching == "padded" or (limits.batching == "auto" and limits.device == "cpu"):
            # Packed attention grows with the square of all rows together: on a CPU that costs more than padding.
            why = "as configured" if limits.batching == "padded" else "quicker than paged on a CPU"
            return self._padded(why)
        try:
            return ContinuousBatcher(
                self._model,
                self._eos,
                rows=limits.max_batch_rows,
                cache_tokens=limits.kv_cache_tokens,
                page_tokens=limits.page_tokens,
                step_tokens=limits.step_tokens,
            )
        except Exception as error:
            if limits.batching == "continuous":
                raise UnsupportedError(
                    f"continuous batching does not take this model: {error}"
                ) from error
            return self._padded(f"continuous batching refused: {str(error).splitlines()[0]}")

    def _padded(self, why: str) -> PaddedBatcher:
        return PaddedBatcher(
            self._model,
            self._eos,
            rows=self._limits.max_batch_rows,
            cache_tokens=self._limits.kv_cache_tokens,
            why=why,
        )

    def for_request(self, request: Request) -> Batcher:
        """Return the batcher that takes this request."""
        if request.sampling.temperature <= 0 or isinstance(self.greedy, PaddedBatcher):
            return self.greedy
        with self._lock:
            if self._sampled is None:
                self._sampled = self._padded("sampled requests")
            return self._sampled

    @property
    def kv_cache(self) -> tuple[int, int]:
        """Bytes of all KV caches, and the tokens that they hold."""
        made = [self.greedy] if self._sampled is None else [self.greedy, self._sampled]
        return sum(b.kv_cache_bytes for b in made), sum(b.kv_cache_tokens for b in made)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the model free for the caller while the block runs."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.greedy.paused())
            if self._sampled is not None:
                stack.enter_context(self._sampled.paused())
            yield

    def close(self) -> None:
        """End all batchers."""
        self.greedy.close()
        if self._sampled is not None:
            self._sampled.close()


class TransformersSession:
    """One loaded model; implements `interfaces.Session`."""

    def __init__(
        self,
        limits: Limits,
        model: Any,
        tokenizer: HFTokenizer,
        batchers: Batchers,
        before_load_bytes: int,
    ) -> None:
        self._limits = limits
        self._model = model
        self._tokenizer = tokenizer
        self._batchers = batchers
        self._before_load_bytes = before_load_bytes
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
        self._max_context = min(limit, limits.kv_cache_tokens, limits.max_context or limit)
        self._activation: accounting.ActivationPeak | None = None
        # Some libraries repack their weights in the first forward pass: it must come before anything
        # is read back, and it also shows whether logits can be rebuilt from hidden states.
        self._rebuilds = self._head_rebuilds_logits()
        self._scorer = self._make_scorer()

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
        """How greedy requests are batched."""
        return self._batchers.greedy.policy

    # ---- generation

    def _refusal(self, request: Request) -> str | None:
        length = len(request.prompt.token_ids)
        if length == 0:
            return "the prompt is empty"
        if request.sampling.max_tokens < 1:
            return f'max_tokens "{request.sampling.max_tokens}" must be at least 1'
        wanted = length + request.sampling.max_tokens
        if wanted > self._max_context:
            return (
                f"{length} prompt and {request.sampling.max_tokens} output tokens are more than the "
                f"{self._max_context} one request may hold"
            )
        return None

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Keep the batcher full and yield completions as they finish."""
        events: queue.Queue[tuple[str, Event]] = queue.Queue()
        running: dict[str, tuple[Batcher, str, Generation]] = {}
        window = 2 * self._limits.max_batch_rows
        source = iter(requests)
        exhausted = False
        try:
            while running or not exhausted:
                while not exhausted and len(running) < window:
                    request = next(source, None)
                    if request is None:
                        exhausted = True
                        break
                    if refusal := self._refusal(request):
                        yield Completion(request.request_id, "", (), "error", refusal)
                        continue
                    if request.request_id in running:
                        raise EngineError(f'request id "{request.request_id}" is in use')
                    running[request.request_id] = self._start(request, events)
                if not running:
                    continue
                request_id, event = events.get()
                if request_id not in running:
                    continue
                batcher, handle, generation = running[request_id]
                if generation.take(event, time.perf_counter()):
                    batcher.cancel(handle)
                if generation.finish_reason is not None:
                    del running[request_id]
                    yield generation.completion()
        finally:
            for batcher, handle, _ in running.values():
                batcher.cancel(handle)

    def _start(
        self, request: Request, events: queue.Queue[tuple[str, Event]]
    ) -> tuple[Batcher, str, Generation]:
        batcher = self._batchers.for_request(request)
        generation = Generation(self._tokenizer.decode, request)
        request_id = request.request_id
        handle = batcher.submit(request, lambda event: events.put((request_id, event)))
        return batcher, handle, generation

    def stream(self, request: Request) -> Iterator[Chunk]:
        """Yield chunks with the time at which the computing thread delivered them."""
        if refusal := self._refusal(request):
            yield Chunk((), time.perf_counter(), "error", refusal)
            return
        arrivals: queue.Queue[tuple[Event, float]] = queue.Queue()
        batcher = self._batchers.for_request(request)
        generation = Generation(self._tokenizer.decode, request)
        handle = batcher.submit(request, lambda event: arrivals.put((event, time.perf_counter())))
        try:
            while generation.finish_reason is None:
                yield generation.chunk(*arrivals.get())
        finally:
            batcher.cancel(handle)

    async def astream(self, request: Request) -> AsyncIterator[Chunk]:
        """As `stream`, on an event loop and without a thread of its own."""
        if refusal := self._refusal(request):
            yield Chunk((), time.perf_counter(), "error", refusal)
            return
        loop = asyncio.get_running_loop()
        arrivals: asyncio.Queue[tuple[Event, float]] = asyncio.Queue()

        def deliver(event: Event) -> None:
            # A loop that has been closed meanwhile has nobody waiting, and must not end the others' batch.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(arrivals.put_nowait, (event, time.perf_counter()))

        batcher = self._batchers.for_request(request)
        generation = Generation(self._tokenizer.decode, request)
        handle = batcher.submit(request, deliver)
        try:
            while generation.finish_reason is None:
                yield generation.chunk(*await arrivals.get())
        finally:
            batcher.cancel(handle)

    # ---- scoring

    def _head_rebuilds_logits(self) -> bool:
        """Whether head(final hidden states) are the model's logits, bit for bit, on a short probe."""
        import torch

        head = self._model.get_output_embeddings()
        probe = torch.arange(1, 17, device=self._model.device)[None] % self._tokenizer.vocab_size
        with torch.no_grad():
            logits = self._model(input_ids=probe, use_cache=False).logits
            if head is None:
                return False
            try:
                hidden = self._model.base_model(input_ids=probe, use_cache=False).last_hidden_state
                rebuilt = Head(self._model, True, self._softcap).cap(head(hidden))
            except (AttributeError, TypeError, RuntimeError):
                return False
        return bool(torch.equal(rebuilt, logits))

    @property
    def _softcap(self) -> float | None:
        return getattr(self._model.config.get_text_config(), "final_logit_softcapping", None)

    def _make_scorer(self) -> Scorer:
        import torch

        on_cpu = self._model.device.type == "cpu"
        config = self._model.config.get_text_config()
        scorer = Scorer(
            Head(self._model, self._rebuilds, self._softcap),
            self._batchers.paused,
            batch_tokens=self._limits.score_batch_tokens,
            workers=torch.get_num_threads() if on_cpu else 1,
            longest_packed=getattr(config, "sliding_window", None) or self._max_context,
        )
        scorer.packs = scorer.can_pack(self._tokenizer.vocab_size)
        return scorer

    def close(self) -> None:
        """End the threads."""
        self._scorer.close()
        self._batchers.close()

    def _check_score_request(self, request: ScoreRequest) -> None:
        length = len(request.token_ids)
        if not 1 <= request.first_scored < length:
            raise EngineError(
                f'"{request.request_id}": of {length} tokens those from {request.first_scored} cannot be scored'
            )
        # The last token is only ever a target, so it needs no place.
        if length > self._max_context + 1:
            raise EngineError(
                f'"{request.request_id}" has {length} tokens, more than the {self._max_context + 1} that can be scored'
            )

    def _checked(self, requests: Iterable[ScoreRequest]) -> Iterator[ScoreRequest]:
        for request in requests:
            self._check_score_request(request)
            yield request

    def loglikelihood(self, requests: Iterable[ScoreRequest]) -> Iterator[TokenLogprobs]:
        """Score sequences in the order asked; those of one call share what their prefixes have in common."""
        return self._scorer.logprobs(self._checked(requests))

    def hidden_states(self, requests: Iterable[ScoreRequest]) -> Iterator[HiddenStates]:
        """Final hidden states before each scored token, on the CPU, in the served dtype."""
        self._need_rebuild()
        return self._scorer.hidden(self._checked(requests))

    def output_head(self) -> OutputHead:
        """The output head's weight and bias on the CPU."""
        self._need_rebuild()
        head = self._model.get_output_embeddings()
        weight = head.weight
        if hasattr(weight, "dequantize") and hasattr(weight, "__tensor_flatten__"):
            weight = weight.dequantize()
        bias = getattr(head, "bias", None)
        return OutputHead(
            weight=weight.detach().cpu(),
            bias=None if bias is None else bias.detach().cpu(),
            softcap=self._softcap,
        )

    def _need_rebuild(self) -> None:
        if not self._rebuilds:
            raise UnsupportedError(
                "this model's logits cannot be rebuilt from its final hidden states, so divergence "
                "from stored distributions cannot be measured"
            )

    # ---- what it is and what it holds

    def describe(self) -> Effective:
        """Read back what is loaded."""
        return census.read_back(self._model)

    def memory(self) -> MemoryUse:
        """Memory by part; the activation peak is measured once and kept."""
        if self._activation is None:
            self._activation = self._measure_activation()
        element = next(p for p in self._model.parameters() if p.is_floating_point()).element_size()
        kv_bytes, kv_tokens = self._batchers.kv_cache
        return accounting.measure(
            device=self._limits.device,
            before_load_bytes=self._before_load_bytes,
            weights_bytes=sum(census.model_dtype_bytes(self._model).values()),
            kv_cache_bytes=kv_bytes,
            kv_cache_tokens=kv_tokens,
            kv_formula=accounting.kv_bytes_per_token(self._model.config, element),
            activation=self._activation,
            weights_mapped_bytes=accounting.mapped_weight_bytes(self._model),
        )

    def device_sampler(self) -> AbstractContextManager[Callable[[], UtilizationSample]]:
        """Watch the device's own counters; a CPU has none that are read here."""
        if self._limits.device == "cuda":
            return nvml.watch_device()
        return contextlib.nullcontext(lambda: nvml.nothing("a CPU has no such counters"))

    def _measure_activation(self) -> accounting.ActivationPeak:
        import torch

        tokens = min(PROBE_TOKENS, self._max_context)
        ids = torch.arange(tokens, device=self._model.device)[None] % self._tokenizer.vocab_size

        def forward() -> None:
            with torch.no_grad():
                self._model(input_ids=ids, use_cache=False, logits_to_keep=1)

        with self._batchers.paused():
            return accounting.activation_peak(forward, self._limits.device, tokens)

"""Running many generations at once on one torch model: the interface, and continuous batching.

`ContinuousBatcher` uses transformers' continuous batching (paged attention; a row that ends makes
room at once) for greedy requests; `padded.PaddedBatcher` takes any model and any sampling. Both
deliver every token from the thread that computed it.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from quanteval.interfaces import Request, Sampling
from quanteval.records import FinishReason

CLOSE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Event:
    """What a batcher delivers: new tokens, or the end of a request, or both."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    started_s: float | None = None
    """`time.perf_counter()` at which the model began to read the request's prompt; None before that."""


Deliver = Callable[[Event], None]


class Batcher(Protocol):
    """Runs requests; `deliver` is called one event at a time, the end last, and must be quick and not raise."""

    @property
    def policy(self) -> str:
        """One line that goes into the records."""
        ...

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes allocated for the KV cache now."""
        ...

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that allocation holds."""
        ...

    def submit(self, request: Request, deliver: Deliver) -> str:
        """Queue a request and return a handle; its end is always delivered."""
        ...

    def cancel(self, handle: str) -> None:
        """Stop working on a request and deliver its end as cancelled, unless it has ended; nothing comes after."""
        ...

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Keep the model free for the caller while the block runs."""
        ...

    def close(self) -> None:
        """End the thread; requests still running get an error."""
        ...


@dataclass
class Open:
    """A request in work."""

    request: Request
    deliver: Deliver
    seen: int = 0


def cache_argument(forward: Callable[..., Any]) -> str:
    """Return the name under which a model's forward takes its cache; older ones say past_key_values."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def end_of(
    token_id: int, count: int, sampling: Sampling, eos: frozenset[int]
) -> FinishReason | None:
    """Return why a generation ends at its `count`-th token, None when it goes on."""
    if token_id in eos and not sampling.ignore_eos:
        return "stop"
    return "length" if count >= sampling.max_tokens else None


class ContinuousBatcher:
    """transformers' continuous batching, with its outputs routed straight to each request.

    Its cache is bounded (the library would take most of the free memory), prefix sharing is off (a
    warm prefix would falsify latency), and rows are capped: with SDPA all rows are packed into one
    sequence, whose attention grows with the square of what is in it.
    """

    def __init__(
        self,
        model: Any,
        eos: frozenset[int],
        *,
        rows: int,
        cache_tokens: int,
        page_tokens: int,
        step_tokens: int,
    ) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self._eos = eos
        self._rows = rows
        self._open: dict[str, Open] = {}
        # Held while delivering, so that nothing comes after an end; a delivery may cancel.
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        # One page more than asked: the cache keeps part of a page to itself.
        blocks = -(-cache_tokens // page_tokens) + 1
        on_cpu = model.device.type == "cpu"
        self._cache_tokens = cache_tokens
        self._step_tokens = min(step_tokens, cache_tokens)
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=1, eos_token_id=sorted(eos) or -1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=page_tokens,
                num_blocks=blocks,
                max_batch_tokens=self._step_tokens,
                max_requests_per_batch=rows,
                allow_block_sharing=False,
                use_async_batching=False,
                use_cuda_graph=False if on_cpu else None,
                auto_switch_to_flash=not on_cpu,
                seed=0,
            ),
        )
        self._manager.output_router = _Router(self._on_output)
        self._attention = model.config._attn_implementation
        self._manager.start()

    @property
    def policy(self) -> str:
        """What runs, and its limits."""
        return (
            f"continuous (transformers, {self._attention}), at most {self._rows} rows, "
            f"{self._cache_tokens} cache tokens, {self._step_tokens} tokens a step, no prefix sharing"
        )

    @property
    def _cache(self) -> Any:
        processor = self._manager.batch_processor
        return None if processor is None else processor.cache

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the page pool."""
        return 0 if self._cache is None else int(self._cache.cache_tensor.nbytes)

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens the page pool holds."""
        if self._cache is None:
            return 0
        return int(self._cache.num_blocks * self._manager.continuous_batching_config.page_size)

    def submit(self, request: Request, deliver: Deliver) -> str:
        """Queue a greedy request."""
        handle = f"{next(self._numbers)}"
        sampling = request.sampling
        with self._lock:
            self._open[handle] = Open(request, deliver)
        try:
            accepted = self._manager.add_request(
                list(request.prompt.token_ids),
                request_id=handle,
                max_new_tokens=sampling.max_tokens,
                streaming=True,
                eos_token_id=-1 if sampling.ignore_eos else (sorted(self._eos) or -1),
            )
        except Exception as error:
            self._deliver(handle, Event((), "error", f"{type(error).__name__}: {error}"))
            return handle
        if accepted is None:
            cause = self._manager.background_thread_status.fatal_error
            self._deliver(handle, Event((), "error", f"the generation loop has ended: {cause}"))
        return handle

    def cancel(self, handle: str) -> None:
        """End a request here and tell the loop to drop it."""
        if self._deliver(handle, Event((), "cancelled")):
            self._manager.cancel_request(handle)

    def _on_output(self, output: Any) -> None:
        with self._lock:
            entry = self._open.get(output.request_id)
            if entry is None:
                return
            new = tuple(int(i) for i in output.generated_tokens[entry.seen :])
            entry.seen += len(new)
            started = output.lifespan[0] if output.lifespan[0] > 0 else None
            if output.error is not None:
                event = Event(new, "error", str(output.error), started)
            elif output.is_finished():
                last = output.generated_tokens[-1] if output.generated_tokens else -1
                reason = end_of(last, entry.seen, entry.request.sampling, self._eos) or "length"
                event = Event(new, reason, None, started)
            elif new:
                event = Event(new, started_s=started)
            else:
                return
            self._deliver(output.request_id, event)

    def _deliver(self, handle: str, event: Event) -> bool:
        """Deliver to a request that has not ended; return whether there was one."""
        with self._lock:
            entry = self._open.get(handle)
            if entry is None:
                return False
            if event.finish_reason is not None:
                del self._open[handle]
            entry.deliver(event)
        return True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the loop between two steps."""
        if not self._manager.is_running():
            yield
            return
        with self._manager.pause():
            yield

    def close(self) -> None:
        """Stop the loop at once."""
        if self._manager.is_running():
            self._manager.stop(block=True, timeout=CLOSE_TIMEOUT_S, hard_stop=True)
        for handle in list(self._open):
            self._deliver(handle, Event((), "error", "the session was closed"))


class _Router:
    """Stands in for the library's output router: no queue between the loop and a request."""

    def __init__(self, on_output: Callable[[Any], None]) -> None:
        self.deliver = on_output
        self.output_queue: queue.Queue[Any] = queue.Queue()

    def deliver_batch(self, outputs: list[Any]) -> None:
        for output in outputs:
            self.deliver(output)

    def fail_and_deliver(self, state: Any, error: Exception) -> None:
        from transformers.generation.continuous_batching.requests import RequestStatus

        state.error = str(error) or type(error).__name__
        state.status = RequestStatus.FAILED
        self.deliver(state.to_generation_output())

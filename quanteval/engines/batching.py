"""Two ways to run many generations at once on one torch model, behind one small interface.

`ContinuousBatcher` uses transformers' continuous batching (paged attention; a row that ends makes
room at once) for greedy requests. `StaticBatcher` runs a left-padded batch to its end; it takes any
model and any sampling, with a random generator of its own for each row. Both deliver every token
from the thread that computed it.
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


Deliver = Callable[[Event], None]


class Batcher(Protocol):
    """Runs requests; `deliver` is called from the computing thread and must be quick."""

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
        """Stop working on a request; nothing more is delivered for it."""
        ...

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Keep the model free for the caller while the block runs."""
        ...

    def close(self) -> None:
        """End the thread; requests still running get an error."""
        ...


@dataclass
class _Open:
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


# --------------------------------------------------------------------------- continuous


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
        self._open: dict[str, _Open] = {}
        self._lock = threading.Lock()
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
            self._open[handle] = _Open(request, deliver)
        accepted = self._manager.add_request(
            list(request.prompt.token_ids),
            request_id=handle,
            max_new_tokens=sampling.max_tokens,
            streaming=True,
            eos_token_id=-1 if sampling.ignore_eos else (sorted(self._eos) or -1),
        )
        if accepted is None:
            cause = self._manager.background_thread_status.fatal_error
            self._end(handle, Event((), "error", f"the generation loop has ended: {cause}"))
        return handle

    def cancel(self, handle: str) -> None:
        """Forget a request here and tell the loop to drop it."""
        with self._lock:
            known = self._open.pop(handle, None)
        if known is not None:
            self._manager.cancel_request(handle)

    def _on_output(self, output: Any) -> None:
        with self._lock:
            entry = self._open.get(output.request_id)
        if entry is None:
            return
        new = tuple(int(i) for i in output.generated_tokens[entry.seen :])
        entry.seen += len(new)
        if output.error is not None:
            self._end(output.request_id, Event(new, "error", str(output.error)))
        elif output.is_finished():
            last = output.generated_tokens[-1] if output.generated_tokens else -1
            reason = end_of(last, entry.seen, entry.request.sampling, self._eos) or "length"
            self._end(output.request_id, Event(new, reason))
        elif new:
            entry.deliver(Event(new))

    def _end(self, handle: str, event: Event) -> None:
        with self._lock:
            entry = self._open.pop(handle, None)
        if entry is not None:
            entry.deliver(event)

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
            self._end(handle, Event((), "error", "the session was closed"))


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


# --------------------------------------------------------------------------- static


class StaticBatcher:
    """A batch runs to its end before the next one starts; requests that wait are taken together."""

    def __init__(self, model: Any, eos: frozenset[int], *, rows: int, why: str) -> None:
        self._model = model
        self._eos = eos
        self._rows = rows
        self._why = why
        self._waiting: queue.Queue[str | None] = queue.Queue()
        self._open: dict[str, _Open] = {}
        self._lock = threading.Lock()
        self._compute = threading.Lock()
        self._numbers = itertools.count()
        self._kv = (0, 0)
        self._thread = threading.Thread(target=self._loop, name="static-batches", daemon=True)
        self._thread.start()

    @property
    def policy(self) -> str:
        """What runs, and why."""
        return f"static, at most {self._rows} rows, left padding ({self._why})"

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the largest cache so far."""
        return self._kv[0]

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens, padding included, of the largest cache so far."""
        return self._kv[1]

    def submit(self, request: Request, deliver: Deliver) -> str:
        """Queue a request of any sampling."""
        handle = f"{next(self._numbers)}"
        with self._lock:
            self._open[handle] = _Open(request, deliver)
        self._waiting.put(handle)
        return handle

    def cancel(self, handle: str) -> None:
        """Forget a request; its row leaves the batch before the next step."""
        with self._lock:
            self._open.pop(handle, None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the running batch, then keep the model."""
        with self._compute:
            yield

    def close(self) -> None:
        """End after the running batch."""
        with self._lock:
            left = list(self._open.values())
            self._open.clear()
        self._waiting.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        for entry in left:
            entry.deliver(Event((), "error", "the session was closed"))

    def _loop(self) -> None:
        while (handle := self._waiting.get()) is not None:
            handles = [handle]
            while len(handles) < self._rows:
                try:
                    more = self._waiting.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    self._waiting.put(None)
                    break
                handles.append(more)
            with self._compute:
                try:
                    self._run(handles)
                except Exception as error:
                    message = f"{type(error).__name__}: {error}"
                    for broken in handles:
                        self._emit(broken, Event((), "error", message))

    def _emit(self, handle: str, event: Event) -> bool:
        """Deliver unless cancelled; return whether the request goes on."""
        with self._lock:
            entry = self._open.get(handle)
            if entry is not None and event.finish_reason is not None:
                del self._open[handle]
        if entry is None:
            return False
        entry.deliver(event)
        return event.finish_reason is None

    def _run(self, handles: list[str]) -> None:
        """Generate for one batch; rows that end leave it."""
        import torch

        with self._lock:
            rows = [(h, self._open[h].request) for h in handles if h in self._open]
        if not rows:
            return
        device = self._model.device
        longest = max(len(request.prompt.token_ids) for _, request in rows)
        ids = torch.zeros((len(rows), longest), dtype=torch.long)
        mask = torch.zeros((len(rows), longest), dtype=torch.long)
        for row, (_, request) in enumerate(rows):
            length = len(request.prompt.token_ids)
            ids[row, longest - length :] = torch.tensor(request.prompt.token_ids)
            mask[row, longest - length :] = 1
        ids, mask = ids.to(device), mask.to(device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        choosers = [_Chooser(request.sampling, torch) for _, request in rows]
        name = cache_argument(self._model.forward)
        cache: Any = None
        count = 0
        with torch.no_grad():
            while rows:
                out = self._model(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=positions,
                    use_cache=True,
                    logits_to_keep=1,
                    **{name: cache},
                )
                cache = out.past_key_values
                self._note_cache(cache, mask.numel())
                count += 1
                logits = out.logits[:, -1].float().cpu()
                tokens: list[int] = []
                kept: list[int] = []
                for row, (handle, request) in enumerate(rows):
                    if not bool(torch.isfinite(logits[row]).all()):
                        event = Event((), "error", "the model returned NaN or infinite logits")
                    else:
                        token = choosers[row](logits[row])
                        event = Event((token,), end_of(token, count, request.sampling, self._eos))
                    if self._emit(handle, event):
                        kept.append(row)
                        tokens.append(event.token_ids[0])
                if len(kept) < len(rows):
                    rows = [rows[row] for row in kept]
                    choosers = [choosers[row] for row in kept]
                    index = torch.tensor(kept, dtype=torch.long, device=device)
                    mask, positions = mask[index], positions[index]
                    if rows:
                        cache.batch_select_indices(index)
                if rows:
                    ids = torch.tensor(tokens, device=device)[:, None]
                    mask = torch.cat([mask, mask.new_ones((len(rows), 1))], dim=1)
                    positions = positions[:, -1:] + 1

    def _note_cache(self, cache: Any, tokens: int) -> None:
        layers = getattr(cache, "layers", None) or []
        size = sum(
            part.nbytes
            for layer in layers
            for part in (getattr(layer, "keys", None), getattr(layer, "values", None))
            if part is not None
        )
        if size > self._kv[0]:
            self._kv = (int(size), tokens)


class _Chooser:
    """Picks a row's next token: the argmax, or a draw from its own seeded generator."""

    def __init__(self, sampling: Sampling, torch: Any) -> None:
        self.sampling = sampling
        self.torch = torch
        self.generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: Any) -> int:
        sampling, torch = self.sampling, self.torch
        if sampling.temperature <= 0:
            return int(logits.argmax())
        logits = logits / sampling.temperature
        order = torch.argsort(logits, descending=True)
        probabilities = torch.softmax(logits[order].double(), dim=-1)
        keep = torch.ones_like(probabilities, dtype=torch.bool)
        if sampling.top_k > 0:
            keep[sampling.top_k :] = False
        if sampling.top_p < 1:
            # A token stays while the mass before it is below top_p, so the first always stays.
            keep &= (probabilities.cumsum(-1) - probabilities) < sampling.top_p
        probabilities = probabilities * keep
        drawn = torch.multinomial(probabilities, 1, generator=self.generator)
        return int(order[drawn])

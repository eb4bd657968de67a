"""A left-padded batch whose slots are refilled: takes any model and any sampling, at some cost in padding.

A row that ends leaves the batch at once and the next request takes its place, so that one long answer
does not hold the others up. Each row draws from a random generator of its own, seeded by its request.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quanteval.engines.batching import (
    CLOSE_TIMEOUT_S,
    Deliver,
    Event,
    Open,
    cache_argument,
    end_of,
)
from quanteval.interfaces import Request, Sampling


class PaddedBatcher:
    """Implements `batching.Batcher` on a plain model and its ordinary cache."""

    def __init__(self, model: Any, eos: frozenset[int], *, rows: int, why: str) -> None:
        self._model = model
        self._eos = eos
        self._rows = rows
        self._why = why
        self._open: dict[str, Open] = {}
        self._waiting: deque[str] = deque()
        # One condition guards all state; the model belongs to the loop unless somebody asked for a pause.
        self._changed = threading.Condition()
        self._pauses = 0
        self._computing = False
        self._closed = False
        self._numbers = itertools.count()
        self._kv = (0, 0)
        self._thread = threading.Thread(target=self._loop, name="padded-batch", daemon=True)
        self._thread.start()

    @property
    def policy(self) -> str:
        """What runs, and why."""
        return f"padded, at most {self._rows} rows, left padding, slots refilled ({self._why})"

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
        with self._changed:
            closed = self._closed
            if not closed:
                self._open[handle] = Open(request, deliver)
                self._waiting.append(handle)
                self._changed.notify_all()
        if closed:
            deliver(Event((), "error", "the session was closed"))
        return handle

    def cancel(self, handle: str) -> None:
        """Forget a request; its row leaves the batch before the next step."""
        with self._changed:
            self._open.pop(handle, None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the running step, then keep the model."""
        with self._changed:
            self._pauses += 1
            self._changed.wait_for(lambda: not self._computing)
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """End after the running step; requests still open get an error."""
        with self._changed:
            self._closed = True
            left = list(self._open.values())
            self._open.clear()
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)
        for entry in left:
            entry.deliver(Event((), "error", "the session was closed"))

    # ---- the computing thread

    def _loop(self) -> None:
        batch = _Batch(self._model)
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or (not self._pauses and (batch.rows or self._waiting))  # noqa: B023
                )
                if self._closed:
                    return
                new = self._take(self._rows - len(batch.rows)) if batch.refills else []
                self._computing = True
            try:
                self._step(batch, new)
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
                for row in (*batch.rows, *new):
                    self._emit(row, Event((), "error", message))
                batch = _Batch(self._model)
            finally:
                with self._changed:
                    self._computing = False
                    self._changed.notify_all()

    def _take(self, count: int) -> list[_Row]:
        """Return up to `count` waiting requests that nobody cancelled."""
        new: list[_Row] = []
        while self._waiting and len(new) < count:
            handle = self._waiting.popleft()
            if handle in self._open:
                new.append(_Row(handle, self._open[handle].request))
        return new

    def _step(self, batch: _Batch, new: list[_Row]) -> None:
        """Compute one token of every row, those of new rows by reading their prompts."""
        with self._changed:
            batch.keep([row.handle in self._open for row in batch.rows])
        logits = batch.advance() if batch.rows else []
        going = self._choose(batch.rows, logits)
        batch.keep(going)
        if new:
            first, logits = batch.begin(new)
            first.keep(self._choose(new, logits))
            batch.join(first)
        tokens, size = batch.cache_use()
        if size > self._kv[0]:
            self._kv = (size, tokens)

    def _choose(self, rows: list[_Row], logits: Any) -> list[bool]:
        """Pick and deliver each row's next token; return which rows go on."""
        import torch

        going = []
        for row, scores in zip(rows, logits, strict=True):
            if not bool(torch.isfinite(scores).all()):
                event = Event((), "error", "the model returned NaN or infinite logits")
            else:
                row.last = row.chooser(scores)
                row.count += 1
                sampling = row.request.sampling
                event = Event((row.last,), end_of(row.last, row.count, sampling, self._eos))
            going.append(self._emit(row, event))
        return going

    def _emit(self, row: _Row, event: Event) -> bool:
        """Deliver unless cancelled; return whether the request goes on."""
        with self._changed:
            entry = self._open.get(row.handle)
            if entry is not None and event.finish_reason is not None:
                del self._open[row.handle]
        if entry is None:
            return False
        entry.deliver(event)
        return event.finish_reason is None


class _Row:
    """A request in the batch: its last token and how many it has."""

    def __init__(self, handle: str, request: Request) -> None:
        self.handle = handle
        self.request = request
        self.chooser = _Chooser(request.sampling)
        self.last = -1
        self.count = 0


@dataclass
class _Batch:
    """Rows computed together: which columns of the cache are theirs, and the cache itself.

    `mask` is [rows, columns], `positions` [rows, 1] the depth of each row's last column.
    """

    model: Any
    rows: list[_Row]
    mask: Any = None
    positions: Any = None
    cache: Any = None

    def __init__(self, model: Any) -> None:
        self.model = model
        self.rows = []

    @property
    def refills(self) -> bool:
        """Whether rows may join now: always while it is empty, later where the cache is of the plain sort."""
        if not self.rows:
            return True
        from transformers.cache_utils import DynamicLayer

        return all(type(layer) is DynamicLayer for layer in self.cache.layers)

    def begin(self, new: list[_Row]) -> tuple[_Batch, Any]:
        """Read the prompts of new rows; return their batch and their logits [rows, V]."""
        import torch

        prompts = [row.request.prompt.token_ids for row in new]
        longest = max(map(len, prompts))
        ids = torch.zeros((len(new), longest), dtype=torch.long)
        mask = torch.zeros((len(new), longest), dtype=torch.long)
        for i, prompt in enumerate(prompts):
            ids[i, longest - len(prompt) :] = torch.tensor(prompt)
            mask[i, longest - len(prompt) :] = 1
        first = _Batch(self.model)
        first.rows = new
        first.mask = mask.to(self.model.device)
        positions = (first.mask.cumsum(-1) - 1).clamp(min=0)
        logits = first._forward(ids.to(self.model.device), positions)
        first.positions = positions[:, -1:]
        return first, logits

    def advance(self) -> Any:
        """Compute one more column from the rows' last tokens; return logits [rows, V]."""
        import torch

        ids = torch.tensor([[row.last] for row in self.rows], device=self.model.device)
        self.mask = torch.cat([self.mask, self.mask.new_ones((len(self.rows), 1))], dim=1)
        self.positions = self.positions + 1
        return self._forward(ids, self.positions)

    def _forward(self, ids: Any, positions: Any) -> Any:
        import torch

        with torch.no_grad():
            out = self.model(
                input_ids=ids,
                attention_mask=self.mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **{cache_argument(self.model.forward): self.cache},
            )
        self.cache = out.past_key_values
        return out.logits[:, -1].float().cpu()

    def keep(self, going: list[bool]) -> None:
        """Drop the rows that do not go on, and columns that belong to nobody any more."""
        import torch

        if all(going):
            return
        self.rows = [row for row, stays in zip(self.rows, going, strict=True) if stays]
        if not self.rows:
            self.mask = self.positions = self.cache = None
            return
        index = torch.tensor([i for i, stays in enumerate(going) if stays], device=self.mask.device)
        self.mask, self.positions = self.mask[index], self.positions[index]
        self.cache.batch_select_indices(index)
        empty = int(self.mask.any(0).long().argmax())
        if empty and self.refills:
            self.mask = self.mask[:, empty:]
            for layer in self.cache.layers:
                layer.keys = layer.keys[:, :, empty:].contiguous()
                layer.values = layer.values[:, :, empty:].contiguous()

    def join(self, other: _Batch) -> None:
        """Take the rows of another batch; the shorter of both is padded on the left."""
        import torch
        from torch.nn.functional import pad

        if not other.rows:
            return
        if not self.rows:
            self.rows, self.mask, self.positions, self.cache = (
                other.rows, other.mask, other.positions, other.cache,
            )  # fmt: skip
            return
        columns = max(self.mask.shape[1], other.mask.shape[1])
        parts = (self, other)
        self.mask = torch.cat([pad(p.mask, (columns - p.mask.shape[1], 0)) for p in parts])
        for mine, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
            for name in ("keys", "values"):
                both = [getattr(layer, name) for layer in (mine, theirs)]
                padded = [pad(part, (0, 0, columns - part.shape[2], 0)) for part in both]
                setattr(mine, name, torch.cat(padded))
        self.positions = torch.cat([self.positions, other.positions])
        self.rows = [*self.rows, *other.rows]

    def cache_use(self) -> tuple[int, int]:
        """Return the tokens, padding included, and the bytes that the cache holds."""
        layers = getattr(self.cache, "layers", None) or []
        size = sum(
            part.nbytes
            for layer in layers
            for part in (getattr(layer, "keys", None), getattr(layer, "values", None))
            if part is not None
        )
        return (0 if self.mask is None else int(self.mask.numel())), int(size)


class _Chooser:
    """Picks a row's next token: the argmax, or a draw from its own seeded generator."""

    def __init__(self, sampling: Sampling) -> None:
        import torch

        self.sampling = sampling
        self.generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits: Any) -> int:
        import torch

        sampling = self.sampling
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

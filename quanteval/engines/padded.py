"""A left-padded batch whose slots are refilled: takes any model and any sampling, at some cost in padding.

A row that ends leaves the batch at once and the next request takes its place, so that one long answer
does not hold the others up. Each row draws from a random generator of its own, seeded by its request.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from quanteval.engines.batching import CLOSE_TIMEOUT_S, Deliver, Event, Open, end_of
from quanteval.engines.slots import Batch, Row
from quanteval.interfaces import Request


class PaddedBatcher:
    """Implements `batching.Batcher` on a plain model and its ordinary cache."""

    def __init__(
        self, model: Any, eos: frozenset[int], *, rows: int, cache_tokens: int, why: str
    ) -> None:
        self._model = model
        self._eos = eos
        self._rows = rows
        self._cache_tokens = cache_tokens
        self._why = why
        self._open: dict[str, Open] = {}
        self._waiting: deque[Row] = deque()
        self._batch = Batch(model)
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
        return (
            f"padded, at most {self._rows} rows, {self._cache_tokens} cache tokens, left padding, "
            f"slots refilled ({self._why})"
        )

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
                self._waiting.append(Row(handle, request))
                self._changed.notify_all()
        if closed:
            deliver(Event((), "error", "the session was closed"))
        return handle

    def cancel(self, handle: str) -> None:
        """End a request; its row leaves the batch before the next step."""
        self._deliver(handle, Event((), "cancelled"))

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
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join(CLOSE_TIMEOUT_S)
        for handle in list(self._open):
            self._deliver(handle, Event((), "error", "the session was closed"))

    # ---- the computing thread

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._has_work())
                if self._closed:
                    return
                gone = [row for row in self._batch.live if row.handle not in self._open]
                self._computing = True
            new: list[Row] = []
            try:
                self._batch.drop(gone)
                new = self._take(self._batch)
                self._step(self._batch, new)
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
                for row in (*self._batch.live, *new):
                    self._emit(row, Event((), "error", message))
                self._batch = Batch(self._model)
            finally:
                with self._changed:
                    self._computing = False
                    self._changed.notify_all()

    def _has_work(self) -> bool:
        return not self._pauses and bool(self._batch.live or self._waiting)

    def _take(self, batch: Batch) -> list[Row]:
        """Return the waiting requests that join now: as many as there are slots and cache for."""
        new: list[Row] = []
        with self._changed:
            while self._waiting and len(batch.live) + len(new) < self._rows:
                row = self._waiting[0]
                if row.handle not in self._open:
                    self._waiting.popleft()
                elif batch.fits([*new, row], self._cache_tokens):
                    new.append(self._waiting.popleft())
                else:
                    break
        return new

    def _step(self, batch: Batch, new: list[Row]) -> None:
        """Compute one token of every row, those of new rows by reading their prompts."""
        if batch.live and not new:
            # Rows grew into what others had hoped for: the latest wait, and read their tokens again later.
            with self._changed:
                for row in batch.give_way(self._cache_tokens):
                    self._waiting.appendleft(row)
        if batch.live:
            batch.drop(self._choose(batch.live, batch.advance()))
        if new:
            for row in new:
                # A row that gave way has begun before.
                row.started_s = row.started_s or time.perf_counter()
            first, logits = batch.begin(new)
            first.drop(self._choose(new, logits))
            batch.join(first)
        else:
            batch.tidy()
        tokens, size = batch.cache_use()
        if size > self._kv[0]:
            self._kv = (size, tokens)

    def _choose(self, rows: list[Row], logits: Any) -> list[Row]:
        """Pick and deliver each row's next token; return the rows that have ended."""
        finite = logits.isfinite().all(-1).tolist()
        likely = logits.argmax(-1).tolist()
        ended = []
        for i, row in enumerate(rows):
            if not finite[i]:
                event = Event(
                    (), "error", "the model returned NaN or infinite logits", row.started_s
                )
            else:
                sampling = row.request.sampling
                token = likely[i] if sampling.temperature <= 0 else row.chooser(logits[i])
                row.written.append(token)
                reason = end_of(token, len(row.written), sampling, self._eos)
                event = Event((token,), reason, started_s=row.started_s)
            if not self._emit(row, event):
                ended.append(row)
        return ended

    def _emit(self, row: Row, event: Event) -> bool:
        """Deliver unless cancelled; return whether the request goes on."""
        return self._deliver(row.handle, event) and event.finish_reason is None

    def _deliver(self, handle: str, event: Event) -> bool:
        """Deliver to a request that has not ended; return whether there was one."""
        # The lock is held meanwhile, so that nothing comes after an end.
        with self._changed:
            entry = self._open.get(handle)
            if entry is None:
                return False
            if event.finish_reason is not None:
                del self._open[handle]
            entry.deliver(event)
        return True

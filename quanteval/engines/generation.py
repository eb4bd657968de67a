"""One generation as it comes in from a batcher: tokens, text where stop strings matter, its end, seconds by layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from quanteval.engines.batching import Event
from quanteval.interfaces import Chunk, Completion, Request
from quanteval.records import FinishReason


class Generation:
    """Follows one request from its submission to its end."""

    def __init__(self, decode: Callable[[Sequence[int]], str], request: Request) -> None:
        self._decode = decode
        self._request = request
        self._submitted_s = time.perf_counter()
        self._started_s: float | None = None
        self._first_s: float | None = None
        self._detokenize_s = 0.0
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self._text_end: int | None = None

    def take(self, event: Event, at_s: float) -> bool:
        """Add what was delivered at `at_s`; return whether a stop string ended the request just now."""
        self.token_ids.extend(event.token_ids)
        self.error = event.error
        self.finish_reason = event.finish_reason
        if event.token_ids and self._first_s is None:
            self._started_s, self._first_s = event.started_s, at_s
        stops = self._request.sampling.stop
        if not stops or not event.token_ids:
            return False
        began = time.perf_counter()
        text = self._decode(self.token_ids)
        self._detokenize_s += time.perf_counter() - began
        ends = [at for stop in stops if (at := text.find(stop)) >= 0]
        if not ends:
            return False
        self._text_end = min(ends)
        hit_early = self.finish_reason is None
        self.finish_reason = "stop"
        return hit_early

    def chunk(self, event: Event, at_s: float) -> Chunk:
        """Take an event and return it as a chunk; the last one says where the time went."""
        self.take(event, at_s)
        if self.finish_reason is None:
            return Chunk(event.token_ids, at_s)
        return Chunk(
            event.token_ids,
            at_s,
            self.finish_reason,
            event.error,
            cached_prompt_tokens=0,
            layers=self._layers(at_s),
        )

    def _layers(self, end_s: float) -> dict[str, float]:
        """Seconds from submission to the computing of the prompt, to the first token, and to the last."""
        layers: dict[str, float] = {}
        if self._started_s is not None and self._first_s is not None:
            layers["queue"] = self._started_s - self._submitted_s
            layers["prefill"] = self._first_s - self._started_s
            layers["decode"] = end_s - self._first_s
        if self._detokenize_s:
            layers["detokenize"] = self._detokenize_s
        return layers

    def completion(self) -> Completion:
        """Return the whole of it, once it has ended."""
        failed = self.finish_reason in ("error", "cancelled")
        return Completion(
            request_id=self._request.request_id,
            text="" if failed else self._decode(self.token_ids)[: self._text_end],
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason or "error",
            error=self.error,
            elapsed_s=time.perf_counter() - self._submitted_s,
        )

"""How many sequences of which length a served model holds at once: found by search, an out-of-memory caught.

Every attempt is a closed load point of as many requests as the batch, all sent at once. It fits when all ended well
and there was a moment at which all were being written. Its requests are marked unmeasured; its record's note says how
it went, and `metrics.fit.fit_rows` reads the table back from the records.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quanteval.bench.client import LoadPoint
from quanteval.bench.driver import drive_closed
from quanteval.bench.prompts import PlannedRequest, PromptMaker, corpus_fingerprint
from quanteval.errors import EngineError
from quanteval.interfaces import Session
from quanteval.metrics.fit import FITS, PREFIX, Outcome, search_fit
from quanteval.records import LoadPointRecord, RequestTrace

CONTEXT_SIGNS = ("one request may hold", "maximum context", "context length", "longer than the context")  # fmt: skip
"""How engines say that a single request is too long."""


@dataclass(frozen=True)
class FitSearch:
    """Searches the largest batch at lengths doubling up to the context; fields are those of conf/bench/fit.yaml."""

    shortest: int = 128
    longest: int | None = None
    max_batch: int = 256
    output_tokens: int = 16
    resolution: float = 0.05
    timeout_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("shortest", "max_batch", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} "{getattr(self, name)}" must be at least 1')
        if self.longest is not None and self.longest < self.shortest:
            raise ValueError(f'longest "{self.longest}" must be at least the shortest')
        if not 0 <= self.resolution < 1:
            raise ValueError(f'resolution "{self.resolution}" must be a share from 0 to below 1')
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f'timeout_s "{self.timeout_s}" must be positive and finite')

    def fingerprint(self) -> dict[str, Any]:
        """Everything the attempts depend on besides the served model."""
        return {"kind": "fit", **asdict(self), "corpus": corpus_fingerprint()}

    def lengths(self, max_context: int) -> list[int]:
        """Return powers of two times the shortest, and the longest itself."""
        end = min(max_context, self.longest or max_context)
        doubling = itertools.takewhile(
            lambda n: n < end, (self.shortest << i for i in itertools.count())
        )
        return [*doubling, end]

    def run(self, session: Session) -> Iterator[RequestTrace | LoadPointRecord]:
        """Yield the traces and the record of every attempt."""
        maker = PromptMaker(session.tokenizer, self.seed)
        attempts = _Attempts(self, session, maker)
        for _ in search_fit(
            self.lengths(session.max_context), attempts, self.max_batch, self.resolution
        ):
            yield from attempts.take()
        yield from attempts.take()


class _Attempts:
    """Drives one load point an attempt and keeps what it left."""

    def __init__(self, plan: FitSearch, session: Session, maker: PromptMaker) -> None:
        self._plan = plan
        self._session = session
        self._maker = maker
        self._places = itertools.count()
        self._left: list[RequestTrace | LoadPointRecord] = []

    def take(self) -> list[RequestTrace | LoadPointRecord]:
        """Return what was left since the last call."""
        left, self._left = self._left, []
        return left

    def __call__(self, length: int, batch: int) -> Outcome:
        """Try a batch; after a failure that says nothing, see whether the served model still answers."""
        outcome = self._try(f"{PREFIX}{length}", length, batch)
        if outcome.limit != "error":
            return outcome
        alive = self._try("fit_alive", self._shortest_length, 1)
        if alive.fits:
            return outcome
        return self._relabel(Outcome(False, "died", outcome.note), f"{PREFIX}{length}")

    @property
    def _shortest_length(self) -> int:
        return min(self._plan.shortest, self._plan.output_tokens + 16)

    def _relabel(self, outcome: Outcome, name: str) -> Outcome:
        """Write into the attempt's record what was learnt after it."""
        for i in reversed(range(len(self._left))):
            item = self._left[i]
            if isinstance(item, LoadPointRecord) and item.name == name:
                self._left[i] = item.model_copy(update={"note": outcome.text})
                break
        return outcome

    def _try(self, name: str, length: int, batch: int) -> Outcome:
        # Prompts are read one after another by some engines: the first must still be written when the last begins.
        output = min(self._plan.output_tokens + batch, max(1, length // 2))
        point = LoadPoint(name, batch, warmup=True, stage="search")
        requests = [
            PlannedRequest(
                f"{name}-{batch}-{i}", str(length), length - output, output, next(self._places)
            )
            for i in range(batch)
        ]
        traces: list[RequestTrace] = []
        record: LoadPointRecord | None = None
        failure = ""
        try:
            for item in drive_closed(
                self._session, self._maker, point, requests, iter(()), self._plan.timeout_s
            ):
                if isinstance(item, RequestTrace):
                    traces.append(item)
                else:
                    record = item
        except EngineError as error:
            failure = str(error)
        outcome = judge(traces, batch, failure)
        self._left += traces
        if record is not None:
            self._left.append(record.model_copy(update={"note": outcome.text}))
        return outcome


def judge(traces: Sequence[RequestTrace], batch: int, failure: str = "") -> Outcome:
    """Say whether `batch` requests sent at once were held at once, from their traces."""
    if failure:
        return Outcome(False, "died", failure)
    bad = [trace for trace in traces if trace.status != "ok"]
    if any(trace.status == "out_of_memory" for trace in bad):
        first = next(trace for trace in bad if trace.status == "out_of_memory")
        return Outcome(False, "memory", first.error)
    if any(sign in trace.error.lower() for trace in bad for sign in CONTEXT_SIGNS):
        return Outcome(False, "context", bad[0].error)
    if bad or len(traces) < batch:
        note = f"{bad[0].status}: {bad[0].error}" if bad else "requests left no trace"
        return Outcome(False, "error", note)
    last_begin = max(trace.chunk_times_s[0] for trace in traces)
    first_end = min(trace.chunk_times_s[-1] for trace in traces)
    if batch > 1 and last_begin > first_end:
        return Outcome(False, "cache", "some waited until others had ended")
    return Outcome(True, note=FITS)

"""What is measured: a warm-up, single-stream latency by prompt length, and closed-loop load points."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quanteval.bench.client import LoadPoint
from quanteval.bench.closed_loop import closed_loop
from quanteval.bench.workload import (
    Bucket,
    PlannedRequest,
    PromptMaker,
    corpus_fingerprint,
    draw_buckets,
    requests_digest,
)
from quanteval.errors import ConfigError
from quanteval.interfaces import Session
from quanteval.records import RequestTrace

WARMUP = "warmup"
SINGLE_STREAM = "single_stream"


@dataclass(frozen=True)
class NoBench:
    """Measures nothing; memory is still accounted for."""

    def fingerprint(self) -> dict[str, Any]:
        """Nothing to depend on."""
        return {"kind": "none"}

    def run(self, session: Session) -> Iterator[RequestTrace]:
        """Yield nothing."""
        yield from ()


@dataclass(frozen=True)
class LoadBench:
    """The standard plan; fields are those of conf/bench/*.yaml.

    Outputs have a fixed length (the end token is ignored), so that every variant does equal work.
    Each load point begins with one unmeasured request a slot, of staggered output lengths, so that
    the slots do not run in step; measured requests follow, and fillers keep all slots full until
    the last of those has ended. Unmeasured requests are in the traces, marked `warmup`.
    """

    buckets: tuple[Bucket, ...] = (Bucket(32, 128, 0.7), Bucket(256, 512, 0.3))
    output_tokens: int = 24
    single_stream_requests: int = 5
    concurrencies: tuple[int, ...] = (4, 8)
    requests_per_slot: int = 2
    repetitions: int = 1
    timeout_s: float = 300.0
    seed: int = 0

    def __post_init__(self) -> None:
        names = [bucket.name for bucket in self.buckets]
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f'buckets "{names}" must be length ranges, at least one and no two alike'
            )
        for name in ("output_tokens", "single_stream_requests", "requests_per_slot", "repetitions"):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} "{getattr(self, name)}" must be at least 1')
        loads = self.concurrencies
        if any(c < 1 for c in loads) or len(set(loads)) < len(loads):
            raise ValueError(f'concurrencies "{list(loads)}" must be at least 1, no two alike')
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f'timeout_s "{self.timeout_s}" must be positive and finite')
        if self.seed < 0:
            raise ValueError(f'seed "{self.seed}" must not be negative')

    def fingerprint(self) -> dict[str, Any]:
        """Everything the traces depend on besides the served model, the planned requests by their hash."""
        planned = [request for _, requests in self.load_points() for request in requests]
        return {
            "kind": "load",
            **asdict(self),
            "buckets": [asdict(bucket) for bucket in self.buckets],
            "concurrencies": list(self.concurrencies),
            "requests_sha256": requests_digest(planned),
            "corpus": corpus_fingerprint(),
        }

    def run(self, session: Session) -> Iterator[RequestTrace]:
        """Warm up, then yield the traces of every load point.

        Raises ConfigError before the first request when a bucket does not fit the session's
        context, and EngineError when the engine hangs.
        """
        for bucket in self.buckets:
            output = self._output_tokens(bucket)
            if bucket.high + output > session.max_context:
                raise ConfigError(
                    f'bench bucket "{bucket.name}" with {output} output tokens does not fit the '
                    f"{session.max_context} tokens a request may hold: choose shorter ones, or a larger cache"
                )
        maker = PromptMaker(session.tokenizer, self.seed)
        numbers = itertools.count()
        for point, requests in self.load_points():
            fillers = _fillers(point, requests, numbers) if not point.warmup else iter(())
            yield from closed_loop(session, maker, point, requests, fillers, self.timeout_s)

    def load_points(self) -> Iterator[tuple[LoadPoint, list[PlannedRequest]]]:
        """Yield every load point in order with its requests, fillers left out: the same at every call."""
        places = itertools.count()
        warmup = LoadPoint(WARMUP, 1, warmup=True)
        yield warmup, self._plan(warmup, [(b, b.high) for b in self.buckets], places)
        for repetition in range(self.repetitions):
            single = LoadPoint(SINGLE_STREAM, 1, repetition)
            yield single, self._plan(single, self._in_turns(), places)
            for slots in self.concurrencies:
                loop = LoadPoint(f"closed_loop_{slots}", slots, repetition)
                yield loop, self._plan(loop, self._mixed(loop.name, slots), places)

    def _plan(
        self, point: LoadPoint, chosen: Sequence[tuple[Bucket, int]], places: Iterator[int]
    ) -> list[PlannedRequest]:
        """Number the requests; the first of each slot is its ramp, and ends after its own share of an output."""
        ramp = 0 if point.warmup else point.concurrency
        planned = []
        for i, (bucket, length) in enumerate(chosen):
            name = f"{point.name}-{point.repetition}-{i}"
            output = self._output_tokens(bucket)
            if i < ramp:
                part = max(1, output * (i + 1) // (ramp + 1))
                request = PlannedRequest(name, bucket.name, length, part, next(places), "ramp")
            else:
                request = PlannedRequest(name, bucket.name, length, output, next(places))
            planned.append(request)
        return planned

    def _output_tokens(self, bucket: Bucket) -> int:
        return bucket.output_tokens or self.output_tokens

    def _in_turns(self) -> list[tuple[Bucket, int]]:
        """One to begin with, then as many of each bucket in turns: a drift of the machine meets all alike.

        Lengths are the same in every repetition; only the texts differ.
        """
        rng = random.Random(f"{self.seed}/{SINGLE_STREAM}")
        chosen = [self.buckets[0], *self.buckets * self.single_stream_requests]
        return [(bucket, rng.randint(bucket.low, bucket.high)) for bucket in chosen]

    def _mixed(self, name: str, slots: int) -> list[tuple[Bucket, int]]:
        """One for each slot to begin with, then the measured ones, both in the shares of the weights."""
        rng = random.Random(f"{self.seed}/{name}")
        chosen = draw_buckets(self.buckets, slots, rng)
        chosen += draw_buckets(self.buckets, slots * self.requests_per_slot, rng)
        return [(bucket, rng.randint(bucket.low, bucket.high)) for bucket in chosen]


def _fillers(
    point: LoadPoint, requests: Sequence[PlannedRequest], numbers: Iterator[int]
) -> Iterator[PlannedRequest]:
    """Yield requests like the measured ones without end; their places come from the far end."""
    like = itertools.cycle([request for request in requests if request.role == "measured"])
    for request in like:
        number = next(numbers)
        name = f"{point.name}-{point.repetition}-filler-{number}"
        yield replace(request, request_id=name, place=-1 - number, role="filler")

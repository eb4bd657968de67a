"""What is measured: a warm-up, single-stream latency by prompt length, and closed-loop load points."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quanteval.bench.client import Slot, follow
from quanteval.bench.workload import (
    Bucket,
    PromptMaker,
    corpus_fingerprint,
    describe_buckets,
    make_requests,
)
from quanteval.errors import ConfigError
from quanteval.interfaces import Request, Session
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
    In a closed loop `concurrency` slots are kept full: each sends its next request when the last one
    ended. Requests that did not run with all slots full the whole time (the first and the last few)
    are kept in the traces and left out of steady-state figures (see `metrics.latency`).
    """

    buckets: tuple[Bucket, ...] = (Bucket(32, 128, 0.7), Bucket(256, 512, 0.3))
    output_tokens: int = 32
    single_stream_requests: int = 6
    concurrencies: tuple[int, ...] = (4, 8)
    requests_per_slot: int = 3
    repetitions: int = 1
    timeout_s: float = 300.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.buckets:
            raise ValueError('buckets "[]" must hold at least one length range')
        for name in ("output_tokens", "single_stream_requests", "requests_per_slot", "repetitions"):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} "{getattr(self, name)}" must be at least 1')
        if any(c < 1 for c in self.concurrencies):
            raise ValueError(f'concurrencies "{list(self.concurrencies)}" must be at least 1')
        if self.timeout_s <= 0:
            raise ValueError(f'timeout_s "{self.timeout_s}" must be positive')

    def fingerprint(self) -> dict[str, Any]:
        """What the traces depend on besides the served model."""
        return {
            "kind": "load",
            "buckets": describe_buckets(self.buckets),
            "output_tokens": self.output_tokens,
            "single_stream_requests": self.single_stream_requests,
            "concurrencies": list(self.concurrencies),
            "requests_per_slot": self.requests_per_slot,
            "repetitions": self.repetitions,
            "timeout_s": self.timeout_s,
            "seed": self.seed,
            "corpus": corpus_fingerprint(),
        }

    def run(self, session: Session) -> Iterator[RequestTrace]:
        """Warm up, then yield the traces of every load point.

        Raises ConfigError when a bucket does not fit the session's context.
        """
        for bucket in self.buckets:
            if bucket.high + self.output_tokens > session.max_context:
                raise ConfigError(
                    f'bench bucket "{bucket.name}" with {self.output_tokens} output tokens is longer than '
                    f"the {session.max_context} tokens a request may hold"
                )
        maker = PromptMaker(session.tokenizer, self.seed)
        yield from self._one_by_one(session, self._warmup_requests(maker), WARMUP, warmup=True)
        for repetition in range(self.repetitions):
            single = self._single_stream_requests(maker, repetition)
            yield from self._one_by_one(session, single, SINGLE_STREAM, repetition=repetition)
            for concurrency in self.concurrencies:
                yield from self._closed_loop(session, maker, concurrency, repetition)

    def _warmup_requests(self, maker: PromptMaker) -> list[tuple[Request, Bucket]]:
        return [
            pair
            for bucket in self.buckets
            for pair in make_requests(
                maker, [bucket], 1, output_tokens=self.output_tokens, seed=self.seed,
                prefix=f"warmup-{bucket.name}",
            )
        ]  # fmt: skip

    def _single_stream_requests(
        self, maker: PromptMaker, repetition: int
    ) -> list[tuple[Request, Bucket]]:
        """As many for each bucket, in turns, so that a drift of the machine meets all of them alike."""
        lists = [
            make_requests(
                maker, [bucket], self.single_stream_requests, output_tokens=self.output_tokens,
                seed=self.seed + repetition, prefix=f"single-{repetition}-{bucket.name}",
            )
            for bucket in self.buckets
        ]  # fmt: skip
        return [pair for row in zip(*lists, strict=True) for pair in row]

    def _one_by_one(
        self,
        session: Session,
        pairs: Sequence[tuple[Request, Bucket]],
        load_point: str,
        *,
        repetition: int = 0,
        warmup: bool = False,
    ) -> Iterator[RequestTrace]:
        origin = time.perf_counter()
        for request, bucket in pairs:
            slot = Slot(load_point, 1, repetition, warmup, bucket.name, origin)
            yield follow(session, request, slot, self.timeout_s)

    def _closed_loop(
        self, session: Session, maker: PromptMaker, concurrency: int, repetition: int
    ) -> Iterator[RequestTrace]:
        name = f"closed_loop_{concurrency}"
        pairs = make_requests(
            maker,
            self.buckets,
            concurrency * self.requests_per_slot,
            output_tokens=self.output_tokens,
            seed=self.seed + 1000 * concurrency + repetition,
            prefix=f"{name}-{repetition}",
        )
        waiting: queue.SimpleQueue[tuple[Request, Bucket]] = queue.SimpleQueue()
        for pair in pairs:
            waiting.put(pair)
        done: queue.SimpleQueue[RequestTrace] = queue.SimpleQueue()
        stop = threading.Event()
        origin = time.perf_counter()

        def fill_slot() -> None:
            while not stop.is_set():
                try:
                    request, bucket = waiting.get_nowait()
                except queue.Empty:
                    return
                slot = Slot(name, concurrency, repetition, False, bucket.name, origin)
                done.put(follow(session, request, slot, self.timeout_s))

        threads = [
            threading.Thread(target=fill_slot, name=f"{name}-{i}", daemon=True)
            for i in range(concurrency)
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in pairs:
                yield done.get()
        finally:
            stop.set()
            for thread in threads:
                thread.join(self.timeout_s)

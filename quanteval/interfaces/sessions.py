"""Engines, their sessions, and what some sessions can do besides."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from quanteval.interfaces.requests import (
    Chunk,
    Completion,
    HiddenStates,
    OutputHead,
    Request,
    ScoreRequest,
    Tokenizer,
    TokenLogprobs,
    TopLogprobs,
)
from quanteval.records import Artifact, Effective, MemoryUse, UtilizationSample


class Session(Protocol):
    """One live served model. Methods may be called from several threads unless said otherwise."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the served model."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens (prompt and output together) one request may hold.

        A scored sequence may have one more: its last token is only ever predicted.
        """
        ...

    @property
    def batch_policy(self) -> str:
        """One line: how requests are batched here, e.g. 'continuous, paged|sdpa, at most 8 rows'."""
        ...

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yield one completion a request, as they finish, in any order; errors are completions too."""
        ...

    def stream(self, request: Request) -> Iterator[Chunk]:
        """Yield chunks as they arrive; the last one has a finish_reason. Closing it cancels."""
        ...

    def loglikelihood(self, requests: Iterable[ScoreRequest]) -> Iterator[TokenLogprobs]:
        """Yield log-probabilities one sequence at a time, in the order asked. EngineError on failure."""
        ...

    def hidden_states(self, requests: Iterable[ScoreRequest]) -> Iterator[HiddenStates]:
        """Yield final hidden states, in the order asked; UnsupportedError where an engine has none."""
        ...

    def output_head(self) -> OutputHead:
        """The output head as served; UnsupportedError where an engine has none."""
        ...

    def memory(self) -> MemoryUse:
        """Memory by part, as measured now; callable any time, after at least one forward pass."""
        ...

    def describe(self) -> Effective:
        """What really runs, read back from the loaded model."""
        ...


@runtime_checkable
class StreamsAsync(Protocol):
    """A session that streams on an event loop by itself; for others a thread a request does it."""

    def astream(self, request: Request) -> AsyncIterator[Chunk]:
        """As `Session.stream`; closing the iterator, or cancelling its task, cancels the request."""
        ...


@runtime_checkable
class TellsMetrics(Protocol):
    """A session whose server counts things itself."""

    def server_metrics(self) -> dict[str, float]:
        """Counters and gauges by name, as they stand now; {} when they cannot be read."""
        ...


@runtime_checkable
class OwnsProcesses(Protocol):
    """A session whose model is served by other processes than the caller's, started for it."""

    def rss_bytes(self) -> int:
        """Their resident memory now, all together."""
        ...

    def take_peak_bytes(self) -> int:
        """Return their highest resident memory since the last call, and begin anew."""
        ...

    def gone(self) -> str:
        """Return why they ended, '' while they are there."""
        ...


@runtime_checkable
class WatchesDevice(Protocol):
    """A session that can watch the device it computes on."""

    def device_sampler(self) -> AbstractContextManager[Callable[[], UtilizationSample]]:
        """Watch while the block runs; what is yielded tells, once, at its end, what the device did."""
        ...


@runtime_checkable
class GivesTopLogprobs(Protocol):
    """A session without hidden states that tells the head of each position's distribution."""

    def top_logprobs(self, requests: Iterable[ScoreRequest], k: int) -> Iterator[TopLogprobs]:
        """Yield the top `k` of each scored position, in the order asked."""
        ...


class Engine(Protocol):
    """What serves an artifact; a frozen dataclass that is its own config."""

    @property
    def device(self) -> str:
        """'cpu' or 'cuda'."""
        ...

    def check(self, artifact: Artifact) -> None:
        """Raise UnsupportedError when this engine cannot serve that artifact."""
        ...

    def serve(self, artifact: Artifact) -> AbstractContextManager[Session]:
        """Load the artifact and yield a session; everything is released on exit."""
        ...

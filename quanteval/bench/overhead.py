"""What the load client adds to what it measures: its times against those of a server that knows the truth.

The server is the mock server, in a process of its own; its clock is this machine's, so that its times
and the client's can be subtracted. What is found includes the way through the sockets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quanteval.bench.client import LoadPoint
from quanteval.bench.loops import ClosedLoop
from quanteval.bench.prompts import PlannedRequest, PromptMaker
from quanteval.errors import EngineError
from quanteval.interfaces import Session
from quanteval.records import RequestTrace

LOADS = (1, 16, 64, 256)
PROMPT_TOKENS = 32


@dataclass(frozen=True)
class OverheadPoint:
    """One load: what was added to the time of each token, and how many tokens a second went through."""

    streams: int
    tokens: int
    added_p50_s: float
    added_p99_s: float
    tokens_per_s: float
    cpu_share: float
    """Of one core, the client's process alone."""
    saturated: str
    """Why the client was the bottleneck, '' when it was not."""


@dataclass(frozen=True)
class ClientOverhead:
    """What the client adds to its figures, and the most it carries."""

    paced: tuple[OverheadPoint, ...]
    """Against a server with set gaps between tokens."""
    flooded: tuple[OverheadPoint, ...]
    """Against a server that sends as fast as it can."""

    @property
    def most_tokens_per_s(self) -> float:
        """The largest rate that one client process carried; the server may have been the one to give out."""
        return max((point.tokens_per_s for point in self.flooded), default=0.0)


Truth = Callable[[], Iterable[Mapping[str, Any]]]
"""Returns a record a request: `received_s`, `prompt_tokens`, `chunk_s` (of each chunk's sending) and `chunk_tokens`.

Times are those of `time.perf_counter()`.
"""


def measure_overhead(
    session: Session,
    truth: Truth,
    *,
    loads: Sequence[int] = LOADS,
    requests_per_slot: int = 4,
    output_tokens: int = 64,
    timeout_s: float = 60.0,
) -> tuple[OverheadPoint, ...]:
    """Return a point for each number of streams; EngineError when requests fail or the truth knows none of them."""
    maker = PromptMaker(session.tokenizer, 0)
    places = itertools.count()
    return tuple(
        _point(session, maker, truth, streams, places, requests_per_slot, output_tokens, timeout_s)
        for streams in loads
    )


def added_s(traces: Iterable[RequestTrace], origin_s: float, truth: Truth) -> list[float]:
    """Return, for every token that arrived, how much later than its sending that was.

    Requests are told apart by the lengths of their prompts, no two of them alike. Tokens are matched by
    their number within a request, so that chunks may be joined on their way.
    """
    sent = {row["prompt_tokens"]: row for row in truth() if row["received_s"] >= origin_s}
    added: list[float] = []
    for trace in traces:
        row = sent.get(trace.prompt_tokens)
        if row is None:
            continue
        theirs = _by_token(row["chunk_s"], row["chunk_tokens"])
        ours = _by_token(trace.chunk_times_s, trace.chunk_tokens)
        added += [origin_s + at_s - sent_s for at_s, sent_s in zip(ours, theirs, strict=False)]
    return added


def _by_token(times: Sequence[float], tokens: Sequence[int]) -> Iterator[float]:
    return (at_s for at_s, count in zip(times, tokens, strict=True) for _ in range(count))


def _point(
    session: Session,
    maker: PromptMaker,
    truth: Truth,
    streams: int,
    places: Iterator[int],
    requests_per_slot: int,
    output_tokens: int,
    timeout_s: float,
) -> OverheadPoint:
    name = f"overhead_{streams}"
    planned = [
        PlannedRequest(f"{name}-{place}", "overhead", PROMPT_TOKENS + i, output_tokens, place)
        for i, place in enumerate(itertools.islice(places, streams * (requests_per_slot + 1)))
    ]
    jobs = [(request, maker.request(request)) for request in planned]
    loop = ClosedLoop(session, LoadPoint(name, streams), timeout_s, jobs, iter(()))
    try:
        loop.start()
        traces = list(loop.traces())
    finally:
        loop.close()
    failed = [trace for trace in traces if trace.status != "ok"]
    if failed or loop.health is None:
        what = failed[0].error if failed else "it was cancelled"
        raise EngineError(f'client overhead at "{streams}" streams could not be measured: {what}')
    # The first of each slot opens its connection.
    late = {request.request_id for request in planned[streams:]}
    added = added_s([t for t in traces if t.request_id in late], loop.origin_s, truth)
    if not added:
        raise EngineError("the server's truth knows none of the requests: is it the mock server?")
    return OverheadPoint(
        streams=streams,
        tokens=len(added),
        added_p50_s=float(np.quantile(added, 0.5)),
        added_p99_s=float(np.quantile(added, 0.99)),
        tokens_per_s=sum(trace.output_tokens for trace in traces) / loop.duration_s,
        cpu_share=loop.health.cpu_share,
        saturated=loop.health.reason,
    )

"""One request, followed to its end on an event loop: the raw trace, whatever happens to it."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

from quanteval.bench.prompts import PlannedRequest
from quanteval.bench.streams import astream
from quanteval.interfaces import Chunk, Request, Session
from quanteval.records import RequestTrace

Status = Literal["ok", "error", "timeout", "cancelled", "out_of_memory"]
Stage = Literal["single", "rising", "search", "capacity", "head_of_line", "soak"]
OUT_OF_MEMORY = (
    "out of memory", "outofmemory", "not enough memory", "can't allocate memory",
    "cannot allocate memory", "memoryerror", "bad_alloc",
)  # fmt: skip
CANCELLED = "the load point had ended"


@dataclass(frozen=True)
class LoadPoint:
    """What names a load point and marks its traces; `warmup` marks all its requests as unmeasured.

    A closed loop has `concurrency` slots and no rate, an open one a `rate` in requests/s and no
    slots. `measured_from_s` to `measured_to_s` is the steady window of an open loop, in seconds
    since the point began: requests scheduled in it are the measured ones.
    """

    name: str
    concurrency: int
    repetition: int = 0
    warmup: bool = False
    loop: Literal["closed", "open"] = "closed"
    rate: float = 0.0
    stage: Stage = "rising"
    measured_from_s: float = 0.0
    measured_to_s: float = math.inf


@dataclass
class _Seen:
    """What has arrived of one request."""

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: int | None = None
    layers: dict[str, float] = field(default_factory=dict)
    status: Status = "error"
    error: str = "the stream ended without a finish reason"


async def follow(
    session: Session,
    planned: PlannedRequest,
    request: Request,
    point: LoadPoint,
    *,
    origin_s: float,
    timeout_s: float,
    scheduled_s: float | None = None,
) -> RequestTrace:
    """Send a request, note when each chunk with tokens arrives, and return the trace.

    Chunks without tokens (a role, a usage count) are no arrivals. The request is cancelled when it
    has not ended `timeout_s` after sending, also when nothing arrives at all; a chunk later than
    that does not count. Cancelling the task that awaits this cancels the request, and the trace is
    returned with the status 'cancelled'. Times are relative to `origin_s`, a `time.perf_counter()`;
    `scheduled_s` is relative to it too, None for when it was sent.
    """
    seen = _Seen()
    stream: Any = None
    sent_s = perf_counter()
    late = sent_s + timeout_s
    timer = asyncio.timeout(timeout_s)
    try:
        async with timer:
            stream = astream(session, request)
            async for chunk in stream:
                if chunk.at_s > late:
                    seen.status, seen.error = "timeout", f"not finished after {timeout_s:g} s"
                    break
                if count := chunk.count:
                    seen.times.append(chunk.at_s - origin_s)
                    seen.tokens.append(count)
                if chunk.finish_reason is not None or chunk.error is not None:
                    _end(seen, chunk)
                    break
    except asyncio.CancelledError:
        seen.status, seen.error = "cancelled", CANCELLED
    except Exception as failure:
        if timer.expired():
            seen.status, seen.error = "timeout", f"not finished after {timeout_s:g} s"
        else:
            seen.status, seen.error = _failure(f"{type(failure).__name__}: {failure}")
    end_s = perf_counter()
    await _close(stream, seen)
    output_tokens = sum(seen.tokens)
    if seen.status == "ok" and output_tokens != planned.output_tokens:
        # Variants would do unequal work, and the shorter one would look the faster.
        seen.status = "error"
        seen.error = (
            f"{output_tokens} output tokens instead of {planned.output_tokens}: "
            "the end token was not ignored"
        )
    return RequestTrace(
        load_point=point.name,
        loop=point.loop,
        concurrency=point.concurrency,
        rate=point.rate,
        repetition=point.repetition,
        warmup=point.warmup or planned.role != "measured",
        request_id=planned.request_id,
        bucket=planned.bucket,
        scheduled_s=sent_s - origin_s if scheduled_s is None else scheduled_s,
        sent_s=sent_s - origin_s,
        chunk_times_s=seen.times,
        chunk_tokens=seen.tokens,
        end_s=end_s - origin_s,
        prompt_tokens=len(request.prompt.token_ids),
        output_tokens=output_tokens,
        cached_prompt_tokens=seen.cached,
        layers=seen.layers,
        status=seen.status,
        error=seen.error,
    )


def _end(seen: _Seen, chunk: Chunk) -> None:
    seen.status, seen.error = _ending(chunk.finish_reason, chunk.error)
    seen.cached = chunk.cached_prompt_tokens
    seen.layers = dict(chunk.layers)


async def _close(stream: Any, seen: _Seen) -> None:
    """Close the stream, which cancels a request that has not ended; a failure to do so is an error."""
    close = getattr(stream, "aclose", None)
    if close is None:
        return
    try:
        await close()
    except asyncio.CancelledError:
        if seen.status != "ok":
            seen.status, seen.error = "cancelled", CANCELLED
    except Exception as failure:
        seen.status, seen.error = _failure(
            f"closing the stream: {type(failure).__name__}: {failure}"
        )


def _ending(finish_reason: str | None, error: str | None) -> tuple[Status, str]:
    if finish_reason in ("stop", "length") and error is None:
        return "ok", ""
    if finish_reason == "cancelled":
        return "cancelled", error or "cancelled by the engine"
    return _failure(error or f'finish reason "{finish_reason}"')


def _failure(text: str) -> tuple[Status, str]:
    line = " ".join(text.split())[:300]
    gone = any(sign in line.lower() for sign in OUT_OF_MEMORY)
    return ("out_of_memory" if gone else "error"), line

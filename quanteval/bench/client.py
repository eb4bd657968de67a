"""One request, followed to its end: the raw trace, whatever happens to it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

from quanteval.bench.workload import PlannedRequest
from quanteval.interfaces import Request, Session
from quanteval.records import RequestTrace

Status = Literal["ok", "error", "timeout", "cancelled", "out_of_memory"]
OUT_OF_MEMORY = (
    "out of memory", "outofmemory", "not enough memory", "can't allocate memory",
    "cannot allocate memory", "memoryerror", "bad_alloc",
)  # fmt: skip


@dataclass(frozen=True)
class LoadPoint:
    """Name, number of slots and repetition of a load point; `warmup` marks all its requests."""

    name: str
    concurrency: int
    repetition: int = 0
    warmup: bool = False


def follow(
    session: Session,
    planned: PlannedRequest,
    request: Request,
    point: LoadPoint,
    *,
    origin_s: float,
    timeout_s: float,
    stop: threading.Event,
) -> RequestTrace:
    """Send a request, note when each chunk with tokens arrives, and return the trace.

    Chunks without tokens (a role, a usage count) are no arrivals. The stream is closed, which
    cancels the request, at the first chunk later than `timeout_s` after sending (it does not
    count) or after `stop` is set. Times are relative to `origin_s`, a `time.perf_counter()`.
    """
    sent_s = perf_counter()
    times: list[float] = []
    tokens: list[int] = []
    status: Status
    status, error = "error", "the stream ended without a finish reason"
    stream = None
    try:
        stream = session.stream(request)
        for chunk in stream:
            if chunk.at_s - sent_s > timeout_s:
                status, error = "timeout", f"not finished after {timeout_s:g} s"
                break
            if chunk.token_ids:
                times.append(chunk.at_s - origin_s)
                tokens.append(len(chunk.token_ids))
            if chunk.finish_reason is not None or chunk.error is not None:
                status, error = _ending(chunk.finish_reason, chunk.error)
                break
            if stop.is_set():
                status, error = "cancelled", "the load point had ended"
                break
    except Exception as failure:
        status, error = _failure(f"{type(failure).__name__}: {failure}")
    try:
        if (close := getattr(stream, "close", None)) is not None:
            close()
    except Exception as failure:
        status, error = _failure(f"closing the stream: {type(failure).__name__}: {failure}")
    if status == "ok" and sum(tokens) != planned.output_tokens:
        # Variants would do unequal work, and the shorter one would look the faster.
        status = "error"
        error = f"{sum(tokens)} output tokens instead of {planned.output_tokens}: the end token was not ignored"
    return RequestTrace(
        load_point=point.name,
        concurrency=point.concurrency,
        repetition=point.repetition,
        warmup=point.warmup or planned.role != "measured",
        request_id=planned.request_id,
        bucket=planned.bucket,
        scheduled_s=sent_s - origin_s,
        sent_s=sent_s - origin_s,
        chunk_times_s=times,
        chunk_tokens=tokens,
        end_s=perf_counter() - origin_s,
        prompt_tokens=len(request.prompt.token_ids),
        output_tokens=sum(tokens),
        status=status,
        error=error,
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

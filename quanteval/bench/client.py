"""One request at a time, followed to its end: the raw trace, whatever happens to it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from quanteval.interfaces import Request, Session
from quanteval.records import RequestTrace


@dataclass(frozen=True)
class Slot:
    """Where a request belongs: its load point, and what is known of it before it is sent."""

    load_point: str
    concurrency: int
    repetition: int
    warmup: bool
    bucket: str
    origin_s: float
    """`time.perf_counter()` when the load point began."""


def follow(session: Session, request: Request, slot: Slot, timeout_s: float) -> RequestTrace:
    """Send a request, note when each chunk with tokens arrives, and return the trace.

    A chunk without tokens is no arrival. After `timeout_s` the stream is closed, which cancels it.
    """
    sent = time.perf_counter()
    times: list[float] = []
    tokens: list[int] = []
    status, error = "error", "the stream ended without a finish reason"
    stream = session.stream(request)
    try:
        for chunk in stream:
            if chunk.token_ids:
                times.append(chunk.at_s - slot.origin_s)
                tokens.append(len(chunk.token_ids))
            if chunk.finish_reason is not None:
                status, error = _status(chunk.finish_reason, chunk.error)
                break
            if time.perf_counter() - sent > timeout_s:
                status, error = "timeout", f"no end after {timeout_s} s"
                break
    except Exception as failure:
        status, error = _failure(failure)
    finally:
        close = getattr(stream, "close", None)
        if close is not None:
            close()
    if status == "ok" and not tokens:
        status, error = "error", "the stream ended without a token"
    return RequestTrace(
        load_point=slot.load_point,
        concurrency=slot.concurrency,
        repetition=slot.repetition,
        warmup=slot.warmup,
        request_id=request.request_id,
        bucket=slot.bucket,
        scheduled_s=sent - slot.origin_s,
        sent_s=sent - slot.origin_s,
        chunk_times_s=times,
        chunk_tokens=tokens,
        end_s=time.perf_counter() - slot.origin_s,
        prompt_tokens=len(request.prompt.token_ids),
        output_tokens=sum(tokens),
        status=status,
        error=error,
    )


def _status(finish_reason: str, error: str | None) -> tuple[str, str]:
    if finish_reason in ("stop", "length"):
        return "ok", ""
    text = error or finish_reason
    if finish_reason == "cancelled":
        return "cancelled", text
    return ("out_of_memory" if "out of memory" in text.lower() else "error"), text


def _failure(failure: Exception) -> tuple[str, str]:
    text = " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
    gone = isinstance(failure, MemoryError) or "out of memory" in text.lower()
    return ("out_of_memory" if gone else "error"), text

"""A closed loop without its record: the traces alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quanteval.bench.client import LoadPoint
from quanteval.bench.driver import drive_closed
from quanteval.bench.prompts import PlannedRequest, PromptMaker
from quanteval.interfaces import Session
from quanteval.records import RequestTrace


def closed_loop(
    session: Session,
    maker: PromptMaker,
    point: LoadPoint,
    requests: Sequence[PlannedRequest],
    fillers: Iterator[PlannedRequest],
    timeout_s: float,
) -> Iterator[RequestTrace]:
    """Yield what `drive_closed` does, but for the record at the end."""
    driven = drive_closed(session, maker, point, requests, fillers, timeout_s)
    try:
        for item in driven:
            if isinstance(item, RequestTrace):
                yield item
    finally:
        driven.close()

"""Scoring many samples in one call, so that an engine can read ahead and compute shared prefixes once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from quanteval.errors import EngineError
from quanteval.interfaces import ScoreRequest, Session, TokenLogprobs

Item = TypeVar("Item")


def score_grouped(
    session: Session, groups: Iterable[tuple[Item, Sequence[ScoreRequest]]]
) -> Iterator[tuple[Item, list[TokenLogprobs]]]:
    """Score each item's requests and yield the item with all its results, in order, as they come.

    An item without requests comes with an empty list. EngineError when results are missing or out of order.
    """
    open_groups: deque[tuple[Item, Sequence[ScoreRequest]]] = deque()

    def asked() -> Iterator[ScoreRequest]:
        for item, requests in groups:
            open_groups.append((item, requests))
            yield from requests

    got: list[TokenLogprobs] = []
    for result in session.loglikelihood(asked()):
        while open_groups and not open_groups[0][1]:
            yield open_groups.popleft()[0], []
        item, requests = open_groups[0] if open_groups else (None, ())
        if item is None or result.request_id != requests[len(got)].request_id:
            raise EngineError(f'"{result.request_id}" was scored out of turn')
        got.append(result)
        if len(got) == len(requests):
            open_groups.popleft()
            yield item, got
            got = []
    for item, requests in open_groups:
        if requests:
            raise EngineError(f'"{requests[len(got)].request_id}" was not scored')
        yield item, []

"""The largest batch of each length that a served model held at once, and what ended the search there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quanteval.records import LoadPointRecord

PREFIX = "fit_"
"""Names of load points that tried whether something fits: this and the length in tokens."""
FITS = "fits"


@dataclass(frozen=True)
class Outcome:
    """Whether a batch was held; `limit` says what kept it from that: cache, context, memory, died or error."""

    fits: bool
    limit: str = ""
    note: str = ""

    @property
    def text(self) -> str:
        """As it stands in a record's note."""
        return FITS if self.fits else f"{self.limit}: {self.note}"


@dataclass(frozen=True)
class FitRow:
    """One length, prompt and output together."""

    length: int
    largest: int
    """Sequences held at once; 0 when not even one was."""
    smallest_failing: int | None = None
    """None when the search ended at its own limit."""
    limit: str = "not tried further"
    note: str = ""


def search_fit(
    lengths: Sequence[int],
    attempt: Callable[[int, int], Outcome],
    max_batch: int,
    resolution: float = 0.0,
) -> Iterator[FitRow]:
    """Yield the largest batch for each of the rising `lengths`, by doubling and bisection.

    What does not fit is taken not to fit in a larger batch or at a longer length either. The search of a length
    ends when `smallest_failing` is `largest` + 1, or within `resolution` of it as a share. It ends altogether
    after an outcome with the limit 'died': there is nothing left to ask.
    """
    ceiling: int | None = None
    limit = Outcome(True)
    for length in sorted(set(lengths)):
        low, high = 0, ceiling
        # A longer sequence most likely leaves room for as many tokens in all: half the batch at twice the length.
        batch = 1 if ceiling is None else max(1, ceiling // 2)
        while batch <= max_batch and (high is None or high - low > max(1, resolution * low)):
            found = attempt(length, batch)
            if found.fits:
                low = batch
            else:
                high, limit = batch, found
            if found.limit == "died":
                yield FitRow(length, low, high, found.limit, found.note)
                return
            if high is not None:
                batch = (low + high) // 2
                if batch == low:
                    break
            elif low == max_batch:
                break
            else:
                batch = min(2 * low, max_batch)
        reason = (limit.limit, limit.note) if high is not None else ("not tried further", "")
        yield FitRow(length, low, high, *reason)
        if low == 0:
            return
        ceiling = high


def fit_rows(points: Sequence[LoadPointRecord]) -> list[FitRow]:
    """Return the rows that stored load points tell: those named `fit_<length>`, by length."""
    tried: dict[int, list[LoadPointRecord]] = {}
    for point in points:
        suffix = point.name.removeprefix(PREFIX)
        if point.name.startswith(PREFIX) and suffix.isdigit():
            tried.setdefault(int(suffix), []).append(point)
    rows = []
    ceiling: LoadPointRecord | None = None
    for length, its in sorted(tried.items()):
        largest = max((p.concurrency for p in its if p.note == FITS), default=0)
        failing = [p for p in its if p.note != FITS]
        # A batch that failed at a shorter length was not tried again.
        if ceiling is not None:
            failing.append(ceiling)
        first = min(failing, key=lambda p: p.concurrency, default=None)
        if first is None:
            rows.append(FitRow(length, largest))
            continue
        limit, _, note = first.note.partition(": ")
        rows.append(FitRow(length, largest, first.concurrency, limit, note))
        ceiling = first
    return rows

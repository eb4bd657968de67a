"""Which load to measure next: a search for the loads at which something breaks, on a grid common to all variants.

Pure: it is told what was seen and answers with the next visit, so it can be simulated. Loads rise by doubling until
everything sought is broken or the server takes no more; the gap around each break is halved down to the grid; loads
beside a break that are not sure are repeated with fresh arrivals. The same load and repetition always means the same
arrivals and requests, whichever variant is measured.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """Loads anchor x 2^(k / per_octave) for every whole k, rounded to whole numbers for slots.

    The anchor is set and never measured: loads of different variants, machines and runs are then the same loads.
    """

    anchor: float = 1.0
    per_octave: int = 4
    whole: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.anchor < math.inf:
            raise ValueError(f'anchor "{self.anchor}" must be positive')
        if not 1 <= self.per_octave <= 64:
            raise ValueError(f'per_octave "{self.per_octave}" must be between 1 and 64')

    def load(self, k: int) -> float:
        """Return the load at place k."""
        load = self.anchor * 2 ** (k / self.per_octave)
        return float(max(1, round(load))) if self.whole else float(f"{load:.4g}")

    def same(self, k: int) -> int:
        """Return the place that stands for all with the same load: a whole octave's, else the lowest of them."""
        if not self.whole:
            return k
        load = self.load(k)
        octave = round(k / self.per_octave) * self.per_octave
        if octave >= 0 and self.load(octave) == load:
            return octave
        while k > 0 and self.load(k - 1) == load:
            k -= 1
        return max(k, 0)

    def at_most(self, load: float) -> int:
        """Return the highest place whose load is not above `load`."""
        k = round(math.log2(max(load, 1e-9) / self.anchor) * self.per_octave)
        while self.load(k) > load * (1 + 1e-9) and (k > 0 or not self.whole):
            k -= 1
        while self.load(k + 1) <= load * (1 + 1e-9):
            k += 1
        return max(k, 0) if self.whole else k

    def octave_at_most(self, load: float) -> int:
        """Return the highest place on a whole octave whose load is not above `load`."""
        return self.at_most(load) // self.per_octave * self.per_octave


@dataclass(frozen=True)
class Visit:
    """One load point to measure."""

    place: int
    repetition: int
    stage: str
    """'rising' or 'search'."""
    why: str


@dataclass(frozen=True)
class Answer:
    """What is known of one target at one load: whether it holds there, and whether that is sure."""

    holds: bool
    sure: bool


Answers = Mapping[str, Mapping[int, Answer]]
"""By target and place. A place that could not be judged is left out."""


def seed_of(seed: int, *names: object) -> int:
    """Return a seed of its own for each thing named, the same in every process."""
    text = "/".join(str(name) for name in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


class Search:
    """Decides visits one at a time: `next`, measure, `tell`, and again until `next` is None."""

    def __init__(
        self,
        grid: Grid,
        *,
        start: int,
        bottom: int,
        top: int,
        repetitions: int = 3,
        max_points: int = 24,
        max_s: float = math.inf,
    ) -> None:
        """`start` is the first place; places outside bottom..top are never visited."""
        self.grid = grid
        self.bottom = grid.same(bottom)
        self.top = max(grid.same(top), self.bottom)
        self.start = min(max(grid.same(start), self.bottom), self.top)
        self.repetitions = repetitions
        self.max_points = max_points
        self.max_s = max_s
        self.visits: dict[int, int] = {}
        self.spent_s = 0.0
        self.ended = ""
        self._answers: Answers = {}
        self._ceiling: int | None = None

    def tell(self, visit: Visit, answers: Answers, *, over_saturated: bool, seconds: float) -> None:
        """Say what is known after a visit; `answers` of all loads so far, since one can change another."""
        self.visits[visit.place] = self.visits.get(visit.place, 0) + 1
        self.spent_s += seconds
        self._answers = answers
        if over_saturated:
            self._ceiling = (
                visit.place if self._ceiling is None else min(self._ceiling, visit.place)
            )

    def next(self) -> Visit | None:
        """Return what to measure next, None at the end; `ended` then says why."""
        if not self.visits:
            return self._visit(self.start, "rising", "first load")
        if sum(self.visits.values()) >= self.max_points:
            self.ended = f"budget of {self.max_points} load points used up"
            return None
        if self.spent_s >= self.max_s:
            self.ended = f"budget of {self.max_s:g} s used up"
            return None
        for step in (self._retry, self._rise, self._sink, self._halve, self._repeat, self._widen):
            visit = step()
            if visit is not None:
                return visit
        self.ended = "every break lies between neighbouring loads of the grid"
        if self._ceiling is None and max(self.visits) >= self.top:
            self.ended = f"the highest load, {self.grid.load(max(self.visits)):g}, was reached"
        return None

    # ---- the steps, each None when there is nothing for it to do

    def _judged(self, place: int) -> bool:
        return any(place in known for known in self._answers.values())

    def _retry(self) -> Visit | None:
        """Measure once more what could not be judged, e.g. since the client was the bottleneck for a moment."""
        for place, visits in self.visits.items():
            if self._answers and not self._judged(place) and visits < min(2, self.repetitions):
                return self._visit(place, "rising", "could not be judged")
        return None

    def _rise(self) -> Visit | None:
        highest = max(self.visits)
        if self._answers and not self._judged(highest):
            # Higher loads would not be judged either.
            return None
        if self._ceiling is not None or self.grid.load(highest) >= self.grid.load(self.top):
            return None
        seen = self._answers.values()
        if self._answers and all(self._sure_broken(target) for target in seen):
            return None
        return self._visit(min(highest + self.grid.per_octave, self.top), "rising", "doubling")

    def _sink(self) -> Visit | None:
        """Go down while the lowest load is broken for some target, or too few loads lie below to tell."""
        lowest = min(self.visits)
        if lowest <= self.bottom:
            return None
        if any(lowest in known and not known[lowest].holds for known in self._answers.values()):
            place = max(self.bottom, lowest - self.grid.per_octave)
            return self._visit(place, "rising", f"{self.grid.load(lowest):g} is too much already")
        return None

    def _halve(self) -> Visit | None:
        gaps = []
        for target in self._answers:
            below, above = self._bracket(target)
            if below is None or above is None:
                continue
            middle = self._between(below, above)
            if middle is not None:
                gaps.append((above - below, target, middle))
        if not gaps:
            return None
        _, target, middle = max(gaps)
        return self._visit(middle, "search", f"{target} breaks around here")

    def _repeat(self) -> Visit | None:
        """Repeat the loads beside a break that are not sure, those seen least first."""
        unsure = []
        for target, known in self._answers.items():
            for place in self._bracket(target):
                if place is None or place not in known or known[place].sure:
                    continue
                if self.visits[place] < self.repetitions:
                    unsure.append((self.visits[place], place, target))
        if not unsure:
            return None
        _, place, target = min(unsure)
        return self._visit(place, "search", f"{target} is not sure here")

    def _widen(self) -> Visit | None:
        """Where a load beside a break stays unsure, look one place further out, where it is easier to be sure."""
        for target, known in self._answers.items():
            for place, step in zip(self._bracket(target), (-1, 1), strict=True):
                if place is None or known[place].sure:
                    continue
                further = self._step(place, step)
                if further is not None and further not in self.visits and self._in_reach(further):
                    return self._visit(further, "search", f"{target} stays unsure beside this")
        return None

    # ---- what is known

    def _visit(self, place: int, stage: str, why: str) -> Visit:
        place = self.grid.same(place)
        return Visit(place, self.visits.get(place, 0), stage, why)

    def _bracket(self, target: str) -> tuple[int | None, int | None]:
        """Return the highest place below the first that is broken, and that one."""
        known = self._answers[target]
        above = min((place for place, answer in known.items() if not answer.holds), default=None)
        if above is None and self._ceiling is not None:
            above = self._ceiling if self._ceiling in known else None
        holding = [
            p for p, answer in known.items() if answer.holds and (above is None or p < above)
        ]
        return max(holding, default=None), above

    def _sure_broken(self, known: Mapping[int, Answer]) -> bool:
        """Whether a target is surely broken somewhere, or broken at two loads."""
        broken = [answer for answer in known.values() if not answer.holds]
        return any(answer.sure for answer in broken) or len(broken) >= 2

    def _between(self, below: int, above: int) -> int | None:
        """Return the place in the middle whose load is another than both ends', None when there is none."""
        for place in _outwards((below + above) // 2, below, above):
            ends = (self.grid.load(below), self.grid.load(above))
            found = self.grid.same(place)
            if self.grid.load(found) not in ends and found not in self.visits:
                return found
        return None

    def _step(self, place: int, step: int) -> int | None:
        """Return the next place whose load is another one."""
        load = self.grid.load(place)
        for further in range(1, 2 * self.grid.per_octave + 1):
            found = self.grid.same(place + step * further)
            if self.grid.load(found) != load:
                return found
        return None

    def _in_reach(self, place: int) -> bool:
        high = self.top if self._ceiling is None else min(self.top, self._ceiling)
        return self.bottom <= place <= high


def _outwards(middle: int, below: int, above: int) -> list[int]:
    """Return the places strictly between two others, those nearest to the middle first."""
    return sorted(range(below + 1, above), key=lambda place: (abs(place - middle), place))


Measure = Callable[[Visit], tuple[Answers, bool, float]]


def run_search(search: Search, measure: Measure) -> list[Visit]:
    """Drive a search to its end with a function that measures; return the visits in order."""
    done = []
    while (visit := search.next()) is not None:
        answers, over_saturated, seconds = measure(visit)
        search.tell(visit, answers, over_saturated=over_saturated, seconds=seconds)
        done.append(visit)
    return done

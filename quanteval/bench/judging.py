"""What is concluded from load points while they are measured: the same statistics that the report computes later."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from quanteval.bench.search import Answer, Grid
from quanteval.metrics.knee import KNEE, Judged, judge_term, knee
from quanteval.metrics.load import Load, loads_of
from quanteval.metrics.slo import Slo
from quanteval.records import LoadPointRecord, RequestTrace


class Judge:
    """Keeps the load points seen so far and judges each against the knee and every promise."""

    def __init__(self, slo: Slo, tolerance: float) -> None:
        self.slo = slo
        self.tolerance = tolerance
        self._traces: dict[str, list[RequestTrace]] = {}
        self._records: dict[str, list[LoadPointRecord]] = {}
        self._loads: dict[str, Load] = {}
        self._terms: dict[tuple[str, str], Judged] = {}

    @property
    def loads(self) -> list[Load]:
        """The load points with figures, lowest load first."""
        kept = [load for load in self._loads.values() if load.runs]
        return sorted(kept, key=lambda load: load.load)

    def take(self, record: LoadPointRecord, traces: Sequence[RequestTrace]) -> LoadPointRecord:
        """Add a repetition of a load point; return its record with the conclusion as its note."""
        mine = self._traces.setdefault(record.name, [])
        mine.extend(traces)
        self._records.setdefault(record.name, []).append(record)
        found = loads_of(mine, self._records[record.name], self.slo)
        if not found:
            return record
        (load,) = found
        self._loads[record.name] = load
        for term in self.slo.terms:
            self._terms[record.name, term.name] = judge_term(load, term)
        judged = [self._terms[record.name, term.name] for term in self.slo.terms]
        notes = [record.note or load.over_saturated, *load.excluded]
        notes += [f"{'holds' if j.holds else 'breaks'}: {j.text}" for j in judged if j.n]
        note = "; ".join(note for note in notes if note)
        over = record.over_saturated or bool(load.over_saturated)
        return record.model_copy(update={"note": note, "over_saturated": over})

    def judged(self) -> dict[str, list[Judged]]:
        """Return every target with its judgement of every load."""
        loads = self.loads
        out = {KNEE: list(knee(loads, self.tolerance).judged)}
        for term in self.slo.terms:
            out[term.name] = [self._terms[load.name, term.name] for load in loads]
        return out


def answers_of(
    grid: Grid, loads: Sequence[Load], judged: Mapping[str, Sequence[Judged]]
) -> dict[str, dict[int, Answer]]:
    """Return what a search is told; loads that could not be judged are left out."""
    places = {load.load: grid.same(grid.at_most(load.load * (1 + 1e-6))) for load in loads}
    return {
        target: {
            places[item.load]: Answer(item.holds, item.sure)
            for item in items
            if item.load in places and not math.isnan(item.value)
        }
        for target, items in judged.items()
    }

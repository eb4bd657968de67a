"""The search: on answers without noise exhaustively, on queues with a known break for its coverage."""

from __future__ import annotations

import itertools
import math

import pytest

from quanteval.bench.search import Answer, Grid, Search, run_search, seed_of
from quanteval.metrics.knee import knee, slo_break
from quanteval.metrics.slo import Slo
from tests.bench.queues import Simulated, exponential, mm1_break, mmc_closed_quantile_share


def exact(grid, breaks, *, ceiling=math.inf, **more):
    """Search breaks without noise; return the search and its visits."""
    seen: set[int] = set()
    search = Search(grid, **{"start": 0, "bottom": -12, "top": 24, **more})

    def measure(visit):
        seen.add(visit.place)
        loads = {place: grid.load(place) for place in seen}
        answers = {
            name: {place: Answer(load <= limit, True) for place, load in loads.items()}
            for name, limit in breaks.items()
        }
        return answers, grid.load(visit.place) > ceiling, 1.0

    return search, run_search(search, measure)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("per_octave", [1, 2, 4])
def test_every_break_is_bracketed_by_neighbouring_loads(whole, per_octave):
    grid = Grid(per_octave=per_octave, whole=whole)
    loads = sorted({grid.load(k) for k in range(0 if whole else -12, 25)})
    for low, high in itertools.pairwise(loads):
        limit = (low + high) / 2
        bottom = 0 if whole else -12
        search, visits = exact(grid, {"a": limit, "b": loads[-1] + 1}, bottom=bottom, max_points=60)
        seen = {grid.load(visit.place) for visit in visits}
        assert {low, high} <= seen, (limit, sorted(seen))
        assert len(seen) == len(visits), "without noise no load is visited twice"
        assert search.ended


def test_loads_rise_by_doubling_and_stop_at_over_saturation():
    grid = Grid(per_octave=4)
    _, visits = exact(grid, {"a": 10.0, "b": 1000.0}, ceiling=10.0)
    rising = [grid.load(v.place) for v in visits if v.stage == "rising"]
    assert rising == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert max(grid.load(v.place) for v in visits) == 16.0


def test_a_first_load_that_is_too_high_makes_it_go_down():
    grid = Grid(per_octave=2)
    _, visits = exact(grid, {"a": 0.3})
    loads = [grid.load(v.place) for v in visits]
    assert loads[0] == 1.0
    assert min(loads) <= 0.3 < max(load for load in loads if load < 0.4)


def test_nothing_sought_rises_to_the_end_and_budgets_end_it():
    grid = Grid(per_octave=1)
    search, visits = exact(grid, {}, top=6)
    assert [v.place for v in visits] == [0, 1, 2, 3, 4, 5, 6]
    assert search.ended == "the highest load, 64, was reached"
    search, visits = exact(grid, {"a": 20.0}, max_points=3)
    assert (len(visits), search.ended) == (3, "budget of 3 load points used up")
    search, visits = exact(grid, {"a": 20.0}, max_s=2.0)
    assert (len(visits), search.ended) == (2, "budget of 2 s used up")


def test_unsure_loads_beside_a_break_are_repeated_and_no_others():
    grid = Grid(per_octave=1)
    seen: dict[int, int] = {}

    def measure(visit):
        assert visit.repetition == seen.get(visit.place, 0)
        seen[visit.place] = visit.repetition + 1
        answers = {p: Answer(p < 3, sure=p not in (2, 3) or seen[p] >= 3) for p in seen}
        return {"a": answers}, visit.place >= 4, 1.0

    run_search(Search(grid, start=0, bottom=0, top=9, repetitions=4), measure)
    assert seen == {0: 1, 1: 1, 2: 3, 3: 3, 4: 1}


def test_what_cannot_be_judged_is_tried_once_more_and_nothing_higher():
    grid = Grid(per_octave=1)
    seen: list[int] = []

    def measure(visit):
        seen.append(visit.place)
        return {"a": {p: Answer(True, True) for p in seen if p < 3}}, False, 1.0

    run_search(Search(grid, start=0, bottom=0, top=9), measure)
    assert seen == [0, 1, 2, 3, 3]


def test_the_grid_is_the_same_for_everyone():
    grid = Grid(per_octave=4)
    assert [grid.load(k) for k in (-4, 0, 1, 4)] == [0.5, 1.0, 1.189, 2.0]
    assert grid.octave_at_most(3.9) == 4
    slots = Grid(per_octave=4, whole=True)
    assert len({slots.same(k) for k in range(17)}) == len({slots.load(k) for k in range(17)})
    for k in range(40):
        assert slots.load(slots.same(k)) == slots.load(k)
        assert grid.at_most(grid.load(k)) == k
    assert seed_of(1, 2.0, 0) == seed_of(1, 2.0, 0) != seed_of(1, 2.0, 1)
    for fields in ({"anchor": 0.0}, {"per_octave": 0}):
        with pytest.raises(ValueError, match='"0'):
            Grid(**fields)


TRIALS = 6
"""At the stated 90 % two misses or fewer have a probability of 98 %."""


def test_the_interval_covers_the_break_of_an_open_queue():
    slo = Slo(ttft={"p90": 0.5})
    truth = mm1_break(10.0, 0.9, 0.5)
    covered = 0
    for seed in range(TRIALS):
        queue = Simulated("open", 1, exponential(0.1), slo, requests=250, seed=seed, knee=False)
        queue.run(start=0, repetitions=2)
        found = slo_break(queue.loads(), slo.terms[0])
        covered += (
            found.lower is not None
            and found.upper is not None
            and found.lower <= truth <= found.upper
        )
        assert found.upper / found.lower < 5
    assert covered >= TRIALS - 2


def test_the_interval_covers_the_break_of_a_closed_queue():
    slo, servers, mean = Slo(ttft={"p90": 0.45}), 4, 0.1
    kept = [n for n in range(1, 64) if mmc_closed_quantile_share(n, servers, mean, 0.45) <= 0.1]
    covered = 0
    for seed in range(TRIALS):
        queue = Simulated(
            "closed", servers, exponential(mean), slo, requests=250, seed=seed, knee=False
        )
        queue.run(repetitions=2)
        found = slo_break(queue.loads(), slo.terms[0])
        covered += found.lower <= max(kept) and found.upper > max(kept)
        assert found.upper / found.lower < 4
    assert covered >= TRIALS - 2


def test_the_knee_of_a_closed_queue_is_about_its_servers():
    queue = Simulated("closed", 8, lambda rng, n: rng.gamma(4, 0.025, n), Slo(), requests=300)
    queue.run(repetitions=2)
    found = knee(queue.loads())
    # A quarter above the flat range: 10 slots with 8 servers.
    assert found.lower <= 10 <= found.upper
    assert found.upper / found.lower <= 2.1

"""A variant as it would be served: alone, under rising load, around the loads at which something breaks, and with
long requests among short ones.

Every load point has a ramp-up, a steady window and a drain. Loads lie on a grid that is common to all variants, and the
requests and arrivals of a load point depend on the workload, the load and the repetition alone: whatever a search
visits, equal names mean equal traffic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from quanteval.bench.arrivals import Arrivals
from quanteval.bench.client import LoadPoint
from quanteval.bench.driver import OpenState, drive_closed, drive_open
from quanteval.bench.judging import Judge, answers_of
from quanteval.bench.plan import SINGLE_STREAM, WARMUP
from quanteval.bench.search import Grid, Search, Visit
from quanteval.bench.workload import PlannedRequest, PromptMaker, Workload
from quanteval.interfaces import Session
from quanteval.metrics.load import GROWTH_SIGMAS
from quanteval.metrics.operating import WITH_TAIL, WITHOUT_TAIL
from quanteval.metrics.slo import Slo
from quanteval.records import LoadPointRecord, RequestTrace

Stage = Literal["single", "rising", "search", "head_of_line"]
Items = Generator[RequestTrace | LoadPointRecord, None, None]
LOOKED_AT = 4000
"""Requests drawn to find some of every bucket."""
COUNTS = (
    "single_requests", "requests", "repetitions", "max_points", "per_octave", "head_of_line_blocks",
)  # fmt: skip
POSITIVE = (
    "start", "min_load", "max_load", "min_window_s", "max_window_s", "max_search_s", "knee_tolerance", "timeout_s",
)  # fmt: skip
TRACE = "load"
"""What names the lengths and bursts that all rising and searched loads share."""


@dataclass(frozen=True)
class ServingBench:
    """The plan of stages; fields are those of conf/bench/serving*.yaml.

    The workload's arrival process decides what is varied: slots (`closed`) or requests/s (every other). `loads`
    replaces the search by a fixed list, e.g. that of a baseline measured before. Loads otherwise begin at `start` and
    double up to `max_load`, and are searched with `per_octave` steps a doubling. A window of an open loop lasts
    `requests` / rate seconds, kept within `min_window_s` and `max_window_s`; a closed loop measures `requests`, but
    at least two a slot.
    """

    workload: Workload = field(default_factory=Workload)
    slo: Slo = field(default_factory=Slo)
    stages: tuple[Stage, ...] = ("single", "rising", "search", "head_of_line")
    single_requests: int = 5
    loads: tuple[float, ...] = ()
    start: float = 1.0
    min_load: float = 0.03125
    max_load: float = 256.0
    per_octave: int = 4
    requests: int = 200
    min_window_s: float = 10.0
    max_window_s: float = 300.0
    ramp_share: float = 0.2
    repetitions: int = 3
    max_points: int = 24
    max_search_s: float = 3600.0
    knee_tolerance: float = 0.25
    head_of_line_rate: float | None = None
    head_of_line_blocks: int = 4
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f'{name} "{getattr(self, name)}" must be at least 1')
        for name in POSITIVE:
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f'{name} "{getattr(self, name)}" must be positive and finite')
        if not self.min_load <= self.start <= self.max_load:
            raise ValueError(f'start "{self.start:g}" must lie between min_load and max_load')
        if not 0 <= self.ramp_share <= 10:
            raise ValueError(f'ramp_share "{self.ramp_share}" must be between 0 and 10')
        if self.min_window_s > self.max_window_s:
            raise ValueError(f'min_window_s "{self.min_window_s:g}" must not exceed max_window_s')
        if any(not 0 < load < math.inf for load in self.loads) or len(set(self.loads)) < len(
            self.loads
        ):
            raise ValueError(f'loads "{list(self.loads)}" must be positive, no two alike')
        if self.closed and any(load != int(load) for load in self.loads):
            raise ValueError(
                f'loads "{list(self.loads)}" of a closed loop are slots: whole numbers'
            )
        if "search" in self.stages and "rising" not in self.stages:
            raise ValueError('stage "search" needs the stage "rising" before it')
        rate = self.head_of_line_rate
        if rate is not None and not 0 < rate < math.inf:
            raise ValueError(f'head_of_line_rate "{rate}" must be positive and finite')

    @property
    def closed(self) -> bool:
        """Whether slots are varied and not a rate."""
        return self.workload.loop == "closed"

    def fingerprint(self) -> dict[str, Any]:
        """Everything the traces depend on besides the served model."""
        plain = {
            **asdict(self),
            "workload": self.workload.fingerprint(),
            "stages": list(self.stages),
        }
        return {"kind": "serving", **plain, "loads": list(self.loads)}

    def run(self, session: Session) -> Iterator[RequestTrace | LoadPointRecord]:
        """Warm up, then do the stages in order; a record follows the traces of each load point.

        Raises ConfigError for a workload that the session's context cannot hold, EngineError when the engine hangs.
        """
        run = _Serving(self, session)
        yield from run.warm_up()
        if "single" in self.stages:
            yield from run.single()
        if "rising" in self.stages:
            yield from run.rising()
        if "head_of_line" in self.stages:
            yield from run.head_of_line()


class _Serving:
    """One run of the plan on one session."""

    def __init__(self, plan: ServingBench, session: Session) -> None:
        self.plan = plan
        self.session = session
        self.context = session.max_context
        self.maker: PromptMaker = plan.workload.maker(session.tokenizer)
        self.judge = Judge(plan.slo, plan.knee_tolerance)
        self.settled = itertools.count(1)

    # ---- stage 1

    def by_bucket(self, name: str, count: int) -> list[PlannedRequest]:
        """Return `count` requests of every bucket that occurs, the buckets in turns."""
        found: dict[str, list[PlannedRequest]] = {}
        drawn = self.plan.workload.requests(name, max_context=self.context)
        for request in itertools.islice(drawn, LOOKED_AT):
            kept = found.setdefault(request.bucket, [])
            if len(kept) < count:
                kept.append(request)
        names = [name for name in self.plan.workload.bucket_names() if name in found]
        names += [name for name in found if name not in names]
        turns = itertools.zip_longest(*(found[name] for name in names))
        return [request for turn in turns for request in turn if request is not None]

    def warm_up(self) -> Items:
        """Send one request of every bucket, none of them measured."""
        point = LoadPoint(WARMUP, 1, warmup=True, stage="single")
        requests = self.by_bucket(WARMUP, 1)
        for item in self._closed(point, requests, iter(())):
            if isinstance(item, LoadPointRecord):
                yield item.model_copy(update={"note": self.plan.workload.clipped(self.context)})
            else:
                yield item

    def single(self) -> Items:
        """Measure one stream: the same number of requests of every bucket."""
        point = LoadPoint(SINGLE_STREAM, 1, stage="single")
        chosen = self.by_bucket(SINGLE_STREAM, self.plan.single_requests)
        first = replace(self.by_bucket(f"{SINGLE_STREAM}_ramp", 1)[0], role="ramp")
        yield from self._closed(point, [first, *chosen], iter(()))

    # ---- stages 2 and 3

    def rising(self) -> Items:
        """Measure rising loads, and search the breaks between them where the plan says so."""
        plan = self.plan
        if plan.loads:
            yield from self._fixed()
            return
        grid = Grid(per_octave=plan.per_octave, whole=plan.closed)
        search = Search(
            grid,
            start=grid.octave_at_most(plan.start),
            bottom=grid.octave_at_most(plan.min_load),
            top=grid.at_most(plan.max_load),
            repetitions=plan.repetitions,
            max_points=plan.max_points,
            max_s=plan.max_search_s,
        )
        while (visit := search.next()) is not None:
            if visit.stage == "search" and "search" not in plan.stages:
                break
            yield from self._visit(search, visit)

    def _visit(self, search: Search, visit: Visit) -> Items:
        load = search.grid.load(visit.place)
        record = yield from self._load_point(load, visit.repetition, visit.stage)
        answers = answers_of(search.grid, self.judge.loads, self.judge.judged())
        over = record.over_saturated
        search.tell(visit, answers, over_saturated=over, seconds=record.duration_s)

    def _fixed(self) -> Items:
        for load, repetition in itertools.product(
            sorted(self.plan.loads), range(self.plan.repetitions)
        ):
            record = yield from self._load_point(load, repetition, "rising")
            if record.over_saturated:
                break

    def _load_point(
        self, load: float, repetition: int, stage: str
    ) -> Generator[RequestTrace | LoadPointRecord, None, LoadPointRecord]:
        """Drive one load; yield its traces and its record with what is concluded from it, and return that."""
        traces: list[RequestTrace] = []
        items = (
            self._slots(int(load), repetition, stage)
            if self.plan.closed
            else self._rate(load, repetition, stage)
        )
        for item in items:
            if isinstance(item, RequestTrace):
                traces.append(item)
                yield item
            else:
                record = self.judge.take(item, traces)
                yield record
        if record.over_saturated:
            yield from self.settle()
        return record

    def settle(self) -> Items:
        """Send one unmeasured request: once it has ended, a queue that was left behind is worked off or dropped."""
        point = LoadPoint(WARMUP, 1, next(self.settled), warmup=True, stage="single")
        drawn = self.plan.workload.requests(WARMUP, point.repetition, max_context=self.context)
        yield from self._closed(point, [next(drawn)], iter(()))

    def _slots(self, slots: int, repetition: int, stage: str) -> Items:
        name = f"closed_loop_{slots}"
        point = LoadPoint(name, slots, repetition, stage=stage)  # type: ignore[arg-type]
        drawn = self.plan.workload.requests(
            name, repetition, max_context=self.context, lengths=TRACE
        )
        requests = []
        # The first of each slot ends after its own share of an output, so that the slots do not run in step.
        for i, request in enumerate(itertools.islice(drawn, slots)):
            part = max(1, request.output_tokens * (i + 1) // (slots + 1))
            requests.append(replace(request, output_tokens=part, role="ramp"))
        requests += itertools.islice(drawn, max(self.plan.requests, 2 * slots))
        return self._closed(point, requests, (replace(r, role="filler") for r in drawn))

    def _rate(self, rate: float, repetition: int, stage: str) -> Items:
        return self._open(f"open_loop_{rate:g}", rate, repetition, stage)

    def _closed(
        self,
        point: LoadPoint,
        requests: Sequence[PlannedRequest],
        fillers: Iterator[PlannedRequest],
    ) -> Items:
        return drive_closed(self.session, self.maker, point, requests, fillers, self.plan.timeout_s)

    def _open(
        self,
        name: str,
        rate: float,
        repetition: int,
        stage: str,
        drop: str = "",
        trace: str = TRACE,
    ) -> Items:
        plan = self.plan
        window = min(max(plan.requests / rate, plan.min_window_s), plan.max_window_s)
        begin = plan.ramp_share * window
        point = LoadPoint(
            name, 0, repetition, loop="open", rate=rate, stage=stage,  # type: ignore[arg-type]
            measured_from_s=begin, measured_to_s=begin + window,
        )  # fmt: skip
        arrivals = _poisson_if_closed(plan.workload).arriving(
            name, rate, repetition, measured_from_s=begin, measured_to_s=begin + window,
            max_context=self.context, trace=trace,
        )  # fmt: skip
        kept = ((request, at_s) for request, at_s in arrivals if request.bucket != drop)
        return drive_open(self.session, self.maker, point, kept, plan.timeout_s, stop_when_growing)

    # ---- head-of-line blocking

    def head_of_line(self) -> Items:
        """Send short requests with and without the long ones, in blocks that take turns; nothing without long ones.

        The rate is half of the best seen, on an octave of the grid, unless the plan sets one.
        """
        drawn = itertools.islice(
            self.plan.workload.requests(TRACE, max_context=self.context), LOOKED_AT
        )
        present = {request.bucket for request in drawn}
        ordered = [name for name in self.plan.workload.bucket_names() if name in present]
        best = max((load.achieved_rate or 0.0 for load in self.judge.loads), default=0.0)
        rate = self.plan.head_of_line_rate
        if len(ordered) < 2 or (rate is None and best <= 0):
            return
        if rate is None:
            grid = Grid()
            rate = grid.load(grid.octave_at_most(best / 2))
        for block in range(self.plan.head_of_line_blocks):
            pair = [(WITH_TAIL, ""), (WITHOUT_TAIL, ordered[-1])]
            # Which of the two comes first changes, so that a drift of the machine meets both alike.
            for name, drop in pair if block % 2 == 0 else reversed(pair):
                yield from self._open(name, rate, block, "head_of_line", drop, "head_of_line")


def _poisson_if_closed(workload: Workload) -> Workload:
    return (
        replace(workload, arrivals=Arrivals("poisson")) if workload.loop == "closed" else workload
    )


def stop_when_growing(state: OpenState) -> str:
    """Say that the queue of an open loop grows without end, '' as long as it may not.

    Asked about once a second. Over the last half of the point's time the requests in flight must have grown by more
    than half of what was sent in it, and by more than chance allows; and every request in flight at its beginning must
    have had its turn, so that filling up at the start is not taken for growth.
    """
    half = state.now_s / 2
    past = [count for at, count in state.in_flight_history if at <= half]
    if state.now_s < 10 or not past:
        return ""
    sent = state.sent / 2
    growth = state.in_flight - past[-1]
    turned_over = state.ended >= past[-1] and state.ended > 0
    if not turned_over or growth <= max(sent / 2, GROWTH_SIGMAS * math.sqrt(2 * max(sent, 1))):
        return ""
    return f"the queue grew by {growth} in {half:.0f} s, of about {sent:.0f} requests sent"

"""Queues whose knee and quantiles are known, as traces: what a search is tried on."""

from __future__ import annotations

import heapq
import math

import numpy as np
from scipy.special import gammaincc

from quanteval.bench.judging import answers_of
from quanteval.bench.search import Grid, Search, Visit, run_search, seed_of
from quanteval.metrics.knee import KNEE, Judged, judge_term, knee
from quanteval.metrics.load import Load, loads_of
from quanteval.records import ClientHealth, LoadPointRecord, RequestTrace

HEALTH = ClientHealth(
    lag_p50_s=0, lag_p99_s=0, loop_lag_p99_s=0, cpu_share=0.1, saturated=False
)  # fmt: skip


def trace(name, start, end, *, loop, concurrency=0, rate=0.0, repetition=0, warmup=False, n=0):
    """One request of a single token, made without checks: simulations make very many."""
    return RequestTrace.model_construct(
        round=0, load_point=name, loop=loop, concurrency=concurrency, rate=rate,
        repetition=repetition, warmup=warmup, request_id=f"{name}-{repetition}-{n}", bucket="1-9",
        scheduled_s=start, sent_s=start, chunk_times_s=[end], chunk_tokens=[1], end_s=end,
        prompt_tokens=5, output_tokens=1, cached_prompt_tokens=None, layers={}, status="ok", error="",
    )  # fmt: skip


def open_point(rate, servers, service, *, requests, repetition=0, seed=0, ramp=0.2, stage="rising"):
    """First come, first served by `servers`; Poisson arrivals. `service(rng, n)` gives the seconds of each."""
    rng = np.random.default_rng(seed)
    n = int(requests * (1 + ramp)) + 1
    arrivals = np.cumsum(rng.exponential(1 / rate, n))
    needs = service(rng, n)
    free = [0.0] * servers
    name = f"open_loop_{rate:g}"
    begin, end = float(arrivals[int(requests * ramp)]), float(arrivals[-1])
    traces = []
    for i, (at, need) in enumerate(zip(arrivals.tolist(), needs.tolist(), strict=True)):
        done = max(at, heapq.heappop(free)) + need
        heapq.heappush(free, done)
        traces.append(
            trace(
                name,
                at,
                done,
                loop="open",
                rate=rate,
                repetition=repetition,
                warmup=at < begin,
                n=i,
            )
        )
    record = LoadPointRecord(
        name=name, loop="open", stage=stage, concurrency=0, rate=rate, repetition=repetition, started_s=1.0,
        measured_from_s=begin, measured_to_s=end, duration_s=end, client=HEALTH,
    )  # fmt: skip
    return traces, record


def closed_point(slots, servers, service, *, requests, repetition=0, seed=0, stage="rising"):
    """`slots` clients that send their next request when the last one ended, without thinking."""
    rng = np.random.default_rng(seed)
    ramp, total = 3 * slots, 3 * slots + requests
    needs = iter(service(rng, total + slots).tolist())
    name = f"closed_loop_{slots}"
    free = [0.0] * servers
    ends: list[tuple[float, int]] = [(0.0, i) for i in range(slots)]
    traces, sent = [], 0
    while sent < total:
        at, slot = heapq.heappop(ends)
        done = max(at, heapq.heappop(free)) + next(needs)
        heapq.heappush(free, done)
        heapq.heappush(ends, (done, slot))
        traces.append(
            trace(
                name,
                at,
                done,
                loop="closed",
                concurrency=slots,
                repetition=repetition,
                warmup=sent < ramp,
                n=sent,
            )
        )
        sent += 1
    record = LoadPointRecord(
        name=name, loop="closed", stage=stage, concurrency=slots, rate=0.0, repetition=repetition, started_s=1.0,
        duration_s=max(t.end_s for t in traces), client=HEALTH,
    )  # fmt: skip
    return traces, record


def exponential(mean):
    """Exponential service times."""
    return lambda rng, n: rng.exponential(mean, n)


def mm1_break(mu, q, limit):
    """Rate at which the q-quantile of an M/M/1 queue's time in system, -ln(1-q)/(mu - rate), is the limit."""
    return mu + math.log(1 - q) / limit


def mmc_closed_quantile_share(slots, servers, mean, limit):
    """Share of requests slower than the limit with `slots` clients, no thinking and exponential service.

    A request finds the other slots - 1 there; it waits for slots - servers departures at rate servers/mean, and is
    then served.
    """
    if slots <= servers:
        return math.exp(-limit / mean)
    waits = slots - servers
    grid = np.linspace(0, limit, 4001)
    # P(W + S > limit) = P(W > limit) + integral of the density of W times P(S > limit - w)
    tail = gammaincc(waits, servers * grid / mean)
    density = -np.diff(tail)
    middle = (grid[1:] + grid[:-1]) / 2
    return float(tail[-1] + (density * np.exp(-(limit - middle) / mean)).sum())


class Simulated:
    """A server that a search measures point by point, judged by the statistics that a bench uses."""

    def __init__(self, loop, servers, service, slo, *, requests=400, seed=0, knee=True):
        self.loop, self.servers, self.service = loop, servers, service
        self.slo, self.requests, self.seed = slo, requests, seed
        self.points: dict[float, tuple[list, list]] = {}
        self.seen: dict[float, Load] = {}
        self.judged: dict[tuple[str, float], Judged] = {}
        self.knee = knee
        self.search: Search | None = None

    def measure(self, visit: Visit):
        load = self.search.grid.load(visit.place)
        seed = seed_of(self.seed, load, visit.repetition)
        more = {"requests": self.requests, "repetition": visit.repetition, "seed": seed}
        point = (
            open_point(load, self.servers, self.service, **more)
            if self.loop == "open"
            else closed_point(int(load), self.servers, self.service, **more)
        )
        mine = self.points.setdefault(load, ([], []))
        mine[0].extend(point[0])
        mine[1].append(point[1])
        (self.seen[load],) = loads_of(*mine, self.slo)
        for term in self.slo.terms:
            self.judged[term.name, load] = judge_term(self.seen[load], term)
        loads = self.loads()
        judged: dict[str, list[Judged]] = {
            term.name: [self.judged[term.name, item.load] for item in loads]
            for term in self.slo.terms
        }
        if self.knee:
            judged[KNEE] = list(knee(loads).judged)
        over = bool(self.seen[load].over_saturated)
        return answers_of(self.search.grid, loads, judged), over, 1.0

    def loads(self) -> list[Load]:
        return [self.seen[load] for load in sorted(self.seen)]

    def run(self, **more) -> list[Visit]:
        grid = Grid(per_octave=4, whole=self.loop == "closed")
        low, high = (0, grid.at_most(64)) if self.loop == "closed" else (-16, 24)
        self.search = Search(
            grid, **{"start": low, "bottom": low, "top": high, "max_points": 40, **more}
        )
        return run_search(self.search, self.measure)

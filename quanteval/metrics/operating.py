"""What an operator may rely on: the load that keeps the SLO, 70 % of the knee, and what long requests do to others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quanteval.metrics.knee import Break, judge_term, knee, slo_break, usable
from quanteval.metrics.latency import e2e_s, ended_well, ttft_s
from quanteval.metrics.load import Load, Run
from quanteval.metrics.slo import Slo
from quanteval.stats.timing import quantile_ratio, throughput_ratio

KNEE_SHARE = 0.7
WITH_TAIL = "head_of_line_with"
WITHOUT_TAIL = "head_of_line_without"
ALPHA = 0.05


@dataclass(frozen=True)
class Operating:
    """What is served at one load. Rates are None where they are not known."""

    load: float
    """Slots of a closed loop, requests/s of an open one."""
    request_rate: float | None
    output_tps: float | None
    goodput: float | None
    how: str
    """'measured at open_loop_2', or 'between open_loop_1 and open_loop_2'."""


@dataclass(frozen=True)
class Capacity:
    """What one variant serves: where its SLO and its linear range end, and what comes out below."""

    loop: Literal["closed", "open"]
    slo: str
    """Every promise in one line, 'none' without one."""
    knee: Break
    breaks: tuple[Break, ...]
    """Of each promise."""
    slo_load: float | None
    """Highest measured load that keeps every promise, all lower ones too; None where there is none."""
    slo_sure: bool
    """Whether that is sure for every promise, not only seen."""
    at_slo: Operating | None
    at_knee_share: Operating | None
    """At KNEE_SHARE of the knee (of the highest load when none was reached)."""
    best: Operating | None
    """The highest output tokens/s of any load."""
    over_saturated_at: float | None
    """Lowest load that was more than the server can take."""
    excluded: tuple[str, ...] = ()
    """Load points, or runs of them, that are in no figure, with the reason."""


def capacity(loads: Sequence[Load], slo: Slo) -> Capacity | None:
    """Return the capacity seen in the rising and search stages, None when no load has a steady state."""
    points = usable(loads)
    if not points:
        return None
    found = knee(points)
    held, sure = _highest_kept(points, slo)
    # Without a knee its share is that of the highest load: that much was seen to be in the linear range.
    reach = found.load if found.load is not None else None
    if reach is None and not any(item.holds is False for item in found.judged):
        reach = points[-1].load
    known = [p for p in points if p.output_tps is not None]
    best = max(known, key=lambda p: p.output_tps or 0.0, default=None)
    return Capacity(
        loop=points[0].loop,
        slo=slo.text,
        knee=found,
        breaks=tuple(slo_break(points, term) for term in slo.terms),
        slo_load=None if held is None else held.load,
        slo_sure=sure,
        at_slo=None if held is None else _measured(held),
        at_knee_share=None if reach is None else at_load(points, KNEE_SHARE * reach),
        best=None if best is None else _measured(best),
        over_saturated_at=next((p.load for p in points if p.over_saturated), None),
        excluded=tuple(f"{load.name}: {why}" for load in loads for why in load.excluded),
    )


def _highest_kept(points: Sequence[Load], slo: Slo) -> tuple[Load | None, bool]:
    """Return the last load before the first that breaks a promise, and whether it surely keeps all of them."""
    held, sure = None, False
    for load in points:
        judged = [judge_term(load, term) for term in slo.terms]
        if load.over_saturated or any(not item.holds for item in judged):
            break
        held, sure = load, bool(judged) and all(item.sure for item in judged)
    return held, sure


def _measured(load: Load) -> Operating:
    how = f"measured at {load.name}"
    return Operating(load.load, load.achieved_rate, load.output_tps, load.goodput, how)


def at_load(points: Sequence[Load], load: float) -> Operating | None:
    """Return what comes out at a load, interpolated between its neighbours; None outside what was measured."""
    for point in points:
        if math.isclose(point.load, load, rel_tol=1e-9):
            return _measured(point)
    below = [p for p in points if p.load < load]
    above = [p for p in points if p.load > load]
    if not below or not above:
        return None
    low, high = below[-1], above[0]
    part = (load - low.load) / (high.load - low.load)

    def mix(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a + part * (b - a)

    return Operating(
        load,
        mix(low.achieved_rate, high.achieved_rate),
        mix(low.output_tps, high.output_tps),
        mix(low.goodput, high.goodput),
        f"between {low.name} and {high.name}",
    )


# --------------------------------------------------------------------------- head-of-line blocking


@dataclass(frozen=True)
class HeadOfLine:
    """A quantile of the short requests' latency with the long ones among them over that without them.

    Bounds are one-sided at 95 % each, None where there are too few requests for one.
    """

    metric: Literal["ttft", "e2e"]
    q: float
    bucket: str
    with_tail_s: float
    without_tail_s: float
    ratio: float
    lower: float | None
    upper: float | None
    requests: tuple[int, int]
    """Short requests that ended well, with and without the long ones."""
    blocks: tuple[int, int]
    failed: tuple[int, int]
    method: str


def head_of_line(
    loads: Sequence[Load], metric: Literal["ttft", "e2e"] = "ttft", q: float = 0.99
) -> HeadOfLine | None:
    """Return the effect of long requests on short ones, None when it was not measured.

    Both loads send the same short requests at the same times, in blocks that take turns. The ratio's bounds are the
    wider, on each side, of those by order statistics over requests and, from two blocks of each on, of those by Welch's
    t on the logarithms of the blocks' own quantiles: requests of one block depend on each other.
    """
    both = [next((x for x in loads if x.name == n), None) for n in (WITH_TAIL, WITHOUT_TAIL)]
    if both[0] is None or both[1] is None or not both[1].buckets:
        return None
    # Buckets are in the order of their lengths.
    short = next(iter(both[1].buckets))
    of = {"ttft": ttft_s, "e2e": e2e_s}[metric]

    def values(run: Run) -> list[float]:
        return [of(t) for t in run.steady if t.bucket == short and ended_well(t)]

    arms = [[found for run in load.runs if (found := values(run))] for load in both if load]
    pooled = [[value for block in arm for value in block] for arm in arms]
    if not pooled[0] or not pooled[1] or min(map(min, pooled)) <= 0:
        return None
    bounds = [quantile_ratio(pooled[1], pooled[0], q, ALPHA)]
    method = "order statistics over requests"
    if min(len(arm) for arm in arms) >= 2:
        own = [[float(np.quantile(block, q)) for block in arm] for arm in arms]
        bounds.append(throughput_ratio(own[1], own[0], ALPHA))
        method += " and Welch's t over blocks, the wider"
    seen = [float(np.quantile(arm, q)) for arm in pooled]
    ratio = seen[0] / seen[1]
    lower = min([ratio, *(b.lower for b in bounds)])
    upper = max([ratio, *(b.upper for b in bounds)])
    failed = [
        sum(not ended_well(t) for r in x.runs for t in r.steady if t.bucket == short)
        for x in both
        if x
    ]
    return HeadOfLine(
        metric=metric,
        q=q,
        bucket=short,
        with_tail_s=seen[0],
        without_tail_s=seen[1],
        ratio=ratio,
        lower=lower if lower > 0 else None,
        upper=upper if math.isfinite(upper) else None,
        requests=(len(pooled[0]), len(pooled[1])),
        blocks=(len(arms[0]), len(arms[1])),
        failed=(failed[0], failed[1]),
        method=method,
    )

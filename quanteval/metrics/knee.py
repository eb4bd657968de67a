"""Where a rising load stops being served well: the knee, the break of each SLO, head-of-line blocking, capacity.

Every load is judged twice: by its point estimate, which tells where a break seems to be, and by a bound, which tells
where it surely is not. The interval of a break runs from the highest load that surely holds to the lowest that surely
does not, so it holds both the grid's resolution and the noise of every point. Requests of one load point depend on each
other (they queue behind one another), so noise is taken from contiguous blocks of requests and not from single ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtri, stdtrit

from quanteval.metrics.latency import e2e_s, ended_well
from quanteval.metrics.load import Load, Run
from quanteval.metrics.slo import Term

ALPHA = 0.025
"""Error of one bound at one load. About two loads beside a break can each be mistaken, so a side errs at most 5 %."""
LEVEL = 0.9
TOLERANCE = 0.25
"""Share by which latency must exceed the line through the lower loads to have left its linear range."""
BLOCKS = 20
REPLICATES = 400
KNEE = "knee"


@dataclass(frozen=True)
class Judged:
    """One load judged against one target: whether it holds (point estimate), and whether that is sure."""

    load: float
    holds: bool
    sure: bool
    value: float
    """What was judged: the share of misses over the share allowed, or latency over the line's limit; 1 is the limit."""
    n: int
    text: str = ""


@dataclass(frozen=True)
class Break:
    """The load at which something breaks, with an interval of level `LEVEL`; an end that is not known is None.

    `load` None: it held at every load that was measured, or at none (`reason` says which).
    """

    target: str
    load: float | None
    lower: float | None
    """Highest load that surely holds."""
    upper: float | None
    """Lowest load that surely does not."""
    reason: str
    judged: tuple[Judged, ...] = ()
    level: float = LEVEL


# --------------------------------------------------------------------------- the break of an SLO


def judge_term(load: Load, term: Term) -> Judged:
    """Judge one promise at one load: whether at most 1 - q of the requests are slower than its limit.

    The share's bounds are Clopper and Pearson's at the effective number of requests (Korn and Graubard, Survey
    Methodology 24, 1998): the number divided by the design effect between contiguous blocks (batch means, Schmeiser,
    Operations Research 30, 1982), and by the ratio of squared t to normal quantiles for so few blocks. The design
    effect is the larger of that of the misses and that of exceeding the sample's 90 % quantile: few misses tell
    little about how they cluster. Failed requests miss.
    """
    allowed = round(1 - term.q, 12)
    groups = [[term.misses(trace) for trace in run.steady] for run in load.runs]
    counts = [np.asarray(group, dtype=float) for group in groups if group]
    if not counts or sum(float(c[:, 1].sum()) for c in counts) == 0:
        if load.over_saturated:
            return Judged(load.load, False, True, math.inf, 0, load.over_saturated)
        return Judged(load.load, False, False, math.nan, 0, "no steady request")
    missed = sum(float(c[:, 0].sum()) for c in counts)
    total = sum(float(c[:, 1].sum()) for c in counts)
    share = missed / total
    if load.over_saturated:
        return Judged(load.load, False, True, share / allowed, int(total), load.over_saturated)
    effective = total / max(_design_effect(counts), _design_effect(_upper_tenth(load, term)))
    x = share * effective
    # Both counts may be fractions, which the beta quantiles behind the exact bounds take as they are.
    upper = 1.0 if share == 1 else float(betaincinv(x + 1, effective - x, 1 - ALPHA))
    lower = 0.0 if share == 0 else float(betaincinv(x, effective - x + 1, ALPHA))
    holds = share <= allowed
    text = f"{term.name}: {missed:.0f} of {total:.0f} above {term.limit_s:g} s, {100 * allowed:.3g} % may be"
    sure = upper <= allowed if holds else lower > allowed
    return Judged(load.load, holds, sure, share / allowed, int(total), text)


def _upper_tenth(load: Load, term: Term) -> list[NDArray[np.float64]]:
    """Return, like the misses of each run, how often each request is in the sample's slowest tenth."""
    rows = [[term.values(t) if ended_well(t) else [math.inf] for t in r.steady] for r in load.runs]
    every = np.asarray([value for run in rows for values in run for value in values])
    cut = float(np.quantile(every, 0.9, method="lower"))
    found = [[(sum(v > cut for v in values), len(values)) for values in run] for run in rows]
    return [np.asarray(run, dtype=float) for run in found if run]


def _design_effect(counts: Sequence[NDArray[np.float64]]) -> float:
    """Return how much more a share varies between blocks than between independent values, at least 1.

    With the penalty for the number of blocks that its estimate rests on.
    """
    blocks = np.concatenate([_sums(run, BLOCKS // len(counts) or 1) for run in counts])
    missed, total = float(blocks[:, 0].sum()), float(blocks[:, 1].sum())
    share = missed / total if total else 0.0
    b = len(blocks)
    if b < 2 or not 0 < share < 1:
        return 1.0
    residual = blocks[:, 0] - share * blocks[:, 1]
    variance = float((residual**2).sum()) * b / (b - 1) / total**2
    penalty = (float(stdtrit(b - 1, ALPHA)) / float(ndtri(ALPHA))) ** 2
    return max(1.0, variance / (share * (1 - share) / total) * penalty)


def _sums(rows: NDArray[np.float64], blocks: int) -> NDArray[np.float64]:
    """Return the sums over at most so many contiguous blocks of at least five rows."""
    count = max(1, min(blocks, len(rows) // 5))
    return np.stack([part.sum(axis=0) for part in np.array_split(rows, count)])


def slo_break(loads: Sequence[Load], term: Term) -> Break:
    """Return the load at which one promise breaks."""
    return find_break(term.text, [judge_term(load, term) for load in usable(loads)])


def usable(loads: Sequence[Load]) -> list[Load]:
    """Return the loads of the rising and search stages that have figures, lowest first."""
    kept = [load for load in loads if load.stage in ("rising", "search") and load.runs]
    return sorted(kept, key=lambda load: load.load)


def find_break(target: str, judged: Sequence[Judged]) -> Break:
    """Return the break between the loads that hold and those that do not; `judged` has rising loads.

    A response that rises with the load holds below a load that holds surely and is broken above one that is surely
    broken; where two sure loads contradict that, the interval covers both. The estimate is interpolated between the
    last load that holds and the first that does not, in the logarithms of load and of excess.
    """
    known = [item for item in judged if not math.isnan(item.value)]
    if not known:
        return Break(target, None, None, None, "no load point has a steady state", tuple(judged))
    broken = [item for item in known if not item.holds]
    sure_broken = min((i.load for i in known if not i.holds and i.sure), default=None)
    sure_holds = [i.load for i in known if i.holds and i.sure]
    lower = max(sure_holds, default=None)
    if lower is not None and sure_broken is not None and lower > sure_broken:
        below = [load for load in sure_holds if load < sure_broken]
        lower, sure_broken = max(below, default=None), lower
    if not broken:
        reason = f"held at every load up to {known[-1].load:g}"
        return Break(target, None, lower, None, reason, tuple(judged))
    first = broken[0]
    last = max((i for i in known if i.load < first.load), key=lambda i: i.load, default=None)
    if last is None:
        reason = f"broken already at the lowest load, {first.load:g}"
        return Break(target, None, None, sure_broken, reason, tuple(judged))
    reason = f"holds at {last.load:g}, broken at {first.load:g}"
    estimate = _between(last, first)
    if lower is not None:
        estimate = max(estimate, lower)
    if sure_broken is not None:
        estimate = min(estimate, sure_broken)
    return Break(target, estimate, lower, sure_broken, reason, tuple(judged))


def _between(last: Judged, first: Judged) -> float:
    if last.value <= 0 or not math.isfinite(first.value) or first.value <= last.value:
        return math.sqrt(last.load * first.load)
    part = -math.log(last.value) / (math.log(first.value) - math.log(last.value))
    part = min(1.0, max(0.0, part))
    return math.exp((1 - part) * math.log(last.load) + part * math.log(first.load))


# --------------------------------------------------------------------------- the knee


def knee(loads: Sequence[Load], tolerance: float = TOLERANCE) -> Break:
    """Return the load at which the median E2E latency leaves the linear range of lower loads.

    Going up, a line is fitted to the loads of at most half a load that are in the linear range (at least two of them;
    least squares of relative errors, no falling slope), and the load has left the range when its median exceeds the
    line by more than `tolerance` and the next load's does so too; then so has every higher one, and every
    over-saturated one. Fitting an octave behind keeps a slow bend from being taken for the line. This is
    one-step-ahead prediction by recursive regression (Brown, Durbin and Evans, JRSS B 37, 1975). Whether a load left
    the range is sure when it did, or did not, in all but ALPHA of REPLICATES bootstrap samples of whole blocks
    (Kuensch, Annals of Statistics 17, 1989), lines refitted. Loads with too few below them for a line count as
    inside, and are never sure.
    """
    points = usable(loads)
    medians = np.asarray([_median(load) for load in points])
    kept = [
        i for i, value in enumerate(medians) if not math.isnan(value) or points[i].over_saturated
    ]
    points = [points[i] for i in kept]
    if not points:
        return find_break(KNEE, [])
    x = np.asarray([load.load for load in points])
    saturated = np.asarray([bool(load.over_saturated) for load in points])
    ratio, outside = _departures(x, medians[kept][None, :], saturated, tolerance)
    rng = np.random.default_rng(0)
    drawn = np.stack([_bootstrap_medians(load, rng) for load in points], axis=1)
    share = _departures(x, drawn, saturated, tolerance)[1].mean(axis=0)
    judged = [
        Judged(
            load=load.load,
            holds=not outside[0, i],
            sure=_sure(
                bool(outside[0, i]), float(share[i]), bool(saturated[i]), float(ratio[0, i])
            ),
            value=math.inf if saturated[i] else float(ratio[0, i]),
            n=load.all.e2e.n,
            text=load.over_saturated or _knee_text(float(ratio[0, i]), tolerance),
        )
        for i, load in enumerate(points)
    ]
    return find_break(KNEE, judged)


def _sure(outside: bool, share: float, saturated: bool, ratio: float) -> bool:
    if outside:
        return saturated or share >= 1 - ALPHA
    return ratio > 0 and share <= ALPHA


def _knee_text(ratio: float, tolerance: float) -> str:
    if ratio == 0:
        return "too few lower loads for a line"
    return f"median E2E latency {100 * (ratio * (1 + tolerance) - 1):+.0f} % of the line below"


def _departures(
    x: NDArray[np.float64], y: NDArray[np.float64], saturated: NDArray[np.bool_], tolerance: float
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return, by replicate and load, latency over its limit (0: no line yet) and whether the range was left."""
    ratio = np.zeros_like(y)
    outside = np.zeros(y.shape, dtype=bool)

    def over_line(j: int, below: int) -> NDArray[np.float64]:
        """Return latency at load j over the limit that the loads before place `below` set."""
        inside = (
            (x[:below] <= x[j] / 2 * (1 + 1e-9)) & ~outside[:, :below] & ~np.isnan(y[:, :below])
        )
        limit = _line_at(x[:below], y[:, :below], inside, x[j]) * (1 + tolerance)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.nan_to_num(np.where(limit > 0, y[:, j] / limit, 0.0))

    for j in range(len(x)):
        ratio[:, j] = over_line(j, j)
        # One load alone may be off by chance; what has left the range stays outside at the next load too.
        next_too = j + 1 == len(x) or saturated[j + 1] or over_line(j + 1, j) > 1
        outside[:, j] = saturated[j] | ((ratio[:, j] > 1) & next_too)
        if j:
            outside[:, j] |= outside[:, j - 1]
    return ratio, outside


def _line_at(
    x: NDArray[np.float64], y: NDArray[np.float64], inside: NDArray[np.bool_], at: float
) -> NDArray[np.float64]:
    """Return each row's fitted line at a load, NaN with fewer than two points; weights 1/y^2."""
    w = np.where(inside, 1 / np.where(inside, y, 1.0) ** 2, 0.0)
    y = np.where(inside, y, 0.0)
    total = w.sum(axis=1)
    enough = inside.sum(axis=1) >= 2
    total = np.where(enough, total, 1.0)
    mean_x, mean_y = (w * x).sum(axis=1) / total, (w * y).sum(axis=1) / total
    dx = x[None, :] - mean_x[:, None]
    spread = (w * dx**2).sum(axis=1)
    slope = (w * dx * y).sum(axis=1) / np.where(spread > 0, spread, 1.0)
    slope = np.where(spread > 0, np.maximum(slope, 0.0), 0.0)
    return np.where(enough, mean_y + slope * (at - mean_x), np.nan)


def _latencies(run: Run) -> NDArray[np.float64]:
    """Return E2E latencies in order of their start; a failed request lasted for ever."""
    return np.asarray([e2e_s(t) if ended_well(t) else math.inf for t in run.steady])


def _median(load: Load) -> float:
    values = [e2e_s(t) for run in load.runs for t in run.steady if ended_well(t)]
    return float(np.median(values)) if values else math.nan


def _bootstrap_medians(load: Load, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return medians of REPLICATES samples, each of as many moving blocks as a run has, drawn run by run."""
    parts = []
    for run in load.runs:
        values = np.asarray([v for v in _latencies(run) if math.isfinite(v)])
        if not values.size:
            continue
        length = max(1, math.ceil(values.size / max(1, BLOCKS // len(load.runs))))
        count = math.ceil(values.size / length)
        starts = rng.integers(0, values.size, (REPLICATES, count))
        places = (starts[:, :, None] + np.arange(length)) % values.size
        parts.append(values[places.reshape(REPLICATES, -1)[:, : values.size]])
    if not parts:
        return np.full(REPLICATES, math.nan)
    return np.asarray(np.median(np.concatenate(parts, axis=1), axis=1))

"""The change of one metric between two runs, with an interval at any level: the methods behind `metrics.drift`.

Noise comes from what was repeated: rounds and repetitions where both runs have two or more, else contiguous stretches
of the one load point. A process started anew can differ by more than its own requests show; a smallest change allows
for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from quanteval.errors import EvidenceError
from quanteval.evidence import ScoreSet
from quanteval.metrics.latency import Count, e2e_s, ended_well, itl_s, tpot_s, ttft_s
from quanteval.metrics.load import Load, Run
from quanteval.metrics.quality import SUMMED, metrics_of
from quanteval.records import RequestTrace
from quanteval.stats import (
    RatioBounds,
    clustered_quantile,
    clustered_ratio,
    quantile_ratio,
    score_interval,
    throughput_ratio,
    wilson_bound,
)

SMALLEST = "smallest change"
STRETCHES = 10
"""Stretches that a single run is cut into."""
LATENCIES: dict[str, Callable[[RequestTrace], float | None]] = {
    "ttft": ttft_s, "tpot": tpot_s, "e2e": e2e_s,
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """A metric of both runs and its change; bounds are None without an interval, infinite where one end is unknown."""

    stored: float | None
    fresh: float | None
    value: float | None
    """fresh/stored - 1 where `relative`, else fresh - stored."""
    relative: bool
    lower: float | None
    upper: float | None
    n: tuple[int, int]
    units: str
    method: str
    reason: str = ""

    @property
    def has_interval(self) -> bool:
        """Whether noise could be told from the measurements."""
        return self.lower is not None and self.upper is not None


def _nothing(n: tuple[int, int], units: str, reason: str) -> Change:
    return Change(None, None, None, True, None, None, n, units, "none", reason)


# --------------------------------------------------------------------------- latency


def quantile_change(a: Load, b: Load, kind: str, q: float, level: float) -> Change:
    """Return the change of a latency quantile, each bound at 1 - level.

    The wider, on each side, of two intervals of the ratio: order statistics over requests, as many as are worth
    independent ones (`worth`), and, from two runs of each on, Welch's t on the logarithms of the runs' own quantiles.
    Gaps within a request depend on each other, so an ITL has Woodruff's interval with requests as clusters first.
    """
    sides = [[_values(run, kind) for run in load.runs] for load in (a, b)]
    sides = [[run for run in side if run] for side in sides]
    pooled = [[value for run in side for value in run] for side in sides]
    n = (len(pooled[0]), len(pooled[1]))
    units = "gaps" if kind == "itl" else "requests"
    if not all(n):
        return _nothing(n, units, "not measured in both runs")
    if min(*pooled[0], *pooled[1]) <= 0:
        return _nothing(n, units, "a latency is not positive")
    seen = [float(np.quantile(side, q)) for side in pooled]
    bounds: list[RatioBounds] = []
    if kind == "itl":
        bounds.append(_gap_ratio(a, b, q, level))
        methods = ["Woodruff's interval over requests"]
    else:
        worth_of = [_thinned(side, q) for side in sides]
        bounds.append(quantile_ratio(worth_of[0], worth_of[1], q, level))
        methods = ["order statistics over requests"]
    if min(map(len, sides)) >= 2:
        own = [[float(np.quantile(run, q)) for run in side] for side in sides]
        bounds.append(throughput_ratio(own[0], own[1], level))
        methods.append("Welch's t over runs")
    value = seen[1] / seen[0] - 1
    lower = min(value, *(bound.lower - 1 for bound in bounds))
    upper = max(value, *(bound.upper - 1 for bound in bounds))
    return Change(
        seen[0], seen[1], value, True, lower, upper, n, units, " and ".join(methods)
    )  # fmt: skip


def _values(run: Run, kind: str) -> list[float]:
    good = [trace for trace in run.steady if ended_well(trace)]
    if kind == "itl":
        return [gap for trace in good for gap in itl_s(trace)]
    of = LATENCIES[kind]
    return [value for trace in good if (value := of(trace)) is not None]


def _gap_ratio(a: Load, b: Load, q: float, level: float) -> RatioBounds:
    """Return the ratio of two quantiles over gaps; bounds joined as `quantile_ratio` does, 0 and inf for none."""
    sides = [
        [gaps for run in load.runs for t in run.steady if ended_well(t) and (gaps := itl_s(t))]
        for load in (a, b)
    ]
    n = (len(sides[0]), len(sides[1]))
    if min(n) < 2:
        return RatioBounds(1.0, 0.0, math.inf, level, *n)
    x, y = (clustered_quantile(side, q, level) for side in sides)
    ratio = y.estimate / x.estimate
    down, up = 0.0, math.inf
    if y.lower > 0 and math.isfinite(x.upper):
        down = ratio * math.exp(
            -math.hypot(math.log(y.estimate / y.lower), math.log(x.upper / x.estimate))
        )
    if x.lower > 0 and math.isfinite(y.upper):
        up = ratio * math.exp(
            math.hypot(math.log(y.upper / y.estimate), math.log(x.estimate / x.lower))
        )
    return RatioBounds(ratio, down, up, level, *n)


def _thinned(runs: Sequence[Sequence[float]], q: float) -> NDArray[np.float64]:
    """Return the pooled values as a sample of the same shape, of as many as are worth independent ones."""
    every = np.sort(np.concatenate([np.asarray(run, dtype=float) for run in runs]))
    keep = max(1, min(every.size, int(worth(runs, q))))
    if keep == every.size:
        return every
    places = (np.arange(keep) + 0.5) / keep
    return np.asarray(np.quantile(every, places, method="inverted_cdf"), dtype=np.float64)


def worth(runs: Sequence[Sequence[float]], q: float) -> float:
    """Return how many independent requests these are worth: their number over the design effect.

    Batch means: how much more the share above a quantile varies between contiguous stretches of at least five requests
    than between independent ones (Schmeiser, Operations Research 30, 1982). Of tails the 90 % quantile is taken.
    """
    every = np.concatenate([np.asarray(run, dtype=float) for run in runs])
    cut = float(np.quantile(every, min(q, 0.9), method="lower"))
    parts = [
        part
        for run in runs
        for part in np.array_split(np.asarray(run) > cut, max(1, min(2 * STRETCHES, len(run) // 5)))
    ]
    share = float((every > cut).mean())
    if len(parts) < 2 or not 0 < share < 1:
        return float(every.size)
    residual = np.array([part.sum() - share * part.size for part in parts])
    variance = float((residual**2).sum()) * len(parts) / (len(parts) - 1) / every.size**2
    return every.size / max(1.0, variance / (share * (1 - share) / every.size))


# --------------------------------------------------------------------------- rates


def rate_change(a: Load, b: Load, count: Count, level: float) -> Change:
    """Return the change of a rate by Welch's t on logarithms: over runs, or over stretches of a single run's window."""
    whole = [_whole(load, count) for load in (a, b)]
    over_runs = min(len(a.runs), len(b.runs)) >= 2
    units = "runs" if over_runs else "stretches"
    sides: list[list[float]] = [[], []]
    # As many stretches as leave none of them empty: a rate of 0 has no logarithm.
    for parts in (1,) if over_runs else (STRETCHES, STRETCHES // 2, 3, 2):
        sides = [[r for run in load.runs for r in _rates(run, count, parts)] for load in (a, b)]
        if all(len(side) >= 2 and min(side) > 0 for side in sides):
            break
    n = (len(sides[0]), len(sides[1]))
    if not all(n) or whole[0] <= 0:
        return _nothing(n, units, "not measured in both runs")
    value = whole[1] / whole[0] - 1
    if whole[1] == 0:
        return Change(whole[0], 0.0, value, True, None, None, n, units, SMALLEST)
    if min(n) < 2 or min(*sides[0], *sides[1]) <= 0:
        why = "too little was served to tell noise from"
        return Change(whole[0], whole[1], value, True, None, None, n, units, "none", why)
    bounds = throughput_ratio(sides[0], sides[1], level)
    lower, upper = min(value, bounds.lower - 1), max(value, bounds.upper - 1)
    method = f"Welch's t over {units}"
    return Change(whole[0], whole[1], value, True, lower, upper, n, units, method)


def _rates(run: Run, count: Count, parts: int) -> Iterator[float]:
    edges = np.linspace(*run.window, parts + 1)
    for begin, end in pairwise(edges):
        yield sum(count(trace, begin, end) for trace in run.traces) / (end - begin)


def _whole(load: Load, count: Count) -> float:
    total = sum(count(trace, *run.window) for run in load.runs for trace in run.traces)
    return total / load.seconds if load.seconds > 0 else 0.0


def failed_share(a: Load, b: Load, level: float) -> Change:
    """Return the change of the share of failed requests, with Newcombe's interval for independent shares.

    Newcombe, Statistics in Medicine 17 (1998), method 10: Wilson's intervals joined.
    """
    n = (a.requests, b.requests)
    if not all(n):
        return _nothing(n, "requests", "not measured in both runs")
    p, q = a.failed / n[0], b.failed / n[1]
    low = [wilson_bound(x.failed, x.requests, level, "lower") for x in (a, b)]
    high = [wilson_bound(x.failed, x.requests, level, "upper") for x in (a, b)]
    lower = q - p - math.hypot(q - low[1], high[0] - p)
    upper = q - p + math.hypot(high[1] - q, p - low[0])
    return Change(p, q, q - p, False, lower, upper, n, "requests", "Newcombe's interval")


# --------------------------------------------------------------------------- quality


Found = tuple[str, str, bool, Callable[[float], Change]]


def quality_change(stored: ScoreSet, fresh: ScoreSet) -> list[Found]:
    """Return a task's main metric: name, unit, whether higher is better, and its change at a level.

    In pairs: samples of equal id and prompt. Of sums over tokens the difference a token (of perplexity the ratio), with
    the clustered t interval; of shares the score interval of the mean difference; of others Student's t.
    """
    try:
        before, after = metrics_of(stored)[0], metrics_of(fresh)[0]
    except (EvidenceError, IndexError) as error:
        reason = str(error)
        return [("score", "", True, lambda _: _nothing((0, 0), "samples", reason))]
    unit = before.unit or ("perplexity" if stored.record.kind == "perplexity" else "")
    reason = _unpaired(stored, fresh)
    n = (before.n, after.n)

    def change(level: float) -> Change:
        if reason:
            return unjudged(before.value, after.value, n, before.units, reason)
        return _paired(stored, fresh, before.value, after.value, level)

    return [(before.name, unit, before.higher_is_better, change)]


def unjudged(stored: float, fresh: float, n: tuple[int, int], units: str, reason: str) -> Change:
    """Return a change that cannot be judged, with both values."""
    return Change(stored, fresh, fresh - stored, False, None, None, n, units, "none", reason)


def _unpaired(stored: ScoreSet, fresh: ScoreSet) -> str:
    """Say why two score sets cannot be paired, '' when they can."""
    if stored.record.kind != fresh.record.kind or (
        stored.record.fingerprint != fresh.record.fingerprint
    ):
        return "not the same suite or prompts"
    return "" if len(_pairs(stored, fresh)) >= 2 else "fewer than two samples in common"


def _pairs(stored: ScoreSet, fresh: ScoreSet) -> list[tuple[int, int]]:
    where = {key: row for row, key in enumerate(_keys(fresh))}
    return [(row, where[key]) for row, key in enumerate(_keys(stored)) if key in where]


def _keys(scores: ScoreSet) -> list[tuple[str, str]]:
    return list(zip(scores.sample_ids, scores.prompt_sha256, strict=True))


def _paired(stored: ScoreSet, fresh: ScoreSet, before: float, after: float, level: float) -> Change:
    rows = _pairs(stored, fresh)
    first, second = np.array([a for a, _ in rows]), np.array([b for _, b in rows])
    kind = stored.record.kind
    x, y = _usable(stored, first, kind), _usable(fresh, second, kind)
    n = (len(rows), len(rows))
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return unjudged(before, after, n, "samples", "a sample has no value")
    if kind in SUMMED:
        tokens = stored.weight[first]
        if not np.array_equal(tokens, fresh.weight[second]):
            return unjudged(before, after, n, "documents", "not the same tokens were scored")
        found = clustered_ratio(y - x, tokens, level)
        ends = (found.lower, found.estimate, found.upper)
        method = "clustered t over pairs of documents"
        if kind == "perplexity":
            with np.errstate(over="ignore"):
                low, mid, high = (float(np.expm1(end)) for end in ends)
            return Change(before, after, mid, True, low, high, n, "documents", method)
        low, mid, high = ends
        return Change(before, after, mid, False, low, high, n, "documents", method)
    difference = y - x
    if stored.problem_ids:
        # Samples of one problem are no independent evidence: a problem counts once.
        names = [stored.problem_ids[a] or stored.sample_ids[a] for a in first]
        _, of = np.unique(names, return_inverse=True)
        difference = np.bincount(of, weights=difference) / np.bincount(of)
        n = (len(difference), len(difference))
        if len(difference) < 2:
            return unjudged(before, after, n, "problems", "fewer than two problems")
    if (np.abs(difference) <= 1).all():
        interval = score_interval(difference, 1 - 2 * level)
        low, mid, high = interval.lower, interval.point, interval.upper
        method = "score interval over pairs"
    else:
        found = clustered_ratio(difference, np.ones_like(difference), level)
        low, mid, high, method = found.lower, found.estimate, found.upper, "t over pairs"
    return Change(before, after, mid, False, low, high, n, "pairs", method)


def _usable(scores: ScoreSet, rows: NDArray[np.int64], kind: str) -> NDArray[np.float64]:
    """Return the values of these rows; a sample that errored counts as 0 unless values are sums."""
    if kind in SUMMED:
        return scores.value[rows]
    errored = np.array([scores.status[row] == "error" for row in rows], dtype=bool)
    return np.where(errored, 0.0, scores.value[rows])

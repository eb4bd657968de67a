"""Quality metrics of one variant's task, from its scores; docs/metrics.md has the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quanteval.errors import EvidenceError
from quanteval.evidence import ScoreSet
from quanteval.stats import clustered_ratio, wilson_interval

CONFIDENCE = 0.95
SUMMED = ("perplexity", "divergence")
"""Kinds whose values are sums over tokens."""


@dataclass(frozen=True)
class Metric:
    """A value with its two-sided interval; bounds are None where there are too few units for one."""

    name: str
    value: float
    lower: float | None
    upper: float | None
    n: int
    units: str
    """What n counts: problems, documents, tokens."""
    unit: str
    """Unit of the value: 'share', 'nats/token', 'bits/byte', or '' for a perplexity."""
    higher_is_better: bool
    confidence: float = CONFIDENCE


def require_usable(scores: ScoreSet) -> None:
    """Raise EvidenceError naming the first sample without a usable value, or when there are none.

    A sum over tokens needs all of them: there an errored sample has no value. A pass rate counts it as 0.
    """
    where = f'task "{scores.record.task}"'
    if not scores.sample_ids:
        raise EvidenceError(f"{where} has no samples")
    summed = scores.record.kind in SUMMED
    for index, sample_id in enumerate(scores.sample_ids):
        value, weight = scores.value[index], scores.weight[index]
        if summed and scores.status[index] in ("error", "timeout"):
            raise EvidenceError(f'{where}: sample "{sample_id}" is an {scores.status[index]}')
        if not math.isfinite(value):
            raise EvidenceError(f'{where}: sample "{sample_id}" has the value {value}')
        if summed and not 0 < weight < math.inf:
            raise EvidenceError(f'{where}: sample "{sample_id}" has {weight:g} scored tokens')


def metrics_of(scores: ScoreSet) -> list[Metric]:
    """Return a task's metrics, the main one first; EvidenceError when they cannot be computed."""
    require_usable(scores)
    makers: dict[str, Callable[[ScoreSet], list[Metric]]] = {
        "code": _pass_rate,
        "perplexity": _perplexity,
        "divergence": _divergence,
    }
    return makers.get(scores.record.kind, _mean)(scores)


def _pass_rate(scores: ScoreSet) -> list[Metric]:
    """Wilson's interval for 0/1 scores; the clustered one for shares of passed samples a problem."""
    errored = np.array([status == "error" for status in scores.status], dtype=bool)
    value, n = np.where(errored, 0.0, scores.value), len(scores.sample_ids)
    if np.isin(value, (0.0, 1.0)).all():
        interval = wilson_interval(int(value.sum()), n, CONFIDENCE)
        rate, lower, upper = float(value.mean()), interval.lower, interval.upper
    else:
        rate, low, high = _ratio(value, np.ones_like(value))
        lower, upper = max(low or 0.0, 0.0), 1.0 if high is None else min(high, 1.0)
    return [Metric("pass@1", rate, lower, upper, n, "problems", "share", True)]


def _mean(scores: ScoreSet) -> list[Metric]:
    value, lower, upper = _ratio(scores.value, np.ones_like(scores.value))
    return [Metric("mean", value, lower, upper, len(scores.sample_ids), "samples", "", True)]


def _ratio(
    totals: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[float, float | None, float | None]:
    """Return sum(totals)/sum(weights) with a two-sided cluster interval where there are two units."""
    value = float(totals.sum() / weights.sum())
    if len(totals) < 2:
        return value, None, None
    bounds = clustered_ratio(totals, weights, (1 - CONFIDENCE) / 2)
    return value, bounds.lower, bounds.upper


def _perplexity(scores: ScoreSet) -> list[Metric]:
    """exp(NLL/tokens), exp(NLL/words), exp(NLL/bytes) and NLL/bytes/ln 2, clustered by document."""
    n = len(scores.sample_ids)
    words, octets = scores.numbers.get("words"), scores.numbers.get("bytes")
    out = [_exponential("token perplexity", scores.value, scores.weight, n)]
    if words is not None:
        out.append(_exponential("word perplexity", scores.value, words, n))
    if octets is not None:
        out.append(_exponential("byte perplexity", scores.value, octets, n))
        value, lower, upper = _ratio(scores.value / math.log(2), octets)
        out.append(Metric("bits per byte", value, lower, upper, n, "documents", "bits/byte", False))
    return out


def _exponential(
    name: str, totals: NDArray[np.float64], weights: NDArray[np.float64], n: int
) -> Metric:
    value, lower, upper = _ratio(totals, weights)
    bounds = [None if x is None else _exp(x) for x in (lower, upper)]
    return Metric(name, _exp(value), bounds[0], bounds[1], n, "documents", "", False)


def _exp(value: float) -> float:
    """Return e^value, infinity where it is too large: a broken model's perplexity."""
    with np.errstate(over="ignore"):
        return float(np.exp(value))


def _divergence(scores: ScoreSet) -> list[Metric]:
    """Mean KL and top-1 agreement clustered by document; median and p99 over tokens, without bounds."""
    n = len(scores.sample_ids)
    value, lower, upper = _ratio(scores.value, scores.weight)
    lower = None if lower is None else max(lower, 0.0)
    out = [Metric("mean KL", value, lower, upper, n, "documents", "nats/token", False)]
    agree = scores.numbers.get("top1_agree")
    if agree is not None:
        value, lower, upper = _ratio(agree, scores.weight)
        bounds = [None if x is None else min(max(x, 0.0), 1.0) for x in (lower, upper)]
        out.append(
            Metric("top-1 agreement", value, bounds[0], bounds[1], n, "documents", "share", True)
        )
    parts = scores.series.get("kl")
    if parts:
        kl = np.concatenate(parts)
        for name, q in (("median KL", 0.5), ("p99 KL", 0.99)):
            quantile = float(np.quantile(kl, q, method="inverted_cdf"))
            out.append(Metric(name, quantile, None, None, len(kl), "tokens", "nats/token", False))
    return out

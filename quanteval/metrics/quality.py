"""Quality metrics of one variant's task, from its scores; docs/metrics.md has the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quanteval.errors import EvidenceError
from quanteval.interfaces import ScoreSet
from quanteval.stats import clustered_ratio, wilson_interval

CONFIDENCE = 0.95


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


def require_finite(scores: ScoreSet) -> None:
    """Raise EvidenceError naming the first sample without a usable value, or when there are none."""
    if not scores.sample_ids:
        raise EvidenceError(f'task "{scores.record.task}" has no samples')
    for index, sample_id in enumerate(scores.sample_ids):
        if not math.isfinite(scores.value[index]):
            raise EvidenceError(
                f'task "{scores.record.task}": sample "{sample_id}" has the value {scores.value[index]}'
            )


def metrics_of(scores: ScoreSet) -> list[Metric]:
    """Return a task's metrics, the main one first; EvidenceError when they cannot be computed."""
    require_finite(scores)
    makers: dict[str, Callable[[ScoreSet], list[Metric]]] = {
        "code": _pass_rate,
        "perplexity": _perplexity,
        "divergence": _divergence,
    }
    return makers.get(scores.record.kind, _mean)(scores)


def _pass_rate(scores: ScoreSet) -> list[Metric]:
    passed, n = int(scores.value.sum()), len(scores.sample_ids)
    interval = wilson_interval(passed, n, CONFIDENCE)
    return [
        Metric("pass@1", passed / n, interval.lower, interval.upper, n, "problems", "share", True)
    ]


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
    bounds = [None if x is None else math.exp(x) for x in (lower, upper)]
    return Metric(name, math.exp(value), bounds[0], bounds[1], n, "documents", "", False)


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
            quantile = float(np.quantile(kl, q))
            out.append(Metric(name, quantile, None, None, len(kl), "tokens", "nats/token", False))
    return out

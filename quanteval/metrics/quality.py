"""Quality metrics of one variant's task, from its scores; docs/metrics.md has the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quanteval.errors import EvidenceError
from quanteval.evidence import ScoreSet
from quanteval.stats import clustered_ratio, pass_at_k, wilson_interval

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
    """What n counts: problems, samples, documents, windows, tokens."""
    unit: str
    """Unit of the value: 'share', 'nats', 'nats/token', 'bits/byte', 'tokens', or '' for a perplexity."""
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
        "code": _pass_rates,
        "perplexity": _perplexity,
        "divergence": _divergence,
        "multiple_choice": _choices,
        "cloze": _cloze,
        "generate": _accuracy,
        "needle": _needle,
    }
    return makers.get(scores.record.kind, _mean)(scores)


def _shares(name: str, values: NDArray[np.float64], units: str) -> Metric:
    """Return the mean of values in [0, 1]: Wilson's interval for 0/1 values, else the clustered one."""
    n = len(values)
    if np.isin(values, (0.0, 1.0)).all():
        interval = wilson_interval(int(values.sum()), n, CONFIDENCE)
        return Metric(
            name, float(values.mean()), interval.lower, interval.upper, n, units, "share", True
        )
    mean, low, high = _ratio(values, np.ones_like(values))
    lower, upper = max(low or 0.0, 0.0), 1.0 if high is None else min(high, 1.0)
    return Metric(name, mean, lower, upper, n, units, "share", True)


def _counted(scores: ScoreSet) -> NDArray[np.float64]:
    """Return the values, 0 for a sample that errored."""
    errored = np.array([status == "error" for status in scores.status], dtype=bool)
    return np.where(errored, 0.0, scores.value)


def _finite(scores: ScoreSet, name: str) -> NDArray[np.float64]:
    """Return a figure of the samples that have one."""
    values = scores.numbers.get(name, np.empty(0))
    return values[np.isfinite(values)]


def _pass_rates(scores: ScoreSet) -> list[Metric]:
    """pass@1, and pass@k for 10, 100 and the number of samples a problem where there are several."""
    values = _counted(scores)
    if not scores.problem_ids:
        return [_shares("pass@1", values, "problems")]
    problems = np.array(
        [p or i for p, i in zip(scores.problem_ids, scores.sample_ids, strict=True)]
    )
    _, of = np.unique(problems, return_inverse=True)
    passed, tried = np.bincount(of, weights=values), np.bincount(of)
    # A problem of which samples are missing can only say something about fewer draws.
    most = int(tried.min())
    out = [_shares("pass@1", passed / tried, "problems")]
    for k in sorted({10, 100, most}):
        if 1 < k <= most:
            pairs = zip(tried, passed, strict=True)
            estimates = np.array([pass_at_k(int(n), round(float(c)), k) for n, c in pairs])
            out.append(_shares(f"pass@{k}", estimates, "problems"))
    return out


def _accuracy(scores: ScoreSet) -> list[Metric]:
    return [_shares("accuracy", _counted(scores), "samples")]


def _choices(scores: ScoreSet) -> list[Metric]:
    """Accuracy as scored, each way to compare likelihoods, and how many answers rounding could turn."""
    out = _accuracy(scores)
    for name in ("acc", "acc_norm", "acc_norm_bytes", "acc_norm_tokens"):
        if (values := scores.numbers.get(name)) is not None:
            # A sample that errored has none of these, and is wrong by all of them.
            out.append(_shares(name, np.nan_to_num(values), "samples"))
    if (ties := scores.numbers.get("near_tie")) is not None:
        found = _shares("near-ties", np.nan_to_num(ties), "samples")
        out.append(replace(found, higher_is_better=False))
    noise = _finite(scores, "batch_noise")
    if len(noise):
        value = float(noise.max())
        out.append(Metric("batch noise", value, None, None, len(noise), "samples", "nats", False))
    return out


def _cloze(scores: ScoreSet) -> list[Metric]:
    """Accuracy, and exp of the mean negative log-likelihood of a whole target (not of a token)."""
    out = _accuracy(scores)
    logprobs = _finite(scores, "logprob")
    if len(logprobs):
        n = len(logprobs)
        out.append(
            _exponential("target perplexity", -logprobs, np.ones_like(logprobs), n, "samples")
        )
    return out


def _needle(scores: ScoreSet) -> list[Metric]:
    out = _accuracy(scores)
    logprobs = _finite(scores, "value_logprob")
    if len(logprobs):
        value, lower, upper = _ratio(logprobs, np.ones_like(logprobs))
        out.append(
            Metric(
                "value log-likelihood", value, lower, upper, len(logprobs), "samples", "nats", True
            )
        )
    return out


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
    out = [_token_perplexity(scores)]
    if words is not None:
        out.append(_exponential("word perplexity", scores.value, words, n))
    if octets is not None:
        out.append(_exponential("byte perplexity", scores.value, octets, n))
        value, lower, upper = _ratio(scores.value / math.log(2), octets)
        out.append(Metric("bits per byte", value, lower, upper, n, "documents", "bits/byte", False))
    return out


def _token_perplexity(scores: ScoreSet) -> Metric:
    """exp(NLL/tokens), clustered by document; a single document's interval is that of its windows."""
    sums, tokens = scores.series.get("window_nll"), scores.series.get("window_tokens")
    if len(scores.sample_ids) == 1 and sums and tokens and len(sums[0]) > 1:
        return _exponential("token perplexity", sums[0], tokens[0], len(sums[0]), "windows")
    return _exponential("token perplexity", scores.value, scores.weight, len(scores.sample_ids))


def _exponential(
    name: str,
    totals: NDArray[np.float64],
    weights: NDArray[np.float64],
    n: int,
    units: str = "documents",
) -> Metric:
    value, lower, upper = _ratio(totals, weights)
    bounds = [None if x is None else _exp(x) for x in (lower, upper)]
    return Metric(name, _exp(value), bounds[0], bounds[1], n, units, "", False)


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
    same, first = _finite(scores, "greedy_same"), _finite(scores, "first_divergence")
    if len(same):
        out.append(_shares("greedy agreement", same, "documents"))
        value, lower, upper = _ratio(first, np.ones_like(first))
        out.append(
            Metric("first divergence", value, lower, upper, len(first), "documents", "tokens", True)
        )
    parts = scores.series.get("kl")
    if parts:
        kl = np.concatenate(parts)
        for name, q in (("median KL", 0.5), ("p99 KL", 0.99)):
            quantile = float(np.quantile(kl, q, method="inverted_cdf"))
            out.append(Metric(name, quantile, None, None, len(kl), "tokens", "nats/token", False))
    return out

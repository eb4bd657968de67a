"""Means and ratios whose observations come in clusters: tokens in documents, samples in problems.

Everything that is not a bounded difference per item goes through here: log-perplexity differences, mean divergence,
shares of tokens, unbounded metrics. The cluster is the unit; treating tokens as independent would understate the
uncertainty several times over. Quantiles of the values in clusters are here too; those of independent items, and shares
of them, are in `intervals`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtr, stdtrit

from quanteval.stats._checks import FloatArray, finite_vector, level_alpha, probability, same_length


@dataclass(frozen=True)
class ClusterEstimate:
    """An estimate with its cluster-robust standard error and one-sided (1 - alpha) bounds.

    `influence` is the largest change of the estimate from leaving one cluster out (estimate minus the estimate
    without it) and `most_influential` the position of that cluster.
    """

    estimate: float
    se: float
    df: float
    lower: float
    upper: float
    alpha: float
    clusters: int
    most_influential: int
    influence: float

    def p_at_least(self, margin: float) -> float:
        """Return the one-sided p-value of "the true value is at least the margin", from the t distribution."""
        if self.se == 0.0:
            return (
                0.5 + 0.5 * math.copysign(1.0, self.estimate - margin)
                if self.estimate != margin
                else 0.5
            )
        return float(stdtr(self.df, (self.estimate - margin) / self.se))


def clustered_ratio(totals: ArrayLike, weights: ArrayLike, alpha: float = 0.05) -> ClusterEstimate:
    """Return sum(totals)/sum(weights) over clusters, with the jackknife standard error and t bounds.

    With R the ratio and R_(j) the one without cluster j: SE = sqrt((D - 1)/D sum (R_(j) - mean R_(j))^2), the
    jackknife of the ratio estimator (Cochran, Sampling Techniques, chapter 6; Quenouille, Biometrika 43, 1956), on
    (sum weights)^2/(sum weights^2) - 1 degrees of freedom: as many as clusters less one when all weigh the same,
    fewer when some weigh more. The linearised standard error is smaller than this, and too small, when they do.
    For the difference of log perplexities the totals are the documents' NLL sums, variant minus baseline, and the
    weights their scored tokens: the estimate is then ln(PPL_variant/PPL_baseline). For a mean divergence the totals
    are the documents' sums of it. Bounds take the clusters' effects to scatter about evenly; with skewed ones the
    side of the tail errs more.
    When all clusters agree exactly the standard error is 0 and the bounds are the estimate.
    Raises `ValueError` for fewer than two clusters, NaN, or weights that are not positive.
    """
    total, weight = finite_vector("totals", totals, minimum=2), finite_vector("weights", weights)
    same_length("totals", total, "weights", weight)
    bad = np.flatnonzero(weight <= 0.0)
    if bad.size:
        raise ValueError(f"'weights' is '{weight[bad[0]]}' at index {bad[0]}; weights are positive")
    clusters, weight_sum = total.size, float(weight.sum())
    estimate = float(total.sum()) / weight_sum
    residual = total - estimate * weight
    noise = 1e-14 * float(np.abs(total).max() + abs(estimate) * weight.max())
    without = (total.sum() - total) / (weight_sum - weight)
    effect = estimate - without
    se = math.sqrt((clusters - 1) * float(np.var(without)))
    if float(np.abs(residual).max()) <= noise:  # rounding alone is no evidence of a spread
        se = 0.0
    df = weight_sum * weight_sum / float(weight @ weight) - 1.0
    reach = 0.0
    if se > 0.0:
        critical = -float(stdtrit(df, level_alpha(alpha)))
        reach = se * critical if math.isfinite(critical) else math.inf
    worst = int(np.argmax(np.abs(effect)))
    return ClusterEstimate(
        estimate=estimate,
        se=se,
        df=df,
        lower=estimate - reach,
        upper=estimate + reach,
        alpha=alpha,
        clusters=clusters,
        most_influential=worst,
        influence=float(effect[worst]),
    )


def log_perplexity_ratio(
    nll_baseline: ArrayLike, nll_variant: ArrayLike, tokens: ArrayLike, alpha: float = 0.05
) -> ClusterEstimate:
    """Return ln(PPL_variant/PPL_baseline) with bounds, from each document's NLL sums in nats and its scored tokens.

    The exponential of `upper` bounds the perplexity ratio. Both variants must have scored the same tokens.
    """
    base = finite_vector("nll_baseline", nll_baseline, minimum=2)
    var = finite_vector("nll_variant", nll_variant, minimum=2)
    same_length("nll_baseline", base, "nll_variant", var)
    return clustered_ratio(var - base, tokens, alpha)


def cluster_mean(values: ArrayLike, alpha: float = 0.05) -> ClusterEstimate:
    """Return the mean of one value per cluster, all of equal weight, with Student's t bounds.

    For metrics without known limits. With limits use `bounded_score`, which keeps a width when all values agree.
    """
    x = finite_vector("values", values, minimum=2)
    return clustered_ratio(x, np.ones(x.size), alpha)


def cluster_sums(values: ArrayLike, labels: Sequence[Hashable]) -> tuple[FloatArray, FloatArray]:
    """Return each cluster's sum of values and its number of them, clusters in order of first appearance."""
    x = finite_vector("values", values)
    if len(labels) != x.size:
        raise ValueError(
            f"'labels' has {len(labels)} entries and 'values' has {x.size}; one label a value"
        )
    position: dict[Hashable, int] = {}
    index = np.array([position.setdefault(label, len(position)) for label in labels])
    sums = np.bincount(index, weights=x).astype(np.float64)
    return sums, np.bincount(index).astype(np.float64)


@dataclass(frozen=True)
class ClusterQuantile:
    """A quantile over all values of all clusters with one-sided bounds, each at level 1 - alpha.

    A bound that so few clusters or values cannot give is infinite (`lower` = -inf, `upper` = inf).
    """

    estimate: float
    lower: float
    upper: float
    q: float
    alpha: float
    clusters: int
    n: int


def clustered_quantile(
    series: Sequence[ArrayLike], q: float, alpha: float = 0.05
) -> ClusterQuantile:
    """Return the q-quantile over the values of all clusters, one vector a cluster (the tokens of a document).

    Woodruff, JASA 47 (1952): the share of values up to the estimate is a ratio over clusters with the standard error
    SE of `clustered_ratio`, and the bounds are the sample quantiles at q -+ t(df) SE, infinite when that leaves
    (0, 1). A quantile is the smallest value that has at least the share q at or below it. SE is taken no smaller than
    sqrt(q (1 - q)/n), that of n independent values: ties and clusters that happen to agree would make it 0.
    Ask for 10 clusters or more; a far quantile of few, unlike clusters rests on the worst of them and its upper bound
    then fails up to twice as often as alpha. Raises `ValueError` for fewer than two clusters, an empty one and NaN.
    """
    probability("q", q)
    level_alpha(alpha)
    if len(series) < 2:
        raise ValueError(f"'series' holds {len(series)} clusters; at least 2 needed")
    values = [finite_vector(f"series[{j}]", x) for j, x in enumerate(series)]
    ordered = np.sort(np.concatenate(values))
    n, clusters = ordered.size, len(values)

    def quantile(share: float) -> float:
        rank = math.ceil(share * n - 1e-9)  # a hair of slack: 0.07 * 100 is above 7
        return float(ordered[min(n, max(1, rank)) - 1])

    estimate = quantile(q)
    below = [float(np.count_nonzero(x <= estimate)) for x in values]
    ratio = clustered_ratio(below, [float(x.size) for x in values], alpha)
    se = max(ratio.se, math.sqrt(q * (1.0 - q) / n))
    reach = se * -float(stdtrit(ratio.df, alpha))
    return ClusterQuantile(
        estimate=estimate,
        lower=quantile(q - reach) if q > reach else -math.inf,
        upper=quantile(q + reach) if q + reach < 1.0 else math.inf,
        q=q,
        alpha=alpha,
        clusters=clusters,
        n=n,
    )


@dataclass(frozen=True)
class BootstrapBounds:
    """Percentile-bootstrap bounds, each at level 1 - alpha; a cross-check, never the rule itself."""

    estimate: float
    lower: float
    upper: float
    alpha: float
    resamples: int


def bootstrap_ratio(
    totals: ArrayLike,
    weights: ArrayLike,
    alpha: float = 0.05,
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> BootstrapBounds:
    """Return percentile-bootstrap bounds of sum(totals)/sum(weights), whole clusters resampled (Efron, 1979).

    The same seed gives the same bounds. With few clusters they are too narrow, and when all differences are equal
    they have no width; `clustered_ratio` is the bound to decide by.
    """
    total, weight = finite_vector("totals", totals, minimum=2), finite_vector("weights", weights)
    same_length("totals", total, "weights", weight)
    bad = np.flatnonzero(weight <= 0.0)
    if bad.size:
        raise ValueError(f"'weights' is '{weight[bad[0]]}' at index {bad[0]}; weights are positive")
    if resamples < 100:
        raise ValueError(f"resamples is '{resamples}'; at least 100 are needed for a tail")
    probability("alpha", alpha, below=0.5)
    rng, clusters = np.random.default_rng(seed), total.size
    ratios = np.empty(resamples)
    block = max(1, 4_000_000 // clusters)  # bounds the index matrix to 32 MB
    for start in range(0, resamples, block):
        stop = min(start + block, resamples)
        pick = rng.integers(clusters, size=(stop - start, clusters))
        ratios[start:stop] = total[pick].sum(axis=1) / weight[pick].sum(axis=1)
    lower, upper = np.quantile(ratios, (alpha, 1.0 - alpha))
    return BootstrapBounds(
        float(total.sum() / weight.sum()), float(lower), float(upper), alpha, resamples
    )

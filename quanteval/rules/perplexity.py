"""Perplexity: is its rise over the baseline's shown to be within a ratio, or beyond it? Documents are the unit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from quanteval.interfaces import VariantEvidence
from quanteval.records import Finding, Outcome
from quanteval.rules._common import (
    Pairs,
    bare,
    beside,
    check_alpha,
    check_each_task,
    check_selection,
    check_share,
    confidence,
    first_unscored,
    invalid,
)
from quanteval.stats import bootstrap_ratio, log_perplexity_ratio

MINIMUM_DOCUMENTS = 10
POWER = 0.8


@dataclass(frozen=True)
class PerplexityRatio:
    """Compare exp(sum NLL / sum tokens) of both variants by their ratio, documents resampled in pairs.

    `max_ratio` is the margin, e.g. 1.02 for two per cent. The bounds are those of a paired bootstrap
    over documents and of the clustered t interval, whichever is wider: the bootstrap alone is too
    narrow with few documents. Fewer than 10 documents decide nothing.
    """

    max_ratio: float
    task: str | None = None
    kind: str | None = None
    required: bool = True
    alpha: float | None = None
    max_missing: float = 0.0
    resamples: int = 10_000
    seed: int = 0

    is_quality = True

    def __post_init__(self) -> None:
        check_selection(self.task, self.kind)
        check_alpha(self.alpha)
        check_share("max_missing", self.max_missing, below=1)
        if not 1 < self.max_ratio < math.inf:
            raise ValueError(f'max_ratio "{self.max_ratio}" must be above 1 (1.02 is two per cent)')
        if self.resamples < 1000:
            raise ValueError(f'resamples "{self.resamples}" must be at least 1000')

    def check(
        self, name: str, baseline: VariantEvidence, candidate: VariantEvidence, alpha: float
    ) -> list[Finding]:
        """Return a finding for each task concerned."""
        return check_each_task(self, self._check_pairs, name, baseline, candidate, alpha)

    def _check_pairs(
        self,
        name: str,
        pairs: Pairs,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        alpha: float,
    ) -> Finding:
        task = pairs.task
        base, cand = baseline.scores[task], candidate.scores[task]
        for evidence, scores in ((baseline, base), (candidate, cand)):
            if bad := first_unscored(scores):
                problem = f'{evidence.name} has no finite likelihood for "{bad}"'
                return invalid(name, required=self.required, task=task, problem=problem)
        tokens = base.weight[pairs.baseline_rows]
        if not np.array_equal(tokens, cand.weight[pairs.candidate_rows]):
            problem = "the variants scored different numbers of tokens"
            return invalid(name, required=self.required, task=task, problem=problem)
        n = len(pairs.sample_ids)
        if n < MINIMUM_DOCUMENTS:
            sentence = (
                f"{task}: {n} documents decide nothing, at least {MINIMUM_DOCUMENTS} are needed"
            )
            return bare(
                name, required=self.required, outcome="inconclusive", sentence=sentence, task=task
            )
        x, y = base.value[pairs.baseline_rows], cand.value[pairs.candidate_rows]
        cluster = log_perplexity_ratio(x, y, tokens, alpha)
        bootstrap = bootstrap_ratio(y - x, tokens, alpha, resamples=self.resamples, seed=self.seed)
        lower = _exp(min(cluster.lower, bootstrap.lower))
        upper = _exp(max(cluster.upper, bootstrap.upper))
        ratio = _exp(cluster.estimate)
        outcome: Outcome = "inconclusive"
        if upper < self.max_ratio:
            outcome = "accept"
        elif lower > self.max_ratio:
            outcome = "reject"
        before, after = _exp(x.sum() / tokens.sum()), _exp(y.sum() / tokens.sum())
        needed = _needed(cluster.se, n, cluster.estimate, math.log(self.max_ratio), alpha)
        outlier = pairs.sample_ids[cluster.most_influential]
        return Finding(
            rule=name,
            required=self.required,
            outcome=outcome,
            sentence=_sentence(
                task,
                n,
                (before, after),
                (ratio, lower, upper),
                self.max_ratio,
                alpha,
                outcome,
                needed,
            ),
            task=task,
            metric="token perplexity",
            unit="ratio",
            method="paired bootstrap over documents and clustered t, the wider of both",
            n=n,
            baseline_value=before,
            candidate_value=after,
            estimate=ratio,
            lower=lower,
            upper=upper,
            confidence=1 - alpha,
            margin=self.max_ratio,
            n_needed=needed if outcome == "inconclusive" else None,
            regression_detected=lower > 1,
            notes=[
                f'most influential document "{outlier}": without it the ratio would be '
                f"{_exp(cluster.estimate - cluster.influence):.4f}"
            ],
        )


def _exp(value: float) -> float:
    """Return e^value, infinity where it is too large: a broken model's perplexity."""
    with np.errstate(over="ignore"):
        return float(np.exp(value))


def _needed(se: float, n: int, estimate: float, margin: float, alpha: float) -> int | None:
    """Return the documents that decide with 80 % power if spread and estimate stay as seen."""
    distance = abs(margin - estimate)
    z = float(ndtri(POWER) - ndtri(alpha))
    return None if distance < 1e-9 else max(math.ceil((z * se / distance) ** 2 * n), n + 1)


def _sentence(
    task: str,
    n: int,
    values: tuple[float, float],
    bounds: tuple[float, float, float],
    margin: float,
    alpha: float,
    outcome: Outcome,
    needed: int | None,
) -> str:
    ratio, lower, upper = (beside(value, margin, 3) for value in bounds)
    sure = confidence(alpha)
    seen = f"{task}: perplexity {values[0]:.2f} -> {values[1]:.2f} (n={n} documents), ratio {ratio}"
    if outcome == "accept":
        return f"{seen}, at most {upper} with {sure} confidence: within the margin of {margin:g}"
    if outcome == "reject":
        return f"{seen}, at least {lower} with {sure} confidence: beyond the margin of {margin:g}"
    more = f", about {needed} documents would decide" if needed else ""
    return (
        f"{seen}, between {lower} and {upper} with {sure} confidence each: "
        f"undecided at the margin of {margin:g}{more}"
    )

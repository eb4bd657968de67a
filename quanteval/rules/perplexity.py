"""Perplexity: is its rise over the baseline's shown to be within a ratio, or beyond it? Documents are the unit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import nctdtr, ndtri, stdtrit

from quanteval.evidence import Forecast, RuleContext, SuiteFacts, VariantEvidence
from quanteval.records import Finding, Outcome
from quanteval.rules._common import (
    Comparison,
    bare,
    beside,
    check_alpha,
    check_each_task,
    check_selection,
    confidence,
    first_unscored,
    invalid,
    percent,
)
from quanteval.stats import log_perplexity_ratio

MINIMUM_DOCUMENTS = 10
POWER = 0.8


@dataclass(frozen=True)
class PerplexityRatio:
    """Compare exp(sum NLL / sum tokens) of both variants by their ratio, documents as the unit.

    `max_ratio` is the margin, e.g. 1.02 for two per cent. The bounds are those of the ratio estimator
    over documents with Student's t; of fewer than 10 documents that were scored in windows (one long
    text), the windows are the unit. Fewer than 10 units decide nothing; one that decides alone is named.
    """

    max_ratio: float
    task: str | None = None
    kind: str | None = None
    required: bool = True
    alpha: float | None = None

    is_quality = True

    def __post_init__(self) -> None:
        check_selection(self.task, self.kind)
        check_alpha(self.alpha)
        if not 1 < self.max_ratio < math.inf:
            raise ValueError(f'max_ratio "{self.max_ratio}" must be above 1 (1.02 is two per cent)')

    def check(
        self,
        name: str,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        context: RuleContext,
    ) -> list[Finding]:
        """Return a finding for each task concerned."""
        return check_each_task(self, self._check_task, name, baseline, candidate, context)

    def forecast(
        self, name: str, suites: Mapping[str, SuiteFacts], context: RuleContext
    ) -> list[Forecast]:
        """Return what each task concerned can decide; needs the spread between documents of a stored run."""
        chosen = [s for s in suites.values() if self.task in (None, s.task)]
        chosen = [s for s in chosen if self.kind in (None, s.kind)]
        alpha = self.alpha if self.alpha is not None else context.alpha
        return [self._forecast(name, suite, alpha) for suite in chosen]

    def _forecast(self, name: str, suite: SuiteFacts, alpha: float) -> Forecast:
        margin = f"ratio {self.max_ratio:g}"
        few = (
            (f"can never decide: {suite.n} documents, at least {MINIMUM_DOCUMENTS} are needed",)
            if suite.n < MINIMUM_DOCUMENTS
            else ()
        )
        if few:
            return Forecast(
                name, suite.task, suite.n, margin, "", accept_harmless=0.0, reject_double=0.0,
                n_needed=MINIMUM_DOCUMENTS, warnings=few,
            )  # fmt: skip
        if suite.spread is None:
            assumed = "the spread between documents is not known: run it once, then plan again"
            return Forecast(name, suite.task, suite.n, margin, assumed)
        z = float(ndtri(POWER) - ndtri(alpha))
        limit = math.log(self.max_ratio)
        harmless = 1.0
        if suite.spread:
            critical = -float(stdtrit(suite.n - 1, alpha))
            harmless = 1 - float(nctdtr(suite.n - 1, limit / suite.spread, critical))
        if harmless < POWER:
            few = (f"a harmless variant is accepted in {percent(harmless)} of runs only",)
        return Forecast(
            rule=name,
            task=suite.task,
            n=suite.n,
            margin=margin,
            assumed=f"spread of ln ratio {suite.spread:.4f} ({suite.source})",
            certifiable=_exp(z * suite.spread),
            detectable=_exp(z * suite.spread),
            n_needed=max(MINIMUM_DOCUMENTS, math.ceil((z * suite.spread / limit) ** 2 * suite.n)),
            accept_harmless=harmless,
            reject_double=harmless,
            warnings=few,
        )

    def _check_task(self, c: Comparison) -> Finding:
        base, cand, pairs = c.base, c.cand, c.pairs
        for side, scores in (("the baseline", base), ("the candidate", cand)):
            if bad := first_unscored(scores):
                problem = f'{side} has no finite likelihood for "{bad}"'
                return invalid(c.rule, required=self.required, task=c.task, problem=problem)
        tokens = base.weight[pairs.baseline_rows]
        if not np.array_equal(tokens, cand.weight[pairs.candidate_rows]):
            problem = "the variants scored different numbers of tokens"
            return invalid(c.rule, required=self.required, task=c.task, problem=problem)
        units = _units(c)
        n, what = len(units.names), units.what
        if n < MINIMUM_DOCUMENTS:
            sentence = (
                f"{c.task}: {n} {what} decide nothing, at least {MINIMUM_DOCUMENTS} are needed"
            )
            return bare(
                c.rule,
                required=self.required,
                outcome="inconclusive",
                sentence=sentence,
                task=c.task,
            )
        x, y, tokens = units.baseline, units.candidate, units.tokens
        found = log_perplexity_ratio(x, y, tokens, c.alpha)
        ratio, lower, upper = _exp(found.estimate), _exp(found.lower), _exp(found.upper)
        outcome: Outcome = "inconclusive"
        if upper < self.max_ratio and not pairs.missing:
            # A document that is missing has no worst case, so it can only keep a candidate from passing.
            outcome = "accept"
        elif lower > self.max_ratio:
            outcome = "reject"
        before, after = _exp(x.sum() / tokens.sum()), _exp(y.sum() / tokens.sum())
        needed = _needed(found.se, n, found.estimate, math.log(self.max_ratio), c.alpha)
        sentence = _sentence(
            c.task,
            f"n={n} {what}",
            (before, after),
            (ratio, lower, upper),
            self.max_ratio,
            c.alpha,
            outcome,
            f", about {needed} {what} would decide" if needed else "",
        )
        without = _exp(found.estimate - found.influence)
        outlier = units.names[found.most_influential]
        if (without < self.max_ratio) != (ratio < self.max_ratio):
            sentence += (
                f'; {what[:-1]} "{outlier}" alone decides: without it the ratio is {without:.3f}'
            )
        if remark := _noise_remark(c, found.estimate, self.max_ratio):
            sentence += f"; {remark}"
        return Finding(
            rule=c.rule,
            required=self.required,
            outcome=outcome,
            sentence=sentence,
            task=c.task,
            metric="token perplexity",
            unit="ratio",
            method=f"clustered t over {what}",
            n=n,
            baseline_value=before,
            candidate_value=after,
            estimate=ratio,
            lower=lower,
            upper=upper,
            confidence=1 - c.alpha,
            margin=self.max_ratio,
            p_value=found.p_at_least(math.log(self.max_ratio)),
            p_regression=1 - found.p_at_least(0.0),
            n_needed=needed if outcome == "inconclusive" else None,
            regression_detected=lower > 1,
            notes=[
                f'most influential {what[:-1]} "{outlier}": without it the ratio would be {without:.4f}'
            ],
        )


@dataclass(frozen=True)
class _Units:
    """What is compared: summed NLL of each unit on both sides, its tokens [n each], and its name."""

    what: str
    names: tuple[str, ...]
    baseline: NDArray[np.float64]
    candidate: NDArray[np.float64]
    tokens: NDArray[np.float64]


def _units(c: Comparison) -> _Units:
    """Return the documents, or their windows where there are too few documents to be units."""
    base, cand, pairs = c.base, c.cand, c.pairs
    rows = list(zip(pairs.baseline_rows, pairs.candidate_rows, strict=True))
    sums, lengths = base.series.get("window_nll"), base.series.get("window_tokens")
    others = cand.series.get("window_nll")
    if len(rows) < MINIMUM_DOCUMENTS and sums and lengths and others and rows:
        windows = [(i, j) for i, j in rows if len(sums[i]) == len(others[j]) > 0]
        if len(windows) == len(rows):
            return _Units(
                "windows",
                tuple(f"{base.sample_ids[i]}@{k}" for i, _ in rows for k in range(len(sums[i]))),
                np.concatenate([sums[i] for i, _ in rows]),
                np.concatenate([others[j] for _, j in rows]),
                np.concatenate([lengths[i] for i, _ in rows]),
            )
    return _Units(
        "documents",
        pairs.sample_ids,
        base.value[pairs.baseline_rows],
        cand.value[pairs.candidate_rows],
        base.weight[pairs.baseline_rows],
    )


def _noise_remark(c: Comparison, estimate: float, max_ratio: float) -> str:
    """Say that a ratio or a margin lies inside the noise of the repeated baseline, '' when not."""
    if c.noise is None:
        return ""
    again, pairs = c.noise
    if first_unscored(again) or len(pairs.sample_ids) < 2:
        return ""
    noise = log_perplexity_ratio(
        c.base.value[pairs.baseline_rows], again.value[pairs.candidate_rows],
        c.base.weight[pairs.baseline_rows],
    )  # fmt: skip
    reach = max(abs(noise.lower), abs(noise.upper))
    floor = f"the noise floor of {100 * math.expm1(reach):.2g} % (the baseline repeated)"
    if math.log(max_ratio) < reach:
        return f"the margin is below {floor}"
    return f"the difference is inside {floor}" if 0 < abs(estimate) <= reach else ""


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
    n: str,
    values: tuple[float, float],
    bounds: tuple[float, float, float],
    margin: float,
    alpha: float,
    outcome: Outcome,
    more: str,
) -> str:
    ratio, lower, upper = (beside(value, margin, 3) for value in bounds)
    sure = confidence(alpha)
    seen = f"{task}: perplexity {values[0]:.2f} -> {values[1]:.2f} ({n}), ratio {ratio}"
    if outcome == "accept":
        return f"{seen}, at most {upper} with {sure} confidence: within the margin of {margin:g}"
    if outcome == "reject":
        return f"{seen}, at least {lower} with {sure} confidence: beyond the margin of {margin:g}"
    return (
        f"{seen}, between {lower} and {upper} with {sure} confidence each: "
        f"undecided at the margin of {margin:g}{more}"
    )

"""Guards: what must hold before, and whatever, the scores say; each can fail a release on its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quanteval.evidence import RuleContext, ScoreSet, VariantEvidence
from quanteval.records import Effective, Finding, Outcome
from quanteval.rules._common import (
    Pairs,
    bare,
    beside,
    check_share,
    first_non_finite,
    invalid,
    pair,
    percent,
)
from quanteval.stats import clustered_ratio

LENGTH_ALPHA = 0.05
"""Level of the bounds that are shown beside a ratio of lengths; they do not decide."""

Checked = tuple[Outcome, str]


@dataclass(frozen=True)
class SampleStatus:
    """Limit the shares of errored, timed-out and truncated samples.

    Errors are limited as they are, on both sides: a baseline that errored is no reference. Timeouts
    and truncations are limited by how far the candidate's share exceeds the baseline's, since a
    baseline has some of its own.
    """

    max_errors: float = 0.0
    max_timeout_excess: float = 0.05
    max_truncated_excess: float = 0.1
    required: bool = True

    is_quality = False

    def __post_init__(self) -> None:
        for name in ("max_errors", "max_timeout_excess", "max_truncated_excess"):
            check_share(name, getattr(self, name))

    def check(
        self,
        name: str,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        context: RuleContext,
    ) -> list[Finding]:
        """Return a finding for each task of the candidate."""
        return _each_task(name, self.required, baseline, candidate, self._task)

    def _task(self, base: ScoreSet | None, cand: ScoreSet) -> Checked:
        if base is not None and (failed := failures(base, cand)) > self.max_errors:
            return "invalid", (
                f"{percent(failed)} of the baseline's samples errored or are missing, at most "
                f"{percent(self.max_errors)} may (n={len(base.sample_ids)})"
            )
        problems = []
        errors = failures(cand, base)
        if errors > self.max_errors:
            problems.append(
                f"{percent(errors)} of samples errored or are missing, at most "
                f"{percent(self.max_errors)} may"
            )
        for status, limit in (
            ("timeout", self.max_timeout_excess),
            ("truncated", self.max_truncated_excess),
        ):
            mine, theirs = share(cand, status), share(base, status, cand) if base else 0.0
            if mine - theirs > limit:
                problems.append(
                    f"{percent(mine)} of samples were {status}, the baseline's {percent(theirs)}: "
                    f"{percent(limit)} more are allowed"
                )
        n = len(cand.sample_ids)
        good = (
            f"{percent(errors)} errored, {percent(share(cand, 'timeout'))} timed out, "
            f"{percent(share(cand, 'truncated'))} truncated (n={n})"
        )
        return ("reject", "; ".join(problems) + f" (n={n})") if problems else ("accept", good)


def failures(scores: ScoreSet, other: ScoreSet | None) -> float:
    """Return the share of samples that errored or are not there, which is no better.

    How many there should be is what either side expects, unless one of them stopped early.
    """
    expected = [scores.record.samples_expected, len(scores.sample_ids)]
    sides = [scores] if other is None else [scores, other]
    if other is not None and not any(side.record.sequential for side in sides):
        expected.append(other.record.samples_expected)
    missing = max(expected) - len(scores.sample_ids)
    return (scores.status.count("error") + missing) / max(expected)


def share(scores: ScoreSet, status: str, among: ScoreSet | None = None) -> float:
    """Return the share of samples with a status, of those that `among` has too (a task may have stopped early)."""
    statuses: Sequence[str] = scores.status
    if among is not None and among.sample_ids != scores.sample_ids:
        ids = set(among.sample_ids)
        rows = zip(scores.sample_ids, scores.status, strict=True)
        statuses = [value for sample_id, value in rows if sample_id in ids]
    return statuses.count(status) / len(statuses) if statuses else 0.0


@dataclass(frozen=True)
class OutputLength:
    """Keep the mean number of output tokens within a band around the baseline's (as MLPerf does).

    The ratio seen decides. Its one-sided bounds are shown: those of a ratio of sums over problems (`clustered_ratio`).
    Nothing is accepted while samples are missing or errored, since their outputs could be of any length.
    """

    min_ratio: float = 0.8
    max_ratio: float = 1.25
    required: bool = False

    is_quality = False

    def __post_init__(self) -> None:
        if not 0 <= self.min_ratio < 1 < self.max_ratio:
            raise ValueError(
                f'min_ratio "{self.min_ratio}" and max_ratio "{self.max_ratio}" must lie around 1'
            )

    def check(
        self,
        name: str,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        context: RuleContext,
    ) -> list[Finding]:
        """Return a finding for each task that generates; `estimate` is the ratio, `n` the problems."""
        findings = []
        for task, cand in candidate.scores.items():
            base = baseline.scores.get(task)
            if not cand.sample_ids:
                findings.append(
                    bare(
                        name, required=self.required, outcome="invalid", task=task,
                        sentence=f"{task}: no samples",
                    )
                )  # fmt: skip
            elif base is not None and base.output_tokens.sum() > 0:
                pairs = pair(task, baseline, candidate, context.max_missing)
                findings.append(
                    invalid(name, required=self.required, task=task, problem=pairs.problem)
                    if pairs.problem
                    else self._task(name, base, cand, pairs)
                )
        return findings or [_nothing(name, self.required)]

    def _task(self, name: str, base: ScoreSet, cand: ScoreSet, pairs: Pairs) -> Finding:
        first, second = pairs.baseline_rows, pairs.candidate_rows
        errored = [
            "error" in (base.status[i], cand.status[j]) for i, j in zip(first, second, strict=True)
        ]
        lost = sum(errored) + pairs.missing
        before, after = base.output_tokens[first], cand.output_tokens[second]
        if not before.sum() > 0:
            problem = "the baseline wrote nothing in the samples scored on both sides"
            return invalid(name, required=self.required, task=pairs.task, problem=problem)
        ratio = float(after.mean() / before.mean())
        bounds = _length_bounds(before, after, pairs)
        good = self.min_ratio <= ratio <= self.max_ratio
        outcome: Outcome = "reject" if not good else "inconclusive" if lost else "accept"
        near = self.max_ratio if ratio > 1 else self.min_ratio
        seen = beside(ratio, near, 2)
        if bounds is not None:
            seen += f" (between {bounds[0]:.2f} and {bounds[1]:.2f} with 95 % confidence each)"
        told = (
            f"{before.mean():.1f} -> {after.mean():.1f} output tokens a sample (n={len(first)}), ratio {seen}, "
            f"{'within' if good else 'outside'} {self.min_ratio:g} to {self.max_ratio:g}"
        )
        if lost:
            told += f"; {lost} samples are missing or errored, so nothing is accepted"
        return Finding(
            rule=name,
            required=self.required,
            outcome=outcome,
            sentence=f"{pairs.task}: {told}",
            task=pairs.task,
            metric="output tokens",
            unit="ratio",
            method="ratio seen; bounds: clustered t over problems",
            n=pairs.n,
            baseline_value=float(before.mean()),
            candidate_value=float(after.mean()),
            estimate=ratio,
            lower=None if bounds is None else bounds[0],
            upper=None if bounds is None else bounds[1],
            confidence=None if bounds is None else 1 - LENGTH_ALPHA,
            margin=near,
        )


def _length_bounds(
    before: NDArray[np.int64], after: NDArray[np.int64], pairs: Pairs
) -> tuple[float, float] | None:
    """Return the bounds of sum(after)/sum(before) over problems, None for fewer than two that can be told apart.

    A problem in which the baseline wrote nothing has no weight of its own and is joined to the one before it (the
    first ones to the one after): independent clusters put together are clusters still.
    """
    weights = np.bincount(pairs.problems, weights=before, minlength=pairs.n)
    totals = np.bincount(pairs.problems, weights=after, minlength=pairs.n)
    cluster = np.maximum(np.cumsum(weights > 0) - 1, 0)
    if cluster[-1] < 1:
        return None
    found = clustered_ratio(
        np.bincount(cluster, weights=totals), np.bincount(cluster, weights=weights), LENGTH_ALPHA
    )
    return max(0.0, found.lower), found.upper


@dataclass(frozen=True)
class FiniteScores:
    """No NaN and no infinity among the scores."""

    required: bool = True

    is_quality = False

    def check(
        self,
        name: str,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        context: RuleContext,
    ) -> list[Finding]:
        """Return a finding for each task of the candidate."""
        return _each_task(name, self.required, baseline, candidate, self._task)

    def _task(self, base: ScoreSet | None, cand: ScoreSet) -> Checked:
        bad = first_non_finite(cand)
        if bad is None:
            return "accept", f"all {len(cand.sample_ids)} scores are finite"
        return "reject", f'sample "{bad}" has a score that is not finite'


@dataclass(frozen=True)
class EffectivePrecision:
    """The scheme really ran: what the served model reports is what the scheme asks for.

    `tolerance_bits` is what scales may add to a weight; `min_quantized` the share of the linear
    weights that must be stored as asked. What an endpoint runs can only be declared by its operator: that is no
    proof, and passes with `allow_declared` alone.
    """

    tolerance_bits: float = 1.0
    min_quantized: float = 0.95
    allow_declared: bool = False
    required: bool = True

    is_quality = False

    def __post_init__(self) -> None:
        check_share("min_quantized", self.min_quantized)
        if not self.tolerance_bits >= 0:
            raise ValueError(f'tolerance_bits "{self.tolerance_bits}" must not be negative')

    def check(
        self,
        name: str,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        context: RuleContext,
    ) -> list[Finding]:
        """Return one finding."""
        artifact = candidate.artifact
        if artifact is None or artifact.effective is None:
            sentence = "what really ran is not recorded"
            return [bare(name, required=self.required, outcome="invalid", sentence=sentence)]
        asked, ran = artifact.precision, artifact.effective
        bits = ran.linear_bits_per_weight
        if math.isnan(bits):
            return [self._declared(name, ran)]
        seen = (
            f"{bits:.2f} bits a linear weight (asked {asked.weight_bits:g}), activations {ran.activation_bits:g} bits "
            f"(asked {asked.activation_bits:g}), {percent(ran.quantized_fraction)} of linear weights quantized"
        )
        wrong = (
            not asked.weight_bits <= bits + 1e-9 <= asked.weight_bits + self.tolerance_bits + 1e-9
        )
        wrong |= asked.quantized and not ran.quantized_fraction >= self.min_quantized
        wrong |= not ran.activation_bits <= asked.activation_bits
        sentence = f"{seen}: {'not what the scheme asks for' if wrong else 'as asked'}"
        if ran.emulated:
            sentence += f" (emulated: {ran.emulation})"
        outcome: Outcome = "reject" if wrong else "accept"
        return [bare(name, required=self.required, outcome=outcome, sentence=sentence)]

    def _declared(self, name: str, ran: Effective) -> Finding:
        sentence = f"what runs could not be read back: {ran.emulation}"
        if self.allow_declared:
            sentence += " (allowed by the policy)"
        else:
            sentence += "; allow_declared=true of this rule takes the operator's word"
        outcome: Outcome = "accept" if self.allow_declared else "invalid"
        return bare(name, required=self.required, outcome=outcome, sentence=sentence)


def _each_task(
    name: str,
    required: bool,
    baseline: VariantEvidence,
    candidate: VariantEvidence,
    check: Callable[[ScoreSet | None, ScoreSet], Checked | None],
) -> list[Finding]:
    """Run a check on every task of the candidate; 'skipped' when it concerns none."""
    findings = []
    for task, scores in candidate.scores.items():
        if not scores.sample_ids:
            sentence = f"{task}: no samples"
            findings.append(
                bare(name, required=required, outcome="invalid", sentence=sentence, task=task)
            )
            continue
        result = check(baseline.scores.get(task), scores)
        if result is not None:
            outcome, sentence = result
            sentence = f"{task}: {sentence}"
            findings.append(
                bare(name, required=required, outcome=outcome, sentence=sentence, task=task)
            )
    return findings or [_nothing(name, required)]


def _nothing(name: str, required: bool) -> Finding:
    return bare(name, required=required, outcome="skipped", sentence="no task it concerns was run")

"""Changes without a direction: problems whose score flipped, and outputs that are no longer the same text.

Both shares say how much a variant moved, not whether it became worse. What is lost (an error, a missing sample) counts
as changed where a candidate could be accepted for it, and as unchanged where it could be rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quanteval.evidence import RuleContext, ScoreSet, VariantEvidence
from quanteval.looks import betting_order
from quanteval.records import Finding, Outcome
from quanteval.rules._common import (
    Comparison,
    FloatArray,
    Pairs,
    bare,
    beside,
    check_alpha,
    check_each_task,
    check_selection,
    check_share,
    confidence,
    invalid,
    percent,
)
from quanteval.rules._noise import flips_text, noise_of
from quanteval.rules.non_inferiority import paired_units, unusable
from quanteval.stats import absolute_loss, clopper_pearson_bound, score_bound
from quanteval.stats.sequential import betting_loss

SAME = 1e-9
"""Means over a problem's samples that differ by less are rounding apart."""

METHODS: Mapping[str, str] = {
    "exact": "exact unconditional test, Tango's ordering",
    "score": "score test (Tango's)",
    "betting": "betting e-process, valid at every look",
}


@dataclass(frozen=True)
class Judged:
    """A share (or a difference of two) with one-sided bounds, and what they say of a limit it should stay below."""

    lower: float
    upper: float
    outcome: Outcome
    method: str


def check_limit(name: str, value: float) -> None:
    """Raise ValueError unless 0 < value < 1: no bound of a share is below 0 or above 1."""
    check_share(name, value, below=1)
    if value == 0:
        raise ValueError(f'{name} "{value}" must be above 0')


def judge_share(
    low: FloatArray,
    high: FloatArray,
    limit: float,
    alpha: float,
    *,
    exact: bool,
    order: Sequence[int] | None = None,
) -> Judged:
    """Judge a mean of values in [0, 1] by an upper limit; each value is only known to lie between `low` and `high`.

    The lower bound is that of `low`, the upper that of `high`, each at level 1 - alpha. With `exact` the values are
    0 or 1 and the bounds Clopper and Pearson's (Biometrika 26, 1934), whose error never exceeds alpha: Wilson's
    reaches three times as much at shares near 0 and 1, which is where flips and agreement are. Otherwise they are
    those of the bounded score test. With an `order` the values were looked at as they came in, in that order, and
    the bounds are those of the betting test.
    """
    if order is not None:
        zeros = np.zeros(len(low))
        least = betting_loss(low[order], zeros, limit, alpha=alpha, reject_alpha=alpha)
        most = betting_loss(high[order], zeros, limit, alpha=alpha, reject_alpha=alpha)
        lower, upper, method = max(0.0, least.lower), most.upper, METHODS["betting"]
    elif exact:
        n = len(low)
        lower = clopper_pearson_bound(int(low.sum()), n, alpha, "lower")
        upper = clopper_pearson_bound(int(high.sum()), n, alpha, "upper")
        method = "exact binomial (Clopper-Pearson)"
    else:
        lower = score_bound(low, alpha, "lower", 0.0, 1.0)
        upper = score_bound(high, alpha, "upper", 0.0, 1.0)
        method = "bounded score test"
    outcome: Outcome = "accept" if upper < limit else "reject" if lower > limit else "inconclusive"
    return Judged(lower, upper, outcome, method)


def replaced(values: FloatArray, count: int, by: float) -> FloatArray:
    """Return the values with the `count` farthest from `by` replaced by it: the worst that missing samples can be."""
    out = values.copy()
    if count:
        out[np.argsort(-np.abs(values - by), kind="stable")[:count]] = by
    return out


def errored_problems(base: ScoreSet, cand: ScoreSet, pairs: Pairs) -> NDArray[np.bool_]:
    """Return which problems have a sample that errored on a side, [problems]."""
    out = np.zeros(pairs.n, dtype=bool)
    for scores, rows in ((base, pairs.baseline_rows), (cand, pairs.candidate_rows)):
        if "error" in scores.status:
            errored = np.array([status == "error" for status in scores.status], dtype=bool)
            out[pairs.problems[errored[rows]]] = True
    return out


@dataclass(frozen=True)
class Flips:
    """Keep the share of problems whose score changed, in either direction, below `max`.

    Flips of both kinds cancel in a mean score and not here (Dutta et al., "Accuracy is Not All You Need", 2024).
    With `excess` the limit is on the flips beyond those of the repeated baseline: each problem's flip of the
    candidate minus its flip of the repetition, judged as a paired loss. A problem with several samples flipped when
    its mean score changed, which it does the more easily the more samples it has. Accepted when the upper bound is
    below `max`, rejected when the lower one is above it.
    """

    max: float
    task: str | None = None
    kind: str | None = None
    required: bool = False
    alpha: float | None = None
    excess: bool = False

    is_quality = False

    def __post_init__(self) -> None:
        check_selection(self.task, self.kind)
        check_alpha(self.alpha)
        check_limit("max", self.max)

    def check(
        self,
        name: str,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        context: RuleContext,
    ) -> list[Finding]:
        """Return a finding for each task concerned; `estimate` and bounds are shares of the problems."""
        return check_each_task(self, self._check_task, name, baseline, candidate, context)

    def _check_task(self, c: Comparison) -> Finding:
        if problem := unusable(c.base) or unusable(c.cand):
            return invalid(c.rule, required=self.required, task=c.task, problem=problem)
        x, y = paired_units(c.base, c.cand, c.pairs)
        lost = errored_problems(c.base, c.cand, c.pairs)
        worse, better = (x - y > SAME) & ~lost, (y - x > SAME) & ~lost
        flipped = (worse | better).astype(np.float64)
        order = betting_order(c.cand.record, c.pairs.problem_ids)
        counts = (int(worse.sum()), int(better.sum()))
        seen = (
            f"{c.task}: {sum(counts)} of {c.pairs.n} flipped ({percent(float(flipped.mean()))}, "
            f"{counts[0]} worse, {counts[1]} better)"
        )
        noise = noise_of(c)
        if self.excess:
            again = _again_flipped(c)
            if isinstance(again, str):
                outcome: Outcome = "invalid" if self.required else "skipped"
                return bare(
                    c.rule, required=self.required, outcome=outcome, task=c.task,
                    sentence=f"{c.task}: no flips beyond the noise can be told, {again}",
                )  # fmt: skip
            least, most = again
            estimate = float((flipped - least).mean())
            judged = self._excess(c, flipped, lost, least, most, order)
            seen += f", the repeated baseline {int(least.sum())}"
            sentence = _excess_sentence(seen, estimate, judged, self.max, c.alpha)
        else:
            estimate = float(flipped.mean())
            low = replaced(flipped, c.pairs.missing, 0.0)
            high = replaced(np.where(lost, 1.0, flipped), c.pairs.missing, 1.0)
            judged = judge_share(low, high, self.max, c.alpha, exact=True, order=order)
            sentence = _share_sentence(seen, judged, self.max, c.alpha)
            if noise is not None:
                sentence += f"; {flips_text(noise)}"
        sentence += _lost_text(int(lost.sum()), c.pairs.missing, "problems that errored", "flips")
        return Finding(
            rule=c.rule,
            required=self.required,
            outcome=judged.outcome,
            sentence=sentence,
            task=c.task,
            metric="flips beyond the repeated baseline's" if self.excess else "flips",
            unit="share",
            method=judged.method,
            n=c.pairs.n,
            baseline_value=noise.flip_rate if noise is not None else None,
            candidate_value=float(flipped.mean()),
            estimate=estimate,
            lower=judged.lower,
            upper=judged.upper,
            confidence=1 - c.alpha,
            margin=self.max,
            broken=counts[0],
            fixed=counts[1],
        )

    def _excess(
        self,
        c: Comparison,
        flipped: FloatArray,
        lost: NDArray[np.bool_],
        least: FloatArray,
        most: FloatArray,
        order: Sequence[int] | None,
    ) -> Judged:
        """Judge mean(flip of the candidate - flip of the repetition), what is lost at its worst for each side."""
        missing = c.pairs.missing
        low = replaced(flipped - most, missing, -1.0)
        high = replaced(np.where(lost, 1.0, flipped) - least, missing, 1.0)
        tests = []
        for d in (low, high):
            # Differences of -1, 0 and 1 as two sides of 0 and 1, which is what the exact test takes.
            sides = np.maximum(d, 0.0), np.maximum(-d, 0.0)
            if order is not None:
                sides = sides[0][order], sides[1][order]
                tests.append(betting_loss(*sides, self.max, alpha=c.alpha, reject_alpha=c.alpha))
            else:
                tests.append(absolute_loss(*sides, self.max, alpha=c.alpha, reject_alpha=c.alpha))
        outcome: Outcome = "inconclusive"
        if tests[1].accepted and not tests[0].rejected:
            outcome = "accept"
        elif tests[0].rejected and not tests[1].accepted:
            outcome = "reject"
        return Judged(tests[0].lower, tests[1].upper, outcome, METHODS[tests[0].method])


def _again_flipped(c: Comparison) -> tuple[FloatArray, FloatArray] | str:
    """Return for each of the candidate's problems whether the repetition flipped it, at least and at most.

    A repetition that errored may not excuse a flip: at least, it did not flip. Returns why there is none to use.
    """
    if c.noise is None:
        return "the baseline was not repeated as these scores were (the same task, one run each): run with aa=true"
    again, pairs = c.noise
    if problem := unusable(again):
        return f"the repeated baseline cannot be used, {problem}"
    x, y = paired_units(c.base, again, pairs)
    lost = errored_problems(c.base, again, pairs)
    flipped = (np.abs(x - y) > SAME) & ~lost
    rows = {problem: row for row, problem in enumerate(pairs.problem_ids)}
    at = np.array([rows[problem] for problem in c.pairs.problem_ids], dtype=np.intp)
    return flipped[at].astype(np.float64), (flipped | lost)[at].astype(np.float64)


@dataclass(frozen=True)
class GreedyAgreement:
    """Keep the share of samples whose output is the same text in both variants above `min`.

    With greedy decoding a single token that differs changes the text from there on, so this share falls far faster
    than any score. Accepted when its lower bound is above `min`, rejected when its upper bound is below. The samples
    of one problem are averaged. Where a sample has no output on a side, or errored, the two are not known to agree.
    """

    min: float
    task: str | None = None
    kind: str | None = None
    required: bool = False
    alpha: float | None = None

    is_quality = False

    def __post_init__(self) -> None:
        check_selection(self.task, self.kind)
        check_alpha(self.alpha)
        check_limit("min", self.min)

    def check(
        self,
        name: str,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        context: RuleContext,
    ) -> list[Finding]:
        """Return a finding for each task concerned; `estimate` and bounds are shares of the samples."""
        return check_each_task(self, self._check_task, name, baseline, candidate, context)

    def _check_task(self, c: Comparison) -> Finding:
        same, known = _texts(c.base, c.cand, c.pairs)
        if not known.any():
            outcome: Outcome = "invalid" if self.required else "skipped"
            sentence = f"{c.task}: no sample has an output on both sides"
            return bare(
                c.rule, required=self.required, outcome=outcome, sentence=sentence, task=c.task
            )
        # In terms of disagreement, which is to stay below 1 - min.
        missing = c.pairs.missing
        low = replaced(c.pairs.means((known & ~same).astype(np.float64)), missing, 0.0)
        high = replaced(c.pairs.means((~same).astype(np.float64)), missing, 1.0)
        order = betting_order(c.cand.record, c.pairs.problem_ids)
        alone = c.pairs.n == len(c.pairs.sample_ids)
        judged = mirrored(judge_share(low, high, 1 - self.min, c.alpha, exact=alone, order=order))
        samples, agreed = len(same), int(same.sum())
        estimate = float(c.pairs.means(same.astype(np.float64)).mean())
        problems = "" if alone else f" of {c.pairs.n} problems"
        seen = (
            f"{c.task}: {agreed} of {samples} outputs{problems} are the same text "
            f"({percent(agreed / samples)})"
        )
        sentence = _share_sentence(seen, judged, self.min, c.alpha)
        own = self._own(c)
        if own is not None:
            sentence += f"; the repeated baseline agrees with itself in {percent(own)}"
        sentence += _lost_text(
            int((~known).sum()), missing, "samples without an output", "changed ones"
        )
        return Finding(
            rule=c.rule,
            required=self.required,
            outcome=judged.outcome,
            sentence=sentence,
            task=c.task,
            metric="greedy agreement",
            unit="share",
            method=judged.method,
            n=c.pairs.n,
            baseline_value=own,
            candidate_value=estimate,
            estimate=estimate,
            lower=judged.lower,
            upper=judged.upper,
            confidence=1 - c.alpha,
            margin=self.min,
        )

    @staticmethod
    def _own(c: Comparison) -> float | None:
        """Return the share of samples in which the repeated baseline gives the baseline's text, None if not known."""
        if c.noise is None:
            return None
        same, known = _texts(c.base, *c.noise)
        return float(same.mean()) if known.any() else None


def _texts(
    base: ScoreSet, cand: ScoreSet, pairs: Pairs
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return for each pair whether both outputs are known and the same, and whether both are known, [pairs] each."""
    n = len(pairs.sample_ids)
    if not (base.output_sha256 and cand.output_sha256):
        return np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
    first, second = (
        np.array(
            [
                text if status != "error" else ""
                for text, status in zip(scores.output_sha256, scores.status, strict=True)
            ]
        )[rows]
        for scores, rows in ((base, pairs.baseline_rows), (cand, pairs.candidate_rows))
    )
    known = (first != "") & (second != "")
    return known & (first == second), known


def mirrored(judged: Judged) -> Judged:
    """Return what was judged of 1 - value as a statement on the value; the outcome stays."""
    return Judged(1 - judged.upper, 1 - judged.lower, judged.outcome, judged.method)


def _share_sentence(seen: str, judged: Judged, limit: float, alpha: float) -> str:
    """Return the sentence of a share and its limit, whichever side of it is wanted."""
    sure, agreed = confidence(alpha), f"the limit of {100 * limit:g} %"
    lower, upper = (
        f"{beside(100 * bound, 100 * limit, 1)} %" for bound in (judged.lower, judged.upper)
    )
    if judged.outcome == "inconclusive":
        return f"{seen}, between {lower} and {upper} with {sure} confidence each: undecided at {agreed}"
    bound = f"at most {upper}" if judged.upper < limit else f"at least {lower}"
    verb = "within" if judged.outcome == "accept" else "beyond"
    return f"{seen}, {bound} with {sure} confidence: {verb} {agreed}"


def _excess_sentence(seen: str, estimate: float, judged: Judged, limit: float, alpha: float) -> str:
    sure, agreed = confidence(alpha), f"the limit of {100 * limit:g} points"
    value, lower, upper = (
        beside(100 * v, 100 * limit, 1) for v in (estimate, judged.lower, judged.upper)
    )
    seen = f"{seen}: {value} points more"
    if judged.outcome == "accept":
        return f"{seen}, at most {upper} with {sure} confidence: within {agreed}"
    if judged.outcome == "reject":
        return f"{seen}, at least {lower} with {sure} confidence: beyond {agreed}"
    return f"{seen}, between {lower} and {upper} with {sure} confidence each: undecided at {agreed}"


def _lost_text(unknown: int, missing: int, what: str, counted: str) -> str:
    """Say how much is lost and what it counts as, '' when nothing is."""
    parts = [f"{unknown} {what}"] if unknown else []
    parts += [f"{missing} missing samples"] if missing else []
    return f"; {' and '.join(parts)} count as {counted} for acceptance" if parts else ""

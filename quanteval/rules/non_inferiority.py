"""Non-inferiority of paired scores in [0, 1]: is the loss shown to be within a margin, or beyond it?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from quanteval.evidence import Forecast, RuleContext, ScoreSet, SuiteFacts, VariantEvidence
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
    confidence,
    first_non_finite,
    invalid,
    percent,
)
from quanteval.rules._forecast import forecast_loss
from quanteval.rules._noise import noise_of
from quanteval.rules.margin import POINTS, RELATIVE, Margin, MarginField
from quanteval.stats import (
    MAX_EXACT_PAIRS,
    absolute_loss,
    bounded_score,
    mcnemar_exact,
    point_rule_error,
    relative_loss,
)
from quanteval.stats import NonInferiority as Test
from quanteval.stats.sequential import betting_loss

POWER = 0.8


@dataclass(frozen=True)
class NonInferiority:
    """Accept when the loss is shown to be below the margin, reject when above, inconclusive otherwise.

    `method` 'auto' is the exact unconditional test for 0/1 scores up to a size where it is affordable
    and the bounded score test otherwise (Tango's for 0/1 scores); 'score' is that test always.
    'point' compares the loss seen with the margin, as other tools do: it is no statistical test, so
    it can keep a candidate from being accepted but is itself no evidence that quality was kept.

    A problem with several samples counts once, with the mean of its scores. No sample leaves the
    denominator: one that errored counts against the candidate, as right on the baseline's side and as
    wrong on the candidate's, and so does one that is missing on a side where the policy allows some.
    Timed-out and truncated samples keep their value.

    An advisory rule with `veto` counts where it finds against a candidate: a loss shown to be beyond
    the margin, or unusable evidence. That is for tasks too small to certify anything.
    """

    margin: MarginField
    task: str | None = None
    kind: str | None = None
    required: bool = True
    veto: bool = False
    alpha: float | None = None
    method: Literal["auto", "exact", "score", "point"] = "auto"

    def __post_init__(self) -> None:
        check_selection(self.task, self.kind)
        check_alpha(self.alpha)
        if self.veto and self.required:
            raise ValueError('veto "True" is for rules with required: false')
        if self.method == "exact" and self.margin.relative is not None:
            raise ValueError('method "exact" needs an absolute margin; use "auto"')

    @property
    def is_quality(self) -> bool:
        """Whether acceptance is evidence of quality: not that of a point comparison."""
        return self.method != "point"

    @property
    def holds_at_any_look(self) -> bool:
        """Whether the betting test can decide this rule."""
        return not self.margin.is_relative

    def check(
        self,
        name: str,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        context: RuleContext,
    ) -> list[Finding]:
        """Return a finding for each task concerned."""
        found = check_each_task(self, self._check_task, name, baseline, candidate, context)
        if not self.veto:
            return found
        against = ("reject", "invalid")
        return [f.model_copy(update={"required": f.outcome in against}) for f in found]

    def forecast(
        self, name: str, suites: Mapping[str, SuiteFacts], context: RuleContext
    ) -> list[Forecast]:
        """Return what each task concerned can decide, before it is run."""
        chosen = [s for s in suites.values() if self.task in (None, s.task)]
        chosen = [s for s in chosen if self.kind in (None, s.kind)]
        alpha = self.alpha if self.alpha is not None else context.alpha
        return [forecast_loss(name, self.margin, suite, alpha, self.method) for suite in chosen]

    def _check_task(self, c: Comparison) -> Finding:
        if problem := unusable(c.base) or unusable(c.cand):
            return invalid(c.rule, required=self.required, task=c.task, problem=problem)
        x, y = paired_units(c.base, c.cand, c.pairs)
        if problem := self._too_much_for_exact(x, y):
            return invalid(c.rule, required=self.required, task=c.task, problem=problem)
        if why := self._says_nothing(c, x):
            sentence = f"{c.task}: {why}"
            return bare(
                c.rule,
                required=self.required,
                outcome="inconclusive",
                task=c.task,
                sentence=sentence,
            )
        notes = _notes(c)
        if self.method == "point":
            return self._compare_points(c, x, y, notes)
        return self._decide(c, x, y, notes)

    def _too_much_for_exact(self, x: FloatArray, y: FloatArray) -> str:
        if self.method != "exact":
            return ""
        if len(x) > MAX_EXACT_PAIRS:
            return f'the exact test takes at most {MAX_EXACT_PAIRS} problems, use method "auto"'
        binary = np.isin([x, y], (0.0, 1.0)).all()
        return "" if binary else "the exact test needs scores of 0 and 1"

    def _says_nothing(self, c: Comparison, x: FloatArray) -> str:
        """Return why a margin cannot be judged here, '' when it can."""
        look = c.cand.record.sequential
        if look is not None and look.method == "betting" and c.pairs.n < len(c.pairs.sample_ids):
            return "the betting test takes one sample a problem; use planned looks"
        if not self.margin.is_relative:
            return ""
        if not x.mean() >= max(self.margin.min_baseline, 1e-9):
            return (
                f"the baseline scores {percent(float(x.mean()))}, below the "
                f"{percent(self.margin.min_baseline)} from which a relative margin means something"
            )
        if look is not None and look.method == "betting":
            return (
                f"the betting test takes absolute margins only, not {self.margin.text}: use points, "
                "or planned looks"
            )
        return ""

    def _compare_points(
        self, c: Comparison, x: FloatArray, y: FloatArray, notes: list[str]
    ) -> Finding:
        """Compare the loss seen with the margin, and say how often that is wrong for a loss at the margin."""
        margin, before, after = self.margin.value, float(x.mean()), float(y.mean())
        loss = 1 - after / before if self.margin.is_relative else before - after
        worse, better = int((x > y).sum()), int((x < y).sum())
        absolute = margin * before if self.margin.is_relative else margin
        wrong = point_rule_error(len(x), max((worse + better) / len(x), absolute), absolute)
        kept = loss <= margin + 1e-12 and not c.pairs.missing
        unit = RELATIVE if self.margin.is_relative else POINTS
        lacking = f", but {c.pairs.missing} samples are missing" if c.pairs.missing else ""
        return Finding(
            rule=c.rule,
            required=self.required,
            outcome="accept" if kept else "reject",
            sentence=f"{_seen(c, x, y)}, loss {beside(100 * loss, 100 * margin, 1)} {unit}, "
            f"{'not above' if loss <= margin + 1e-12 else 'above'} the margin of {100 * margin:g}{lacking}: "
            f"not a statistical test, it passes a loss exactly at the margin {percent(wrong)} of the time",
            task=c.task,
            metric="mean score",
            unit="share of the baseline" if self.margin.is_relative else "share",
            method="point comparison, not a statistical test",
            n=len(x),
            baseline_value=before,
            candidate_value=after,
            estimate=loss,
            margin=margin,
            broken=worse,
            fixed=better,
            notes=notes,
        )

    def _decide(self, c: Comparison, x: FloatArray, y: FloatArray, notes: list[str]) -> Finding:
        test = self._test(c, x, y, c.alpha)
        worst = test
        if c.pairs.missing:
            # What is missing counts against the candidate where it could help it.
            worst = self._test(c, *with_missing(c.pairs, x, y), c.alpha)
        outcome: Outcome = "inconclusive"
        if worst.accepted and not test.rejected:
            outcome = "accept"
        elif test.rejected and not worst.accepted:
            outcome = "reject"
        p_regression = regression_p(x, y)
        needed = self._needed(x, y, test, c.alpha)
        noise = noise_of(c)
        remark = (
            "" if noise is None or self.margin.is_relative else noise.remark(test.loss, test.margin)
        )
        sentence = judged_text(
            _seen(c, x, y), test, worst.upper, outcome, needed, margin=self.margin
        )
        return Finding(
            rule=c.rule,
            required=self.required,
            outcome=outcome,
            sentence=f"{sentence}; {remark}" if remark else sentence,
            task=c.task,
            metric="mean score",
            unit="share of the baseline" if self.margin.is_relative else "share",
            method=_method(test.method),
            n=len(x),
            baseline_value=float(x.mean()),
            candidate_value=float(y.mean()),
            estimate=test.loss,
            lower=test.lower,
            upper=worst.upper,
            confidence=1 - c.alpha,
            margin=test.margin,
            p_value=worst.p_accept,
            p_regression=p_regression,
            broken=int((x > y).sum()),
            fixed=int((x < y).sum()),
            n_needed=needed if outcome == "inconclusive" else None,
            regression_detected=p_regression <= c.alpha,
            notes=notes,
        )  # fmt: skip

    def _test(self, c: Comparison, x: FloatArray, y: FloatArray, alpha: float) -> Test:
        margin = self.margin.value
        # Pairs of a task that was looked at as it came in lack nothing, so these are all its problems.
        order = betting_order(c.cand.record, c.pairs.problem_ids)
        if order is not None:
            return betting_loss(x[order], y[order], margin, alpha=alpha, reject_alpha=alpha)
        if self.margin.is_relative:
            return relative_loss(x, y, margin, alpha=alpha, reject_alpha=alpha)
        method: Literal["auto", "exact", "score"] = (
            "auto" if self.method == "point" else self.method
        )
        return absolute_loss(x, y, margin, alpha=alpha, reject_alpha=alpha, method=method)

    def _needed(self, x: FloatArray, y: FloatArray, test: Test, alpha: float) -> int | None:
        """Return the samples that would decide, more than there are; a relative loss in the baseline's own unit."""
        scale = float(x.mean()) if self.margin.is_relative else 1.0
        kept = 1 - test.margin if self.margin.is_relative else 1.0
        variance = float(np.var(kept * x - y)) / scale**2
        needed = needed_pairs(variance, test.loss, test.margin, alpha)
        return None if needed is None else max(needed, len(x) + 1)


def paired_units(base: ScoreSet, cand: ScoreSet, pairs: Pairs) -> tuple[FloatArray, FloatArray]:
    """Return both variants' scores, one a problem; a sample that errored counts against the candidate."""
    x = np.where(_errored(base, pairs.baseline_rows), 1.0, base.value[pairs.baseline_rows])
    y = np.where(_errored(cand, pairs.candidate_rows), 0.0, cand.value[pairs.candidate_rows])
    return pairs.means(x), pairs.means(y)


def with_missing(pairs: Pairs, x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the units with every missing sample as right in the baseline and wrong in the candidate."""
    counts = np.bincount(pairs.problems, minlength=pairs.n).astype(np.float64)
    rows = {problem: row for row, problem in enumerate(pairs.problem_ids)}
    lost = np.zeros(pairs.n)
    others: dict[str, None] = {}
    for problem in pairs.missing_problems:
        if problem in rows:
            lost[rows[problem]] += 1
        else:
            others[problem] = None
    known_x = (x * counts + lost) / (counts + lost)
    known_y = y * counts / (counts + lost)
    return (
        np.concatenate([known_x, np.ones(len(others))]),
        np.concatenate([known_y, np.zeros(len(others))]),
    )


def unusable(scores: ScoreSet) -> str:
    """Return why these scores cannot be compared, '' when they can."""
    if bad := first_non_finite(scores):
        return f'sample "{bad}" has no finite score'
    if ((scores.value < 0) | (scores.value > 1)).any():
        return "a score lies outside 0 to 1"
    return "every sample errored" if set(scores.status) == {"error"} else ""


def _errored(scores: ScoreSet, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    if "error" not in scores.status:
        return np.zeros(len(rows), dtype=bool)
    return np.array([status == "error" for status in scores.status], dtype=bool)[rows]


def regression_p(x: FloatArray, y: FloatArray) -> float:
    """Return the one-sided p-value of "there is no loss": McNemar's exact test, or for fractions the score test."""
    if ((x == 0) | (x == 1)).all() and ((y == 0) | (y == 1)).all():
        return mcnemar_exact(int((x > y).sum()), int((x < y).sum()), "greater")
    d = x - y
    return float(ndtr(-bounded_score(d, 0.0))) if d.any() else 1.0


def _notes(c: Comparison) -> list[str]:
    notes = []
    if c.pairs.missing:
        notes.append(
            f"{c.pairs.missing} samples were not scored on both sides; for acceptance they count as lost"
        )
    lost = int(_errored(c.base, c.pairs.baseline_rows).sum())
    if lost:
        notes.append(f"{lost} samples that errored in the baseline count as right there")
    look = c.cand.record.sequential
    if look is not None:
        notes.append(
            f"decided at look {look.look} of {len(look.fractions)}, after {c.pairs.n} of "
            f"{look.samples_planned} samples; bounds hold at the level that look may spend"
        )
    return notes


def needed_pairs(variance: float, loss: float, margin: float, alpha: float) -> int | None:
    """Return how many pairs decide with 80 % power if loss and variance stay as seen; None at the margin.

    n = (z_alpha + z_power)^2 variance / (margin - loss)^2, the normal approximation; the variance of
    the paired difference is f - D^2 for 0/1 scores with discordance f and loss D. Below the margin it
    is never less than what zero discordant pairs need, ln(alpha)/ln(1 - margin).
    """
    distance = abs(margin - loss)
    if distance < 1e-9:
        return None
    z = -float(ndtri(alpha)) + float(ndtri(POWER))
    smallest = math.ceil(math.log(alpha) / math.log(1 - margin))
    return max(math.ceil(z * z * variance / distance**2), smallest if loss < margin else 1)


def _method(method: str) -> str:
    return {
        "exact": "exact unconditional test, Tango's ordering",
        "score": "score test (Tango's for 0/1 scores)",
        "score_ratio": "score test of the ratio (Tang; Nam and Blackwelder)",
        "score_exact": "score test, referred to the exact null of 0/1 scores",
        "betting": "betting e-process, valid at every look",
    }.get(method, method)


def _seen(c: Comparison, x: FloatArray, y: FloatArray) -> str:
    worse, better = int((x > y).sum()), int((x < y).sum())
    before, after = percent(float(x.mean())), percent(float(y.mean()))
    samples = len(c.pairs.sample_ids)
    samples = c.cand.samples or samples
    n = f"n={len(x)}" if samples == len(x) else f"n={len(x)} problems, {samples} samples"
    return f"{c.task}: {before} -> {after} ({n}, {worse} worse, {better} better)"


def judged_text(
    seen: str, test: Test, upper: float, outcome: Outcome, needed: int | None, *, margin: Margin
) -> str:
    """Return the sentence of a judged loss; `upper` is the bound that decides on acceptance."""
    unit = RELATIVE if margin.is_relative else POINTS
    sure, limit = confidence(test.alpha), 100 * test.margin
    agreed = f"the margin of {limit:g} {'%' if margin.is_relative else unit}"
    loss, least, most = (beside(100 * v, limit, 1) for v in (test.loss, test.lower, upper))
    seen = f"{seen}, loss {loss} {unit}"
    if outcome == "accept":
        return f"{seen}, at most {most} with {sure} confidence: within {agreed}"
    if outcome == "reject":
        return f"{seen}, at least {least} with {sure} confidence: beyond {agreed}"
    more = (
        f"about {needed} samples would decide"
        if needed
        else "no number of samples decides at the margin"
    )
    return (
        f"{seen}, between {least} and {most} with {sure} confidence each: "
        f"undecided at {agreed}, {more}"
    )

"""A floor under the candidate's own score: below it a task says nothing, whatever the baseline does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quanteval.evidence import RuleContext, ScoreSet, VariantEvidence
from quanteval.looks import betting_order, level
from quanteval.records import Finding
from quanteval.rules._common import (
    FloatArray,
    beside,
    check_alpha,
    check_selection,
    confidence,
    invalid,
    percent,
    problem_of,
    select_tasks,
)
from quanteval.rules.flips import (
    Judged,
    check_limit,
    judge_share,
    mirrored,
    replaced,
)
from quanteval.rules.non_inferiority import unusable


@dataclass(frozen=True)
class Floor:
    """Demand that the candidate's own mean score, one value a problem, is shown to be above `min`.

    Accepted when the lower bound is above `min`, rejected when the upper one is below it. Bounds are Clopper and
    Pearson's for scores of 0 and 1 and those of the bounded score test for fractions and for problems with several
    samples, which are averaged. An errored sample counts 0. A missing one, where the policy allows some, counts as a
    problem less solved for acceptance and as one more for rejection.
    """

    min: float
    task: str | None = None
    kind: str | None = None
    required: bool = True
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
        """Return a finding for each task concerned; `estimate` is the score and `lower`, `upper` bound it."""
        if self.task is not None:
            tasks = [self.task]
        else:
            # A task that only the baseline has is missing here, and what is missing never passes.
            known = {**baseline.scores, **candidate.scores}
            tasks = sorted(t for t, scores in known.items() if scores.record.kind == self.kind)
        if not tasks:
            none = select_tasks(
                name, required=self.required, task=None, kind=self.kind,
                baseline=baseline, candidate=candidate,
            )  # fmt: skip
            return [none.finding] if none.finding else []
        return [self._task(name, task, candidate, context) for task in tasks]

    def _task(
        self, name: str, task: str, candidate: VariantEvidence, context: RuleContext
    ) -> Finding:
        scores = candidate.scores.get(task)
        if scores is None or (problem := _problem(scores, context.max_missing)):
            told = f"{candidate.name} has no scores" if scores is None else problem
            return invalid(name, required=self.required, task=task, problem=told)
        alpha = level(scores.record, self.alpha if self.alpha is not None else context.alpha)
        missing = scores.record.samples_expected - len(scores.sample_ids)
        y, problem_ids = _by_problem(scores)
        judged = self._judge(scores, y, problem_ids, missing, alpha)
        score = float(y.mean())
        return Finding(
            rule=name,
            required=self.required,
            outcome=judged.outcome,
            sentence=self._sentence(task, score, len(y), len(scores.sample_ids), judged, alpha)
            + (f"; {missing} missing samples count as unsolved for acceptance" if missing else ""),
            task=task,
            metric="mean score",
            unit="share",
            method=judged.method,
            n=len(y),
            candidate_value=score,
            estimate=score,
            lower=judged.lower,
            upper=judged.upper,
            confidence=1 - alpha,
            margin=self.min,
        )

    def _judge(
        self,
        scores: ScoreSet,
        y: FloatArray,
        problem_ids: tuple[str, ...],
        missing: int,
        alpha: float,
    ) -> Judged:
        """Judge the share that was not reached, which is to stay below 1 - min."""
        lacking = 1 - y
        return mirrored(
            judge_share(
                replaced(lacking, missing, 0.0),
                replaced(lacking, missing, 1.0),
                1 - self.min,
                alpha,
                # Not by the means alone: an error must not exchange the exact bound for a narrower one.
                exact=len(y) == len(scores.sample_ids) and bool(np.isin(y, (0.0, 1.0)).all()),
                order=betting_order(scores.record, problem_ids),
            )
        )

    def _sentence(
        self, task: str, score: float, n: int, samples: int, judged: Judged, alpha: float
    ) -> str:
        limit, sure = 100 * self.min, confidence(alpha)
        lower, upper = (f"{beside(100 * v, limit, 1)} %" for v in (judged.lower, judged.upper))
        count = f"n={n}" if n == samples else f"n={n} problems, {samples} samples"
        seen, floor = f"{task}: scores {percent(score)} ({count})", f"the floor of {limit:g} %"
        if judged.outcome == "accept":
            return f"{seen}, at least {lower} with {sure} confidence: above {floor}"
        if judged.outcome == "reject":
            return f"{seen}, at most {upper} with {sure} confidence: below {floor}"
        return (
            f"{seen}, between {lower} and {upper} with {sure} confidence each: undecided at {floor}"
        )


def _problem(scores: ScoreSet, max_missing: float) -> str:
    """Return why these scores have no mean to judge, '' when they have one."""
    expected, seen = scores.record.samples_expected, len(scores.sample_ids)
    if scores.record.status != "complete":
        return "the task is not finished"
    if not seen:
        return "it has no samples"
    if len(set(scores.sample_ids)) != seen:
        return "it has a sample twice"
    if expected - seen > max_missing * expected:
        return (
            f"{expected - seen} of {expected} samples were not scored, more than the "
            f"{max_missing:.1%} that may be missing"
        )
    return unusable(scores)


def _by_problem(scores: ScoreSet) -> tuple[FloatArray, tuple[str, ...]]:
    """Return one mean score a problem, errors counting 0, and the problems' ids."""
    errored = np.array([status == "error" for status in scores.status], dtype=bool)
    value = np.where(errored, 0.0, scores.value)
    numbers: dict[str, int] = {}
    index = [numbers.setdefault(problem_of(scores, row), len(numbers)) for row in range(len(value))]
    if len(numbers) == len(value):
        return value, tuple(numbers)
    sums, counts = np.bincount(index, weights=value), np.bincount(index)
    return np.asarray(sums / counts, dtype=np.float64), tuple(numbers)

"""What rules share: which tasks a rule concerns, pairs of samples, and findings without a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quanteval.interfaces import ScoreSet, VariantEvidence
from quanteval.records import Finding, Outcome


@dataclass(frozen=True)
class Selection:
    """The tasks a rule concerns, or the finding that there is nothing (usable) to check."""

    tasks: tuple[str, ...] = ()
    finding: Finding | None = None


def check_selection(task: str | None, kind: str | None) -> None:
    """Raise ValueError unless exactly one of `task` and `kind` is given."""
    if (task is None) == (kind is None):
        raise ValueError(f'task "{task}" and kind "{kind}": give exactly one of them')


def check_share(name: str, value: float, *, below: float = math.inf) -> None:
    """Raise ValueError unless 0 <= value <= 1 and value < below; NaN, which no comparison trips, is refused too."""
    if not (0 <= value <= 1 and value < below):
        raise ValueError(f'{name} "{value}" must be a share between 0 and 1')


def check_alpha(alpha: float | None) -> None:
    """Raise ValueError for a level that is none; None means the policy's."""
    if alpha is not None and not 0 < alpha < 0.5:
        raise ValueError(f'alpha "{alpha}" must be between 0 and 0.5')


def bare(name: str, *, required: bool, outcome: Outcome, sentence: str, task: str = "") -> Finding:
    """Return a finding that rests on no comparison."""
    return Finding(rule=name, required=required, outcome=outcome, sentence=sentence, task=task)


def select_tasks(
    name: str,
    *,
    required: bool,
    task: str | None,
    kind: str | None,
    baseline: VariantEvidence,
    candidate: VariantEvidence,
) -> Selection:
    """Return the tasks: the one named, or all of a kind that either variant has.

    A named task that is missing on a side, or a task that only one side has, is invalid: absent
    evidence never passes.
    """
    if task is not None:
        for side, evidence in (("baseline", baseline), ("candidate", candidate)):
            if task not in evidence.scores:
                sentence = f"{task}: the {side} {evidence.name} has no scores"
                return Selection(
                    finding=bare(
                        name, required=required, outcome="invalid", sentence=sentence, task=task
                    )
                )
        return Selection((task,))
    known = {**baseline.scores, **candidate.scores}
    chosen = sorted(t for t, scores in known.items() if scores.record.kind == kind)
    if not chosen:
        sentence = f"no task of kind {kind} was run"
        return Selection(
            finding=bare(name, required=required, outcome="skipped", sentence=sentence)
        )
    return Selection(tuple(chosen))


@dataclass(frozen=True)
class Pairs:
    """Samples that both variants scored, in the baseline's order, and how many were on one side only."""

    task: str
    sample_ids: tuple[str, ...]
    baseline_rows: NDArray[np.intp]
    candidate_rows: NDArray[np.intp]
    missing: int
    problem: str | None = None
    """Why these pairs must not be compared, None when they may."""


def pair(
    task: str, baseline: VariantEvidence, candidate: VariantEvidence, max_missing: float
) -> Pairs:
    """Pair two variants' samples of a task by id, and check that they may be compared."""
    for evidence in (baseline, candidate):
        if task not in evidence.scores:
            return _no_pairs(task, f"{evidence.name} has no scores")
        scores = evidence.scores[task]
        if scores.record.status != "complete":
            return _no_pairs(task, f"{evidence.name} did not finish the task")
        if len(set(scores.sample_ids)) != len(scores.sample_ids):
            return _no_pairs(task, f"{evidence.name} has a sample twice")
    return _pair_sets(task, baseline.scores[task], candidate.scores[task], max_missing)


def _no_pairs(task: str, problem: str) -> Pairs:
    empty = np.array([], dtype=np.intp)
    return Pairs(task, (), empty, empty, 0, problem)


def _pair_sets(task: str, base: ScoreSet, cand: ScoreSet, max_missing: float) -> Pairs:
    where = {sample_id: row for row, sample_id in enumerate(cand.sample_ids)}
    common = [(row, where[i]) for row, i in enumerate(base.sample_ids) if i in where]
    everything = len(base.sample_ids) + len(cand.sample_ids) - len(common)
    expected = max(everything, base.record.samples_expected, cand.record.samples_expected)
    missing = expected - len(common)
    rows = np.array(common, dtype=np.intp).reshape(-1, 2)
    ids = tuple(base.sample_ids[row] for row in rows[:, 0])
    problem = None
    if not common:
        problem = "no sample was scored on both sides"
    elif missing > max_missing * expected:
        problem = (
            f"{missing} of {expected} samples were not scored on both sides, more than the "
            f"{max_missing:.1%} that may be missing"
        )
    else:
        for row_b, row_c in common:
            if base.prompt_sha256[row_b] != cand.prompt_sha256[row_c]:
                problem = f'sample "{base.sample_ids[row_b]}" had different prompt ids'
                break
    return Pairs(task, ids, rows[:, 0], rows[:, 1], missing, problem)


def invalid(name: str, *, required: bool, task: str, problem: str) -> Finding:
    """Return the finding that a task cannot be compared."""
    sentence = f"{task}: not comparable, {problem}"
    return bare(name, required=required, outcome="invalid", sentence=sentence, task=task)


def percent(share: float) -> str:
    """Return '12.3 %'."""
    return f"{100 * share:.1f} %"


def confidence(alpha: float) -> str:
    """Return '95 %', with the decimals that the level needs: 99.95 % is not 100 %."""
    return f"{100 * (1 - alpha):.6g} %"


def beside(value: float, limit: float, digits: int) -> str:
    """Return a number with `digits` decimals, up to 6 where fewer would make it look equal to the limit."""
    while digits < 6 and value != limit and f"{value:.{digits}f}" == f"{limit:.{digits}f}":
        digits += 1
    return f"{value:z.{digits}f}"


def first_non_finite(scores: ScoreSet) -> str | None:
    """Return the id of the first sample whose value or weight is NaN or infinite."""
    bad = np.flatnonzero(~(np.isfinite(scores.value) & np.isfinite(scores.weight)))
    return scores.sample_ids[int(bad[0])] if bad.size else None


def first_unscored(scores: ScoreSet) -> str | None:
    """Return the id of the first sample whose sum over tokens cannot be used: errored, not finite, or no token."""
    good = np.isfinite(scores.value) & np.isfinite(scores.weight) & (scores.weight > 0)
    good &= np.array([status not in ("error", "timeout") for status in scores.status], dtype=bool)
    return None if good.all() else scores.sample_ids[int(np.argmin(good))]


class PairedRule(Protocol):
    """The fields of a rule that compares paired samples task by task."""

    @property
    def required(self) -> bool: ...
    @property
    def task(self) -> str | None: ...
    @property
    def kind(self) -> str | None: ...
    @property
    def alpha(self) -> float | None: ...
    @property
    def max_missing(self) -> float: ...


CheckPairs = Callable[[str, Pairs, VariantEvidence, VariantEvidence, float], Finding]


def check_each_task(
    rule: PairedRule,
    check: CheckPairs,
    name: str,
    baseline: VariantEvidence,
    candidate: VariantEvidence,
    alpha: float,
) -> list[Finding]:
    """Pair the samples of every task a rule concerns and check those that may be compared."""
    chosen = select_tasks(
        name, required=rule.required, task=rule.task, kind=rule.kind,
        baseline=baseline, candidate=candidate,
    )  # fmt: skip
    if chosen.finding:
        return [chosen.finding]
    level = rule.alpha if rule.alpha is not None else alpha
    findings = []
    for task in chosen.tasks:
        pairs = pair(task, baseline, candidate, rule.max_missing)
        if pairs.problem:
            findings.append(invalid(name, required=rule.required, task=task, problem=pairs.problem))
        else:
            findings.append(check(name, pairs, baseline, candidate, level))
    return findings

"""What rules share: which tasks a rule concerns, pairs of samples, and findings without a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quanteval.evidence import RuleContext, ScoreSet, VariantEvidence
from quanteval.looks import evaluated_ids, level
from quanteval.records import Finding, Outcome
from quanteval.targets import near

FloatArray = NDArray[np.float64]
KINDS = ("code", "perplexity", "divergence", "multiple_choice", "cloze", "generate", "needle")
"""Kinds of tasks that ship; others come from outside and are known once they were run."""


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
        # A kind that nobody knows is a slip of the pen, and must not switch a rule off.
        slip = "" if kind in KINDS else f"; {near(str(kind), KINDS)}"
        sentence = f"no task of kind {kind} was run{slip}"
        outcome: Outcome = "invalid" if slip and required else "skipped"
        return Selection(finding=bare(name, required=required, outcome=outcome, sentence=sentence))
    return Selection(tuple(chosen))


@dataclass(frozen=True)
class Pairs:
    """Samples that both variants scored, in the baseline's order, and those that only one of them did."""

    task: str
    sample_ids: tuple[str, ...]
    baseline_rows: NDArray[np.intp]
    candidate_rows: NDArray[np.intp]
    problems: NDArray[np.intp]
    """Which problem each pair belongs to, numbered from 0 in order of appearance."""
    problem_ids: tuple[str, ...] = ()
    missing_problems: tuple[str, ...] = ()
    """The problem of each sample that was not scored on both sides."""
    problem: str | None = None
    """Why these pairs must not be compared, None when they may."""

    @property
    def missing(self) -> int:
        """How many samples were not scored on both sides."""
        return len(self.missing_problems)

    @property
    def n(self) -> int:
        """How many problems: the units of every test."""
        return len(self.problem_ids)

    def means(self, values: FloatArray) -> FloatArray:
        """Average one value a pair over the pairs of each problem."""
        if self.n == len(values):
            return values
        sums = np.bincount(self.problems, weights=values, minlength=self.n)
        return np.asarray(sums / np.bincount(self.problems, minlength=self.n), dtype=np.float64)


def pair(
    task: str, baseline: VariantEvidence, candidate: VariantEvidence, max_missing: float
) -> Pairs:
    """Pair two variants' samples of a task by id, and check that they may be compared."""
    for evidence in (baseline, candidate):
        if task not in evidence.scores:
            return _no_pairs(task, f"{evidence.name} has no scores")
        scores = evidence.scores[task]
        if scores.record.status != "complete" and max_missing == 0:
            return _no_pairs(task, f"{evidence.name} did not finish the task")
        if len(set(scores.sample_ids)) != len(scores.sample_ids):
            return _no_pairs(task, f"{evidence.name} has a sample twice")
    return pair_sets(task, baseline.scores[task], candidate.scores[task], max_missing)


def _no_pairs(task: str, problem: str) -> Pairs:
    empty = np.array([], dtype=np.intp)
    return Pairs(task, (), empty, empty, empty, problem=problem)


def pair_sets(task: str, base: ScoreSet, cand: ScoreSet, max_missing: float) -> Pairs:
    """Pair two score sets of a task by sample id; `problem` says why they must not be compared.

    A candidate that stopped early is compared on the samples it was to evaluate, which the order drawn
    beforehand decides and not the journal: leaving out a sample is found out.
    """
    wanted = base.sample_ids
    if cand.record.sequential is not None:
        chosen = set(evaluated_ids(cand.record, base.sample_ids))
        wanted = tuple(i for i in base.sample_ids if i in chosen)
    if wanted == cand.sample_ids == base.sample_ids:
        rows = np.arange(len(wanted), dtype=np.intp)
        base_rows = cand_rows = rows
        ids, missing = wanted, []
    else:
        where = {sample_id: row for row, sample_id in enumerate(cand.sample_ids)}
        at = {sample_id: row for row, sample_id in enumerate(base.sample_ids)}
        ids = tuple(i for i in wanted if i in where)
        base_rows = np.array([at[i] for i in ids], dtype=np.intp)
        cand_rows = np.array([where[i] for i in ids], dtype=np.intp)
        lost = [problem_of(base, at[i]) for i in wanted if i not in where]
        lost += [problem_of(cand, row) for i, row in where.items() if i not in at]
        missing = lost
    unknown = max(
        0 if cand.record.sequential else base.record.samples_expected, cand.record.samples_expected
    ) - (len(ids) + len(missing))
    missing += [f"never scored {k}" for k in range(unknown)]
    expected = len(ids) + len(missing)
    problem = None
    if not ids:
        problem = "no sample was scored on both sides"
    elif len(missing) > max_missing * expected:
        problem = (
            f"{len(missing)} of {expected} samples were not scored on both sides, more than the "
            f"{max_missing:.1%} that may be missing"
        )
    elif missing and cand.record.sequential and cand.record.sequential.method == "betting":
        problem = "samples are missing from a task that was looked at as they came in"
    elif differing := _first_differing_prompt(base, cand, base_rows, cand_rows):
        problem = f'sample "{differing}" had different prompt ids'
    problems, problem_ids = _problems(base, base_rows, ids)
    return Pairs(task, ids, base_rows, cand_rows, problems, problem_ids, tuple(missing), problem)


def problem_of(scores: ScoreSet, row: int) -> str:
    """Return the problem that a sample belongs to."""
    return (scores.problem_ids[row] if scores.problem_ids else "") or scores.sample_ids[row]


def _problems(
    base: ScoreSet, rows: NDArray[np.intp], ids: tuple[str, ...]
) -> tuple[NDArray[np.intp], tuple[str, ...]]:
    if not base.problem_ids:
        return np.arange(len(ids), dtype=np.intp), ids
    numbers: dict[str, int] = {}
    index = [numbers.setdefault(problem_of(base, int(row)), len(numbers)) for row in rows]
    return np.array(index, dtype=np.intp), tuple(numbers)


def _first_differing_prompt(
    base: ScoreSet, cand: ScoreSet, base_rows: NDArray[np.intp], cand_rows: NDArray[np.intp]
) -> str | None:
    if base.prompt_sha256 == cand.prompt_sha256 and np.array_equal(base_rows, cand_rows):
        return None
    for row_b, row_c in zip(base_rows, cand_rows, strict=True):
        if base.prompt_sha256[row_b] != cand.prompt_sha256[row_c]:
            return str(base.sample_ids[int(row_b)])
    return None


def invalid(name: str, *, required: bool, task: str, problem: str) -> Finding:
    """Return the finding that a task cannot be compared."""
    sentence = f"{task}: not comparable, {problem}"
    return bare(name, required=required, outcome="invalid", sentence=sentence, task=task)


def percent(share: float) -> str:
    """Return '12.3 %'."""
    return f"{100 * share:.1f} %"


def confidence(alpha: float) -> str:
    """Return '95 %', with the decimals that the level needs: 99.95 % is not 100 %, and 95.9045 % is 95.9 %."""
    share, digits = 100 * (1 - alpha), 0
    while digits < 6 and abs(round(share, digits) - share) > 2 * alpha:
        digits += 1
    return f"{share:.{digits}f} %"


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


@dataclass(frozen=True)
class Comparison:
    """One task of a baseline and a candidate, their samples paired, and the level at which to decide."""

    rule: str
    task: str
    base: ScoreSet
    cand: ScoreSet
    pairs: Pairs
    alpha: float
    context: RuleContext

    @property
    def noise(self) -> tuple[ScoreSet, Pairs] | None:
        """The baseline's repetition of this task, paired with the baseline; None when there is none to use."""
        if self.context.again is None or self.task not in self.context.again.scores:
            return None
        again = self.context.again.scores[self.task]
        if (
            again.record.status != "complete"
            or again.record.fingerprint != self.base.record.fingerprint
        ):
            return None
        if again.samples != self.base.samples:
            # A mean over several runs against one run would be neither's noise.
            return None
        found = pair_sets(self.task, self.base, again, 0.0)
        return None if found.problem else (again, found)


CheckTask = Callable[[Comparison], Finding]


def check_each_task(
    rule: PairedRule,
    check: CheckTask,
    name: str,
    baseline: VariantEvidence,
    candidate: VariantEvidence,
    context: RuleContext,
) -> list[Finding]:
    """Pair the samples of every task a rule concerns and check those that may be compared."""
    chosen = select_tasks(
        name, required=rule.required, task=rule.task, kind=rule.kind,
        baseline=baseline, candidate=candidate,
    )  # fmt: skip
    if chosen.finding:
        return [chosen.finding]
    wanted = rule.alpha if rule.alpha is not None else context.alpha
    findings = []
    for task in chosen.tasks:
        pairs = pair(task, baseline, candidate, context.max_missing)
        if pairs.problem:
            findings.append(invalid(name, required=rule.required, task=task, problem=pairs.problem))
            continue
        base, cand = baseline.scores[task], candidate.scores[task]
        alpha = level(cand.record, wanted)
        findings.append(check(Comparison(name, task, base, cand, pairs, alpha, context)))
    return findings

"""Pooled evidence: the mean loss over several tasks, stratified by task, against one margin."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import ndtr

from quanteval.evidence import Forecast, RuleContext, SuiteFacts, VariantEvidence
from quanteval.records import Finding, Outcome
from quanteval.rules._common import (
    FloatArray,
    Pairs,
    bare,
    beside,
    check_alpha,
    invalid,
    pair,
    percent,
    select_tasks,
)
from quanteval.rules.margin import POINTS, MarginField
from quanteval.rules.non_inferiority import (
    judged_text,
    needed_pairs,
    paired_units,
    unusable,
    with_missing,
)
from quanteval.stats import accept_probability, certifiable_margin, pairs_needed
from quanteval.stats.stratified import stratified_loss, stratified_score

POWER = 0.8
Weights = Literal["items", "equal"] | dict[str, float]


@dataclass(frozen=True)
class Pooled:
    """Accept when the weighted mean of the tasks' losses is shown to be below the margin.

    One suite is often too small for a tight margin; together several decide. `tasks` names them, or
    `kind` takes all of a kind. `weights` are fixed beforehand: 'items' (every problem counts alike),
    'equal' (every task does) or one number a task. A loss in one task can hide behind the others, so
    keep a looser rule for each task beside this one. Takes whole tasks: none of them stops early.
    """

    margin: MarginField
    tasks: tuple[str, ...] = ()
    kind: str | None = None
    weights: Weights = "items"
    required: bool = True
    alpha: float | None = None

    is_quality = True

    def __post_init__(self) -> None:
        if bool(self.tasks) == (self.kind is not None):
            raise ValueError(
                f'tasks "{list(self.tasks)}" and kind "{self.kind}": give exactly one of them'
            )
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f'tasks "{list(self.tasks)}" names one twice')
        check_alpha(self.alpha)
        if self.margin.is_relative:
            raise ValueError(
                f'margin "{self.margin.text}" is relative; a pooled margin is absolute'
            )
        if isinstance(self.weights, dict):
            bad = [name for name, w in self.weights.items() if not 0 < w < math.inf]
            if bad:
                raise ValueError(f'weight "{self.weights[bad[0]]}" of {bad[0]} must be positive')
            if self.tasks and set(self.weights) != set(self.tasks):
                raise ValueError(
                    f'weights "{sorted(self.weights)}" and tasks "{sorted(self.tasks)}" must name the same'
                )

    def takes_whole(self, task: str, kind: str) -> bool:
        """Whether this rule needs every sample of a task."""
        return task in self.tasks or kind == self.kind

    def check(
        self,
        name: str,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        context: RuleContext,
    ) -> list[Finding]:
        """Return one finding over all tasks concerned."""
        chosen: list[str] = []
        for task in self.tasks or (None,):
            found = select_tasks(
                name, required=self.required, task=task, kind=None if task else self.kind,
                baseline=baseline, candidate=candidate,
            )  # fmt: skip
            if found.finding:
                return [found.finding]
            chosen += found.tasks
        if isinstance(self.weights, dict) and set(self.weights) != set(chosen):
            problem = (
                f"weights are given for {sorted(self.weights)}, the tasks are {sorted(chosen)}"
            )
            return [bare(name, required=self.required, outcome="invalid", sentence=problem)]
        paired: list[Pairs] = []
        for task in chosen:
            pairs = pair(task, baseline, candidate, context.max_missing)
            problem = pairs.problem or unusable(baseline.scores[task]) or unusable(
                candidate.scores[task]
            )  # fmt: skip
            if not problem and candidate.scores[task].record.sequential is not None:
                problem = "it may have stopped early, and a pooled rule takes whole tasks"
            if problem:
                return [invalid(name, required=self.required, task=task, problem=problem)]
            paired.append(pairs)
        alpha = self.alpha if self.alpha is not None else context.alpha
        return [self._decide(name, paired, baseline, candidate, alpha)]

    def forecast(
        self, name: str, suites: Mapping[str, SuiteFacts], context: RuleContext
    ) -> list[Forecast]:
        """Return what the tasks decide together, if a harmless variant flips as the suites say."""
        chosen = [s for s in suites.values() if self.takes_whole(s.task, s.kind)]
        if not chosen or (self.tasks and len(chosen) < len(self.tasks)):
            return []
        if isinstance(self.weights, dict) and set(self.weights) != {s.task for s in chosen}:
            return []
        alpha = self.alpha if self.alpha is not None else context.alpha
        shares = self._shares([s.task for s in chosen], [s.n for s in chosen])
        flips = math.fsum(w * s.flip_rate for w, s in zip(shares, chosen, strict=True))
        variance = math.fsum(w * w * s.flip_rate / s.n for w, s in zip(shares, chosen, strict=True))
        items = sum(s.n for s in chosen)
        # As many pairs of one suite would have the same variance.
        n = min(items, max(1, round(flips / variance))) if variance else items
        limit = self.margin.value
        harmless = accept_probability(n, flips, 0.0, limit, alpha=alpha)
        alone = [accept_probability(s.n, s.flip_rate, 0.0, limit, alpha=alpha) for s in chosen]
        best = max(zip(alone, chosen, strict=True), key=lambda pair: pair[0])
        warnings = (
            (f"a harmless variant is accepted in {percent(harmless)} of runs only",)
            if harmless < POWER
            else ()
        )
        return [
            Forecast(
                rule=name,
                task=" + ".join(s.task for s in chosen),
                n=items,
                margin=self.margin.text,
                assumed=f"{percent(flips)} flips, weights by {self._weights_text()}, worth {n} pairs",
                certifiable=certifiable_margin(n, flips, alpha, POWER),
                n_needed=math.ceil(pairs_needed(limit, flips, 0.0, alpha, POWER) * items / n),
                accept_harmless=harmless,
                remarks=(
                    f"the best of these tasks alone ({best[1].task}) accepts in {percent(best[0])} of runs",
                ),
                warnings=warnings,
            )
        ]

    def _shares(self, tasks: Sequence[str], sizes: Sequence[int]) -> list[float]:
        if isinstance(self.weights, dict):
            raw = [self.weights[task] for task in tasks]
        else:
            raw = [float(n) for n in sizes] if self.weights == "items" else [1.0] * len(tasks)
        return [weight / math.fsum(raw) for weight in raw]

    def _weights_text(self) -> str:
        if isinstance(self.weights, dict):
            return ", ".join(f"{task} {weight:g}" for task, weight in self.weights.items())
        return "problem" if self.weights == "items" else "task"

    def _decide(
        self,
        name: str,
        paired: Sequence[Pairs],
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        alpha: float,
    ) -> Finding:
        units = [paired_units(baseline.scores[p.task], candidate.scores[p.task], p) for p in paired]
        shares = self._shares([p.task for p in paired], [len(x) for x, _ in units])
        test = stratified_loss(*_sides(units), shares, self.margin.value, alpha, alpha)
        worst = test
        missing = sum(p.missing for p in paired)
        if missing:
            filled = [with_missing(p, x, y) for p, (x, y) in zip(paired, units, strict=True)]
            worst = stratified_loss(*_sides(filled), shares, self.margin.value, alpha, alpha)
        outcome: Outcome = "inconclusive"
        if worst.accepted and not test.rejected:
            outcome = "accept"
        elif test.rejected and not worst.accepted:
            outcome = "reject"
        before, after = (
            math.fsum(w * float(side[i].mean()) for w, side in zip(shares, units, strict=True))
            for i in (0, 1)
        )
        worse = sum(int((x > y).sum()) for x, y in units)
        better = sum(int((x < y).sum()) for x, y in units)
        variance = math.fsum(
            w * w * float(np.var(x - y)) / len(x) for w, (x, y) in zip(shares, units, strict=True)
        )
        needed = needed_pairs(variance * test.n, test.loss, test.margin, alpha)
        needed = None if needed is None else max(needed, test.n + 1)
        losses = ", ".join(
            f"{p.task} {beside(100 * float((x - y).mean()), 100 * test.margin, 1)}"
            for p, (x, y) in zip(paired, units, strict=True)
        )
        seen = (
            f"{len(paired)} tasks, weights by {self._weights_text()}: {percent(before)} -> {percent(after)} "
            f"(n={test.n}, {worse} worse, {better} better; losses in {POINTS}: {losses})"
        )
        p_regression = _regression_p([x - y for x, y in units], shares)
        return Finding(
            rule=name,
            required=self.required,
            outcome=outcome,
            sentence=judged_text(seen, test, worst.upper, outcome, needed, margin=self.margin),
            metric="weighted mean score",
            unit="share",
            method="score test, stratified by task",
            n=test.n,
            baseline_value=before,
            candidate_value=after,
            estimate=test.loss,
            lower=test.lower,
            upper=worst.upper,
            confidence=1 - alpha,
            margin=test.margin,
            p_value=worst.p_accept,
            p_regression=p_regression,
            broken=worse,
            fixed=better,
            n_needed=needed if outcome == "inconclusive" else None,
            regression_detected=p_regression <= alpha,
            notes=[f"{missing} samples were not scored on both sides; for acceptance they count as lost"]
            if missing
            else [],
        )  # fmt: skip


def _sides(
    units: Sequence[tuple[FloatArray, FloatArray]],
) -> tuple[list[FloatArray], list[FloatArray]]:
    return [x for x, _ in units], [y for _, y in units]


def _regression_p(differences: Sequence[FloatArray], shares: Sequence[float]) -> float:
    """Return the one-sided p-value of "there is no loss"; 1 when nothing differs at all."""
    if not any(d.any() for d in differences):
        return 1.0
    return float(ndtr(-stratified_score(differences, shares, 0.0)))

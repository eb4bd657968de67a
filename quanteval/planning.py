"""`quanteval plan`: what a policy can decide on the chosen suites, before anything is run.

Sizes come from the composed configuration. The baseline's scores, the flips to expect and the spread of
perplexities come from a stored run of the same model and suite where there is one, and are assumed
otherwise. No model is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any

import numpy as np

from quanteval.config import compose, make_plan
from quanteval.errors import ConfigError, QuantevalError
from quanteval.evidence import Forecast, Rule, RuleContext, ScoreSet, SuiteFacts
from quanteval.interfaces import Sample, Task
from quanteval.judge import find_run, runs_under
from quanteval.policy import Policy
from quanteval.records import TaskRecord
from quanteval.report.planning import Planning, Together, planning_json, planning_text
from quanteval.rules._common import Pairs, first_unscored, pair_sets
from quanteval.rules.non_inferiority import paired_units, unusable
from quanteval.runplan import RunPlan
from quanteval.stats import log_perplexity_ratio, mcnemar_exact
from quanteval.store import RunDirectory, read_scores
from quanteval.store.files import read_record
from quanteval.targets import near

ASSUMED_FLIPS = 0.05
HARM_ALPHA = 0.05
"""Level at which a candidate of a stored run counts as worse, so that its flips are not those of a harmless one."""

DISTANCES = ("perplexity", "divergence")
"""Kinds whose scores are no shares: nothing of them flips."""


@dataclass(frozen=True)
class Suite:
    """A task that is to run: its kind and its samples' ids; `same` says whether stored scores are of its samples."""

    kind: str
    sample_ids: tuple[str, ...]
    same: Callable[[ScoreSet], bool] = lambda _: True


@dataclass(frozen=True)
class Seen:
    """A task's scores in a stored run."""

    run: str
    baseline: ScoreSet
    candidates: tuple[ScoreSet, ...] = ()
    again: ScoreSet | None = None


# --------------------------------------------------------------------------- the verb


def plan_text(
    overrides: Sequence[str],
    run: str | None = None,
    flips: float | None = None,
    *,
    as_json: bool = False,
) -> str:
    """Return what `quanteval plan` prints, as text or as JSON. ConfigError for wrong input."""
    made = plan(overrides, run, flips)
    return planning_json(made) if as_json else planning_text(made)


def plan(overrides: Sequence[str], run: str | None = None, flips: float | None = None) -> Planning:
    """Compose a configuration as `run` does and say what its policy can decide.

    `run` names the stored run to learn from (default: for each task the newest of the same model, engine and
    suite under the output root); `flips` is the share of problems that a harmless variant changes, and
    overrides what a run tells. Raises ConfigError for either when it is wrong.
    """
    if flips is not None and not 0 <= flips <= 1:
        raise ConfigError(f'flips "{flips:g}" must be a share from 0 to 1: 0.05 is five per cent')
    config = make_plan(compose(overrides))
    suites = suites_of(config)
    seen, notes = stored_scores(config, suites, run)
    facts = suite_facts(suites, seen, flips)
    return planning_of(config.policy, facts, config.engine.object.device, notes)


def planning_of(
    policy: Policy, facts: Mapping[str, SuiteFacts], device: str, notes: Sequence[str] = ()
) -> Planning:
    """Return all that can be said of a policy on suites of which these facts are known."""
    rules = policy.rules_on(device)
    found = forecasts(policy, facts, device)
    kinds = {name: suite.kind for name, suite in facts.items()}
    idle = [idle_text(name, rule, kinds) for name, rule in rules.items()]
    warnings = [text for text in idle if text]
    told = {forecast.rule for forecast in found}
    active = [name for name, text in zip(rules, idle, strict=True) if not text]
    plannable = [name for name in active if hasattr(rules[name], "forecast")]
    warnings += [
        f"{name}: nothing can be said of it on these tasks"
        for name in plannable
        if name not in told
    ]
    if not any(
        rule.is_quality and rule.required and not text
        for rule, text in zip(rules.values(), idle, strict=True)
    ):
        warnings.append("can accept nothing: no required quality rule has a task here")
    return Planning(
        policy=policy.name,
        alpha=policy.alpha,
        device=device,
        suites=tuple(facts.values()),
        forecasts=tuple(found),
        required=tuple(rules[forecast.rule].required for forecast in found),
        together=together(policy, found, device),
        unplanned=tuple(name for name in active if name not in plannable),
        warnings=tuple(warnings),
        notes=(*notes, *_policy_notes(policy)),
    )


def _policy_notes(policy: Policy) -> list[str]:
    notes = []
    if policy.sequential is not None and policy.sequential.method == "betting":
        notes.append(
            "tasks may stop at any look (betting), which takes more samples than these figures, "
            "meant for one look at the whole suite, say"
        )
    elif policy.sequential is not None:
        notes.append(
            f"tasks may stop early ({policy.sequential.looks} looks); these figures are for one look at the "
            "whole suite, several accept a little less often"
        )
    return notes + [f"{waiver.rule} is {waiver.text}" for waiver in policy.waivers]


# --------------------------------------------------------------------------- rules


def forecasts(policy: Policy, facts: Mapping[str, SuiteFacts], device: str) -> list[Forecast]:
    """Return the forecasts of every rule that makes any, in the policy's order."""
    context = RuleContext(policy.alpha, policy.max_missing)
    return [
        forecast
        for name, rule in policy.rules_on(device).items()
        if hasattr(rule, "forecast")
        for forecast in rule.forecast(name, facts, context)
    ]


def together(policy: Policy, found: Sequence[Forecast], device: str) -> Together | None:
    """Return how likely a harmless variant passes all required rules that forecast; None without any."""
    rules = policy.rules_on(device)
    required = [f for f in found if rules[f.rule].required and not _waived(policy, f)]
    known = [f for f in required if f.accept_harmless is not None]
    if not known:
        return None
    tasks = [task for f in known for task in f.task.split(" + ")]
    chances = [float(f.accept_harmless or 0) for f in known]
    return Together(
        accept_harmless=math.prod(chances),
        at_most=min(chances),
        shared=tuple(sorted({task for task in tasks if tasks.count(task) > 1})),
        counted=tuple(_label(f) for f in known),
        unknown=tuple(_label(f) for f in required if f.accept_harmless is None),
    )


def _waived(policy: Policy, forecast: Forecast) -> bool:
    """Whether a waiver covers a rule for every candidate."""
    return any(
        waiver.rule == forecast.rule
        and waiver.candidate is None
        and waiver.task in (None, forecast.task)
        for waiver in policy.waivers
    )


def _label(forecast: Forecast) -> str:
    return f"{forecast.rule} on {forecast.task}"


def unknown_tasks(rule: Rule, kinds: Mapping[str, str]) -> list[str]:
    """Return the tasks that a rule names and that are not among the chosen ones."""
    named = [getattr(rule, "task", None), *(getattr(rule, "tasks", None) or ())]
    return [task for task in named if isinstance(task, str) and task not in kinds]


def idle_text(name: str, rule: Rule, kinds: Mapping[str, str]) -> str:
    """Say why a rule has nothing to check on tasks of these kinds, '' when it has something."""
    if missing := unknown_tasks(rule, kinds):
        return f'{name}: no task "{missing[0]}" is chosen; {near(missing[0], kinds)}'
    kind = getattr(rule, "kind", None)
    if isinstance(kind, str) and kind not in kinds.values():
        return f'{name}: has nothing to check, no task of kind "{kind}" is chosen'
    return ""


def blocking(forecast: Forecast) -> list[str]:
    """Return the warnings that say a rule cannot accept at this size."""
    starts = ("can never accept", "can never decide", "cannot accept")
    return [text for text in forecast.warnings if text.startswith(starts)]


# --------------------------------------------------------------------------- facts


def suites_of(config: RunPlan) -> dict[str, Suite]:
    """Load the samples of every chosen task. ConfigError when one has none."""
    return {name: _suite(made.object, made.object.samples()) for name, made in config.tasks.items()}


def _suite(task: Task, samples: Sequence[Sample]) -> Suite:
    ids = tuple(sample.sample_id for sample in samples)
    version = str(getattr(task, "version", ""))

    def same(scores: ScoreSet) -> bool:
        if scores.record.kind != task.kind or scores.record.suite_version != version:
            return False
        stored, chosen = set(scores.sample_ids), set(ids)
        if not stored or not (stored <= chosen or chosen <= stored):
            return False
        # A larger or smaller limit takes more or fewer of the same samples; an edit makes them other ones.
        if not stored <= chosen:
            return True
        now = task.fingerprint([sample for sample in samples if sample.sample_id in stored])
        return bool(now.get("data") == scores.record.inputs.get("data"))

    return Suite(task.kind, ids, same)


def suite_facts(
    suites: Mapping[str, Suite], seen: Mapping[str, Seen], flips: float | None = None
) -> dict[str, SuiteFacts]:
    """Return what is known of each task: from stored scores, or assumed. `flips` overrides the flips seen."""
    facts = {}
    for name, suite in suites.items():
        fact = SuiteFacts(name, suite.kind, len(suite.sample_ids), flip_rate=ASSUMED_FLIPS)
        if name in seen:
            fact = _learn(fact, seen[name])
        if flips is not None and suite.kind not in DISTANCES:
            fact = replace(fact, flip_rate=flips, source="given")
        facts[name] = fact
    return facts


def _learn(fact: SuiteFacts, seen: Seen) -> SuiteFacts:
    """Add what a stored run tells; what it cannot tell stays assumed."""
    if fact.kind == "perplexity":
        return _learn_spread(fact, seen)
    if fact.kind in DISTANCES or unusable(seen.baseline):
        return fact
    problems = len(set(seen.baseline.problem_ids)) or len(seen.baseline.sample_ids)
    share = problems / len(seen.baseline.sample_ids)
    pairs = pair_sets(fact.task, seen.baseline, seen.baseline, 1.0)
    score = float(pairs.means(seen.baseline.value).mean())
    fact = replace(fact, score=score, n=max(1, round(share * fact.n)))
    flips, source = _flips(seen)
    return fact if flips is None else replace(fact, flip_rate=flips, source=source)


@dataclass(frozen=True)
class _Change:
    """How a variant's scores of a task differ from the baseline's, over n problems."""

    n: int
    flip_rate: float
    """Mean square of the differences: for scores of 0 and 1 the share that changed, for others worth as many."""
    is_worse: bool


def _flips(seen: Seen) -> tuple[float | None, str]:
    """Return the flips of a harmless variant, and where they come from; None where nothing tells.

    A repeated baseline shows the noise of serving alone, and quantization changes more answers than that
    without making them worse: the candidates not shown to be worse tell how many, and the repetition is
    the least it can be.
    """
    changes = [change for scores in seen.candidates if (change := _change(seen.baseline, scores))]
    harmless = [change for change in changes if not change.is_worse]
    noise = _change(seen.baseline, seen.again) if seen.again is not None else None
    middle = median_low([_flip_rate(change) for change in harmless]) if harmless else 0.0
    if noise is not None and _flip_rate(noise) > middle:
        return _flip_rate(noise), f"repeated baseline of {seen.run}"
    if not harmless:
        return None, ""
    who = "candidate" if len(harmless) == 1 else f"median of {len(harmless)} candidates"
    left = len(changes) - len(harmless)
    without = f" without {left} that lost" if left else ""
    return middle, f"{who}{without} in {seen.run}"


def _flip_rate(change: _Change) -> float:
    """Return the flip rate, half a flip where there was none: none among n does not show that there never is one."""
    return change.flip_rate or 0.5 / change.n


def _change(baseline: ScoreSet, other: ScoreSet) -> _Change | None:
    pairs = _paired(baseline, other)
    if pairs is None or unusable(other):
        return None
    x, y = paired_units(baseline, other, pairs)
    p = mcnemar_exact(int((x > y).sum()), int((x < y).sum()), "greater")
    return _Change(len(x), float(np.mean((x - y) ** 2)), p <= HARM_ALPHA)


def _paired(baseline: ScoreSet, other: ScoreSet) -> Pairs | None:
    if other.record.status != "complete":
        return None
    pairs = pair_sets(baseline.record.task, baseline, other, 0.0)
    return None if pairs.problem else pairs


def _learn_spread(fact: SuiteFacts, seen: Seen) -> SuiteFacts:
    """Take the spread of ln ratio from the candidates (the median), or from the repeated baseline alone."""
    spreads = [s for scores in seen.candidates if (s := _spread(seen.baseline, scores)) is not None]
    source = "candidate" if len(spreads) == 1 else f"median of {len(spreads)} candidates"
    source = f"{source} in {seen.run}"
    if not spreads:
        noise = None if seen.again is None else _spread(seen.baseline, seen.again)
        if noise is None:
            return fact
        spreads, source = [noise], f"repeated baseline of {seen.run}"
    return replace(fact, spread=median_low(spreads) / math.sqrt(fact.n), source=source)


def _spread(baseline: ScoreSet, other: ScoreSet) -> float | None:
    """Return the standard error of ln ratio times the root of the documents, None where there is none."""
    pairs = _paired(baseline, other)
    if pairs is None or len(pairs.sample_ids) < 2:
        return None
    if first_unscored(baseline) or first_unscored(other):
        return None
    x, y = baseline.value[pairs.baseline_rows], other.value[pairs.candidate_rows]
    found = log_perplexity_ratio(x, y, baseline.weight[pairs.baseline_rows])
    return found.se * math.sqrt(len(pairs.sample_ids))


# --------------------------------------------------------------------------- stored runs


@dataclass
class _Search:
    """Looks for each task's scores in stored runs, and notes what could not be read."""

    suites: Mapping[str, Suite]
    seen: dict[str, Seen] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)
    """Tasks whose scores could not be read somewhere."""

    @property
    def missing(self) -> list[str]:
        """Tasks of which a run could tell something, and none has yet."""
        return [
            name
            for name, suite in self.suites.items()
            if name not in self.seen and suite.kind != "divergence"
        ]

    def look_into(self, run: RunDirectory, alike: Callable[[Mapping[str, Any]], bool]) -> None:
        """Take the tasks that are still missing; what is torn is left out and said."""
        try:
            manifest = run.load_manifest()
        except (QuantevalError, OSError) as error:
            self.notes.append(f'run "{run.path.name}" was ignored: {error}')
            self.ignored.update(self.suites)
            return
        if not alike(manifest.config):
            return
        for task in [task for task in self.missing if task in manifest.tasks]:
            try:
                found = self._task(run, task, manifest.baseline, manifest.variants, manifest.again)
            except (QuantevalError, OSError, ValueError) as error:
                self.notes.append(f'{task} of run "{run.path.name}" was ignored: {error}')
                self.ignored.add(task)
                continue
            if found is not None:
                self.seen[task] = found

    def _task(
        self, run: RunDirectory, task: str, baseline: str, variants: Sequence[str], again: str
    ) -> Seen | None:
        base = _complete(run, baseline, task)
        if base is None or not self.suites[task].same(base):
            return None
        others = [name for name in variants if name != baseline]
        candidates = [s for name in others if (s := _complete(run, name, task)) is not None]
        repeated = _complete(run, again, task) if again else None
        return Seen(run.path.name, base, tuple(candidates), repeated)


def _complete(run: RunDirectory, variant: str, task: str) -> ScoreSet | None:
    """Return a variant's scores of a task when all of them are there; RecordError when they are torn."""
    folder = run.variant(variant)
    path = folder.task_record(task)
    if not path.exists():
        return None
    record = read_record(path, TaskRecord)
    return read_scores(record, folder.scores(task)) if record.status == "complete" else None


def stored_scores(
    config: RunPlan, suites: Mapping[str, Suite], run: str | None
) -> tuple[dict[str, Seen], list[str]]:
    """Return each task's stored scores, and notes on what was left out.

    Only a run of the same model and engine is taken unasked. ConfigError when the one named is not there.
    """
    search = _Search(suites)
    if run is not None:
        named = find_run(run, config.output_root)
        search.look_into(named, lambda _: True)
        search.notes += [
            f'run "{named.path.name}" has no complete scores of {task} with these samples'
            for task in search.missing
            if task not in search.ignored
        ]
        return search.seen, search.notes
    for stored in reversed(list(runs_under(config.output_root))):
        if not search.missing:
            break
        search.look_into(stored, lambda other: _alike(config.config, other))
    return search.seen, search.notes


def _alike(mine: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two configurations are of one model, served by one kind of engine."""
    keys = ("model", "model_options")
    engines = [dict(config.get("engine") or {}).get("_target_") for config in (mine, other)]
    return engines[0] == engines[1] and all(mine.get(key) == other.get(key) for key in keys)

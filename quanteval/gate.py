"""The gate: a policy's rules on one candidate and its baseline give one verdict. Pure functions of records.

Absence of evidence never passes: a task that was to run and is missing or incomplete, an invalid required
finding, or a policy under which nothing about quality was accepted, can each only lead away from accept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quanteval import __version__
from quanteval.comparability import incomparable
from quanteval.environment import now
from quanteval.evidence import Rule, RuleContext, VariantEvidence
from quanteval.looks import stopped_early
from quanteval.policy import COMPLETENESS, Policy
from quanteval.records import (
    VERDICT_EXIT_CODES,
    Finding,
    SequentialLook,
    Verdict,
    VerdictOutcome,
)
from quanteval.stats import holm

SEVERITY: tuple[VerdictOutcome, ...] = (
    "error",
    "not_comparable",
    "reject",
    "inconclusive",
    "accept",
)


def decide(
    policy: Policy,
    baseline: VariantEvidence,
    candidate: VariantEvidence,
    *,
    tasks: Sequence[str] = (),
    again: VariantEvidence | None = None,
) -> Verdict:
    """Return the verdict on one candidate; `tasks` are those that were to run, `again` the repeated baseline."""
    failed = _not_measured(baseline, candidate)
    if failed:
        return _verdict(policy, baseline, candidate, "error", failed, [])
    differing = incomparable(baseline, candidate)
    if differing:
        reason = f"{candidate.name} and {baseline.name} were not measured alike: {differing}"
        return _verdict(policy, baseline, candidate, "not_comparable", reason, [])
    findings = [_completeness(baseline, candidate, tasks, policy)]
    accepted: list[Finding] = []
    silent: list[Finding] = []
    context = RuleContext(policy.alpha, policy.max_missing, again)
    for name, rule in policy.rules_on(_device(candidate)).items():
        found = rule.check(name, baseline, candidate, context) or [_silent(name, rule)]
        found = [_waive(finding, policy, candidate.name) for finding in found]
        findings += found
        if rule.is_quality:
            accepted += [f for f in found if f.required and f.outcome == "accept"]
            silent += [f for f in found if f.required and f.outcome == "skipped"]
    outcome, reason = _combine(findings, accepted, silent)
    return _verdict(policy, baseline, candidate, outcome, reason, findings)


def may_stop(policy: Policy, device: str, task: str, kind: str) -> bool:
    """Return whether a task may end before all its samples are evaluated.

    It needs a sequential policy and a required quality rule that decides on it, and no rule that takes
    this task together with others.
    """
    if policy.sequential is None:
        return False
    rules = policy.rules_on(device).values()
    if any(takes(task, kind) for rule in rules if (takes := getattr(rule, "takes_whole", None))):
        return False
    deciding = [
        rule
        for rule in rules
        if rule.is_quality
        and rule.required
        and task == (getattr(rule, "task", None) or task)
        and kind == (getattr(rule, "kind", None) or kind)
    ]
    if policy.sequential.method == "betting":
        # Planned looks can lower the level of any rule; at unplanned ones only the betting test holds.
        return bool(deciding) and all(
            getattr(rule, "holds_at_any_look", False) for rule in deciding
        )
    return bool(deciding)


def is_decided(
    policy: Policy,
    baseline: VariantEvidence,
    candidate: VariantEvidence,
    task: str,
) -> bool:
    """Return whether the samples so far decide a task: a required rule rejects, or all quality rules accept."""
    if task not in baseline.scores:
        return False
    base = replace(baseline, scores={task: baseline.scores[task]})
    context = RuleContext(policy.alpha)
    accepted = []
    for name, rule in policy.rules_on(_device(candidate)).items():
        concerns = getattr(rule, "kind", None) or getattr(rule, "task", None)
        if not (rule.required and rule.is_quality and concerns):
            continue
        for found in rule.check(name, base, candidate, context):
            finding = _waive(found, policy, candidate.name)
            if finding.task != task or finding.waived:
                continue
            if finding.outcome == "reject":
                return True
            accepted.append(finding.outcome == "accept")
    return bool(accepted) and all(accepted)


def _silent(name: str, rule: Rule) -> Finding:
    sentence = "the rule returned no finding"
    return Finding(rule=name, required=rule.required, outcome="invalid", sentence=sentence)


def _device(candidate: VariantEvidence) -> str:
    return str(candidate.result.comparable.get("device", ""))


def _waive(finding: Finding, policy: Policy, candidate: str) -> Finding:
    """Mark a finding that a waiver covers: rejections and undecided ones only, never what is invalid."""
    if finding.outcome not in ("reject", "inconclusive"):
        return finding
    for waiver in policy.waivers:
        if (
            waiver.rule == finding.rule
            and waiver.task in (None, finding.task)
            and waiver.candidate in (None, candidate)
        ):
            return finding.model_copy(update={"waived": waiver.text})
    return finding


def _not_measured(baseline: VariantEvidence, candidate: VariantEvidence) -> str:
    for role, evidence in (("baseline", baseline), ("candidate", candidate)):
        status = evidence.result.status
        if status != "ok":
            return f"the {role} {evidence.name} is {status}: {evidence.result.reason or 'it did not finish'}"
    return ""


def _completeness(
    baseline: VariantEvidence,
    candidate: VariantEvidence,
    tasks: Sequence[str],
    policy: Policy,
) -> Finding:
    """Return whether every task that was to run is there, whole (up to a share), on both sides."""
    problems, remarks = [], []
    names = sorted({*tasks, *baseline.scores, *candidate.scores})
    for task in names:
        for evidence in (baseline, candidate):
            scores = evidence.scores.get(task)
            if scores is None:
                problems.append(f"{evidence.name} has no scores for {task}")
                continue
            expected, seen = scores.record.samples_expected, len(scores.sample_ids)
            allowed = policy.max_missing * expected
            look = scores.record.sequential
            if look is not None and not _planned(look, expected, policy):
                problems.append(f"{evidence.name} stopped {task} by other looks than the policy's")
            if expected - seen > allowed or seen > expected:
                problems.append(f"{evidence.name} has {seen} of {expected} samples of {task}")
            elif scores.record.status != "complete" and not policy.max_missing:
                problems.append(f"{evidence.name} did not finish {task}")
            elif seen < expected:
                remarks.append(f"{evidence.name} lacks {expected - seen} of {expected} of {task}")
            if look is not None and stopped_early(scores.record):
                remarks.append(
                    f"{task} was decided after {expected} of {look.samples_planned} samples"
                )
    if not names:
        problems.append("no task was run")
    if baseline.artifact is not None and baseline.artifact.precision.quantized:
        remarks.append(f"the baseline {baseline.name} is itself quantized")
    return Finding(
        rule=COMPLETENESS,
        required=True,
        outcome="invalid" if problems else "accept",
        sentence="; ".join(problems)
        or "; ".join([f"complete on both sides: {', '.join(names)}", *remarks]),
    )


def _planned(look: SequentialLook, samples: int, policy: Policy) -> bool:
    """Whether a task was looked at as the policy says: another seed would choose other samples."""
    plan = policy.sequential
    if plan is None or plan.at(look.samples_planned, look.look) != look:
        return False
    sizes = plan.sizes(look.samples_planned)
    return 1 <= look.look <= len(sizes) and sizes[look.look - 1] == samples


def _combine(
    findings: Sequence[Finding], accepted: Sequence[Finding], silent: Sequence[Finding]
) -> tuple[VerdictOutcome, str]:
    """Combine required findings: invalid, then reject, then inconclusive, then accept.

    `accepted` are the required findings that are evidence of quality; without one nothing is accepted.
    `silent` are those of quality rules that found no task: what they ask for was not shown.
    """
    required = [finding for finding in findings if finding.required and not finding.waived]
    order: tuple[tuple[str, VerdictOutcome], ...] = (
        ("invalid", "error"),
        ("reject", "reject"),
        ("inconclusive", "inconclusive"),
    )
    for outcome, verdict in order:
        deciding = [finding for finding in required if finding.outcome == outcome]
        if deciding:
            more = f" (and {len(deciding) - 1} more)" if len(deciding) > 1 else ""
            return verdict, f"{deciding[0].rule}: {deciding[0].sentence}{more}"
    if not accepted:
        return "error", "no required quality rule found anything to accept"
    if silent:
        asked = "; ".join(f"{finding.rule}: {finding.sentence}" for finding in silent)
        return "inconclusive", (
            f"{asked}; a required rule about quality that had nothing to look at shows nothing: run such a task, "
            "or make the rule advisory"
        )
    tightest = min(accepted, key=_room)
    count = f"{len(accepted)} quality finding{'s' if len(accepted) > 1 else ''} accepted"
    idle = [finding.rule for finding in required if finding.outcome == "skipped"]
    more = f"; required rules with nothing to check: {', '.join(idle)}" if idle else ""
    waived = [f"{f.rule} ({f.waived})" for f in findings if f.required and f.waived]
    more += f"; not counted: {'; '.join(waived)}" if waived else ""
    return "accept", f"{count}; closest: {tightest.sentence}{more}"


def degraded_tasks(findings: Sequence[Finding], alpha: float) -> list[str]:
    """Return the tasks shown to have lost anything at all: Holm over the tasks, each by its smallest p-value.

    Naming several tasks is "at least one of", so it is corrected; that all must pass is not.
    """
    smallest: dict[str, float] = {}
    for finding in findings:
        if finding.p_regression is not None and finding.task:
            p = min(finding.p_regression, smallest.get(finding.task, 1.0))
            smallest[finding.task] = min(1.0, max(0.0, p))
    if not smallest:
        return []
    adjusted = holm(list(smallest.values()))
    return [task for task, p in zip(smallest, adjusted, strict=True) if p <= alpha]


def _room(finding: Finding) -> float:
    """Return which share of the margin the upper bound leaves; a ratio's margin is counted from 1."""
    if finding.margin is None or finding.upper is None:
        return float("inf")
    none = 1.0 if finding.unit == "ratio" else 0.0
    return (finding.margin - finding.upper) / abs(finding.margin - none)


def _verdict(
    policy: Policy,
    baseline: VariantEvidence,
    candidate: VariantEvidence,
    outcome: VerdictOutcome,
    reason: str,
    findings: list[Finding],
) -> Verdict:
    return Verdict(
        candidate=candidate.name,
        baseline=baseline.name,
        outcome=outcome,
        reason=reason,
        findings=findings,
        degraded=degraded_tasks(findings, policy.alpha),
        policy_name=policy.name,
        policy_sha256=policy.sha256,
        policy=policy.node,
        quanteval_version=__version__,
        created_at=now(),
    )


def worst(verdicts: Sequence[Verdict]) -> VerdictOutcome:
    """Return the worst outcome; 'error' when there is no verdict at all."""
    outcomes = {verdict.outcome for verdict in verdicts}
    return next((outcome for outcome in SEVERITY if outcome in outcomes), "error")


def exit_code(outcome: VerdictOutcome) -> int:
    """Return the exit code of an outcome."""
    return VERDICT_EXIT_CODES[outcome]

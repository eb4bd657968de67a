"""The gate: a policy's rules on one candidate and its baseline give one verdict. Pure functions of records.

Absence of evidence never passes: a task that was to run and is missing or incomplete, an invalid required
finding, or a policy under which nothing about quality was accepted, can each only lead away from accept.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quanteval import __version__
from quanteval.environment import now
from quanteval.errors import ConfigError
from quanteval.interfaces import Rule, VariantEvidence
from quanteval.records import VERDICT_EXIT_CODES, Finding, Verdict, VerdictOutcome
from quanteval.store import canonical_json, fingerprint
from quanteval.targets import DEFAULT_PREFIXES, build, near

SEVERITY: tuple[VerdictOutcome, ...] = (
    "error",
    "not_comparable",
    "reject",
    "inconclusive",
    "accept",
)
KEYS = ("version", "name", "alpha", "rules", "description")
VERSION = 1
COMPLETENESS = "completeness"
"""The gate's own finding; no rule may take this name."""


@dataclass(frozen=True)
class Policy:
    """Named rules and the level they share; `node` is what they were built from."""

    name: str
    alpha: float
    rules: Mapping[str, Rule]
    node: dict[str, Any]

    @property
    def sha256(self) -> str:
        """Hash of the policy's content."""
        return fingerprint(self.node)


def load_policy(
    source: Path | Mapping[str, Any], *, prefixes: Sequence[str] = DEFAULT_PREFIXES
) -> Policy:
    """Build a policy from a YAML file or a mapping. ConfigError names unknown keys and wrong values."""
    if isinstance(source, Path):
        try:
            node = yaml.load(source.read_text(encoding="utf-8"), Loader=_UniqueKeys)
        except FileNotFoundError:
            raise ConfigError(f'policy "{source}" does not exist') from None
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(
                f'policy "{source}" cannot be read: {str(error).splitlines()[0]}'
            ) from None
        label = source.stem
    else:
        node, label = dict(source), "gate"
    if not isinstance(node, dict):
        raise ConfigError(f'policy "{label}" is not a mapping with rules')
    for key in node:
        if key not in KEYS:
            raise ConfigError(f'policy "{label}": unknown key "{key}"; {near(str(key), KEYS)}')
    if node.get("version", VERSION) != VERSION:
        raise ConfigError(
            f'policy "{label}": version "{node["version"]}" is not known; this is version {VERSION}'
        )
    alpha = node.get("alpha", 0.05)
    if not isinstance(alpha, int | float) or not 0 < alpha < 0.5:
        raise ConfigError(f'policy "{label}": alpha "{alpha}" must be between 0 and 0.5')
    rules = node.get("rules")
    if not isinstance(rules, Mapping) or not rules:
        raise ConfigError(f'policy "{label}" has no rules')
    built = {name: _rule(name, rule, prefixes) for name, rule in rules.items()}
    if not any(rule.is_quality and rule.required for rule in built.values()):
        raise ConfigError(
            f'policy "{label}" has no required quality rule, so it could accept nothing'
        )
    return Policy(str(node.get("name", label)), float(alpha), built, node)


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key given twice: YAML keeps the last, and the first rule would be gone unnoticed."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                line = key_node.start_mark.line + 1
                raise yaml.YAMLError(f'the key "{key}" is given twice (again in line {line})')
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _rule(name: Any, node: Any, prefixes: Sequence[str]) -> Rule:
    """Build one named rule. ConfigError when the name is not free or the object is not a rule."""
    where = f"gate.rules.{name}"
    if not isinstance(name, str) or not name or name == COMPLETENESS:
        raise ConfigError(f'{where}: a rule cannot be named "{name}"; choose another name')
    rule = build(node, where=where, prefixes=prefixes)
    if not all(hasattr(rule, part) for part in ("check", "required", "is_quality")):
        raise ConfigError(f'{where}: "{node["_target_"]}" is not a rule')
    made: Rule = rule
    return made


def decide(
    policy: Policy,
    baseline: VariantEvidence,
    candidate: VariantEvidence,
    *,
    tasks: Sequence[str] = (),
) -> Verdict:
    """Return the verdict on one candidate; `tasks` are those that were to run."""
    failed = _not_measured(baseline, candidate)
    if failed:
        return _verdict(policy, baseline, candidate, "error", failed, [])
    differing = incomparable(baseline, candidate)
    if differing:
        reason = f"{candidate.name} and {baseline.name} were not measured alike: {differing}"
        return _verdict(policy, baseline, candidate, "not_comparable", reason, [])
    findings = [_completeness(baseline, candidate, tasks)]
    accepted: list[Finding] = []
    for name, rule in policy.rules.items():
        found = rule.check(name, baseline, candidate, policy.alpha) or [_silent(name, rule)]
        findings += found
        if rule.is_quality:
            accepted += [f for f in found if f.required and f.outcome == "accept"]
    outcome, reason = _combine(findings, accepted)
    return _verdict(policy, baseline, candidate, outcome, reason, findings)


def _silent(name: str, rule: Rule) -> Finding:
    sentence = "the rule returned no finding"
    return Finding(rule=name, required=rule.required, outcome="invalid", sentence=sentence)


def _not_measured(baseline: VariantEvidence, candidate: VariantEvidence) -> str:
    for role, evidence in (("baseline", baseline), ("candidate", candidate)):
        status = evidence.result.status
        if status != "ok":
            return f"the {role} {evidence.name} is {status}: {evidence.result.reason or 'it did not finish'}"
    return ""


def incomparable(baseline: VariantEvidence, candidate: VariantEvidence) -> str:
    """Name the conditions in which two variants differ beyond their schemes; '' when there are none."""
    for evidence in (baseline, candidate):
        if not evidence.result.comparable:
            return f"the conditions of {evidence.name} were not recorded"
    differing = _differences(baseline.result.comparable, candidate.result.comparable)
    for task in sorted(set(baseline.scores) & set(candidate.scores)):
        first, second = baseline.scores[task].record, candidate.scores[task].record
        if first.kind != second.kind:
            differing.append(f"task {task}: kind ({first.kind} and {second.kind})")
        if first.fingerprint != second.fingerprint:
            names = _differences(first.inputs, second.inputs) or ["fingerprint"]
            differing += [f"task {task}: {name}" for name in names]
    return "; ".join(differing)


def _differences(first: Mapping[str, Any], second: Mapping[str, Any], path: str = "") -> list[str]:
    out: list[str] = []
    for key in sorted({*first, *second}):
        a, b = first.get(key), second.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            out += _differences(a, b, f"{path}{key}.")
        elif canonical_json(a) != canonical_json(b):
            out.append(f"{path}{key} ({_short(a)} and {_short(b)})")
    return out


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else canonical_json(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _completeness(
    baseline: VariantEvidence, candidate: VariantEvidence, tasks: Sequence[str]
) -> Finding:
    """Return whether every task that was to run is there, whole, on both sides."""
    problems = []
    names = sorted({*tasks, *baseline.scores, *candidate.scores})
    for task in names:
        for evidence in (baseline, candidate):
            scores = evidence.scores.get(task)
            if scores is None:
                problems.append(f"{evidence.name} has no scores for {task}")
            elif scores.record.status != "complete":
                problems.append(f"{evidence.name} did not finish {task}")
            elif len(scores.sample_ids) != scores.record.samples_expected:
                expected = scores.record.samples_expected
                problems.append(
                    f"{evidence.name} has {len(scores.sample_ids)} of {expected} samples of {task}"
                )
    if not names:
        problems.append("no task was run")
    return Finding(
        rule=COMPLETENESS,
        required=True,
        outcome="invalid" if problems else "accept",
        sentence="; ".join(problems) or f"complete on both sides: {', '.join(names)}",
    )


def _combine(
    findings: Sequence[Finding], accepted: Sequence[Finding]
) -> tuple[VerdictOutcome, str]:
    """Combine required findings: invalid, then reject, then inconclusive, then accept.

    `accepted` are the required findings that are evidence of quality; without one nothing is accepted.
    """
    required = [finding for finding in findings if finding.required]
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
    tightest = min(accepted, key=_room)
    count = f"{len(accepted)} quality finding{'s' if len(accepted) > 1 else ''} accepted"
    idle = [finding.rule for finding in required if finding.outcome == "skipped"]
    more = f"; required rules with nothing to check: {', '.join(idle)}" if idle else ""
    return "accept", f"{count}; closest: {tightest.sentence}{more}"


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

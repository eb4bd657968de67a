"""The policy of a gate: named rules with their levels, per-device changes, and waivers, read from YAML.

Everything that is wrong with a policy shows when it is read: unknown keys, wrong values, rules that
could accept nothing, waivers that have expired.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from quanteval.errors import ConfigError
from quanteval.evidence import Rule
from quanteval.looks import SequentialPlan
from quanteval.store import fingerprint
from quanteval.targets import DEFAULT_PREFIXES, build, near

KEYS = (
    "version", "name", "description", "alpha", "max_missing", "sequential", "rules", "devices",
    "waivers",
)  # fmt: skip
OPTIONAL = ("max_missing", "sequential", "devices", "waivers", "description")
DEVICES = ("cpu", "cuda")
VERSION = 1
COMPLETENESS = "completeness"
"""The gate's own finding; no rule may take this name."""


@dataclass(frozen=True)
class Waiver:
    """Somebody's word that a rule may fail until a day: the finding is shown, but does not decide.

    `task` and `candidate` narrow it; what is invalid (not measured, not comparable) cannot be waived.
    """

    rule: str
    owner: str
    reason: str
    until: datetime.date
    task: str | None = None
    candidate: str | None = None

    def __post_init__(self) -> None:
        for name in ("rule", "owner", "reason"):
            if not getattr(self, name).strip():
                raise ValueError(f'{name} "" must say something')

    @property
    def text(self) -> str:
        """Who waived what until when, and why."""
        return f"waived by {self.owner} until {self.until}: {self.reason}"


@dataclass(frozen=True)
class Policy:
    """Named rules and the level they share; `node` is what they were built from."""

    name: str
    alpha: float
    rules: Mapping[str, Rule]
    node: dict[str, Any]
    max_missing: float = 0.0
    sequential: SequentialPlan | None = None
    waivers: tuple[Waiver, ...] = ()
    rules_by_device: Mapping[str, Mapping[str, Rule]] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """Hash of the policy's content; what is written out though it is the default changes nothing."""
        return fingerprint({k: v for k, v in self.node.items() if v or k not in OPTIONAL})

    def rules_on(self, device: str) -> Mapping[str, Rule]:
        """Return the rules that hold on a device."""
        return self.rules_by_device.get(device, self.rules)


def load_policy(
    source: Path | Mapping[str, Any],
    *,
    prefixes: Sequence[str] = DEFAULT_PREFIXES,
    today: datetime.date | None = None,
) -> Policy:
    """Build a policy from a YAML file or a mapping. ConfigError names unknown keys and wrong values.

    A waiver whose last day is before `today` (default: the present day, UTC) is an error.
    """
    node, label = _read(source)
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
    missing = node.get("max_missing", 0.0)
    if not isinstance(missing, int | float) or not 0 <= missing < 1:
        raise ConfigError(f'policy "{label}": max_missing "{missing}" must be a share below 1')
    rules = node.get("rules")
    if not isinstance(rules, Mapping) or not rules:
        raise ConfigError(f'policy "{label}" has no rules')
    built = _rules(rules, label, "gate.rules", prefixes)
    by_device = {
        device: _rules(merged, label, f"gate.devices.{device}.rules", prefixes)
        for device, merged in _by_device(node.get("devices") or {}, rules, label).items()
    }
    names = {*built, *(rule for changed in by_device.values() for rule in changed)}
    return Policy(
        name=str(node.get("name", label)),
        alpha=float(alpha),
        rules=built,
        node=node,
        max_missing=float(missing),
        sequential=_sequential(node.get("sequential"), label),
        waivers=_waivers(node.get("waivers") or [], label, names, today),
        rules_by_device=by_device,
    )


def _read(source: Path | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    if not isinstance(source, Path):
        return dict(source), str(source.get("name", "gate"))
    try:
        node = yaml.load(source.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except FileNotFoundError:
        raise ConfigError(f'policy "{source}" does not exist') from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(
            f'policy "{source}" cannot be read: {str(error).splitlines()[0]}'
        ) from None
    if not isinstance(node, dict):
        raise ConfigError(f'policy "{source.stem}" is not a mapping with rules')
    return node, source.stem


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key given twice: YAML keeps the last, and the first rule would be gone unnoticed."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str | int | float | bool | None):
                raise yaml.YAMLError(f'the key "{key}" in line {line} is not a name')
            if key in seen:
                raise yaml.YAMLError(f'the key "{key}" is given twice (again in line {line})')
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


# --------------------------------------------------------------------------- rules


def _rules(
    nodes: Mapping[str, Any], label: str, where: str, prefixes: Sequence[str]
) -> dict[str, Rule]:
    built = {name: _rule(name, rule, f"{where}.{name}", prefixes) for name, rule in nodes.items()}
    if not any(rule.is_quality and rule.required for rule in built.values()):
        raise ConfigError(
            f'policy "{label}" has no required quality rule, so it could accept nothing'
        )
    return built


def _rule(name: Any, node: Any, where: str, prefixes: Sequence[str]) -> Rule:
    """Build one named rule. ConfigError when the name is not free or the object is not a rule."""
    if not isinstance(name, str) or not name or name == COMPLETENESS:
        raise ConfigError(f'{where}: a rule cannot be named "{name}"; choose another name')
    rule = build(node, where=where, prefixes=prefixes)
    if not all(hasattr(rule, part) for part in ("check", "required", "is_quality")):
        raise ConfigError(f'{where}: "{node["_target_"]}" is not a rule')
    made: Rule = rule
    return made


def _by_device(
    devices: Any, rules: Mapping[str, Any], label: str
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the nodes of all rules on each device: what a device states replaces single fields of a rule."""
    if not isinstance(devices, Mapping):
        raise ConfigError(
            f'policy "{label}": devices "{devices}" must be a mapping, e.g. cuda: ...'
        )
    out = {}
    for device, change in devices.items():
        if device not in DEVICES:
            raise ConfigError(
                f'policy "{label}": no device "{device}"; {near(str(device), DEVICES)}'
            )
        changed = change.get("rules") if isinstance(change, Mapping) else None
        if not isinstance(changed, Mapping) or set(change) != {"rules"}:
            raise ConfigError(
                f'policy "{label}": devices.{device} must hold "rules" and nothing else'
            )
        merged = {name: dict(node) for name, node in rules.items()}
        for name, fields in changed.items():
            if not isinstance(fields, Mapping):
                raise ConfigError(
                    f'policy "{label}": devices.{device}.rules.{name} must be a mapping'
                )
            if name not in rules and "_target_" not in fields:
                raise ConfigError(
                    f'policy "{label}": devices.{device}: no rule "{name}"; {near(str(name), rules)}'
                )
            merged[name] = {**merged.get(name, {}), **fields}
        out[str(device)] = merged
    return out


# --------------------------------------------------------------------------- sequential, waivers


def _sequential(node: Any, label: str) -> SequentialPlan | None:
    """Read `sequential`: true for the default plan, a mapping of its fields, or nothing."""
    if node in (None, False) or node == {}:
        return None
    if node is True:
        return SequentialPlan()
    if not isinstance(node, Mapping):
        raise ConfigError(f'policy "{label}": sequential "{node}" must be true, false or a mapping')
    target = {**node, "_target_": "quanteval.looks.SequentialPlan"}
    plan: SequentialPlan = build(target, where="gate.sequential")
    return plan


def _waivers(
    nodes: Any, label: str, rules: set[str], today: datetime.date | None
) -> tuple[Waiver, ...]:
    if not isinstance(nodes, Sequence) or isinstance(nodes, str):
        raise ConfigError(f'policy "{label}": waivers "{nodes}" must be a list')
    day = today or datetime.datetime.now(datetime.UTC).date()
    return tuple(_waiver(node, f"gate.waivers[{i}]", rules, day) for i, node in enumerate(nodes))


def _waiver(node: Any, where: str, rules: set[str], today: datetime.date) -> Waiver:
    if not isinstance(node, Mapping):
        raise ConfigError(f'{where}: "{node}" must be a mapping with rule, owner, reason and until')
    fields = dict(node)
    if "until" in node:
        fields["until"] = str(node["until"])
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", fields["until"]):
            raise ConfigError(f'{where}.until: "{node["until"]}" is not a day such as 2027-01-31')
    waiver: Waiver = build({**fields, "_target_": "quanteval.policy.Waiver"}, where=where)
    if waiver.rule not in rules:
        raise ConfigError(f'{where}: there is no rule "{waiver.rule}"; {near(waiver.rule, rules)}')
    if waiver.until < today:
        raise ConfigError(
            f'{where}: the waiver of "{waiver.rule}" by {waiver.owner} ended on {waiver.until}: '
            "renew it with a new day and reason, or remove it"
        )
    return waiver

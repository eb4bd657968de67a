"""docs/policy.md: its policies load, its tables name what there is, and each shipped policy is in it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from quanteval.policy import load_policy
from quanteval.resources import presets
from quanteval.targets import locate

TEXT = (Path(__file__).parent.parent / "docs" / "policy.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", TEXT, re.S)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_policies_shown_load(block):
    policy = load_policy(yaml.safe_load(block))
    assert policy.rules


def test_the_device_of_the_example_changes_one_rule():
    policy = load_policy(yaml.safe_load(BLOCKS[0]))
    assert not policy.rules_on("cpu")["speed"].required
    assert policy.rules_on("cuda")["speed"].required
    assert policy.rules_on("cuda")["speed"].metric == "output_tps"


def test_the_table_of_rules_names_every_rule_and_its_fields():
    rows = re.findall(r"^\| `([a-z_]+\.[A-Za-z]+)` \| [^|]* \| (.*) \|$", TEXT, re.M)
    named = {name for name, _ in rows}
    for name, fields in rows:
        rule = locate(f"quanteval.rules.{name}")
        known = {field.name for field in dataclasses.fields(rule)}
        for field in re.findall(r"`([a-z_]+)`", fields):
            assert field in known, (name, field)
    rules = Path(__file__).parent.parent / "quanteval" / "rules"
    for module in rules.glob("[a-z]*.py"):
        made = locate(f"quanteval.rules.{module.stem}.__dict__")
        for cls in made.values():
            if getattr(cls, "__module__", "").endswith(f".{module.stem}") and hasattr(cls, "check"):
                assert f"{module.stem}.{cls.__name__}" in named


def test_every_shipped_policy_is_described():
    shown = set(re.findall(r"^\| `([a-z]+)` \| ", TEXT, re.M))
    assert shown == set(presets("gate"))

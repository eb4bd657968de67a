"""Ways in which a policy or a record could lose its meaning without anyone noticing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest

from quanteval.errors import ConfigError
from quanteval.gate import decide
from quanteval.policy import Policy, load_policy
from quanteval.resources import presets
from tests.gate import evidence as make

CODE = {
    "_target_": "quanteval.rules.non_inferiority.NonInferiority",
    "kind": "code",
    "margin": {"absolute": 0.05},
}
GOOD = make.scores(values=np.ones(200))


def test_a_key_given_twice_is_refused(tmp_path):
    """YAML keeps the last of two equal keys, so the first rule would silently be gone."""
    text = presets("gate")["default"].read_text()
    path = tmp_path / "twice.yaml"
    path.write_text(text.replace("  code:\n", "  perplexity:\n", 1))
    with pytest.raises(ConfigError, match='the key "perplexity" is given twice') as caught:
        load_policy(path)
    assert "\n" not in str(caught.value)
    path.write_text(text.replace("required: false", "required: false\n    required: true", 1))
    with pytest.raises(ConfigError, match='"required" is given twice'):
        load_policy(path)


@pytest.mark.parametrize("name", sorted(presets("gate")))
def test_renaming_any_one_key_of_a_policy_is_noticed_or_changes_nothing(name, tmp_path):
    """A renamed rule stays a rule; every other renamed key is an error."""
    source = presets("gate")[name]
    rules = load_policy(source).rules
    lines = source.read_text().splitlines()
    renamed = 0
    for i, line in enumerate(lines):
        key, colon, rest = line.partition(":")
        if not colon or line.lstrip().startswith("#"):
            continue
        path = tmp_path / "renamed.yaml"
        path.write_text("\n".join([*lines[:i], f"{key}x:{rest}", *lines[i + 1 :]]))
        renamed += 1
        try:
            changed = load_policy(path)
        except ConfigError:
            continue
        assert list(changed.rules.values()) == list(rules.values()), line
    assert renamed > 10


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ({"rules": {"completeness": CODE}}, 'cannot be named "completeness"'),
        ({"rules": {1: CODE}}, 'cannot be named "1"'),
        ({"version": 2, "rules": {"code": CODE}}, 'version "2" is not known'),
        (
            {"rules": {"code": {"_target_": "quanteval.schemes.none.Unquantized"}}},
            '"quanteval.schemes.none.Unquantized" is not a rule',
        ),
        ({"rules": {"code": {**CODE, "method": "point"}}}, "no required quality rule"),
        ({"rules": {"code": "strict"}}, '"_target_" is missing'),
    ],
)
def test_a_policy_without_meaning_is_refused(node, says):
    with pytest.raises(ConfigError, match=says) as caught:
        load_policy(node)
    assert "\n" not in str(caught.value)


def test_conditions_that_were_not_recorded_are_not_equal_conditions():
    policy = load_policy({"rules": {"code": CODE}})
    for base, cand in (({}, {}), (make.CONDITIONS, {}), ({}, make.CONDITIONS)):
        found = decide(
            policy,
            make.variant("base", GOOD, comparable=base),
            make.variant("cand", GOOD, comparable=cand),
        )
        assert found.outcome == "not_comparable"
        assert "were not recorded" in found.reason


def test_a_task_of_another_kind_is_not_comparable():
    policy = load_policy({"rules": {"code": CODE}})
    other = dataclasses.replace(GOOD, record=GOOD.record.model_copy(update={"kind": "choice"}))
    found = decide(policy, make.variant("base", GOOD), make.variant("cand", other))
    assert found.outcome == "not_comparable"
    assert "task code, not the same suite or prompts: kind (code and choice)" in found.reason


@dataclass(frozen=True)
class Silent:
    required: bool = True
    is_quality: bool = True

    def check(self, name, baseline, candidate, alpha):
        return []


def test_a_rule_that_says_nothing_does_not_pass():
    code = load_policy({"rules": {"code": CODE}}).rules["code"]
    policy = Policy("p", 0.05, {"code": code, "silent": Silent()}, {})
    found = decide(policy, make.variant("base", GOOD), make.variant("cand", GOOD))
    assert found.outcome == "error"
    assert found.reason == "silent: the rule returned no finding"


MANY = make.scores(values=np.ones(400))


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("scheme_ran", {"artifact": make.artifact(4, effective_bits=16)}),
        ("sample_status", {"status": ("error",) + ("ok",) * 399}),
        ("sample_status", {"status": ("timeout",) * 40 + ("ok",) * 360}),
        ("sample_status", {"status": ("truncated",) * 80 + ("ok",) * 320}),
        ("output_length", {"output_tokens": np.full(400, 60)}),
        ("worth_it", {"memory": make.memory(16_000)}),
    ],
)
def test_every_guard_of_the_strict_policy_fails_a_release_on_its_own(rule, change):
    policy = load_policy(presets("gate")["strict"])
    nll = np.linspace(200, 300, 40)
    others = (make.perplexity(nll), make.divergence(np.full(20, 0.5), np.full(20, 99)))
    columns = {k: v for k, v in change.items() if k in ("status", "output_tokens")}
    parts = {k: v for k, v in change.items() if k not in columns}
    base, again = (make.variant(name, MANY, *others) for name in ("base", "base_again"))
    others = (make.perplexity(nll + 0.01), others[1])
    good = decide(policy, base, make.variant("cand", MANY, *others), again=again)
    assert good.outcome == "accept", good.reason
    harmed = make.variant("cand", dataclasses.replace(MANY, **columns), *others, **parts)
    found = decide(policy, base, harmed, again=again)
    # Without memory saved, whether speed is worth it stays open: no rounds were measured.
    assert found.outcome == ("inconclusive" if rule == "worth_it" else "reject")
    failed = {f.rule for f in found.findings if f.required and f.outcome != "accept"}
    assert rule in failed


def test_the_strict_policy_wants_the_noise_floor_measured():
    policy = load_policy(presets("gate")["strict"])
    found = decide(policy, make.variant("base", MANY), make.variant("cand", MANY))
    assert found.outcome == "error"
    assert "run with aa=true" in found.reason


def test_the_mlperf_policy_needs_more_than_a_comparison_of_two_scores():
    policy = load_policy(presets("gate")["mlperf"])
    small = make.scores(values=np.ones(100))
    found = decide(policy, make.variant("base", small), make.variant("cand", small))
    by_rule = {f.rule: f for f in found.findings}
    assert by_rule["mlperf_99"].outcome == by_rule["mlperf_99_9"].outcome == "accept"
    assert (
        "not a statistical test, it passes a loss exactly at the margin"
        in by_rule["mlperf_99"].sentence
    )
    assert (found.outcome, by_rule["shown_99"].outcome) == ("inconclusive", "inconclusive")
    assert (
        decide(policy, make.variant("base", MANY), make.variant("cand", MANY)).outcome == "accept"
    )


def test_a_score_that_is_not_finite_fails_a_release_by_itself():
    """Also in a task that no other rule looks at."""
    finite = {"_target_": "quanteval.rules.guards.FiniteScores"}
    policy = load_policy({"rules": {"code": CODE, "finite": finite}})
    rating = make.scores("rating", "rating", [1.0, 2.0])
    broken = make.scores("rating", "rating", [1.0, np.inf])
    base = make.variant("base", GOOD, rating)
    assert decide(policy, base, make.variant("cand", GOOD, rating)).outcome == "accept"
    found = decide(policy, base, make.variant("cand", GOOD, broken))
    assert found.outcome == "reject"
    assert found.reason == 'finite: rating: sample "s1" has a score that is not finite'

"""`quanteval check` holds the policy against the chosen tasks and their sizes."""

from __future__ import annotations

from quanteval.check import check, check_policy
from quanteval.evidence import SuiteFacts
from quanteval.policy import load_policy

CODE = {
    "_target_": "quanteval.rules.non_inferiority.NonInferiority",
    "kind": "code",
    "margin": "5 points",
}


def checked(rules, sizes, chosen=None):
    facts = {name: SuiteFacts(name, "code", n) for name, n in sizes.items()}
    return check_policy(load_policy({"rules": rules}), facts, chosen or list(sizes), "cpu")


def test_a_required_rule_on_a_task_that_is_not_chosen_is_an_error_and_an_advisory_one_a_warning():
    named = {**CODE, "kind": None, "task": "humanevall"}
    warnings, errors = checked({"code": CODE, "named": named}, {"humaneval": 164})
    assert errors == ['named: no task "humanevall" is chosen; did you mean "humaneval"?']
    assert warnings == []
    named["required"] = False
    warnings, errors = checked({"code": CODE, "named": named}, {"humaneval": 164})
    assert errors == []
    assert warnings == ['named: no task "humanevall" is chosen; did you mean "humaneval"?']
    together = {
        "_target_": "quanteval.rules.pooled.Pooled",
        "tasks": ["humaneval", "pyeasy"],
        "margin": "5 points",
    }
    _, errors = checked({"together": together}, {"humaneval": 164})
    assert errors == ['together: no task "pyeasy" is chosen; known: humaneval']


def test_a_kind_that_is_not_chosen_is_a_warning_unless_a_task_could_not_be_loaded():
    prose = {
        "_target_": "quanteval.rules.perplexity.PerplexityRatio",
        "kind": "perplexity",
        "max_ratio": 1.02,
    }
    rules = {"code": CODE, "prose": prose}
    warnings, errors = checked(rules, {"humaneval": 164})
    assert warnings == ['prose: has nothing to check, no task of kind "perplexity" is chosen']
    assert errors == []
    assert checked(rules, {"humaneval": 164}, ["humaneval", "torn"]) == ([], [])


def test_a_required_rule_that_cannot_accept_is_a_warning_in_the_forecasts_words():
    warnings, errors = checked({"code": CODE}, {"a": 58})
    assert warnings == [
        "code on a (n=58, margin 5 points): cannot accept a variant that answers exactly like the "
        "baseline: that takes 59 problems"
    ]
    assert errors == []
    (text,), _ = checked({"code": CODE}, {"a": 1})
    assert text.endswith("can never accept: n=1 is too few, whatever is measured")
    other = {**CODE, "required": False}
    big = {**CODE, "margin": "20 points"}
    assert checked({"code": big, "other": other}, {"a": 58}) == ([], [])


def test_check_shows_them_with_everything_else():
    lines, errors = check(
        [
            "task=[pyeasy]",
            "task.pyeasy.limit=10",
            "~gate.rules.perplexity.kind",
            "+gate.rules.perplexity.task=pydoc",
        ]
    )
    assert [str(error) for error in errors] == [
        'gate: perplexity: no task "pydoc" is chosen; known: pyeasy'
    ]
    assert errors[0].exit_code == 2
    assert any(line.startswith("warning: gate: code on pyeasy (n=10") for line in lines)
    assert any(line.startswith("warning: gate: divergence: has nothing") for line in lines)

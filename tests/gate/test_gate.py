"""The verdict: what accepts, what never may, and in which order findings decide."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quanteval.errors import ConfigError
from quanteval.gate import decide, exit_code, load_policy, worst
from quanteval.records import Verdict
from quanteval.resources import presets
from tests.gate import evidence as make

POLICY = load_policy(presets("gate")["default"])
TASKS = ("code", "prose", "distance")
RNG = np.random.default_rng(0)
NLL = RNG.normal(270, 30, 40)


def sets(values=None, nll=NLL, kl=0.5, agree=97):
    values = np.ones(200) if values is None else values
    return (
        make.scores(values=values),
        make.perplexity(nll),
        make.divergence(np.full(20, kl), np.full(20, agree)),
    )


def base():
    return make.variant("base", *sets(kl=0.0, agree=100))


def verdict(*candidate_sets, tasks=TASKS, baseline=None, **more):
    candidate = make.variant("cand", *(candidate_sets or sets()), **more)
    return decide(POLICY, baseline or base(), candidate, tasks=tasks)


def test_equal_variants_are_accepted():
    found = verdict()
    assert found.outcome == "accept", found.reason
    assert found.exit_code == 0
    assert {f.outcome for f in found.findings if f.required} == {"accept"}
    assert found.policy_sha256 == POLICY.sha256


def test_a_clear_loss_is_rejected_and_a_small_suite_is_inconclusive():
    broken = np.ones(200)
    broken[:40] = 0
    lost = verdict(*sets(broken))
    assert (lost.outcome, lost.exit_code) == ("reject", 3)
    assert "40 worse" in lost.reason
    small = make.scores(values=np.ones(20))
    few = verdict(small, *sets()[1:], baseline=make.variant("base", small, *sets(kl=0.0)[1:]))
    assert (few.outcome, few.exit_code) == ("inconclusive", 4)
    (code,) = [f for f in few.findings if f.rule == "code"]
    assert code.n_needed == 59


def test_a_rise_in_perplexity_alone_rejects():
    found = verdict(*sets(nll=NLL + 100 * np.log(1.3)))
    assert found.outcome == "reject"
    assert "ratio 1.300" in found.reason


@pytest.mark.parametrize(
    "status", ["failed", "unsupported", "out_of_memory", "interrupted", "running"]
)
def test_a_variant_that_was_not_measured_is_an_error(status):
    found = verdict(status=status, reason="because")
    assert (found.outcome, found.exit_code) == ("error", 1)
    assert status in found.reason
    assert "because" in found.reason
    broken = make.variant("base", *sets(), status=status)
    assert verdict(baseline=broken).outcome == "error"


def test_unequal_conditions_are_not_comparable_and_are_named():
    other = {**make.CONDITIONS, "threads": 1, "engine": {"device": "cpu", "rows": 4}}
    found = verdict(comparable=other)
    assert (found.outcome, found.exit_code) == ("not_comparable", 5)
    assert "threads (2 and 1)" in found.reason
    assert "engine.rows (8 and 4)" in found.reason
    assert "device" not in found.reason
    missing = {k: v for k, v in make.CONDITIONS.items() if k != "threads"}
    assert verdict(comparable=missing).outcome == "not_comparable"


def test_unequal_suites_are_not_comparable_and_are_named():
    code, *rest = sets()
    record = code.record.model_copy(update={"fingerprint": "x", "inputs": {"version": "2"}})
    found = verdict(dataclasses.replace(code, record=record), *rest)
    assert found.outcome == "not_comparable"
    assert "task code: version (1 and 2)" in found.reason


def test_a_task_that_was_to_run_and_is_missing_is_an_error():
    assert verdict(*sets()[1:]).outcome == "error"
    assert verdict(tasks=(*TASKS, "other")).outcome == "error"
    both = make.variant("base", *sets(kl=0.0)[1:])
    found = verdict(*sets()[1:], baseline=both)
    assert found.outcome == "error"
    assert "no scores for code" in found.reason


def test_an_unfinished_task_is_an_error():
    code, *rest = sets()
    running = dataclasses.replace(code, record=code.record.model_copy(update={"status": "running"}))
    assert verdict(running, *rest).outcome == "error"


def test_all_errors_or_nan_are_errors():
    code, prose, distance = sets()
    errored = dataclasses.replace(code, value=np.zeros(200), status=("error",) * 200)
    assert verdict(errored, prose, distance).outcome == "error"
    values = NLL.copy()
    values[3] = np.nan
    found = verdict(code, make.perplexity(values), distance)
    assert found.outcome == "error"
    assert '"s3"' in found.reason


def test_no_task_at_all_is_an_error():
    empty = decide(POLICY, make.variant("base"), make.variant("cand"), tasks=())
    assert empty.outcome == "error"


def test_divergence_alone_accepts_nothing():
    distance = sets()[2]
    baseline = make.variant("base", sets(kl=0.0, agree=100)[2])
    found = decide(POLICY, baseline, make.variant("cand", distance), tasks=("distance",))
    assert found.outcome == "error"
    assert "no required quality rule" in found.reason


def damaged():
    """Candidates that are not accepted, and what keeps them from it."""
    broken = np.ones(200)
    broken[:7] = 0
    return {
        "inconclusive code": sets(broken),
        "perplexity": sets(nll=NLL + 100 * np.log(1.06)),
    }


@settings(max_examples=60, deadline=None)
@given(
    which=st.sampled_from(["inconclusive code", "perplexity"]),
    part=st.sampled_from(["sample", "task", "id", "prompt", "condition", "task name"]),
    index=st.integers(0, 39),
    task=st.sampled_from([0, 1, 2]),
)
def test_taking_something_away_never_makes_an_accept(which, part, index, task):
    chosen = list(damaged()[which])
    assert verdict(*chosen).outcome != "accept"
    target = chosen[task]
    index %= len(target.sample_ids)
    comparable = dict(make.CONDITIONS)
    if part == "sample":
        keep = [i for i in range(len(target.sample_ids)) if i != index]
        chosen[task] = dataclasses.replace(
            target,
            **{
                name: tuple(column[i] for i in keep)
                for name in ("sample_ids", "prompt_sha256", "status", "finish_reason", "outcome")
                for column in [getattr(target, name)]
            },
            **{name: getattr(target, name)[keep] for name in ("value", "weight", "output_tokens")},
            numbers={k: v[keep] for k, v in target.numbers.items()},
            series={k: tuple(v[i] for i in keep) for k, v in target.series.items()},
        )
    elif part == "task":
        del chosen[task]
    elif part in ("id", "prompt"):
        column = "sample_ids" if part == "id" else "prompt_sha256"
        renamed = list(getattr(target, column))
        renamed[index] += "x"
        chosen[task] = dataclasses.replace(target, **{column: tuple(renamed)})
    elif part == "task name":
        record = target.record.model_copy(update={"task": target.record.task + "x"})
        chosen[task] = dataclasses.replace(target, record=record)
    else:
        comparable.pop(sorted(comparable)[index % len(comparable)])
    assert verdict(*chosen, comparable=comparable).outcome != "accept"


def test_the_same_evidence_gives_the_same_verdict():
    first, second = verdict(), verdict()
    assert first.findings == second.findings
    assert first.reason == second.reason


def made(outcome) -> Verdict:
    return verdict().model_copy(update={"outcome": outcome})


def test_the_worst_verdict_decides():
    order = ["error", "not_comparable", "reject", "inconclusive", "accept"]
    codes = [1, 5, 3, 4, 0]
    for i, (outcome, code) in enumerate(zip(order, codes, strict=True)):
        assert worst([made(o) for o in reversed(order[i:])]) == outcome
        assert exit_code(outcome) == code
        assert made(outcome).exit_code == code
    assert worst([]) == "error"


# --------------------------------------------------------------------------- policies

RULE = {
    "_target_": "quanteval.rules.perplexity.PerplexityRatio",
    "kind": "perplexity",
    "max_ratio": 1.02,
}


@pytest.mark.parametrize("name", sorted(presets("gate")))
def test_shipped_policies_load(name):
    policy = load_policy(presets("gate")[name])
    assert policy.name == name
    assert all(rule.check for rule in policy.rules.values())


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ({"rules": {"p": RULE}, "alhpa": 0.1}, 'unknown key "alhpa"; did you mean "alpha"'),
        ({"rules": {"p": RULE}, "alpha": 0.7}, 'alpha "0.7"'),
        ({"rules": {"p": RULE}, "alpha": "low"}, 'alpha "low"'),
        ({"rules": {}}, "has no rules"),
        ({"name": "x"}, "has no rules"),
        ({"rules": {"p": {**RULE, "required": False}}}, "no required quality rule"),
        (
            {"rules": {"p": {**RULE, "max_ratoi": 1}}},
            'unknown key "max_ratoi"; did you mean "max_ratio"',
        ),
        ({"rules": {"p": {**RULE, "max_ratio": 0.9}}}, "must be above 1"),
        ({"rules": {"p": {**RULE, "task": "t"}}}, "exactly one"),
        ({"rules": {"p": {"_target_": "os.system"}}}, "not allowed"),
    ],
)
def test_a_wrong_policy_is_one_clear_line(node, says):
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")) as caught:
        load_policy(node)
    assert "\n" not in str(caught.value)


def test_policy_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_policy(Path("nowhere.yaml"))
    path = tmp_path / "p.yaml"
    path.write_text("rules: [")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_policy(path)
    path.write_text("- a\n- b\n")
    with pytest.raises(ConfigError, match="not a mapping"):
        load_policy(path)

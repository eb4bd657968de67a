"""The verdict: what accepts, what never may, and in which order findings decide."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quanteval.errors import ConfigError
from quanteval.gate import decide, exit_code, worst
from quanteval.policy import load_policy
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


def test_an_accept_names_what_left_the_least_of_its_margin_and_what_was_not_checked():
    found = verdict(*sets(values(3)))
    room = {f.rule: f for f in found.findings if f.rule in ("code", "perplexity")}
    # Code leaves about a quarter of its 5 points, perplexity all of its 5 %.
    assert room["code"].upper > 0.035
    assert room["perplexity"].upper == pytest.approx(1.0)
    assert found.reason.startswith("2 quality findings accepted; closest: code: 100.0 % -> 98.5 %")
    prose = make.variant("base", make.perplexity(NLL))
    found = decide(POLICY, prose, make.variant("cand", make.perplexity(NLL)), tasks=("prose",))
    # A kept perplexity says nothing about code: what a required rule asks for was not shown.
    assert found.outcome == "inconclusive"
    assert found.reason.startswith("code: no task of kind code was run; a required rule")
    rules = {name: dict(rule) for name, rule in POLICY.node["rules"].items()}
    rules["code"]["required"] = False
    alone = load_policy({"rules": rules})
    found = decide(alone, prose, make.variant("cand", make.perplexity(NLL)), tasks=("prose",))
    assert found.reason.startswith("1 quality finding accepted; closest: prose: ")


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
    assert "task code, not the same suite or prompts: version (1 and 2)" in found.reason


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


def test_samples_missing_alike_on_both_sides_are_an_error_in_any_task():
    """Also in one that no rule looks at: what is left may be what was easy."""
    short = make.scores("rating", "rating", np.ones(30), expected=31)
    baseline = make.variant("base", *sets(kl=0.0), short)
    found = verdict(*sets(), short, baseline=baseline)
    assert found.outcome == "error"
    assert "cand has 30 of 31 samples of rating" in found.reason


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


def values(lost=0, bad=1.0):
    found = np.ones(200)
    found[:lost] = 0
    found[-1] = bad
    return found


def few(keep):
    return make.scores(values=np.ones(keep))


# Pairs that are not accepted: the baseline's sets, the candidate's, and what else the candidate has.
DAMAGED = {
    "inconclusive code": (sets(), sets(values(7)), {}),
    "code one sample short of deciding": ((few(58), *sets()[1:]), (few(58), *sets()[1:]), {}),
    "rejected code": (sets(), sets(values(40)), {}),
    "perplexity": (sets(), sets(nll=NLL + 100 * np.log(1.06)), {}),
    "a NaN": (sets(), sets(values(bad=np.nan)), {}),
    "a NaN in the baseline": (sets(values(bad=np.nan)), sets(), {}),
    "an error": (sets(), (dataclasses.replace(sets()[0], status=("error",) + ("ok",) * 199), *sets()[1:]), {}),
    "a scheme that did not run": (sets(), sets(), {"artifact": make.artifact(4, effective_bits=16)}),
    "other conditions": (sets(), sets(), {"comparable": {**make.CONDITIONS, "threads": 1}}),
    "a failure": (sets(), sets(), {"status": "failed"}),
}  # fmt: skip


def without(scores, index):
    """Return the scores without one sample, as a torn journal would give them."""
    keep = [i for i in range(len(scores.sample_ids)) if i != index]
    texts = ("sample_ids", "prompt_sha256", "status", "finish_reason", "outcome")
    return dataclasses.replace(
        scores,
        **{name: tuple(getattr(scores, name)[i] for i in keep) for name in texts},
        **{name: getattr(scores, name)[keep] for name in ("value", "weight", "output_tokens")},
        numbers={k: v[keep] for k, v in scores.numbers.items()},
        series={k: tuple(v[i] for i in keep) for k, v in scores.series.items()},
    )


def spoil(chosen, comparable, part, task, index):
    """Return the sets and conditions with one thing taken away or renamed."""
    chosen, comparable, target = list(chosen), dict(comparable), chosen[task]
    index %= len(target.sample_ids)
    if part == "sample":
        chosen[task] = without(target, index)
    elif part == "task":
        del chosen[task]
    elif part in ("sample_ids", "prompt_sha256"):
        renamed = list(getattr(target, part))
        renamed[index] += "x"
        chosen[task] = dataclasses.replace(target, **{part: tuple(renamed)})
    elif part == "task name":
        record = target.record.model_copy(update={"task": target.record.task + "x"})
        chosen[task] = dataclasses.replace(target, record=record)
    else:
        key = sorted(comparable)[index % len(comparable)]
        comparable[key + "x"] = comparable.pop(key)
        if part == "condition":
            del comparable[key + "x"]
    return chosen, comparable


@settings(max_examples=200, deadline=None)
@given(
    which=st.sampled_from(sorted(DAMAGED)),
    part=st.sampled_from(
        [
            "sample",
            "task",
            "sample_ids",
            "prompt_sha256",
            "task name",
            "condition",
            "condition name",
        ]
    ),
    sides=st.sampled_from([("base",), ("cand",), ("base", "cand")]),
    index=st.integers(0, 199),
    task=st.sampled_from([0, 1, 2]),
)
def test_taking_away_or_renaming_something_never_makes_an_accept(which, part, sides, index, task):
    # Two records that both lack a condition agree about it: that is two changes, not one.
    assume(not (part == "condition" and len(sides) == 2))
    first, second, more = DAMAGED[which]
    more = {"comparable": make.CONDITIONS, **more}
    pair = {"base": (first, make.CONDITIONS), "cand": (second, more.pop("comparable"))}

    def outcome():
        (one, conditions), (other, others) = pair["base"], pair["cand"]
        baseline = make.variant("base", *one, comparable=conditions)
        return verdict(*other, baseline=baseline, comparable=others, **more).outcome

    assert outcome() != "accept"
    for side in sides:
        pair[side] = spoil(*pair[side], part, task, index)
    assert outcome() != "accept"


def test_large_suites_are_judged():
    n = 10_000
    names = [f"code{i}" for i in range(4)]
    rng = np.random.default_rng(3)
    truth = [(rng.random(n) < 0.5).astype(float) for _ in names]
    nll = rng.normal(270, 30, n)

    def big(name, lost, rise):
        broken = [np.where(np.arange(n) < lost, 0.0, x) for x in truth]
        code = [make.scores(t, values=x) for t, x in zip(names, broken, strict=True)]
        return make.variant(name, *code, make.perplexity(nll + rise))

    baseline, tasks = big("base", 0, 0.0), (*names, "prose")
    for lost, outcome in ((100, "accept"), (1500, "reject")):
        found = decide(POLICY, baseline, big("cand", lost, 0.5), tasks=tasks)
        assert found.outcome == outcome, found.reason
        code = [f for f in found.findings if f.rule == "code"]
        assert [f.n for f in code] == [n] * 4
        for finding, x in zip(code, truth, strict=True):
            assert (finding.broken, finding.fixed) == (x[:lost].sum(), 0)


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

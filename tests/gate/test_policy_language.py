"""What a policy file can say: margins with units, other limits on a device, waivers that end, looks."""

from __future__ import annotations

import datetime

import pytest

from quanteval.errors import ConfigError
from quanteval.gate import decide, is_decided, may_stop
from quanteval.looks import SequentialPlan
from quanteval.policy import Waiver, load_policy
from quanteval.rules.margin import Margin, parse_margin
from tests.gate import evidence as make

CODE = {"_target_": "quanteval.rules.non_inferiority.NonInferiority", "kind": "code"}
PPL = {
    "_target_": "quanteval.rules.perplexity.PerplexityRatio",
    "kind": "perplexity",
    "max_ratio": 1.05,
}
MEMORY = {
    "_target_": "quanteval.rules.budget.Budget", "metric": "weight_memory_bytes", "max_ratio": 0.6,
    "required": True,
}  # fmt: skip
TODAY = datetime.date(2026, 6, 1)
WAIVER = {"rule": "code", "owner": "Ada", "reason": "known, fixed in 2.1", "until": "2026-07-31"}


def policy(**more):
    rules = {"code": {**CODE, "margin": "5 points"}, "perplexity": PPL}
    return load_policy({"rules": rules, **more}, today=TODAY)


def verdict(made, *, broken=0, device="cpu", tasks=("code", "prose"), name="cand"):
    base, cand = [1.0] * 164, [0.0] * broken + [1.0] * (164 - broken)
    prose = make.perplexity([200.0 + i for i in range(20)])
    conditions = {**make.CONDITIONS, "device": device}
    baseline = make.variant("base", make.scores(values=base), prose, comparable=conditions)
    candidate = make.variant(name, make.scores(values=cand), prose, comparable=conditions)
    return decide(made, baseline, candidate, tasks=tasks)


# --------------------------------------------------------------------------- margins


@pytest.mark.parametrize(
    ("text", "margin"),
    [
        ("2 points", Margin(absolute=0.02)),
        ("1 point", Margin(absolute=0.01)),
        (" 0.5points ", Margin(absolute=0.005)),
        ("1 % of baseline", Margin(relative=0.01)),
        ("0.1% of the baseline's score", Margin(relative=0.001)),
    ],
)
def test_margins_are_written_with_their_unit(text, margin):
    assert Margin(**parse_margin(text)) == margin
    rules = {"code": {**CODE, "margin": text}}
    assert load_policy({"rules": rules}).rules["code"].margin == margin
    assert (
        load_policy({"rules": {"code": {**CODE, "margin": "2 points"}}}).rules["code"].margin.text
        == "2 points"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("2", 'margin "2" is not one'),
        (0.02, 'margin "0.02" has no unit'),
        ("2 %", 'margin "2 %" is not one'),
        ("2 points of baseline", "is not one"),
        ("two points", "is not one"),
        ("150 points", "must be between 0 and 1"),
        ("0 points", "must be between 0 and 1"),
        ({"absolut": 0.02}, 'unknown key "absolut"; did you mean "absolute"?'),
    ],
)
def test_a_margin_without_a_unit_or_a_meaning_is_refused(text, says):
    with pytest.raises(ConfigError) as error:
        load_policy({"rules": {"code": {**CODE, "margin": text}}})
    assert says in str(error.value)
    assert "\n" not in str(error.value)


# --------------------------------------------------------------------------- devices


def test_a_device_changes_single_fields_of_a_rule():
    made = policy(devices={"cuda": {"rules": {"code": {"margin": "1 point"}, "memory": MEMORY}}})
    assert made.rules_on("cpu")["code"].margin.value == 0.05
    assert made.rules_on("cuda")["code"].margin.value == 0.01
    assert made.rules_on("cuda")["code"].kind == "code"
    assert set(made.rules_on("cuda")) == {"code", "perplexity", "memory"}
    assert verdict(made, broken=1).outcome == "accept"
    assert verdict(made, broken=1, device="cuda").outcome == "inconclusive"


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        ({"cudda": {"rules": {"code": {"margin": "1 point"}}}}, 'no device "cudda"; did you mean "cuda"?'),
        ({"cuda": {"rules": {"cod": {"margin": "1 point"}}}}, 'no rule "cod"; did you mean "code"?'),
        ({"cuda": {"code": {}}}, 'devices.cuda must hold "rules" and nothing else'),
        ({"cuda": {"rules": {"code": {"margn": "1 point"}}}}, 'gate.devices.cuda.rules.code: unknown key "margn"'),
        ({"cuda": {"rules": {"code": {"required": False}, "perplexity": {"required": False}}}}, "could accept nothing"),
        (["cuda"], "must be a mapping"),
    ],
)  # fmt: skip
def test_what_a_device_cannot_change_is_named(devices, says):
    with pytest.raises(ConfigError) as error:
        policy(devices=devices)
    assert says in str(error.value)


# --------------------------------------------------------------------------- waivers


def test_a_waiver_lets_a_failing_rule_pass_and_is_shown():
    assert verdict(policy(), broken=30).outcome == "reject"
    found = verdict(policy(waivers=[WAIVER]), broken=30)
    assert found.outcome == "accept"
    assert "waived by Ada until 2026-07-31: known, fixed in 2.1" in found.reason
    (finding,) = [f for f in found.findings if f.rule == "code"]
    assert finding.outcome == "reject"
    assert finding.waived.startswith("waived by Ada")
    assert found.degraded == ["code"]


def test_a_waiver_can_be_for_one_task_or_candidate():
    for field, value in (("task", "other"), ("candidate", "other")):
        assert verdict(policy(waivers=[{**WAIVER, field: value}]), broken=30).outcome == "reject"
    for field, value in (("task", "code"), ("candidate", "cand")):
        assert verdict(policy(waivers=[{**WAIVER, field: value}]), broken=30).outcome == "accept"


def test_a_waiver_does_not_make_up_for_evidence():
    made = policy(waivers=[WAIVER, {**WAIVER, "rule": "perplexity"}])
    # A task that is missing stays an error, and waiving all that is about quality leaves nothing to accept.
    assert verdict(made, tasks=("code", "prose", "other")).outcome == "error"
    only = load_policy(
        {"rules": {"code": {**CODE, "margin": "5 points"}}, "waivers": [WAIVER]}, today=TODAY
    )
    found = verdict(only, broken=30)
    assert (found.outcome, found.reason) == (
        "error", "no required quality rule found anything to accept"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"until": "2026-05-31"}, 'the waiver of "code" by Ada ended on 2026-05-31'),
        ({"until": datetime.date(2026, 5, 31)}, "renew it with a new day and reason, or remove it"),
        ({"until": "soon"}, '"soon" is not a day such as 2027-01-31'),
        ({"until": 4102444800}, '"4102444800" is not a day'),
        ({"rule": "cod"}, 'there is no rule "cod"; did you mean "code"?'),
        ({"owner": " "}, "owner"),
        ({"reasons": "x"}, 'unknown key "reasons"; did you mean "reason"?'),
    ],
)
def test_a_waiver_that_ended_or_says_too_little_is_refused(change, says):
    with pytest.raises(ConfigError) as error:
        policy(waivers=[{**WAIVER, **change}])
    assert says in str(error.value)
    assert "gate.waivers[0]" in str(error.value)


@pytest.mark.parametrize(
    "text", ["? [a]\n: 1\n", "rules: {[a]: {}}\n", "rules: " + "[" * 3000, "rules: {{a: b}: c}\n"]
)
def test_a_file_of_any_shape_is_answered_with_one_line(tmp_path, text):
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_policy(path)
    assert "\n" not in str(error.value)
    for foreign in ({"sequential": {"_target_": "quanteval.rules.guards.FiniteScores"}},
                    {"waivers": [{**WAIVER, "_target_": "quanteval.rules.guards.FiniteScores"}]}):  # fmt: skip
        # A target of one's own does not change what these keys hold.
        made = policy(**foreign)
        assert isinstance(made.sequential, SequentialPlan) == ("sequential" in foreign)
        assert [type(w) for w in made.waivers] == [Waiver] * len(foreign.get("waivers", []))


def test_the_last_day_of_a_waiver_counts():
    assert policy(waivers=[{**WAIVER, "until": "2026-06-01"}]).waivers[0].until == TODAY
    for missing in ("owner", "reason", "until", "rule"):
        with pytest.raises(ConfigError, match="required"):
            policy(waivers=[{k: v for k, v in WAIVER.items() if k != missing}])


# --------------------------------------------------------------------------- looks


def test_sequential_is_true_or_a_plan():
    assert policy().sequential is None
    assert policy(sequential=False).sequential is None
    assert policy(sequential=True).sequential == SequentialPlan("obrien_fleming", 5, 0)
    made = policy(sequential={"method": "betting", "looks": 10, "seed": 3})
    assert made.sequential == SequentialPlan("betting", 10, 3)
    for wrong, says in (
        ({"look": 3}, 'unknown key "look"; did you mean "looks"?'),
        ({"looks": 1}, "looks"),
        ({"method": "peek"}, "method"),
        ("yes", "must be true, false or a mapping"),
    ):
        with pytest.raises(ConfigError, match="sequential") as error:
            policy(sequential=wrong)
        assert says in str(error.value)


def test_only_tasks_with_a_deciding_rule_of_their_own_may_stop():
    made = policy(sequential=True)
    assert may_stop(made, "cpu", "x", "code")
    assert may_stop(made, "cpu", "x", "perplexity")
    assert not may_stop(made, "cpu", "x", "divergence")
    assert not may_stop(policy(), "cpu", "x", "code")
    pooled = {"_target_": "quanteval.rules.pooled.Pooled", "kind": "code", "margin": "2 points"}
    rules = {"code": {**CODE, "margin": "5 points"}, "together": pooled}
    assert not may_stop(load_policy({"rules": rules, "sequential": True}), "cpu", "x", "code")
    named = {"code": {**CODE, "kind": None, "task": "one", "margin": "5 points"}}
    assert may_stop(load_policy({"rules": named, "sequential": True}), "cpu", "one", "code")
    assert not may_stop(load_policy({"rules": named, "sequential": True}), "cpu", "two", "code")


def test_a_task_is_decided_by_one_rejection_or_by_all_acceptances():
    both = {"wide": {**CODE, "margin": "20 points"}, "tight": {**CODE, "margin": "1 point"}}
    made = load_policy({"rules": both})

    def decided(broken, baseline=None):
        base = make.variant("base", make.scores(values=[1.0] * 164))
        cand = make.variant("cand", make.scores(values=[0.0] * broken + [1.0] * (164 - broken)))
        return is_decided(made, baseline or base, cand, "code")

    assert not decided(0)  # the tight margin is not shown by 164 pairs
    assert decided(30)
    assert not decided(0, make.variant("base"))
    wide = load_policy({"rules": {"wide": both["wide"]}})
    same = make.scores(values=[1.0] * 164)
    assert is_decided(wide, make.variant("base", same), make.variant("cand", same), "code")


# --------------------------------------------------------------------------- the hash


def test_defaults_written_out_change_nothing_and_everything_else_does():
    plain = policy()
    assert policy(sequential=False, max_missing=0.0, waivers=[]).sha256 == plain.sha256
    for more in (
        {"sequential": True},
        {"max_missing": 0.01},
        {"waivers": [WAIVER]},
        {"alpha": 0.01},
    ):
        assert policy(**more).sha256 != plain.sha256

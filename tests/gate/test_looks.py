"""Early stopping: the order, the looks, the level at each of them, and that nothing can be left out."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quanteval.gate import decide
from quanteval.looks import SequentialPlan, evaluated_ids, level, sample_order, stopped_early
from quanteval.policy import load_policy
from quanteval.stats import sequential_design
from tests.gate import evidence as make
from tests.gate.sequential import Simulation

CODE = {
    "_target_": "quanteval.rules.non_inferiority.NonInferiority", "kind": "code", "margin": "5 points"
}  # fmt: skip


@given(st.integers(1, 400), st.integers(2, 12))
def test_looks_grow_and_end_with_all_samples(samples, looks):
    plan = SequentialPlan(looks=looks)
    sizes = plan.sizes(samples)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == samples
    assert len(sizes) <= looks
    assert plan.at(samples, 1).fractions[-1] == 1


@given(st.lists(st.text(max_size=5), unique=True, max_size=30), st.integers(0, 9))
def test_the_order_depends_on_the_ids_and_the_seed_alone(ids, seed):
    order = sample_order(ids, seed)
    assert sorted(order) == sorted(ids)
    assert sample_order(ids[::-1], seed) == order


def test_the_order_is_not_the_suites():
    ids = [f"task/{i}" for i in range(100)]
    assert sample_order(ids, 0) != ids
    assert sample_order(ids, 0) != sample_order(ids, 1)
    first = [int(i.split("/")[1]) for i in sample_order(ids, 0)[:50]]
    assert 35 < sum(first) / 50 < 65


def record(look=None, expected=100, plan=None):
    made = plan or SequentialPlan()
    return make.scores(values=[1.0] * expected).record.model_copy(
        update={"sequential": made.at(100, look) if look else None}
    )


def test_the_level_at_a_look_is_the_designs():
    design = sequential_design(5, 0.05)
    for look in range(1, 6):
        assert level(record(look), 0.05) == pytest.approx(design.nominal_alpha[look - 1], rel=1e-9)
    assert level(record(), 0.05) == 0.05
    assert level(record(3, plan=SequentialPlan("betting")), 0.05) == 0.05
    assert not stopped_early(record(5))
    assert stopped_early(record(2, expected=40))
    ids = [f"s{i}" for i in range(100)]
    assert evaluated_ids(record(2, expected=40), ids) == sample_order(ids, 0)[:40]
    assert evaluated_ids(record(), ids) == ids


def stopped(values, plan, look, n=164, drop=None):
    """Return a candidate that stopped at a look; `drop` leaves one of its samples out."""
    size = plan.sizes(n)[look - 1]
    kept = sorted(int(i[1:]) for i in sample_order([f"s{i}" for i in range(n)], plan.seed)[:size])
    if drop is not None:
        kept = [i for i in kept if i != kept[drop]]
    sets = make.scores(values=[values[i] for i in kept], expected=size)
    return dataclasses.replace(
        sets,
        record=sets.record.model_copy(update={"sequential": plan.at(n, look)}),
        sample_ids=tuple(f"s{i}" for i in kept),
        prompt_sha256=tuple(f"p{i}" for i in kept),
    )


def verdict(candidate, n=164, **more):
    policy = load_policy({"rules": {"code": CODE}, "sequential": True, **more})
    baseline = make.variant("base", make.scores(values=[1.0] * n))
    return decide(policy, baseline, make.variant("cand", candidate), tasks=["code"])


def test_a_stopped_task_is_judged_at_its_look():
    plan = SequentialPlan()
    found = verdict(stopped([1.0] * 164, plan, 4))
    assert found.outcome == "accept"
    (finding,) = [f for f in found.findings if f.rule == "code"]
    assert finding.n == 132
    assert finding.confidence == pytest.approx(
        1 - sequential_design(plan.at(164, 4).fractions).nominal_alpha[3]
    )
    assert "code was decided after 132 of 164 samples" in found.findings[0].sentence
    assert "look 4 of 5" in finding.notes[0]


def test_leaving_out_a_sample_of_a_stopped_task_is_found_out():
    plan = SequentialPlan()
    values = [1.0] * 164
    candidate = stopped(values, plan, 4, drop=7)
    assert verdict(candidate).outcome == "error"
    # Lowering the number it says it has does not help: the order says which samples those are.
    lowered = dataclasses.replace(
        candidate, record=candidate.record.model_copy(update={"samples_expected": 131})
    )
    assert verdict(lowered).outcome == "error"


def test_betting_holds_at_any_look_and_in_the_drawn_order():
    plan = SequentialPlan("betting", looks=8)
    n = 400
    candidate = stopped([1.0] * n, plan, 5, n=n)
    found = verdict(candidate, n=n, sequential={"method": "betting", "looks": 8})
    (finding,) = [f for f in found.findings if f.rule == "code"]
    assert finding.outcome == "accept"
    assert finding.method.startswith("betting")
    assert finding.upper < 0.05
    assert finding.lower == -1
    worse = [0.0 if i % 4 == 0 else 1.0 for i in range(n)]
    (finding,) = [
        f for f in verdict(stopped(worse, plan, 8, n=n), n=n).findings if f.rule == "code"
    ]
    assert finding.outcome == "reject"
    assert 0.05 < finding.lower < 0.25 < finding.upper


@pytest.mark.parametrize(("method", "power"), [("obrien_fleming", 0.65), ("betting", 0.4)])
def test_stopping_early_keeps_the_level_and_saves_samples(method, power):
    """Through the shipped gate at every look: n=164, margin 5 points, flips 5 %."""
    simulation = Simulation(164, 0.05, method)
    at_margin = simulation.run(0.05, 0.05, 400, seed=1)
    # 5 % and three standard errors of 400 replicates.
    assert at_margin.accept <= 0.05 + 3 * 0.011
    assert at_margin.reject <= 0.05 + 3 * 0.011
    harmless = simulation.run(0.05, 0.0, 200, seed=2)
    assert harmless.accept >= power
    assert harmless.samples < 150


@pytest.mark.parametrize("sequential", [False, {"seed": 1}, {"looks": 4}, {"method": "betting"}])
def test_a_stop_by_other_looks_than_the_policys_is_refused(sequential):
    """Another seed would leave out other samples; which it is must not be chosen afterwards."""
    found = verdict(stopped([1.0] * 164, SequentialPlan(), 4), sequential=sequential)
    assert found.outcome == "error"
    assert "by other looks than the policy's" in found.reason

"""How often the shipped gate errs, and that taking evidence away never helps a candidate."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quanteval.errors import ConfigError
from quanteval.gate import decide
from quanteval.policy import load_policy
from quanteval.stats import accept_probability
from tests.gate import evidence as make
from tests.gate import operating

# --------------------------------------------------------------------------- 0/1 scores, exactly

SIZES = (20, 50, 164)
ASKED = {(n, m): operating.Enumeration(n, m) for n in SIZES for m in operating.MARGINS}


@pytest.mark.parametrize("n", SIZES)
def test_a_loss_of_exactly_the_margin_is_accepted_at_most_one_time_in_twenty(n):
    """Comparing the loss seen with the margin lets half of such variants pass, asking for significance nearly all."""
    found = [
        operating.rates(ASKED[size, points], flips)
        for size, points, flips in operating.cells((n,), operating.FLIPS[:4])
    ]
    assert all(0 <= r.gate <= 0.05 for r in found), found
    assert max(r.gate for r in found) > 0.02  # neither is the level thrown away
    assert all(0.48 < r.point < 0.82 for r in found), found
    assert max(r.not_worse for r in found) > 0.97


@pytest.mark.parametrize(("n", "points"), sorted(ASKED))
def test_the_gate_accepts_a_harmless_variant_as_often_as_the_statistics_say(n, points):
    for flips in operating.FLIPS[:4]:
        told = accept_probability(n, flips, 0.0, points / 100)
        assert ASKED[n, points].probability(flips, 0.0) == pytest.approx(told, abs=1e-6)


@pytest.mark.parametrize(("n", "points", "flips"), [(50, 5, 0.05)])
def test_the_forecast_is_what_the_gate_does(n, points, flips):
    asked = ASKED[n, points]
    assert asked.probability(flips, 0.0) == pytest.approx(asked.harmless(flips), abs=1e-6)


@pytest.mark.parametrize("n", [20, 50, 164])
def test_more_broken_pairs_never_make_a_verdict_better(n):
    """The enumeration looks for one end of acceptance in each row of tables; here whole rows are asked."""
    asked = ASKED[n, 5]
    order = ["accept", "inconclusive", "reject"]
    for fixed in (0, 1, 5):
        accepted = asked.accepted(fixed)[fixed]
        row = [asked.outcome(b, fixed) for b in range(min(n - fixed, accepted + 25) + 1)]
        assert row == sorted(row, key=order.index)
        assert row.count("accept") == accepted + 1


def test_probabilities_of_all_tables_add_up_to_one():
    n = 30
    everything = [n - c for c in range(n + 1)]
    assert operating.trinomial(everything, n, 0.07, 0.03) == pytest.approx(1, abs=1e-12)
    assert operating.trinomial(everything, n, 0.07, 0.0) == pytest.approx(1, abs=1e-12)
    # Nothing broken: 0.93 to the power of n, whatever is fixed.
    assert operating.trinomial([0] * (n + 1), n, 0.07, 0.03) == pytest.approx(0.93**n, rel=1e-12)


@given(st.integers(0, 60), st.integers(-1, 60), st.integers(-3, 70))
def test_the_end_of_acceptance_is_found_from_any_guess(top, last, guess):
    last = min(last, top)
    assert operating.last_true(lambda k: k <= last, guess, top) == last


# --------------------------------------------------------------------------- fractions and documents

REPLICATES = 400
LIMIT = operating.LIMIT + 2 * operating.standard_error(operating.LIMIT, REPLICATES)
"""8.4 %: two standard errors above the rate allowed."""
CELLS = [
    operating.Cell(operating.even, 50, 5, 5),
    operating.Cell(operating.both_ways, 164, 5, 2),
    operating.Cell(operating.halved, 164, 5, 2),
    operating.Cell(operating.partial_credit, 52, 1, 5),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: f"{c.draw.__name__}-{c.problems}-{c.samples}")
def test_pass_rates_that_lost_exactly_the_margin_are_rarely_accepted(cell):
    loss = cell.points / 100
    assert cell.accepted(REPLICATES, loss, seed=1) <= LIMIT
    # The same draws can exceed the limit by far: a comparison of the two scores accepts half of them.
    assert cell.within(REPLICATES, loss, seed=1) > 0.4


def test_the_populations_have_the_loss_they_are_named_for():
    rng = np.random.default_rng(0)
    for draw in (operating.even, operating.both_ways, operating.halved, operating.partial_credit):
        for loss in (0.0, 0.02, 0.05):
            x, y = draw(rng, 400_000, 1, loss)
            assert (x - y).mean() == pytest.approx(loss, abs=0.003)
    for effect in (operating.normal, operating.mildly_skewed, operating.skewed):
        drawn = effect(rng, 400_000)
        assert drawn.mean() == pytest.approx(0, abs=0.01)
        assert drawn.std() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("samples", [2, 5])
def test_samples_of_a_problem_count_as_one_pass_rate(samples):
    cell = operating.Cell(operating.both_ways, 60, samples, 10)
    policy = operating.code_policy(cell.points)
    for x, y in cell.replicates(20, 0.05, seed=2):
        shapes = (cell.fractions, cell.rows)
        rates, rows = (_finding(policy, form(x), form(y)) for form in shapes)
        for name in ("outcome", "n", "estimate", "lower", "upper", "p_value", "method"):
            assert getattr(rates, name) == getattr(rows, name)


def test_samples_of_a_problem_taken_for_problems_of_their_own_are_accepted_too_often():
    """What the limit above would find: the same evidence without the problems that tie its samples together."""
    cell, loss = operating.Cell(operating.halved, 50, 10, 10), 0.1
    policy = operating.code_policy(cell.points)
    drawn = list(cell.replicates(150, loss, seed=3))
    wrong = [operating.verdict(policy, cell.pooled(x), cell.pooled(y)) for x, y in drawn]
    right = [operating.verdict(policy, cell.rows(x), cell.rows(y)) for x, y in drawn]
    assert wrong.count("accept") / len(drawn) > LIMIT
    assert right.count("accept") / len(drawn) <= LIMIT


@pytest.mark.parametrize(
    ("documents", "uneven"), [(10, 0.0), (20, 0.0), (60, 0.0), (10, 0.7), (20, 0.7)]
)
def test_a_perplexity_exactly_at_the_margin_is_rarely_accepted(documents, uneven):
    cell = operating.Documents(operating.normal, documents, uneven)
    accepted, within = cell.accepted(REPLICATES, cell.max_ratio, seed=1)
    assert accepted <= LIMIT
    assert within > 0.4


def _finding(policy, base, cand):
    first, second = make.variant("base", base), make.variant("cand", cand)
    found = decide(policy, first, second, tasks=(base.record.task,)).findings
    return next(f for f in found if f.rule == "only")


# --------------------------------------------------------------------------- evidence taken away

RULES = "quanteval.rules."
PAIRED = {
    "code": {"_target_": f"{RULES}non_inferiority.NonInferiority", "kind": "code"},
    "prose": {"_target_": f"{RULES}perplexity.PerplexityRatio", "kind": "perplexity", "max_ratio": 1.05},
}  # fmt: skip
OTHERS = {
    "together": {"_target_": f"{RULES}pooled.Pooled", "kind": "code"},
    "distance": {
        "_target_": f"{RULES}divergence.DivergenceBound", "kind": "divergence", "metric": "mean_kl",
        "max": 0.02, "required": True,
    },
    "agreement": {
        "_target_": f"{RULES}divergence.DivergenceBound", "kind": "divergence",
        "metric": "top1_agreement", "min": 0.9, "required": True,
    },
    "status": {"_target_": f"{RULES}guards.SampleStatus", "max_errors": 0.02},
    "finite": {"_target_": f"{RULES}guards.FiniteScores"},
    "length": {"_target_": f"{RULES}guards.OutputLength", "required": True},
}  # fmt: skip


def policy_node(points, *, missing=0.0, method="auto", also=tuple(OTHERS)):
    """Return a policy with required rules on code and prose, and others."""
    rules = {"code": {**PAIRED["code"], "margin": f"{points} points", "method": method}}
    rules["prose"] = PAIRED["prose"]
    rules |= {name: OTHERS[name] for name in also}
    if "together" in rules:
        rules["together"] = {**OTHERS["together"], "margin": f"{points} points"}
    return {"version": 1, "name": "all", "alpha": 0.05, "max_missing": missing, "rules": rules}


FAULTS = ("flips", "flips", "long", "prose", "distance", "agreement")


@st.composite
def sides(draw, faults=(*FAULTS, "error", "nan")):
    """Return two variants' tasks with one fault at most: flips near what a margin allows, or a sample that is off."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    fault, side = draw(st.sampled_from(faults)), draw(st.sampled_from([0, 1]))
    few = fault == "flips"
    n, documents = draw(st.integers(12 if few else 40, 60)), draw(st.integers(10, 14))
    broken, fixed = (draw(st.integers(0, 4 if few else 0)) for _ in range(2))
    values = np.ones((2, n))
    values[1, :broken] = 0
    values[0, broken : broken + fixed] = 0
    tokens, status = np.full(n, 40), ("ok",) * n
    if fault == "nan":
        values[side, -1] = np.nan
    code = [make.scores(values=v) for v in values]
    if fault == "error":
        status = (*status[:-1], "error")
        code[side] = dataclasses.replace(code[side], status=status)
    elif fault == "long":
        tokens[-1] = 4000
        code[side] = dataclasses.replace(code[side], output_tokens=tokens)
    nll = rng.normal(270, 30, documents)
    change = rng.normal(0, 1.0, documents)
    kl, agree = np.full(documents, 0.2), np.full(documents, 97.0)
    if fault == "prose":
        change[-1] += draw(st.sampled_from([20.0, 60.0]))
    elif fault == "distance":
        kl[-1] = draw(st.sampled_from([10.0, 60.0]))
    elif fault == "agreement":
        agree[-1] = 10.0
    same = make.divergence(np.zeros(documents), np.full(documents, 100.0))
    return (
        {"code": code[0], "prose": make.perplexity(nll), "distance": same},
        {
            "code": code[1],
            "prose": make.perplexity(nll + change),
            "distance": make.divergence(kl, agree),
        },
    )


def outcome(node, base, cand):
    policy = load_policy(node)
    first = make.variant("base", *base.values())
    second = make.variant("cand", *cand.values())
    return decide(policy, first, second, tasks=("code", "prose", "distance")).outcome


def without(scores, gone):
    """Return the scores without some of their samples; how many were expected stays."""
    keep = [i for i in range(len(scores.sample_ids)) if i not in gone]
    texts = ("sample_ids", "prompt_sha256", "status", "finish_reason", "outcome", "problem_ids")
    return dataclasses.replace(
        scores,
        **{f: tuple(getattr(scores, f)[i] for i in keep) for f in texts if getattr(scores, f)},
        **{f: getattr(scores, f)[keep] for f in ("value", "weight", "output_tokens")},
        numbers={k: v[keep] for k, v in scores.numbers.items()},
        series={k: tuple(v[i] for i in keep) for k, v in scores.series.items()},
    )


def expecting(scores, fewer):
    record = scores.record
    lowered = {"samples_expected": record.samples_expected - fewer}
    return dataclasses.replace(scores, record=record.model_copy(update=lowered))


SHARES = st.sampled_from([0.0, 0.05, 0.2])


@st.composite
def cases(draw):
    """Return a share of samples that may be missing, and two variants.

    A sample without a finite score is as good as missing: a policy that allows for missing ones has said that there
    may be some, and they count as lost either way. So that fault comes where none may be missing.
    """
    missing = draw(SHARES)
    return missing, draw(sides((*FAULTS, "error")) if missing else sides())


@settings(max_examples=100, deadline=None)
@given(
    case=cases(), points=st.sampled_from([10, 20]), method=st.sampled_from(["auto", "score"]),
    also=st.sets(st.sampled_from(sorted(OTHERS)), max_size=2), side=st.sampled_from([0, 1]),
    task=st.sampled_from(["code", "code", "prose", "distance"]),
    gone=st.sampled_from([{-1}, {0}, {1, -1}]) | st.sets(st.integers(0, 59), min_size=1, max_size=3),
    lowered=st.sampled_from([(), (0,), (1,), (0, 1)]),
)  # fmt: skip
def test_removing_samples_from_one_side_never_makes_an_accept(
    case, points, method, also, side, task, gone, lowered
):
    """Whether or not either side's record owns up to them.

    Removed from both sides alike, with both records changed, they leave a smaller suite like any other: what gives that
    away is the suite's fingerprint and the hash of the journal, which are checked where evidence is read.
    """
    missing, pair = case
    node = policy_node(points, missing=missing, method=method, also=also)
    if outcome(node, *pair) == "accept":
        return
    n = len(pair[side][task].sample_ids)
    gone = {i % n for i in gone}
    edited = [dict(pair[0]), dict(pair[1])]
    edited[side][task] = without(edited[side][task], gone)
    for other in lowered:
        edited[other][task] = expecting(edited[other][task], len(gone))
    assert outcome(node, *edited) != "accept"


@settings(max_examples=25, deadline=None)
@given(
    pair=sides(), missing=SHARES, taken=st.sampled_from([(0,), (1,), (0, 1)]),
    task=st.sampled_from(["code", "prose", "distance"]),
)  # fmt: skip
def test_without_one_of_its_tasks_nothing_is_accepted(pair, missing, taken, task):
    edited = [dict(side) for side in pair]
    for side in taken:
        del edited[side][task]
    assert outcome(policy_node(20, missing=missing), *edited) == "error"


@settings(max_examples=25, deadline=None)
@given(
    pair=sides(), side=st.sampled_from([0, 1]),
    renamed=st.sampled_from([("distance", "top1_agree"), ("prose", "words"), ("prose", "bytes")]),
)  # fmt: skip
def test_renaming_a_number_of_the_samples_never_makes_an_accept(pair, side, renamed):
    node, (task, key) = policy_node(20), renamed
    if outcome(node, *pair) == "accept" and (side, key) != (1, "top1_agree"):
        return
    edited = [dict(pair[0]), dict(pair[1])]
    numbers = {k + "x" if k == key else k: v for k, v in edited[side][task].numbers.items()}
    edited[side][task] = dataclasses.replace(edited[side][task], numbers=numbers)
    assert outcome(node, *edited) != "accept"


def keys_of(node, path=()):
    """Yield the path of every key of a policy but the names of its rules, which are free."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if path != ("rules",) and isinstance(key, str):
            yield (*path, key)
        if isinstance(value, dict | list):
            yield from keys_of(value, (*path, key))


WHOLE = policy_node(20) | {
    "max_missing": 0.01,
    "sequential": {"method": "betting", "looks": 4, "seed": 1},
    "waivers": [{"rule": "code", "owner": "o", "reason": "r", "until": "2999-01-01", "task": "t", "candidate": "c"}],
}  # fmt: skip
WHOLE["rules"]["code"]["margin"] = {"relative": 0.01, "min_baseline": 0.3}
WHOLE["rules"]["worth"] = {
    "_target_": f"{RULES}worth_it.WorthIt",
    "benefits": [{"metric": "weight_memory_bytes", "max_ratio": 0.75}],
}


@pytest.mark.parametrize("path", list(keys_of(WHOLE)), ids=lambda path: ".".join(map(str, path)))
@pytest.mark.parametrize("change", ["x", "_", ""])
def test_renaming_any_key_of_a_policy_is_an_error(path, change):
    """Spelt longer, spelt shorter, also deep inside: nothing falls back to a default unnoticed."""
    node = copy.deepcopy(WHOLE)
    load_policy(node)
    inner = node
    for step in path[:-1]:
        inner = inner[step]
    key = path[-1]
    inner[key + change if change else key[:-1]] = inner.pop(key)
    with pytest.raises(ConfigError):
        load_policy(node)


@pytest.mark.parametrize("problems", [52, 54, 59, 133])
def test_removing_a_sample_does_not_change_the_test_to_a_kinder_one(problems):
    """One sample of ten missing makes a problem a fraction, which must not be judged by a rougher test."""
    ids = tuple(f"problem {i}" for i in range(problems) for _ in range(10))
    whole = make.scores(values=np.ones(10 * problems), problem_ids=ids)
    node = policy_node(5, missing=0.01, also=())
    node["rules"] = {"code": node["rules"]["code"]}
    lacking = without(whole, {7})
    policy = load_policy(node)

    def answer(cand):
        pair = (make.variant("base", whole), make.variant("cand", cand))
        return decide(policy, *pair, tasks=("code",)).outcome

    if answer(whole) != "accept":
        assert answer(lacking) != "accept"

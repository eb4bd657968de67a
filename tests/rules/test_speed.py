"""Speed over interleaved rounds and latency limits: outcomes, refusals, and how often they err."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quanteval.errors import ConfigError
from quanteval.evidence import RuleContext
from quanteval.rules.speed import LatencyLimit, Speed, interleaving
from quanteval.stats import (
    clopper_pearson_bound,
    early_stopping_queries,
    quantile_ratio,
    throughput_ratio,
)
from quanteval.targets import build
from tests.gate import evidence as make
from tests.gate.rounds import in_rounds, rate, requests, stage

ALPHA = 0.05
BASE = (100.0, 102.0, 98.0, 101.0, 99.0)


def one(rule, base, cand, alpha=ALPHA):
    (finding,) = rule.check("speed", base, cand, RuleContext(alpha))
    return finding


def rates(factor=1.0, name="cand", values=BASE, **more):
    return in_rounds(name, [rate(factor * value) for value in values], **more)


def spread(rng, *, n=60, rounds=5, factor=1.0, round_sd=0.05, sd=0.3, median=0.1):
    """Return rounds of log-normal TTFTs that share an effect of their round."""
    return [
        factor * median * np.exp(rng.normal(0, round_sd) + rng.normal(0, sd, n))
        for _ in range(rounds)
    ]


def latencies(name, rounds, **more):
    return in_rounds(name, [requests([float(x) for x in group]) for group in rounds], **more)


# --------------------------------------------------------------------------- rates


@pytest.mark.parametrize("metric", ["output_tps", "request_rate", "stream_tps"])
@pytest.mark.parametrize(
    ("factor", "outcome", "says"),
    [
        (1.4, "accept", "(1.40x, 5 rounds each, at least 1.37x with 95 % confidence): meets"),
        (1.0, "reject", "(1.00x, 5 rounds each, at most 1.02x with 95 % confidence): misses"),
        (
            1.2,
            "inconclusive",
            "between 1.18x and 1.22x with 95 % confidence each): undecided whether it is",
        ),
    ],
)
def test_rates_are_compared_over_rounds(metric, factor, outcome, says):
    finding = one(Speed(metric, min_ratio=1.2), rates(name="base"), rates(factor))
    assert finding.outcome == outcome
    assert finding.sentence.startswith(f"{metric} at single_stream ")
    assert says in finding.sentence
    assert "at least 1.2x" in finding.sentence


def test_a_finding_of_a_rate_has_the_figures_of_welchs_test():
    cand_values = [120.0, 125.0, 118.0, 122.0, 121.0]
    base, cand = rates(name="base"), rates(values=cand_values)
    finding = one(Speed("output_tps", min_ratio=1.1, alpha=0.01, required=True), base, cand)
    wanted = throughput_ratio(BASE, cand_values, 0.01)
    assert finding.estimate == pytest.approx(wanted.ratio)
    assert (finding.lower, finding.upper) == pytest.approx((wanted.lower, wanted.upper))
    assert (finding.n, finding.margin, finding.unit) == (5, 1.1, "ratio")
    assert (finding.required, finding.confidence) == (True, 0.99)
    assert finding.baseline_value == pytest.approx(float(np.exp(np.log(BASE).mean())))
    assert finding.candidate_value == pytest.approx(float(np.exp(np.log(cand_values).mean())))
    assert finding.method == "Welch's t on logarithms over rounds"
    assert finding.sentence == (
        "output_tps at single_stream 99.99 -> 121.2 tokens/s (1.21x, 5 rounds each, at least 1.17x with "
        "99 % confidence): meets at least 1.1x"
    )


def test_fast_rates_are_shown_without_an_exponent():
    finding = one(Speed("output_tps", min_ratio=1.1), rates(200, "base"), rates(400))
    assert "at single_stream 19998 -> 39996 tokens/s (2.00x" in finding.sentence


def test_repetitions_of_a_round_are_no_replicates():
    """Two repetitions a round leave as many rounds as there are, and change each round's value only."""
    again = [
        trace.model_copy(update={"repetition": i})
        for i, tps in enumerate((90.0, 110.0))
        for trace in rate(tps)
    ]
    base = in_rounds("base", [again] * 4)
    finding = one(Speed("output_tps", min_ratio=0.5), base, rates(values=BASE[:4]))
    assert finding.n == 4
    assert finding.baseline_value == pytest.approx(12 / (6 / 90 + 6 / 110))


def test_rates_are_taken_where_the_baseline_is_fastest_and_both_were_measured():
    def at(name, points):
        groups = [[t for p, tps in points.items() for t in rate(tps * x, p)] for x in (1, 1.02, 1)]
        return in_rounds(name, groups)

    base = at("base", {"single_stream": 50.0, "closed_loop_4": 150.0, "closed_loop_8": 400.0})
    slow = at("cand", {"single_stream": 100.0, "closed_loop_4": 100.0, "closed_loop_9": 900.0})
    rule = Speed("output_tps", min_ratio=1.2)
    finding = one(rule, base, slow)
    assert finding.outcome == "reject"
    assert finding.sentence.startswith("output_tps at closed_loop_4 151 -> 100.7 tokens/s")
    single = Speed("output_tps", min_ratio=1.2, load_point="single_stream")
    assert one(single, base, slow).outcome == "accept"
    assert "at single_stream 50.33" in one(Speed("stream_tps", min_ratio=1.2), base, slow).sentence
    other = one(Speed("output_tps", min_ratio=1, load_point="closed_loop_8"), base, slow)
    assert other.sentence == "output_tps at closed_loop_8 of cand was not measured"
    alone = at("cand", {"closed_loop_9": 900.0})
    assert one(rule, base, alone).outcome == "skipped"


# --------------------------------------------------------------------------- latency quantiles


@pytest.mark.parametrize("metric", ["ttft_p50_s", "ttft_p95_s", "ttft_p99_s"])
@pytest.mark.parametrize(
    ("factor", "outcome"), [(0.6, "accept"), (3.0, "reject"), (1.3, "inconclusive")]
)
def test_latency_quantiles_are_compared(metric, factor, outcome):
    rng = np.random.default_rng(3)
    base, cand = spread(rng), spread(rng, factor=factor)
    finding = one(Speed(metric, max_ratio=1.3), latencies("base", base), latencies("cand", cand))
    assert finding.outcome == outcome
    assert "at most 1.3x" in finding.sentence
    q = int(metric[6:8]) / 100
    pooled = quantile_ratio(np.concatenate(base), np.concatenate(cand), q, ALPHA)
    welch = throughput_ratio([np.quantile(x, q) for x in base], [np.quantile(x, q) for x in cand])
    assert finding.lower == pytest.approx(min(pooled.lower, welch.lower))
    assert finding.upper == pytest.approx(max(pooled.upper, welch.upper))
    assert finding.candidate_value == pytest.approx(np.quantile(np.concatenate(cand), q))
    assert finding.estimate == pytest.approx(finding.candidate_value / finding.baseline_value)


def test_either_bound_can_be_the_wider():
    """Rounds that differ widen Welch's bound, requests that differ the pooled one."""
    rule = Speed("ttft_p95_s", max_ratio=1.3)
    drifting = np.geomspace(0.5, 2, 5)
    steady_rounds = [np.linspace(0.1, 0.2, 60) * x for x in np.linspace(0.999, 1.001, 5)]
    moving = [np.linspace(0.1, 0.1001, 60) * x for x in drifting]
    for rounds, wider in ((steady_rounds, "pooled"), (moving, "welch")):
        finding = one(rule, latencies("base", rounds), latencies("cand", rounds))
        per_round = [np.quantile(x, 0.95) for x in rounds]
        bounds = {
            "pooled": quantile_ratio(np.concatenate(rounds), np.concatenate(rounds), 0.95).upper,
            "welch": throughput_ratio(per_round, per_round).upper,
        }
        assert max(bounds, key=bounds.get) == wider
        assert finding.upper == pytest.approx(bounds[wider])


@pytest.mark.parametrize("metric", ["tpot_p95_s", "e2e_p95_s"])
def test_tpot_and_e2e_are_those_of_the_requests(metric):
    gaps = [float(x) for x in np.linspace(0.02, 0.04, 60)]
    base = in_rounds("base", [requests([0.1] * 60, gaps)] * 5)
    cand = in_rounds("cand", [requests([0.1] * 60, [2 * gap for gap in gaps])] * 5)
    finding = one(Speed(metric, max_ratio=1.9), base, cand)
    added = 0.1 if metric.startswith("e2e") else 0.0
    assert finding.baseline_value == pytest.approx(added + np.quantile(gaps * 5, 0.95))
    assert finding.candidate_value == pytest.approx(added + 2 * np.quantile(gaps * 5, 0.95))


@pytest.mark.parametrize(
    ("metric", "n", "needed"),
    [("ttft_p99_s", 298, 299), ("ttft_p95_s", 58, 59), ("ttft_p50_s", 4, 5)],
)
def test_quantiles_of_too_few_requests_are_refused(metric, n, needed):
    rng = np.random.default_rng(1)
    few = np.array_split(0.1 * np.exp(rng.normal(0, 0.1, n)), min(3, n))
    enough = np.array_split(0.1 * np.exp(rng.normal(0, 0.1, needed)), min(3, n))
    rule = Speed(metric, max_ratio=10)
    for base, cand in ((few, enough), (enough, few)):
        finding = one(rule, latencies("base", base), latencies("cand", cand))
        counts = f"{sum(map(len, base))} and {sum(map(len, cand))} steady requests"
        assert finding.outcome == "inconclusive"
        assert f"{counts}, at least {needed} each needed for 95 % confidence" in finding.sentence
        assert finding.lower is finding.upper is None
        assert "bench_rounds" not in finding.sentence
    assert one(rule, latencies("base", enough), latencies("cand", enough)).outcome == "accept"


def test_a_stricter_level_needs_more_requests():
    rng = np.random.default_rng(1)
    base, cand = (latencies(name, spread(rng)) for name in ("base", "cand"))
    finding = one(Speed("ttft_p99_s", max_ratio=5, alpha=0.01), base, cand)
    assert "300 and 300 steady requests, at least 459 each needed for 99 %" in finding.sentence


# --------------------------------------------------------------------------- taking turns


def test_single_runs_are_indicative():
    base, cand = make.variant("base", traces=rate(100.0)), make.variant("cand", traces=rate(300.0))
    for required in (True, False):
        finding = one(Speed("stream_tps", min_ratio=1.2, required=required), base, cand)
        assert finding.outcome == "inconclusive"
        assert finding.sentence == (
            "stream_tps at single_stream 100 -> 300 tokens/s (3.00x, indicative: one run each, not interleaved): "
            "undecided whether it is at least 1.2x; run with runtime.bench_rounds=5"
        )
        assert (finding.n, finding.estimate) == (1, pytest.approx(3.0))
        assert finding.lower is finding.upper is finding.confidence is None


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_two_rounds_decide_nothing(factor):
    base, cand = rates(name="base", values=BASE[:2]), rates(factor, values=BASE[:2])
    finding = one(Speed("output_tps", min_ratio=1.0), base, cand)
    assert finding.outcome == "inconclusive"
    assert "indicative: 2 of at least 3 rounds" in finding.sentence
    assert finding.sentence.endswith("run with runtime.bench_rounds=5")
    assert (
        one(Speed("output_tps", min_ratio=1.0, min_rounds=2), base, cand).outcome != "inconclusive"
    )


def started(base_starts, cand_starts):
    n, m = len(base_starts), len(cand_starts)
    return (
        in_rounds("base", [rate(100.0)] * n, base_starts),
        in_rounds("cand", [rate(100.0)] * m, cand_starts),
    )


@pytest.mark.parametrize(
    ("base_starts", "cand_starts", "reason"),
    [
        ([1, 3, 5], [2, 4, 6], ""),
        ([2, 4, 6], [1, 3, 5], ""),
        ([1, 4, 5], [2, 3, 6], ""),
        ([5, 1, 3], [6, 2, 4], ""),
        ([1, 2, 3], [4, 5, 6], "round 1 of base was followed by round 2 of base"),
        ([1, 3, 4], [2, 5, 6], "round 2 of base was followed by round 3 of base"),
        ([1, 3, 5], [4, 2, 6], "round 1 of base was followed by round 2 of cand"),
        ([1, 3, 5], [1, 4, 6], "round 1 of base began with round 1 of cand"),
        ([1, 3, 5], [2, 4], "not the same rounds: base has rounds 1, 2, 3, cand has rounds 1, 2"),
        ([1, 3, 5], [2, 4, 0], "when round 3 of cand began is not recorded"),
        ([1, 3, math.nan], [2, 4, 6], "when round 3 of base began is not recorded"),
    ],
)
def test_rounds_take_turns(base_starts, cand_starts, reason):
    base, cand = started(base_starts, cand_starts)
    assert interleaving(base, cand) == reason
    finding = one(Speed("output_tps", min_ratio=0.5), base, cand)
    assert finding.outcome == ("inconclusive" if reason else "accept")
    assert not reason or f"indicative: {reason}" in finding.sentence


@given(st.permutations(range(6)), st.lists(st.booleans(), min_size=6, max_size=6))
@settings(deadline=None)
def test_rounds_in_pairs_take_turns_in_any_order_and_no_others_do(order, swapped):
    base_starts, cand_starts = [0.0] * 6, [0.0] * 6
    for place, number in enumerate(order):
        first, second = 1 + 2 * place, 2 + 2 * place
        late = swapped[place]
        base_starts[number], cand_starts[number] = (second, first) if late else (first, second)
    assert interleaving(*started(base_starts, cand_starts)) == ""
    base_starts[order[0]], base_starts[order[1]] = base_starts[order[1]], base_starts[order[0]]
    assert interleaving(*started(base_starts, cand_starts)) != ""


def test_rounds_of_another_run_and_unfinished_ones_do_not_count():
    base, cand = rates(name="base"), rates()
    cand.result.stages["bench:2"] = stage("bench:2", 1030.0, reused_from="/runs/earlier")
    assert interleaving(base, cand) == "round 2 of cand was measured in another run"
    del cand.result.stages["bench:2"]
    assert interleaving(base, cand) == "round 2 of cand was not finished"
    assert one(Speed("output_tps", min_ratio=0.1), base, cand).outcome == "inconclusive"
    single = make.variant("cand", traces=rate(100.0))
    assert interleaving(base, single) == "cand was measured without rounds"
    assert one(Speed("output_tps", min_ratio=0.1), base, single).outcome == "inconclusive"


# --------------------------------------------------------------------------- unusable evidence


@pytest.mark.parametrize("metric", ["output_tps", "request_rate", "stream_tps", "ttft_p50_s"])
@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("status", ["error", "timeout", "out_of_memory", "cancelled"])
def test_the_survivors_of_a_failing_server_are_not_compared(metric, required, status):
    limit = {"max_ratio": 100} if metric.endswith("_s") else {"min_ratio": 0.01}
    rule = Speed(metric, **limit, required=required)
    broken = [rate(x) for x in BASE]
    broken[3][1] = broken[3][1].model_copy(update={"status": status})
    for base, cand in (
        (rates(name="base"), in_rounds("cand", broken)),
        (in_rounds("base", broken), rates()),
    ):
        finding = one(rule, base, cand)
        assert finding.outcome == "invalid"
        assert "says nothing: 1 of its requests failed" in finding.sentence


@pytest.mark.parametrize("bad", [0.0, math.nan])
def test_times_that_are_none_are_not_compared(bad):
    good = requests([0.1] * 5)
    chunks = [good[2].sent_s + bad, good[2].sent_s + 0.11]
    odd = [*good[:2], good[2].model_copy(update={"chunk_times_s": chunks}), *good[3:]]
    base, cand = in_rounds("base", [good] * 3), in_rounds("cand", [good, odd, good])
    finding = one(Speed("ttft_p50_s", max_ratio=2), base, cand)
    assert finding.outcome == "invalid"
    assert finding.sentence == f"ttft_p50_s at single_stream of cand says nothing: it is {bad:g}"
    limit = one(LatencyLimit("ttft", 1.0), base, cand)
    assert limit.outcome == "invalid"


@pytest.mark.parametrize("metric", ["output_tps", "ttft_p50_s", "e2e_p95_s"])
def test_a_round_without_requests_is_found_out(metric):
    limit = {"max_ratio": 100} if metric.endswith("_s") else {"min_ratio": 0.01}
    cand = in_rounds("cand", [rate(100.0), [], rate(100.0), rate(100.0)])
    finding = one(Speed(metric, **limit), rates(name="base", values=BASE[:4]), cand)
    assert finding.outcome == "invalid"
    assert "it has no value in round 2" in finding.sentence


@pytest.mark.parametrize("metric", ["output_tps", "stream_tps", "ttft_p50_s"])
def test_what_was_not_measured_never_passes(metric):
    limit = {"max_ratio": 100} if metric.endswith("_s") else {"min_ratio": 0.01}
    nothing = make.variant("cand", traces=[])
    for required, outcome in ((True, "invalid"), (False, "skipped")):
        rule = Speed(metric, **limit, required=required)
        for base, cand in ((rates(name="base"), nothing), (nothing, rates())):
            finding = one(rule, base, cand)
            assert finding.outcome == outcome
            assert "was not measured" in finding.sentence


# --------------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"metric": "output_tps"}, "exactly one"),
        ({"metric": "output_tps", "min_ratio": 1.0, "max_ratio": 1.0}, "exactly one"),
        ({"metric": "output_tps", "max_ratio": 1.0}, "more is better, give min_ratio"),
        ({"metric": "ttft_p50_s", "min_ratio": 1.0}, "less is better, give max_ratio"),
        ({"metric": "ttft_p50_s", "max_ratio": 0.0}, 'limit "0.0" must be positive'),
        ({"metric": "ttft_p50_s", "max_ratio": math.nan}, 'limit "nan" must be positive'),
        ({"metric": "ttft_p50_s", "max_ratio": 1.0, "alpha": 0.5}, 'alpha "0.5"'),
        ({"metric": "ttft_p50_s", "max_ratio": 1.0, "min_rounds": 1}, 'min_rounds "1"'),
    ],
)
def test_wrong_parameters_of_speed_are_named(fields, match):
    with pytest.raises(ConfigError, match=match):
        build({"_target_": "quanteval.rules.speed.Speed", **fields}, where="gate.rules.speed")


def test_an_unknown_metric_is_named():
    node = {"_target_": "quanteval.rules.speed.Speed", "metric": "tokens", "min_ratio": 1}
    with pytest.raises(ConfigError, match=r'gate\.rules\.speed\.metric: "tokens" is not valid'):
        build(node, where="gate.rules.speed")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"limit_s": math.nan}, 'limit_s "nan"'),
        ({"limit_s": 0.0}, 'limit_s "0.0"'),
        ({"limit_s": 1.0, "percentile": 1.0}, 'percentile "1.0"'),
        ({"limit_s": 1.0, "confidence": 0.5}, 'confidence "0.5"'),
    ],
)
def test_wrong_parameters_of_a_limit_are_named(fields, match):
    with pytest.raises(ValueError, match=match):
        LatencyLimit("ttft", **fields)


# --------------------------------------------------------------------------- absolute limits


def missing(n, misses, failed=0):
    """Return a candidate with n requests, of which so many are slow and others failed."""
    found = requests([0.9] * misses + [0.1] * (n - misses))
    lost = [t.model_copy(update={"status": "error"}) for t in found[n - failed :]]
    return make.variant("cand", traces=[*found[: n - failed], *lost])


@pytest.mark.parametrize(
    ("n", "misses", "outcome"),
    [
        (459, 0, "accept"), (458, 0, "inconclusive"), (662, 1, "accept"), (661, 1, "inconclusive"),
        (1307, 5, "accept"), (1306, 5, "inconclusive"), (100, 5, "reject"), (5, 1, "inconclusive"),
        (5, 5, "reject"),
    ],
)  # fmt: skip
def test_misses_are_counted(n, misses, outcome):
    finding = one(LatencyLimit("ttft", 0.5), make.variant("base"), missing(n, misses))
    assert finding.outcome == outcome
    assert (finding.n, finding.estimate) == (n, pytest.approx(misses / n))
    assert finding.sentence.startswith(
        f"ttft at single_stream of cand: {misses} of {n} requests missed 0.5 s, "
    )
    needed = early_stopping_queries(misses, 0.99)
    assert finding.n_needed == (needed if outcome == "inconclusive" else None)
    assert outcome != "inconclusive" or f"{needed} requests would decide" in finding.sentence
    assert finding.lower == clopper_pearson_bound(misses, n, 1 - 0.99, "lower")


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 400),
    st.integers(0, 20),
    st.sampled_from([0.5, 0.9, 0.95]),
    st.sampled_from([0.9, 0.95, 0.99]),
)
def test_the_counts_agree_with_the_exact_bounds(n, misses, percentile, confidence):
    misses = min(n, misses)
    rule = LatencyLimit("e2e", 0.5, percentile, confidence=confidence)
    finding = one(rule, make.variant("base"), missing(n, misses))
    upper = clopper_pearson_bound(misses, n, 1 - confidence, "upper")
    if abs(upper - (1 - percentile)) > 1e-9:
        assert (finding.outcome == "accept") == (upper < 1 - percentile)
    assert (finding.outcome == "reject") == (finding.lower > 1 - percentile)


def test_a_failed_request_is_a_miss():
    rule = LatencyLimit("ttft", 0.5)
    finding = one(rule, make.variant("base"), missing(500, 0, failed=1))
    assert finding.outcome == "inconclusive"
    assert "1 of 500 requests missed 0.5 s (1 failed)" in finding.sentence
    lost = one(rule, make.variant("base"), missing(30, 0, failed=30))
    assert (lost.outcome, lost.estimate, lost.candidate_value) == ("reject", 1.0, None)


def test_a_limit_takes_the_requests_of_every_round_in_whatever_order():
    cand = in_rounds("cand", [requests([0.1] * 100)] * 5, [1, 2, 3, 4, 5])
    finding = one(LatencyLimit("ttft", 0.5, required=True), make.variant("base"), cand)
    assert (finding.outcome, finding.n) == ("accept", 500)
    assert finding.sentence.endswith("shown to be at most 1 % with 99 % confidence")


@pytest.mark.parametrize(("required", "outcome"), [(True, "invalid"), (False, "skipped")])
def test_a_limit_on_what_was_not_measured_never_passes(required, outcome):
    base = make.variant("base")
    nothing = make.variant("cand", traces=[])
    assert one(LatencyLimit("ttft", 1.0, required=required), base, nothing).outcome == outcome
    rule = LatencyLimit("ttft", 1.0, load_point="closed_loop_8", required=required)
    assert one(rule, base, missing(1000, 0)).outcome == outcome
    single_chunks = [
        t.model_copy(update={"chunk_times_s": t.chunk_times_s[:1], "chunk_tokens": [2]})
        for t in requests([0.1] * 9)
    ]
    whole = make.variant("cand", traces=single_chunks)
    assert one(LatencyLimit("tpot", 1.0, required=required), base, whole).outcome == outcome


# --------------------------------------------------------------------------- how often they err


@pytest.mark.parametrize("metric", ["ttft_p50_s", "ttft_p95_s", "ttft_p99_s"])
def test_latencies_on_the_limit_are_seldom_accepted(metric):
    """5 rounds of 60 log-normal requests with an effect of the round: at most 5 % may be accepted, within 3 sd."""
    rng, sims, accepted = np.random.default_rng(int(metric[6:8])), 100, 0
    rule = Speed(metric, max_ratio=1.1)
    for _ in range(sims):
        base, cand = spread(rng, round_sd=0.1), spread(rng, round_sd=0.1, factor=1.1)
        finding = one(rule, latencies("base", base), latencies("cand", cand))
        accepted += finding.outcome == "accept"
    assert accepted <= sims * ALPHA + 3 * math.sqrt(sims * ALPHA * (1 - ALPHA))


def test_rates_on_the_limit_are_accepted_and_rejected_at_the_level():
    """5 rounds an arm, 3 % spread: 5 % on either side, within 3 sd."""
    rng, sims = np.random.default_rng(5), 250
    rule = Speed("output_tps", min_ratio=1.2, load_point="single_stream")
    outcomes = []
    for _ in range(sims):
        base = rates(name="base", values=100 * np.exp(rng.normal(0, 0.03, 5)))
        cand = rates(values=120 * np.exp(rng.normal(0, 0.03, 5)))
        outcomes.append(one(rule, base, cand).outcome)
    reach = 3 * math.sqrt(sims * ALPHA * (1 - ALPHA))
    for outcome in ("accept", "reject"):
        assert abs(outcomes.count(outcome) - sims * ALPHA) <= reach

"""Drift between two runs of a variant: what is flagged, what noise explains, and what is never taken for "no drift"."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from quanteval.metrics.drift import Smallest, drift, summary
from quanteval.metrics.drift_bands import worth
from tests.gate import evidence as make
from tests.report.load_evidence import loaded_variant, open_point

FEW = {"rates": (1, 2), "seconds": 200.0}


def rows(found, flag):
    return {(row.metric, row.where) for row in found.rows if row.flag == flag}


def row(found, metric, where=""):
    (one,) = [r for r in found.rows if (r.metric, r.where) == (metric, where)]
    return one


@pytest.fixture(scope="module")
def stored():
    return loaded_variant("v", sets=(make.scores(values=[1] * 100 + [0] * 100),), **FEW)


def test_a_run_against_itself_has_not_drifted(stored):
    found = drift(stored, stored)
    assert not found.drifted
    assert not found.better
    assert not found.conditions
    assert found.exit_code == 0
    assert all(r.change in (None, 0.0) for r in found.rows)
    assert "within their noise band" in summary(found)[0]


def test_two_runs_that_differ_by_chance_alone_do_not_drift(stored):
    for seed in (1, 2, 3, 4):
        points = [open_point(rate, seed=seed, seconds=200.0) for rate in (1, 2)]
        other = loaded_variant("v", rates=(), points=points)
        found = drift(replace(stored, scores={}), other)
        assert not found.drifted, [(r.metric, r.where, r.change) for r in found.drifted]
        assert not found.better


def test_a_slower_decode_is_flagged_with_its_band(stored):
    points = [open_point(rate, gap_s=0.02, seconds=200.0) for rate in (1, 2)]
    found = drift(stored, loaded_variant("v", rates=(), points=points, sets=stored.scores.values()))
    assert {("TPOT p50", "open_loop_2"), ("ITL p50", "open_loop_2")} <= rows(found, "drift")
    assert ("TTFT p50", "open_loop_2") not in rows(found, "drift")
    one = row(found, "TPOT p50", "open_loop_2")
    assert one.change == pytest.approx(1, abs=1e-6)
    assert 0 < one.lower <= one.change
    assert one.band[0] < one.stored < one.band[1] < one.fresh
    assert found.exit_code == 3
    back = drift(
        loaded_variant("v", rates=(), points=points), replace(stored, scores={}, memory=None)
    )
    assert ("TPOT p50", "open_loop_2") in rows(back, "better")


def test_a_change_that_is_sure_and_small_is_within_the_band(stored):
    points = [open_point(rate, gap_s=0.0105, seconds=200.0) for rate in (1, 2)]
    other = loaded_variant("v", rates=(), points=points, sets=stored.scores.values())
    assert not drift(stored, other).drifted
    assert drift(stored, other, smallest=Smallest(latency=0.01)).drifted


def test_lost_samples_are_flagged_in_pairs_and_a_single_one_is_not(stored):
    for lost, flagged in ((1, False), (30, True)):
        values = [0] * lost + [1] * (100 - lost) + [0] * 100
        other = replace(stored, scores={"code": make.scores(values=values)})
        found = drift(stored, other)
        assert (("pass@1", "code") in rows(found, "drift")) is flagged
    one = row(found, "pass@1", "code")
    assert one.change == pytest.approx(-0.15)
    assert (one.n_stored, one.method) == (200, "score interval over pairs")


def test_perplexity_is_compared_as_a_ratio_of_pairs():
    nll = np.linspace(200, 300, 40)
    a, b = (make.variant("v", make.perplexity(nll + rise)) for rise in (0.0, 20.0))
    one = row(drift(a, b), "token perplexity", "prose")
    assert one.flag == "drift"
    assert one.change == pytest.approx(math.exp(0.2) - 1)


def test_memory_has_the_smallest_change_as_its_band():
    a = make.variant("v")
    peak = a.memory.process_peak_bytes
    for factor, flag in ((1.04, "within"), (1.06, "drift"), (0.9, "better")):
        memory = a.memory.model_copy(update={"process_peak_bytes": int(peak * factor)})
        assert row(drift(a, replace(a, memory=memory)), "peak while serving").flag == flag


def test_failures_are_flagged_even_when_nothing_else_can_be(stored):
    nothing = {"status": "error", "chunk_times_s": [], "chunk_tokens": []}
    dead = [trace.model_copy(update=nothing) for trace in stored.traces]
    found = drift(stored, replace(stored, traces=dead))
    assert ("error rate", "open_loop_2") in rows(found, "drift")
    assert ("output tokens/s", "open_loop_2") in rows(found, "drift")
    assert row(found, "TTFT p50", "open_loop_2").flag == "unknown"
    assert found.exit_code == 3


def test_what_the_fresh_run_lacks_is_missing_and_never_passes(stored):
    result = stored.result.model_copy(update={"status": "failed", "reason": "it died"})
    empty = replace(stored, traces=[], load_points=[], scores={}, memory=None, result=result)
    found = drift(stored, empty)
    assert rows(found, "missing") == {
        ("status", ""), ("load point", "open_loop_1"), ("load point", "open_loop_2"), ("task", "code"),
        ("memory", ""),
    }  # fmt: skip
    assert found.exit_code == 4
    assert drift(empty, empty).exit_code == 4


def test_unlike_conditions_are_named_and_no_drift(stored):
    conditions = {**stored.result.comparable, "cpu": "Another CPU", "packages": {"torch": "3"}}
    result = stored.result.model_copy(update={"comparable": conditions})
    points = [open_point(rate, gap_s=0.02, seconds=200.0) for rate in (1, 2)]
    other = replace(loaded_variant("v", rates=(), points=points), result=result)
    found = drift(stored, other)
    assert not found.drifted
    assert ("TPOT p50", "open_loop_2") in rows(found, "unlike")
    assert "cpu (A CPU and Another CPU)" in found.conditions
    assert found.exit_code == 5


def test_another_suite_is_not_judged():
    a = make.variant("v", make.scores())
    record = a.scores["code"].record.model_copy(update={"fingerprint": "other"})
    b = replace(a, scores={"code": replace(a.scores["code"], record=record)})
    one = row(drift(a, b), "pass@1", "code")
    assert (one.flag, one.reason) == ("unknown", "not the same suite or prompts")


def test_repetitions_carry_the_noise_between_processes():
    def run(scale):
        points = []
        for n, gap in enumerate((0.01, 0.012, 0.014)):
            traces, told = open_point(2, gap_s=gap * scale, seconds=150.0, repetition=n)
            points.append(([t.model_copy(update={"repetition": n}) for t in traces], told))
        return loaded_variant("v", rates=(), points=points)

    found = drift(run(1), run(1.15))
    assert "Welch's t over runs" in row(found, "TPOT p50", "open_loop_2").method
    assert not found.drifted


def test_requests_that_wait_for_each_other_are_worth_fewer():
    rng = np.random.default_rng(0)
    alone = rng.exponential(size=400)
    assert worth([alone], 0.5) > 200
    waiting = np.repeat(rng.exponential(size=20), 20)
    assert worth([waiting], 0.5) < 60

"""No retry until green: a second run of the same question adds its samples to the first one's."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import numpy as np
import pytest

from quanteval.attempts import Attempt, others, question, remember, with_earlier
from quanteval.errors import EvidenceError
from quanteval.gate import decide
from quanteval.judge import gate_pair
from quanteval.policy import load_policy
from quanteval.records import Manifest, Score, SequentialLook, StageRecord, TaskRecord
from quanteval.store import RunDirectory, load_evidence, write_atomic, write_record
from tests.gate import evidence as make

CODE = "quanteval.rules.non_inferiority.NonInferiority"
POLICY = load_policy(
    {"rules": {"code": {"_target_": CODE, "kind": "code", "margin": {"absolute": 0.05}}}}
)
CONDITIONS = {"model_weights": "d", "device": "cpu", "engine": {"_target_": "e", "rows": 8}}


def stored(
    folder, base, cand, *, created="2026-01-01", comparable=CONDITIONS, sequential=None, errors=0
):
    """Write a run of two variants with these scores, and return it as an attempt."""
    run = RunDirectory(folder)
    write_record(
        run.manifest,
        Manifest(
            run_id=folder.name, created_at=created, command=[], config={}, baseline="base",
            variants=["base", "cand"], tasks=["code"], policy_name="p", policy={}, environment={},
            fingerprint="f",
        ),
    )  # fmt: skip
    for name, values in (("base", base), ("cand", cand)):
        place = run.variant(name)
        lines = [
            Score(
                sample_id=f"s{i}", prompt_sha256=f"p{i}", value=value, weight=1, finish_reason="stop",
                status="error" if i < errors and name == "cand" else "ok", output_tokens=9,
                detail=folder.name,
            ).model_dump_json()
            for i, value in enumerate(values)
        ]  # fmt: skip
        raw = "".join(line + "\n" for line in lines)
        write_atomic(place.scores("code"), raw)
        record = TaskRecord(
            task="code", kind="code", suite_version="1", fingerprint="suite", inputs={"version": "1"},
            status="complete", samples_expected=len(values),
            journal_sha256=hashlib.sha256(raw.encode()).hexdigest(),
            sequential=sequential if name == "cand" else None,
        )  # fmt: skip
        write_record(place.task_record("code"), record)
        stage = {"artifact": name}
        result = make.variant(name).result.model_copy(
            update={
                "comparable": comparable,
                "stages": {
                    part: StageRecord(name=part, fingerprint="s", inputs=stage, finished_at="", elapsed_s=1)
                    for part in ("artifact", "task:code")
                },
            }
        )  # fmt: skip
        write_record(place.result, result)
    return Attempt(run, load_evidence(run, "base"), load_evidence(run, "cand"))


def flips(n, broken):
    base, cand = np.ones(n), np.ones(n)
    cand[:broken] = 0
    return base, cand


def verdict(attempt):
    judged = with_earlier(attempt)
    return decide(POLICY, judged.baseline, judged.candidate, tasks=["code"])


def test_a_lucky_second_run_is_averaged_with_the_first(tmp_path):
    bad = stored(tmp_path / "bad", *flips(164, 12))
    remember(bad)
    assert verdict(bad).outcome != "accept"
    lucky = stored(tmp_path / "lucky", *flips(164, 2), created="2026-02-01")
    alone = decide(POLICY, lucky.baseline, lucky.candidate, tasks=["code"])
    assert alone.outcome == "accept"
    remember(lucky)
    together = verdict(lucky)
    assert together.outcome != "accept"
    (finding,) = [f for f in together.findings if f.rule == "code"]
    assert finding.n == 164
    assert finding.estimate == pytest.approx(7 / 164)
    assert "n=164 problems, 328 samples" in finding.sentence
    # The order of the runs does not matter: the first one is judged by all samples too.
    assert verdict(bad).outcome == together.outcome


def test_batch_size_and_seed_are_not_part_of_the_question_but_schemes_and_engines_are():
    base, cand = make.variant("base"), make.variant("cand")

    def asked(**conditions):
        result = cand.result.model_copy(update={"comparable": {**CONDITIONS, **conditions}})
        return question(base, dataclasses.replace(cand, result=result))

    same = asked()
    for engine in (
        {"_target_": "e", "rows": 3}, {"_target_": "e", "rows": 8.0}, {"_target_": "e", "rows": "8"},
        {"_target_": "e"}, {"_target_": "e", "rows": 8, "max_context": 4096, "batching": "static"},
    ):  # fmt: skip
        assert asked(seed=7, threads=9, engine=engine) == same
    for changed in (
        {"engine": {"_target_": "other", "rows": 8}},
        {"model_weights": "x"},
        {"device": "cuda"},
    ):
        assert asked(**changed) != same


def test_copies_failed_attempts_and_other_suites_add_nothing(tmp_path):
    first = stored(tmp_path / "a", *flips(50, 1))
    remember(first)
    assert list(others(first)) == []
    # The same journal elsewhere (a copy) is the same evidence.
    copy = Attempt(RunDirectory(tmp_path / "copy"), first.baseline, first.candidate)
    assert with_earlier(copy).candidate.scores["code"].samples == 0
    failed = stored(tmp_path / "b", *flips(50, 0), errors=3)
    remember(failed)
    assert with_earlier(first).candidate.scores["code"].samples == 0
    smaller = stored(tmp_path / "c", *flips(40, 0))
    remember(smaller)
    assert with_earlier(first).candidate.scores["code"].samples == 0


def test_errors_of_this_run_count_against_it_whatever_was_before(tmp_path):
    remember(stored(tmp_path / "a", *flips(164, 0)))
    failing = stored(tmp_path / "b", *flips(164, 0), errors=30)
    (finding,) = [f for f in verdict(failing).findings if f.rule == "code"]
    assert finding.outcome == "reject"


def test_a_run_that_is_gone_or_torn_is_passed_over(tmp_path):
    first = stored(tmp_path / "a", *flips(50, 1))
    remember(first)
    second = stored(tmp_path / "b", *flips(50, 5))
    remember(second)
    assert len(list(others(first))) == 1
    (tmp_path / "b" / "variants" / "cand" / "scores" / "code.jsonl").write_text("{}\n")
    assert list(others(first)) == []
    (tmp_path / "b" / "manifest.json").unlink()
    assert list(others(first)) == []


def test_where_tasks_stop_early_the_first_attempt_decides(tmp_path):
    look = SequentialLook(
        method="obrien_fleming", fractions=[0.5, 1.0], look=2, order_seed=0, samples_planned=164
    )
    first = stored(tmp_path / "a", *flips(164, 12), sequential=look)
    remember(first)
    lucky = stored(tmp_path / "b", *flips(164, 0), created="2026-03-01", sequential=look)
    judged = with_earlier(lucky)
    assert judged.candidate.scores["code"].value.sum() == 152


def test_an_attempt_that_stopped_early_adds_what_it_has_to_a_whole_one(tmp_path):
    look = SequentialLook(
        method="obrien_fleming", fractions=[0.5, 1.0], look=2, order_seed=0, samples_planned=164
    )
    stopped = stored(tmp_path / "a", *flips(164, 12), sequential=look)
    remember(stopped)
    whole = stored(tmp_path / "b", *flips(164, 0), created="2026-03-01")
    remember(whole)
    for attempt in (whole, stopped):
        scores = with_earlier(attempt).candidate.scores["code"]
        assert scores.record.sequential is None
        assert scores.value.sum() == pytest.approx(164 - 6)
        assert scores.samples == 328


def test_pairs_joined_from_two_runs_are_attempts_too(tmp_path):
    """A nightly baseline, and candidates measured alone in one job after another."""
    nightly = stored(tmp_path / "nightly", *flips(164, 0))
    policy = tmp_path / "policy.yaml"
    policy.write_text(json.dumps(POLICY.node))
    outcomes = []
    for name, broken in (("first", 14), ("lucky", 2)):
        job = stored(tmp_path / name, np.ones(164), flips(164, broken)[1])
        found = gate_pair(f"{nightly.run.path}:base", f"{job.run.path}:cand", str(policy))
        outcomes.append(found.outcome)
    assert outcomes[0] != "accept"
    assert outcomes[1] != "accept"


def test_a_baseline_is_no_candidate_for_itself(tmp_path):
    run = stored(tmp_path / "a", *flips(164, 0)).run.path
    policy = tmp_path / "policy.yaml"
    policy.write_text(json.dumps(POLICY.node))
    with pytest.raises(EvidenceError, match="is the baseline itself"):
        gate_pair(f"{run}:base", f"{run}:base", str(policy))


def test_runs_that_fail_in_part_are_held_to_each_other(tmp_path):
    remember(stored(tmp_path / "a", *flips(164, 12), errors=1))
    lucky = stored(tmp_path / "b", *flips(164, 1), errors=1)
    assert with_earlier(lucky).candidate.scores["code"].samples == 328

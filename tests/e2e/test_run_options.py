"""Runs that repeat the baseline, take turns, and stop early, with a scripted engine from end to end."""

from __future__ import annotations

import json

import pytest

from quanteval.looks import sample_order
from quanteval.records import RequestTrace, Score, TaskRecord
from quanteval.store import RunDirectory, read_journal, read_record
from tests.e2e.test_fake_run import only_run, quanteval, stages


@pytest.fixture(scope="module")
def everything(tmp_path_factory, tiny_folder):
    """Return a run with a repeated baseline, two interleaved rounds and tasks that may stop early."""
    cwd = tmp_path_factory.mktemp("options")
    command = [
        "run", f"model={tiny_folder}", "engine=fake", "engine.ttft_s=0.002", "bench=quick",
        "scheme=[fp32,bf16]", "task=[pyeasy,pydoc]", "task.pydoc.limit=20", "task.pyeasy.limit=10",
        "runtime.threads=1", "aa=true", "runtime.bench_rounds=2", "gate.sequential=true",
    ]  # fmt: skip
    done = quanteval(cwd, *command)
    assert done.returncode == 0, done.stderr
    return cwd, command, done.stdout


def test_the_baseline_is_repeated_and_sets_the_noise_floor(everything):
    cwd, _, shown = everything
    run = only_run(cwd)
    assert run.load_manifest().again == "fp32_again"
    again = run.variant("fp32_again")
    assert again.load_result().status == "ok"
    assert len(read_journal(again.scores("pydoc"), Score)) == 20
    # In another order than the suite's, so that an effect of the order would show.
    ids = [score.sample_id for score in read_journal(again.scores("pyeasy"), Score)]
    assert ids == sample_order(sorted(ids), 0)
    assert not again.traces.exists()
    assert "noise floor" in shown
    (verdict,) = run.load_verdicts()
    assert verdict.candidate == "bf16"
    (finding,) = [f for f in verdict.findings if f.rule == "noise_floor"]
    assert finding.outcome == "accept"
    assert "flipped 0 of 10" in finding.sentence


def test_rounds_take_turns(everything):
    cwd, _, shown = everything
    run = only_run(cwd)
    begun = []
    for name in ("fp32", "bf16"):
        result = run.variant(name).load_result()
        assert {s for s in result.stages if s.startswith("bench")} == {"bench:1", "bench:2"}
        begun += [(result.stages[f"bench:{i}"].started_s, i, name) for i in (1, 2)]
        traces = read_journal(run.variant(name).traces, RequestTrace)
        assert {trace.round for trace in traces} == {1, 2}
        points = [{(t.load_point, t.request_id) for t in traces if t.round == i} for i in (1, 2)]
        assert points[0] >= {p for p in points[1] if "filler" not in p[1]}
    turns = [(i, name) for _, i, name in sorted(begun)]
    assert turns == [(1, "fp32"), (1, "bf16"), (2, "fp32"), (2, "bf16")]
    assert "2 interleaved rounds" in shown


def test_a_task_stops_as_soon_as_it_is_decided(everything):
    cwd, _, shown = everything
    run = only_run(cwd)
    stopped = read_record(run.variant("bf16").task_record("pydoc"), TaskRecord)
    assert stopped.status == "complete"
    # Looks after 4, 8, 12, ... documents; fewer than ten decide nothing.
    assert (stopped.samples_expected, stopped.sequential.look) == (12, 3)
    scores = read_journal(run.variant("bf16").scores("pydoc"), Score)
    every = [s.sample_id for s in read_journal(run.variant("fp32").scores("pydoc"), Score)]
    assert len(every) == 20
    assert [s.sample_id for s in scores] == sample_order(every, 0)[:12]
    assert "pydoc was decided after 12 of 20 samples" in " ".join(shown.split())
    full = read_record(run.variant("bf16").task_record("pyeasy"), TaskRecord)
    assert (full.samples_expected, full.sequential.look) == (10, 5)


def test_all_of_it_is_reused(everything):
    cwd, command, _ = everything
    run = only_run(cwd)
    before = {v: stages(run, v) for v in ("fp32", "fp32_again", "bf16")}
    assert quanteval(cwd, *command).returncode == 0
    assert {v: stages(run, v) for v in ("fp32", "fp32_again", "bf16")} == before


def test_what_a_stopped_task_left_out_cannot_be_left_out_by_hand(everything):
    cwd, _, _ = everything
    run = only_run(cwd)
    place = run.variant("bf16")
    whole, record = place.scores("pydoc").read_bytes(), place.task_record("pydoc").read_bytes()
    kept = b"".join(whole.splitlines(keepends=True)[:-1])
    place.scores("pydoc").write_bytes(kept)
    try:
        assert quanteval(cwd, "gate", "latest").returncode == 1
    finally:
        place.scores("pydoc").write_bytes(whole)
        place.task_record("pydoc").write_bytes(record)


def test_a_second_run_adds_its_samples(tmp_path, tiny_folder):
    command = [
        "run", f"model={tiny_folder}", "engine=fake", "bench=none", "scheme=[fp32,bf16]", "task=[pyeasy]",
        "task.pyeasy.limit=5", "runtime.threads=1",
    ]  # fmt: skip
    assert quanteval(tmp_path, *command).returncode == 0
    first = quanteval(tmp_path, "gate", "latest", "--json")
    assert "(n=5, 0 worse" in first.stdout
    assert quanteval(tmp_path, *command, "runtime.seed=1", "output_root=elsewhere").returncode == 0
    (second,) = (tmp_path / "elsewhere").glob("*/manifest.json")
    for run in ("latest", str(second.parent)):
        (verdict,) = json.loads(quanteval(tmp_path, "gate", run, "--json").stdout)
        assert any("n=5 problems, 10 samples" in f["sentence"] for f in verdict["findings"]), run


def test_a_stored_baseline_is_taken_under_the_same_conditions_alone(tmp_path, tiny_folder):
    common = [
        f"model={tiny_folder}", "engine=fake", "bench=none", "task=[pydoc]", "task.pydoc.limit=12",
        "runtime.threads=1", "gate.rules.code.required=false",
    ]  # fmt: skip
    assert quanteval(tmp_path, "run", *common, "scheme=[fp32]").returncode == 0
    nightly = only_run(tmp_path).path
    here = ["run", *common, f"baseline={nightly}:fp32", "scheme=[bf16]", "output_root=pr"]
    done = quanteval(tmp_path, *here)
    assert done.returncode == 0, done.stderr
    (manifest,) = (tmp_path / "pr").glob("*/manifest.json")
    run = RunDirectory(manifest.parent)
    assert run.load_manifest().variants == ["fp32", "bf16"]
    taken = run.variant("fp32").load_result()
    assert {stage.reused_from for stage in taken.stages.values()} == {
        str(nightly / "variants" / "fp32")
    }
    assert "bf16 against fp32: ACCEPT" in done.stdout
    assert quanteval(tmp_path, *here).returncode == 0

    other = quanteval(tmp_path, *here, "task.pydoc.limit=13")
    assert other.returncode == 5
    (line,) = other.stderr.strip().splitlines()
    assert "cannot be taken: task:pydoc: suite.data (" in line
    assert "measure it in this run (baseline=fp32)" in line
    more = quanteval(tmp_path, *here, "task=[pydoc,pyeasy]")
    assert "task:pyeasy: it is not there" in more.stderr
    assert (
        quanteval(tmp_path, "run", *common, "baseline=nowhere:fp32", "scheme=[bf16]").returncode
        == 2
    )


def test_a_baseline_reused_from_an_earlier_sweep_stays_comparable(tmp_path, tiny_folder):
    common = [
        "run", f"model={tiny_folder}", "engine=fake", "bench=none", "task=[pydoc]", "task.pydoc.limit=12",
        "runtime.threads=1", "gate.rules.code.required=false",
    ]  # fmt: skip
    assert quanteval(tmp_path, *common, "scheme=[fp32,bf16]").returncode == 0
    done = quanteval(tmp_path, *common, "scheme=[fp32,fp16]")
    assert "fp16 against fp32: ACCEPT" in done.stdout
    runs = [RunDirectory(m.parent) for m in (tmp_path / "outputs").glob("*/manifest.json")]
    (second,) = [run for run in runs if "fp16" in run.load_manifest().variants]
    stages = second.variant("fp32").load_result().stages
    assert all(stage.reused_from for stage in stages.values())

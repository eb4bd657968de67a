"""Evidence is read as it was written, and a stage is reused by fingerprint alone."""

from __future__ import annotations

import json

import numpy as np
import pytest

from quanteval.errors import RecordError
from quanteval.records import Score, StageRecord, TaskRecord, VariantResult
from quanteval.store import (
    Journal,
    RunDirectory,
    done_samples,
    file_sha256,
    load_evidence,
    read_scores,
    remember_stage,
    reuse_stage,
    write_record,
)


def score(i, value=1.0, **more):
    fields = {
        "sample_id": f"s{i}", "prompt_sha256": "p", "value": value, "weight": 2.0, "status": "ok",
        "finish_reason": "stop", "output_tokens": i,
    }  # fmt: skip
    return Score(**{**fields, **more})


def task_record(**more):
    fields = {
        "task": "t", "kind": "code", "suite_version": "1", "fingerprint": "f", "inputs": {},
        "stage_fingerprint": "stage", "status": "complete", "samples_expected": 3,
    }  # fmt: skip
    return TaskRecord(**{**fields, **more})


def write_task(folder, scores, **more):
    with Journal(folder.scores("t")) as journal:
        for item in scores:
            journal.append(item)
    record = task_record(journal_sha256=file_sha256(folder.scores("t")), **more)
    write_record(folder.task_record("t"), record)
    return record


@pytest.fixture
def folder(tmp_path):
    return RunDirectory(tmp_path / "run").variant("v")


def test_scores_come_back_as_columns(folder):
    scores = [
        score(0, numbers={"words": 3.0}, series={"kl": [0.1, float("inf")]}),
        score(1, float("nan"), status="error"),
    ]
    record = write_task(folder, scores)
    columns = read_scores(record, folder.scores("t"))
    assert columns.sample_ids == ("s0", "s1")
    assert columns.status == ("ok", "error")
    np.testing.assert_array_equal(columns.value, [1.0, np.nan])
    np.testing.assert_array_equal(columns.numbers["words"], [3.0, np.nan])
    np.testing.assert_array_equal(columns.series["kl"][0], [0.1, np.inf])
    assert columns.series["kl"][1].size == 0


def test_a_complete_journal_that_was_changed_is_refused(folder):
    record = write_task(folder, [score(0), score(1)])
    path = folder.scores("t")
    path.write_text(path.read_text().replace('"value":1.0', '"value":0.0', 1))
    with pytest.raises(RecordError, match="was changed after it was completed"):
        read_scores(record, path)
    path.unlink()
    with pytest.raises(RecordError):
        read_scores(record, path)


@pytest.mark.parametrize("key", ["sample_id", "value", "status", "prompt_sha256", "weight"])
def test_a_line_that_lacks_a_key_is_refused(folder, key):
    write_task(folder, [score(0), score(1)])
    path = folder.scores("t")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1][key + "x"] = rows[1].pop(key)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = task_record(journal_sha256=file_sha256(path))
    with pytest.raises(RecordError, match=f'line 2 has no "{key}"'):
        read_scores(record, path)


def test_a_journal_goes_on_only_for_the_same_stage(folder):
    write_task(folder, [score(0), score(1)], status="running")
    assert sorted(done_samples(folder, "t", "stage")) == ["s0", "s1"]
    assert done_samples(folder, "t", "another") == {}
    assert done_samples(folder, "none", "stage") == {}


def stage(name="task:t", fingerprint="stage"):
    return StageRecord(name=name, fingerprint=fingerprint, inputs={}, finished_at="", elapsed_s=1.0)


def result(*stages):
    return VariantResult(
        name="v", is_baseline=False, status="ok", stages={s.name: s for s in stages}
    )


def test_evidence_holds_what_is_stored(folder):
    write_task(folder, [score(0), score(1), score(2)])
    with pytest.raises(RecordError, match="never run"):
        load_evidence(RunDirectory(folder.path.parent.parent), "v")
    write_record(folder.result, result(stage()))
    evidence = load_evidence(RunDirectory(folder.path.parent.parent), "v")
    assert set(evidence.scores) == {"t"}
    assert evidence.memory is None
    assert evidence.artifact is None
    assert list(evidence.traces) == []


def test_a_stage_is_reused_by_fingerprint_and_the_copy_stands_alone(tmp_path, folder):
    write_task(folder, [score(0)])
    extra = folder.path / "code" / "t"
    extra.mkdir(parents=True)
    (extra / "file").write_text("x")
    write_record(folder.result, result(stage()))
    remember_stage(tmp_path, folder, stage())
    other = RunDirectory(tmp_path / "other").variant("w")
    assert reuse_stage(tmp_path, other, "task:t", "another", "code") is None
    found = reuse_stage(tmp_path, other, "task:t", "stage", "code")
    assert found.reused_from == str(folder.path)
    assert (other.path / "code" / "t" / "file").read_text() == "x"
    write_record(folder.task_record("t"), task_record(status="running"))
    assert json.loads(other.task_record("t").read_text())["status"] == "complete"


def test_a_note_that_leads_nowhere_is_no_reuse(tmp_path, folder):
    write_record(folder.result, result(stage()))
    remember_stage(tmp_path, folder, stage())
    other = RunDirectory(tmp_path / "other").variant("w")
    write_record(folder.result, result(stage(fingerprint="redone")))
    assert reuse_stage(tmp_path, other, "task:t", "stage") is None
    folder.result.unlink()
    assert reuse_stage(tmp_path, other, "task:t", "stage") is None
    (tmp_path / ".stages" / "stage").write_text("torn")
    assert reuse_stage(tmp_path, other, "task:t", "stage") is None

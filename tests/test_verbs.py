"""The verbs that read: ls, show, doctor, check, and how runs are named."""

from __future__ import annotations

import json

import pytest

from quanteval import records
from quanteval.catalog import list_group, record_kinds, show
from quanteval.check import check
from quanteval.cli import main
from quanteval.doctor import diagnose
from quanteval.errors import ConfigError
from quanteval.judge import find_run, find_variant, publish, runs_under
from quanteval.records import Manifest
from quanteval.resources import GROUPS, presets, task_folders
from quanteval.store import RunDirectory, write_record


def test_every_group_is_listed_and_every_preset_explains_itself():
    text = "\n".join(list_group(None))
    for group in GROUPS:
        assert f"{group}:" in text
    for line in list_group("schemes"):
        if line.startswith("  "):
            assert len(line.split(maxsplit=1)) == 2, line


@pytest.mark.parametrize("kind", ["scheme", "engine", "bench", "gate", "models"])
def test_every_preset_can_be_shown(kind):
    assert presets(kind)
    for name in presets(kind):
        assert show(kind, name)


def test_suites_schemas_and_mistakes():
    assert "_target_" in show("task", "humaneval")
    assert "sample_id" in json.loads(show("schema", "Score"))["properties"]
    assert set(record_kinds()) >= {"Score", "Verdict", "Manifest", "Artifact", "MemoryUse"}
    for name in record_kinds():
        json.loads(show("schema", name))
    with pytest.raises(ConfigError, match='did you mean "Score"'):
        show("schema", "Scores")
    with pytest.raises(ConfigError, match='did you mean "scheme"'):
        show("schemes_", "bf16")
    with pytest.raises(ConfigError, match='did you mean "humaneval"'):
        show("task", "humanevall")


def test_every_record_field_that_is_a_quantity_names_its_unit():
    for name, kind in record_kinds().items():
        for field in kind.model_fields:
            for wrong in ("_ms", "_mb", "_gb", "_seconds"):
                assert not field.endswith(wrong), (name, field)
    assert records.SCHEMA_VERSION == 1


def test_doctor_says_something_of_everything():
    checks = {check.name: check for check in diagnose()}
    assert {"python", "torch", "cpu", "memory", "gpu", "sandbox", "cache", "outputs"} <= set(checks)
    assert checks["python"].status == "ok"
    assert "token" not in checks["hub token"].text.replace("HF_TOKEN", "")


def test_doctor_never_shows_a_token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert "hf_secret" not in json.dumps([vars(check) for check in diagnose()])


def test_check_finds_all_errors_at_once():
    lines, errors = check(
        ["scheme.bf16.dtype=int3", "task.pydoc.limit=0", "runtime.threads=0", "model=nowhere"]
    )
    text = "\n".join(str(error) for error in errors)
    for part in ("int3", "limit", "threads", "nowhere"):
        assert part in text
    assert {error.exit_code for error in errors} == {2}
    assert any("pyeasy" in line for line in lines)


def test_check_of_the_defaults_has_no_errors():
    lines, errors = check([])
    assert errors == []
    assert any("baseline" in line for line in lines)


def manifest(run_id):
    return Manifest(
        run_id=run_id, created_at="", command=[], config={}, baseline="a", variants=["a", "b"], tasks=[],
        policy_name="", policy={}, environment={}, fingerprint="",
    )  # fmt: skip


def test_runs_are_found_by_path_id_and_latest(tmp_path):
    with pytest.raises(ConfigError, match="no run under"):
        find_run("latest", tmp_path)
    for name in ("one-1", "two-2"):
        write_record(RunDirectory(tmp_path / name).manifest, manifest(name))
    assert [run.path.name for run in runs_under(tmp_path)] == ["one-1", "two-2"]
    assert find_run("latest", tmp_path).path.name == "two-2"
    assert find_run("one-1", tmp_path).path == tmp_path / "one-1"
    assert find_run(str(tmp_path / "one-1")).path == tmp_path / "one-1"
    with pytest.raises(ConfigError, match='did you mean "one-1"'):
        find_run("one-11", tmp_path)
    with pytest.raises(ConfigError, match=r"no manifest\.json"):
        find_run(str(tmp_path), tmp_path)


def test_variants_are_named_after_a_colon(tmp_path):
    write_record(RunDirectory(tmp_path / "r").manifest, manifest("r"))
    with pytest.raises(ConfigError, match='has no variant "c"'):
        find_variant(f"{tmp_path / 'r'}:c")


def test_results_go_nowhere_else(tmp_path):
    with pytest.raises(ConfigError, match="cannot name a folder"):
        publish(RunDirectory(tmp_path), "../escape", tmp_path)


def test_help_names_the_exit_codes(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["gate", "--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    for code in ("0  accepted", "2  usage", "3  rejected", "4  inconclusive", "5  not comparable"):
        assert code in said


def test_user_suites_stand_beside_the_shipped_ones(tmp_path, monkeypatch):
    suite = tmp_path / "mine"
    suite.mkdir()
    (suite / "task.yaml").write_text("_target_: quanteval.tasks.code.CodeTask\n")
    monkeypatch.setenv("QUANTEVAL_TASK_PATH", str(tmp_path))
    assert task_folders()["mine"] == suite
    assert "humaneval" in task_folders()


def test_check_asks_the_engine_before_anything_is_built(tmp_path, tiny_folder, capsys):
    command = ["check", f"model={tiny_folder}", "task=[pyeasy]"]
    refused = [*command, "engine=vllm", f"engine.executable={tmp_path}/none", "scheme=[fp32]"]
    assert main(refused) == 1
    assert "no vLLM in" in capsys.readouterr().err
    assert main([*command, "engine=openvino", "scheme=[fp32]"]) == 1
    assert 'does not serve "transformers" artifacts' in capsys.readouterr().err
    assert main([*command, "engine=transformers", "scheme=[fp32]"]) == 0


def test_plan_memory_exits_by_whether_it_fits(tiny_folder, capsys):
    command = ["plan", "memory", f"model={tiny_folder}", "scheme=[fp32]", "context=64"]
    assert main([*command, "gpu=24GB"]) == 0
    assert "fits" in capsys.readouterr().out
    assert main([*command, "gpu=1MB"]) == 3
    assert "does not fit" in capsys.readouterr().out

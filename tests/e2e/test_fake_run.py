"""The whole path with a scripted engine: run, reuse, resume after a kill, failing children, gate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quanteval.records import Score, VariantResult
from quanteval.store import RunDirectory, file_lock, read_journal

COMMON = ["engine=fake", "bench=none", "gate=smoke", "runtime.threads=1"]


@pytest.fixture
def place(tmp_path, tiny_folder):
    return tmp_path, f"model={tiny_folder}"


def quanteval(cwd, *arguments, **env):
    return subprocess.run(
        [sys.executable, "-m", "quanteval", *arguments],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def only_run(cwd) -> RunDirectory:
    (manifest,) = Path(cwd).glob("outputs/*/manifest.json")
    return RunDirectory(manifest.parent)


def stages(run: RunDirectory, variant: str) -> dict[str, str]:
    result = run.variant(variant).load_result()
    return {name: stage.finished_at + str(stage.elapsed_s) for name, stage in result.stages.items()}


def test_a_run_leaves_everything_the_contract_names(place):
    cwd, model = place
    done = quanteval(
        cwd, "run", model, *COMMON, "scheme=[fp32,bf16]", "task=[pydoc,pyeasy]",
        "task.pydoc.limit=12", "task.pyeasy.limit=3",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = only_run(cwd)
    assert str(run.path) in done.stdout
    for variant in ("fp32", "bf16"):
        folder = run.variant(variant)
        assert folder.load_result().status == "ok"
        for name in ("artifact.json", "traces.jsonl", "memory.json", "result.json"):
            assert (folder.path / name).exists(), name
        assert len(read_journal(folder.scores("pydoc"), Score)) == 12
        assert len(read_journal(folder.scores("pyeasy"), Score)) == 3
    for name in ("manifest.json", "table.md", "table.csv", "table.json", "verdicts/bf16.json"):
        assert (run.path / name).exists(), name
    manifest = run.load_manifest()
    assert manifest.baseline == "fp32"
    assert manifest.tasks == ["pydoc", "pyeasy"]


def test_a_second_run_reuses_and_a_changed_option_redoes_what_depends_on_it(place):
    cwd, model = place
    first = ["run", model, *COMMON, "scheme=[fp32,bf16]", "task=[pydoc]", "task.pydoc.limit=12"]
    assert quanteval(cwd, *first).returncode == 0
    run = only_run(cwd)
    before = {v: stages(run, v) for v in ("fp32", "bf16")}
    assert quanteval(cwd, *first).returncode == 0
    assert only_run(cwd).path == run.path
    assert {v: stages(run, v) for v in ("fp32", "bf16")} == before

    more = [*first[:-2], "task=[pydoc,pyeasy]", "task.pydoc.limit=12", "task.pyeasy.limit=2"]
    assert quanteval(cwd, *more).returncode == 0
    (other,) = (p.parent for p in cwd.glob("outputs/*/manifest.json") if p.parent != run.path)
    after = stages(RunDirectory(other), "bf16")
    # Serving again for the new task reads the model back again; what was measured stays.
    kept = ("bench", "task:pydoc")
    assert {k: after[k] for k in kept} == {k: before["bf16"][k] for k in kept}
    assert "task:pyeasy" in after
    result = RunDirectory(other).variant("bf16").load_result()
    assert result.stages["task:pydoc"].reused_from == str(run.variant("bf16").path)
    assert result.stages["task:pyeasy"].reused_from is None


def test_a_killed_run_goes_on_where_it_was(place):
    cwd, model = place
    arguments = [
        "run", model, *COMMON, "scheme=[fp32]", "task=[pyeasy]", "task.pyeasy.limit=12",
        "engine.ttft_s=0.3",
    ]  # fmt: skip
    parent = subprocess.Popen(
        [sys.executable, "-m", "quanteval", *arguments], cwd=cwd, env=os.environ
    )
    journal = None
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = list(cwd.glob("outputs/*/variants/fp32/scores/pyeasy.jsonl"))
        if found and found[0].read_bytes().count(b"\n") >= 3:
            journal = found[0]
            break
        time.sleep(0.05)
    assert journal is not None
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    time.sleep(1.0)
    kept = journal.read_bytes()
    assert 3 <= kept.count(b"\n") < 12
    time.sleep(0.7)
    assert journal.read_bytes() == kept, "a child goes on after its parent was killed"
    done = quanteval(cwd, *arguments)
    assert done.returncode == 0, done.stderr
    whole = kept[: kept.rfind(b"\n") + 1]
    assert journal.read_bytes().startswith(whole)
    ids = [score.sample_id for score in read_journal(journal, Score)]
    assert len(ids) == len(set(ids)) == 12


def test_an_interrupted_run_says_so_and_keeps_what_it_has(place):
    cwd, model = place
    arguments = [
        "run", model, *COMMON, "scheme=[fp32]", "task=[pyeasy]", "task.pyeasy.limit=40",
        "engine.ttft_s=0.3",
    ]  # fmt: skip
    parent = subprocess.Popen(
        [sys.executable, "-m", "quanteval", *arguments],
        cwd=cwd, env=os.environ, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        found = list(cwd.glob("outputs/*/variants/fp32/scores/pyeasy.jsonl"))
        if found and found[0].read_bytes().count(b"\n") >= 2:
            break
        time.sleep(0.05)
    parent.send_signal(signal.SIGINT)
    _, said = parent.communicate(timeout=60)
    assert parent.returncode == 130
    (line,) = said.strip().splitlines()
    assert "interrupted" in line
    run = only_run(cwd)
    assert run.variant("fp32").load_result().status == "interrupted"
    assert 2 <= len(read_journal(run.variant("fp32").scores("pyeasy"), Score)) < 40


def test_a_second_process_on_the_same_run_is_refused(place):
    cwd, model = place
    arguments = ["run", model, *COMMON, "scheme=[fp32]", "task=[pydoc]", "task.pydoc.limit=12"]
    assert quanteval(cwd, *arguments).returncode == 0
    run = only_run(cwd)
    with file_lock(run.path / ".lock", wait=False, busy=""):
        done = quanteval(cwd, *arguments)
    assert done.returncode == 1
    assert "another quanteval process" in done.stderr


def outside(tmp_path: Path, code: str) -> dict[str, str]:
    """Put a module with dataclasses of a user's own on the path."""
    (tmp_path / "mine.py").write_text(code)
    return {"PYTHONPATH": str(tmp_path)}


BROKEN = """
import os, signal
from dataclasses import dataclass
from quanteval.schemes.none import Unquantized

@dataclass(frozen=True)
class Broken(Unquantized):
    how: str = "raise"

    def quantize(self, source, out, calibration, device):
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "exit":
            os._exit(7)
        if self.how == "memory":
            raise MemoryError("cannot allocate 1 TB")
        if self.how == "unsupported":
            from quanteval.errors import UnsupportedError
            raise UnsupportedError("needs another device")
        raise ValueError("two\\nlines")
"""


@pytest.mark.parametrize(
    ("how", "status", "says", "code"),
    [
        ("raise", "failed", "ValueError: two lines", 1),
        ("kill", "out_of_memory", "signal 9", 1),
        ("exit", "failed", "exited with 7", 1),
        ("memory", "out_of_memory", "cannot allocate 1 TB", 1),
        ("unsupported", "unsupported", "needs another device", 0),
    ],
)
def test_a_child_that_dies_is_a_status_and_the_others_go_on(place, how, status, says, code):
    cwd, model = place
    env = outside(cwd, BROKEN)
    done = quanteval(
        cwd, "run", model, *COMMON, "scheme=[fp32,bf16,fp16]", "task=[pydoc]", "task.pydoc.limit=12",
        "scheme.bf16._target_=mine.Broken", f"+scheme.bf16.how={how}", "trust.targets=[mine.]", **env,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    run = only_run(cwd)
    broken: VariantResult = run.variant("bf16").load_result()
    assert broken.status == status
    assert says in broken.reason
    assert run.variant("fp16").load_result().status == "ok"
    gate = quanteval(cwd, "gate", str(run.path), **env)
    assert gate.returncode == 1
    assert says in gate.stdout
    verdicts = json.loads(quanteval(cwd, "gate", str(run.path), "--json", **env).stdout)
    assert [v["candidate"] for v in verdicts] == ["bf16", "fp16"]
    assert verdicts[0]["outcome"] == "error"


def test_a_sweep_runs_every_cell(place):
    cwd, model = place
    done = quanteval(
        cwd, "run", "-m", model, *COMMON, "scheme=[fp32]", "task=[pydoc]", "task.pydoc.limit=11,12"
    )
    assert done.returncode == 0, done.stderr
    assert len(list(cwd.glob("outputs/*/manifest.json"))) == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "scheme=[bf17]"], "bf17"),
        (["run", "scheme.bf16.dtyp=float32"], "dtyp"),
        (["run", "scheme.bf16.dtype=int3"], "int3"),
        (["run", "modle=x"], "modle"),
        (["run", "model=nowhere"], "nowhere"),
        (["run", "scheme=[]"], "none is chosen"),
        (["run", "baseline=fp64"], "fp64"),
        (["run", "scheme.bf16._target_=os.system"], "not allowed"),
        (["run", "task.pydoc.limit=-1"], "limit"),
        (["run", "runtime.threads=0"], "threads"),
        (["run", "+task.pydocs.limit=3"], 'did you mean "pydoc"'),
        (["gate", "nowhere"], "nowhere"),
        (["gate"], "--baseline"),
        (["show", "scheme", "nf5"], "nf5"),
        (["ls", "everything"], "everything"),
        (["frobnicate"], "frobnicate"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, arguments, says):
    done = quanteval(tmp_path, *arguments)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("quanteval: ")
    assert says in line
    assert done.stdout == ""

"""The real model through the real path, from an installed wheel in an empty folder: run, kill, resume, gate."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quanteval.records import Artifact, MemoryUse, Score
from quanteval.store import RunDirectory, read_journal, read_record

pytestmark = [pytest.mark.model, pytest.mark.slow]
ROOT = Path(__file__).parent.parent.parent
SMOKE = ["run", "experiment=smoke", "runtime.threads=2"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> dict[str, str]:
    """Build the wheel, install it away from the checkout, and return the environment that uses it."""
    dist, target = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("site")
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(dist),
        str(ROOT),
    ]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = dist.glob("quanteval-*.whl")
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True)
    env = {**os.environ, "PYTHONPATH": str(target)}
    code = "import quanteval, quanteval.resources as r; print(quanteval.__file__, r.resource_dir('conf'))"
    said = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=dist, capture_output=True, text=True, check=True
    ).stdout.split()
    assert all(path.startswith(str(target)) for path in said)
    return env


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("empty")


def quanteval(env, cwd, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "quanteval", *arguments],
        env=env, cwd=cwd, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(installed, place, embedded_model) -> RunDirectory:
    """Kill a smoke run in the middle of a task, then run it to its end."""
    parent = subprocess.Popen(
        [sys.executable, "-m", "quanteval", *SMOKE], env=installed, cwd=place,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    journals: list[Path] = []
    while time.monotonic() < deadline and parent.poll() is None:
        journals = [
            p for p in place.glob("outputs/*/variants/bf16/scores/*.jsonl") if p.read_bytes()
        ]
        if journals:
            break
        time.sleep(0.05)
    assert journals, "no sample was journaled"
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    time.sleep(1)
    before = {path: path.read_bytes() for path in journals}
    done = quanteval(installed, place, *SMOKE)
    assert done.returncode == 0, done.stderr
    for path, content in before.items():
        assert path.read_bytes().startswith(content[: content.rfind(b"\n") + 1])
    (manifest,) = place.glob("outputs/*/manifest.json")
    assert str(manifest.parent) in done.stdout
    return RunDirectory(manifest.parent)


def test_every_sample_of_every_task_was_scored_once(run):
    expected = {"pyeasy": 4, "pydoc": 12, "divergence_pydoc": 4, "arithmetic": 8}
    for variant in ("bf16", "int8_bnb"):
        for task, count in expected.items():
            scores = read_journal(run.variant(variant).scores(task), Score)
            assert len({score.sample_id for score in scores}) == len(scores) == count
            assert {score.status for score in scores} <= {"ok", "truncated"}


def test_the_readback_says_that_int8_ran(run):
    artifact = read_record(run.variant("int8_bnb").artifact, Artifact)
    assert artifact.effective is not None
    assert artifact.effective.quantized_fraction == 1.0
    assert artifact.effective.activation_bits == 8
    assert 8 <= artifact.effective.linear_bits_per_weight < 8.2
    assert artifact.effective.left_alone == ["lm_head"]
    base = read_record(run.variant("bf16").artifact, Artifact)
    assert base.effective is not None
    assert base.effective.resident_weight_bytes == pytest.approx(269_030_272, rel=1e-3)


def test_the_memory_account_adds_up(run):
    for variant in ("bf16", "int8_bnb"):
        use = read_record(run.variant(variant).memory, MemoryUse)
        parts = sum(use.parts.values())
        assert parts + use.unaccounted_bytes == use.process_peak_bytes
        assert abs(use.unaccounted_bytes) < 0.05 * use.process_peak_bytes
        assert use.account_phase
        assert {"load", "warmup", "bench", "task:pyeasy"} <= set(use.phase_peak_bytes)
        assert use.kv_bytes_per_token_formula == 23040


def test_divergence_is_zero_for_the_baseline_and_small_for_int8(run):
    base = read_journal(run.variant("bf16").scores("divergence_pydoc"), Score)
    assert sum(score.value for score in base) == 0
    scores = read_journal(run.variant("int8_bnb").scores("divergence_pydoc"), Score)
    mean = sum(s.value for s in scores) / sum(s.weight for s in scores)
    assert 0.001 < mean < 0.1


def test_a_second_run_reuses_every_stage(installed, place, run):
    before = {v: run.variant(v).load_result().stages for v in ("bf16", "int8_bnb")}
    done = quanteval(installed, place, *SMOKE)
    assert done.returncode == 0
    assert {v: run.variant(v).load_result().stages for v in ("bf16", "int8_bnb")} == before


def test_gate_report_and_compare_read_what_is_stored(installed, place, run):
    gate = quanteval(
        installed, place, "gate", "latest", "--junit", "junit.xml", "--summary", "summary.md"
    )
    verdict = json.loads(quanteval(installed, place, "gate", "latest", "--json").stdout)[0]
    code = {"accept": 0, "error": 1, "reject": 3, "inconclusive": 4, "not_comparable": 5}
    assert gate.returncode == code[verdict["outcome"]]
    assert verdict["outcome"].upper() in gate.stdout
    assert (place / "junit.xml").exists()
    assert "int8_bnb" in (place / "summary.md").read_text()
    strict = quanteval(installed, place, "gate", "latest", "--policy", "strict")
    assert strict.returncode == 1
    assert "noise_floor: the baseline was not repeated: run with aa=true" in strict.stdout
    mlperf = quanteval(installed, place, "gate", "latest", "--policy", "mlperf")
    assert mlperf.returncode in (3, 4)
    table = quanteval(installed, place, "report", "latest", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(table.stdout)))
    assert [row["variant"] for row in rows] == ["bf16", "int8_bnb"]
    assert float(rows[1]["weights_ratio"]) == pytest.approx(0.61, abs=0.02)
    compare = quanteval(installed, place, "compare", "latest:bf16", "latest:int8_bnb")
    assert "pyeasy: pass@1" in compare.stdout
    sample = quanteval(installed, place, "compare", "latest", "latest", "--sample", "pyeasy/0")
    assert sample.stdout.count("value") == 2


def test_joining_runs_made_apart_needs_equal_conditions(installed, place, run):
    done = quanteval(
        installed, place, "run", "experiment=smoke", "runtime.threads=1", "scheme=[fp32]", "task=[pydoc]",
        "task.pydoc.limit=10", "task.pydoc.max_tokens_per_document=64", "bench=none",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    joined = quanteval(
        installed, place, "gate", "--baseline", f"{run.path}:bf16", "--candidate", "latest:fp32"
    )
    assert joined.returncode == 5
    assert "threads" in joined.stdout
    assert "max_tokens_per_document" in joined.stdout


def readme_commands() -> list[list[str]]:
    """Return the quanteval commands of README's shell blocks."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.S)
    lines = [
        line for block in blocks for line in block.splitlines() if line.startswith("quanteval ")
    ]
    return [shlex.split(line)[1:] for line in lines]


def test_the_commands_of_the_readme_work(installed, place, run):
    """Runs are composed and built (`check`), or are the smoke run itself; everything else is executed."""
    commands = readme_commands()
    assert len(commands) > 10
    for command in commands:
        if command == ["run", "experiment=smoke"]:
            continue
        arguments = [part.replace("latest", str(run.path)) for part in command]
        if command[0] == "run":
            # Of a sweep the first cell.
            cells = [re.sub(r"\],\[.*", "]", part) for part in command[1:] if part != "-m"]
            arguments = ["check", *cells]
        done = quanteval(installed, place, *arguments)
        allowed = (0, 3, 4) if command[0] == "gate" else (0,)
        assert done.returncode in allowed, (command, done.stderr)
        assert done.stdout.strip(), command

"""How long gating a large stored run again takes: 10,000 samples x 5 tasks x 8 candidates, another margin.

Writes a synthetic run of that size into a temporary folder, gates it once (which writes the columns beside
the journals) and then again with a changed policy, each in a process of its own.

    python benchmarks/regate.py [samples]
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml

from quanteval.records import (
    Artifact,
    Effective,
    Manifest,
    Precision,
    StageRecord,
    TaskRecord,
    VariantResult,
)
from quanteval.resources import presets
from quanteval.store import RunDirectory, fingerprint, write_record

CANDIDATES = 8
TASKS = {
    "code_a": "code",
    "code_b": "code",
    "code_c": "code",
    "prose": "perplexity",
    "kl": "divergence",
}


def main() -> None:
    samples = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder) / "run", samples)
        policy = yaml.safe_load(presets("gate")["default"].read_text())
        policy["rules"]["code"]["margin"] = {"absolute": 0.03}
        changed = Path(folder) / "changed.yaml"
        changed.write_text(json.dumps(policy))
        for label, arguments in (
            ("first time, journals read", []),
            ("again", []),
            ("again, another margin", ["--policy", str(changed)]),
        ):
            seconds = min(gate(run, arguments) for _ in range(3 if "again" in label else 1))
            print(f"{label:28} {seconds:6.2f} s")


def gate(run: Path, arguments: list[str]) -> float:
    started = time.perf_counter()
    command = [sys.executable, "-m", "quanteval", "gate", str(run), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3, 4):
        raise SystemExit(done.stderr)
    return time.perf_counter() - started


def make_run(folder: Path, samples: int) -> Path:
    rng = np.random.default_rng(0)
    run = RunDirectory(folder)
    names = ["base", *(f"cand{i}" for i in range(CANDIDATES))]
    policy = yaml.safe_load(presets("gate")["default"].read_text())
    manifest = Manifest(
        run_id="run", created_at="2026-01-01T00:00:00+00:00", command=[], config={}, baseline="base",
        variants=names, tasks=list(TASKS), policy_name="default", policy=policy, environment={},
        fingerprint="f",
    )  # fmt: skip
    write_record(run.manifest, manifest)
    right = rng.random((3, samples)) < 0.6
    nll = rng.gamma(50, 2, samples)
    for name in names:
        write_variant(run, name, samples, right, nll, rng)
    return folder


def write_variant(run, name, samples, right, nll, rng) -> None:
    place, stages = run.variant(name), {}
    for i, (task, kind) in enumerate(TASKS.items()):
        if kind == "code":
            values = np.where(rng.random(samples) < 0.03, ~right[i], right[i]).astype(float)
            if name == "base":
                values = right[i].astype(float)
        else:
            values = (
                nll * (1 + 0.001 * rng.standard_normal(samples))
                if kind == "perplexity"
                else nll / 5000
            )
        write_task(place, task, kind, values)
        stages[f"task:{task}"] = StageRecord(
            name=f"task:{task}", fingerprint="s", inputs={}, finished_at="", elapsed_s=1.0
        )
    result = VariantResult(
        name=name,
        is_baseline=name == "base",
        status="ok",
        comparable={"device": "cpu"},
        stages=stages,
    )
    write_record(place.result, result)
    write_record(place.artifact, artifact(16.0 if name == "base" else 8.0))


def write_task(place, task, kind, values) -> None:
    lines = []
    for i, value in enumerate(values):
        row = {
            "sample_id": f"{task}/{i}", "prompt_sha256": hashlib.sha256(f"{task}{i}".encode()).hexdigest(),
            "value": float(value), "weight": 1.0 if kind == "code" else 100.0, "status": "ok",
            "finish_reason": "stop", "output_tokens": 40 if kind == "code" else 0,
        }  # fmt: skip
        if kind == "code":
            row |= {
                "output": f"def f{i}(x):\n    return x * {i}\n" * 10,
                "outcome": "passed" if value else "wrong",
            }
        elif kind == "perplexity":
            row |= {
                "numbers": {"words": 60.0, "bytes": 400.0},
                "series": {"logprobs": [-0.5] * 100},
            }
        else:
            row |= {"numbers": {"top1_agree": 95.0}, "series": {"kl": [float(value) / 100] * 100}}
        lines.append(json.dumps(row))
    raw = ("\n".join(lines) + "\n").encode()
    path = place.scores(task)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)
    record = TaskRecord(
        task=task, kind=kind, suite_version="1", fingerprint=fingerprint(task), inputs={}, status="complete",
        samples_expected=len(values), journal_sha256=hashlib.sha256(raw).hexdigest(),
    )  # fmt: skip
    write_record(place.task_record(task), record)


def artifact(bits: float) -> Artifact:
    return Artifact(
        scheme="s", scheme_config={}, model_id="m", model_revision=None, model_provenance="",
        weights_digest="d", path="/", format="transformers", bytes_on_disk=1, build_s=1.0,
        precision=Precision(
            weight_bits=bits, activation_bits=16, weight_format="x", compute="float", quantized=bits < 16
        ),
        effective=Effective(
            linear_layers=[], dtype_bytes={}, bits_per_weight=bits, linear_bits_per_weight=bits,
            quantized_fraction=float(bits < 16), left_alone=[], activation_bits=16, compute_dtype="bfloat16",
            emulated=False, emulation="", resident_weight_bytes=1, parameters=1,
        ),
    )  # fmt: skip


if __name__ == "__main__":
    main()

"""One variant, seen from the parent: which stages are missing, and the child processes that do them.

Every variant is built and evaluated in child processes of its own (see `child`), so that its memory
peaks are its own and its death is a recorded status, not the end of the run. A stage whose
fingerprint is already there is reused, from this run or from another under the same output root.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quanteval import __version__
from quanteval.environment import cpu_model, now, package_versions, set_thread_variables
from quanteval.errors import QuantevalError
from quanteval.interfaces import ModelSource
from quanteval.models.cache import cache_dir
from quanteval.records import StageRecord, VariantResult, VariantStatus
from quanteval.runplan import RunPlan
from quanteval.store import (
    RunDirectory,
    VariantDirectory,
    fingerprint,
    remember_stage,
    reuse_stage,
    write_atomic,
    write_record,
)

Notify = Callable[[str], None]
RESULT_PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "bitsandbytes", "torchao")


@dataclass(frozen=True)
class RunContext:
    """What all variants of a run share; `suites` holds each task's fingerprint inputs."""

    plan: RunPlan
    source: ModelSource
    suites: Mapping[str, dict[str, Any]]
    run: RunDirectory


@dataclass(frozen=True)
class Stage:
    """A stage to be done: its name, what it depends on, and (for tasks) its kind and suite inputs."""

    name: str
    inputs: dict[str, Any]
    kind: str = ""
    suite_inputs: dict[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """sha256 of the inputs."""
        return fingerprint(self.inputs)


class VariantWorker:
    """Brings one variant's stages up to date through child processes."""

    def __init__(self, context: RunContext, name: str, notify: Notify) -> None:
        self.plan = context.plan
        self.source = context.source
        self.run_dir = context.run
        self.name = name
        self.notify = notify
        self.folder: VariantDirectory = context.run.variant(name)
        self.is_baseline = name == context.plan.baseline
        self.stages = self._stages(context.suites)

    def run(self) -> VariantResult:
        """Do the missing stages and return the stored result."""
        kept = self._kept()
        if len(kept) == len(self.stages):
            self.notify("reused")
            return self._finish("ok", kept)
        self._finish("running", kept)
        try:
            artifact_dir = self._artifact_dir()
            if not (artifact_dir / "artifact.json").exists():
                self.notify("quantize")
                self._child({"mode": "quantize", "artifact_dir": str(artifact_dir)})
            missing = [stage for stage in self.stages if stage.name not in kept]
            self.notify("serve, then " + ", ".join(stage.name for stage in missing[1:] or missing))
            self._child(
                {
                    "mode": "evaluate",
                    "artifact_dir": str(artifact_dir),
                    "stages": [
                        {
                            "name": s.name,
                            "kind": s.kind,
                            "inputs": s.inputs,
                            "suite_inputs": s.suite_inputs,
                        }
                        for s in self.stages
                        if s.name not in kept or s.name == "artifact"
                    ],
                }
            )
        except _ChildFailedError as failure:
            self.notify(f"{failure.status}: {failure}")
            return self._finish(
                failure.status, self._stored_stages(), str(failure), failure.exit_code
            )
        except KeyboardInterrupt:
            self._finish("interrupted", self._stored_stages(), "interrupted by the user")
            raise
        result = self._finish("ok", self._stored_stages())
        for stage in result.stages.values():
            if stage.reused_from is None:
                remember_stage(self.plan.output_root.absolute(), self.folder, stage)
        return result

    # ---- what there is to do

    def _stages(self, suites: Mapping[str, dict[str, Any]]) -> list[Stage]:
        serving = self._serving_inputs(self.name)
        stages = [Stage("artifact", serving)]
        bench = self.plan.bench.object.fingerprint()
        stages.append(Stage("bench", {"serving": serving, "bench": bench}))
        for name, task in self.plan.tasks.items():
            inputs = {"serving": serving, "suite": suites[name], "seed": self.plan.runtime.seed}
            if task.object.uses_baseline:
                inputs["baseline"] = self._serving_inputs(self.plan.baseline)
            stages.append(Stage(f"task:{name}", inputs, task.object.kind, suites[name]))
        return stages

    def _artifact_inputs(self, name: str) -> dict[str, Any]:
        return {
            "quanteval": __version__,
            "model": self.source.weights_digest,
            "revision": self.source.revision,
            "scheme": self.plan.variants[name].node,
            "device": self.plan.engine.object.device,
            "packages": _result_packages(),
        }

    def _serving_inputs(self, name: str) -> dict[str, Any]:
        return {
            "artifact": fingerprint(self._artifact_inputs(name)),
            "engine": self.plan.engine.node,
            "device": self.plan.engine.object.device,
            "cpu": cpu_model(),
            "threads": self.plan.runtime.thread_count,
            "packages": _result_packages(),
        }

    def _artifact_dir(self) -> Path:
        return cache_dir() / "artifacts" / fingerprint(self._artifact_inputs(self.name))

    def _kept(self) -> dict[str, StageRecord]:
        """Return the finished stages with the right fingerprint, here or in another run."""
        here = self._stored_stages()
        kept = {}
        for stage in self.stages:
            mine = here.get(stage.name)
            if mine is not None and mine.fingerprint == stage.fingerprint:
                kept[stage.name] = mine
                continue
            root = self.plan.output_root.absolute()
            found = reuse_stage(root, self.folder, stage.name, stage.fingerprint, stage.kind)
            if found is not None:
                kept[stage.name] = found
        return kept

    def _stored_stages(self) -> dict[str, StageRecord]:
        wanted = {stage.name: stage.fingerprint for stage in self.stages}
        result = self.folder.load_result()
        stored = result.stages if result else {}
        return {n: s for n, s in stored.items() if wanted.get(n) == s.fingerprint}

    # ---- records

    def _finish(
        self,
        status: VariantStatus,
        stages: Mapping[str, StageRecord],
        reason: str = "",
        exit_code: int | None = None,
    ) -> VariantResult:
        old = self.folder.load_result()
        result = VariantResult(
            name=self.name,
            is_baseline=self.is_baseline,
            status=status,
            reason=reason,
            comparable=self._comparable(old),
            stages=dict(stages),
            environment=old.environment if old else {},
            started_at=old.started_at if old else now(),
            finished_at="" if status == "running" else now(),
            exit_code=exit_code,
        )
        write_record(self.folder.result, result)
        return result

    def _comparable(self, old: VariantResult | None) -> dict[str, Any]:
        serving = self._serving_inputs(self.name)
        kept = (
            {} if old is None else {k: v for k, v in old.comparable.items() if k == "batch_policy"}
        )
        return {
            "model_weights": self.source.weights_digest,
            "model_revision": self.source.revision,
            "engine": serving["engine"],
            "device": serving["device"],
            "cpu": serving["cpu"],
            "threads": serving["threads"],
            "packages": serving["packages"],
            "bench": self.plan.bench.object.fingerprint(),
            "seed": self.plan.runtime.seed,
            **kept,
        }

    # ---- child processes

    def _child(self, order: Mapping[str, Any]) -> None:
        """Run one child to its end. _ChildFailedError says how it failed."""
        spec = {
            **order,
            "variant": self.name,
            "is_baseline": self.is_baseline,
            "variant_dir": str(self.folder.path),
            "baseline_dir": str(self.run_dir.variant(self.plan.baseline).path),
            "source": {**vars(self.source), "path": str(self.source.path)},
            "scheme": self.plan.variants[self.name].node,
            "scheme_name": self.name,
            "engine": self.plan.engine.node,
            "bench": self.plan.bench.node,
            "tasks": {name: task.node for name, task in self.plan.tasks.items()},
            "artifact_fingerprint": fingerprint(self._artifact_inputs(self.name)),
            "seed": self.plan.runtime.seed,
            "threads": self.plan.runtime.thread_count,
            "prefixes": self.plan.prefixes,
            "parent_pid": os.getpid(),
        }
        write_atomic(self.folder.spec, json.dumps(spec, indent=1))
        outcome = self.folder.path / "child.json"
        outcome.unlink(missing_ok=True)
        env = dict(os.environ)
        set_thread_variables(self.plan.runtime.thread_count, env)
        process = subprocess.Popen(
            [sys.executable, "-m", "quanteval.child", str(self.folder.spec)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            code = process.wait()
        except BaseException:
            _stop(process)
            raise
        if code == 0:
            return
        raise _child_failure(code, outcome, self.folder.log)


class _ChildFailedError(QuantevalError):
    def __init__(self, message: str, status: VariantStatus, child_exit_code: int) -> None:
        super().__init__(message)
        self.status = status
        self.exit_code = child_exit_code


def _child_failure(code: int, outcome: Path, log: Path) -> _ChildFailedError:
    """Say why a child ended: its own words where it left any, else the signal."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        said = json.loads(outcome.read_text(encoding="utf-8"))
        return _ChildFailedError(said["reason"], said["status"], code)
    if code == -signal.SIGKILL:
        reason = "killed by signal 9, usually the system's out-of-memory killer: use a smaller model or batch"
        return _ChildFailedError(reason, "out_of_memory", code)
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        return _ChildFailedError(f"the child process died of {name}; see {log}", "failed", code)
    return _ChildFailedError(f"the child process exited with {code}; see {log}", "failed", code)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a child to stop, then make it."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(timeout=15)
            return
        process.kill()
        process.wait()


def _result_packages() -> dict[str, str]:
    return {k: v for k, v in package_versions().items() if k in RESULT_PACKAGES}

"""One variant, seen from the parent: which stages are missing, and the child processes that do them.

Every variant is built and evaluated in child processes of its own (see `child`), so that its memory
peaks are its own and its death is a recorded status, not the end of the run. A stage whose
fingerprint is already there is reused, from this run or from another under the same output root.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quanteval.artifacts import artifact_inputs, artifact_place, quantize_spec, result_packages
from quanteval.children import ChildFailedError, run_child
from quanteval.comparability import differences
from quanteval.environment import cpu_model, now
from quanteval.errors import NotComparableError
from quanteval.gate import may_stop
from quanteval.interfaces import Engine, ModelSource
from quanteval.records import StageRecord, VariantResult, VariantStatus
from quanteval.runplan import Component, RunPlan
from quanteval.store import (
    RunDirectory,
    VariantDirectory,
    adopt_stage,
    fingerprint,
    remember_stage,
    reuse_stage,
    write_record,
)

Notify = Callable[[str], None]
THIS_PROCESS = uuid.uuid4().hex
"""Part of the inputs of what must not be found again by another process: its results are used in this one alone."""


@dataclass(frozen=True)
class RunContext:
    """What all variants of a run share; `suites` holds each task's fingerprint inputs."""

    plan: RunPlan
    source: ModelSource
    suites: Mapping[str, dict[str, Any]]
    run: RunDirectory


@dataclass(frozen=True)
class VariantJob:
    """One variant to bring up to date: a scheme of the plan, or the baseline once more in other ways.

    `order_seed` evaluates samples in the random order it draws instead of the suite's; `rounds` are the
    interleaved rounds of the bench to be done by processes of their own (0: the bench is a stage like
    the others, None: no bench).
    """

    name: str
    scheme: str
    engine: Component[Engine]
    order_seed: int | None = None
    rounds: int | None = 0
    stored: Path | None = None
    """Folder of the same variant in another run, from which all its stages are taken."""


def jobs_of(plan: RunPlan) -> list[VariantJob]:
    """Return what a plan asks for, the baseline first and its repetition second."""
    rounds = plan.runtime.bench_rounds if plan.runtime.bench_rounds > 1 else 0
    jobs = [VariantJob(name, name, plan.engine, rounds=rounds) for name in plan.variants]
    if plan.stored_baseline is not None:
        # What it cost is known only where the load was the same; speed is never compared across runs.
        has_bench = not rounds and (plan.stored_baseline / "traces.jsonl").exists()
        jobs[0] = replace(jobs[0], rounds=0 if has_bench else None, stored=plan.stored_baseline)
    if plan.again:
        repeated = VariantJob(plan.again, plan.baseline, plan.other_engine, plan.runtime.seed, None)
        jobs.insert(1, repeated)
    return jobs


@dataclass(frozen=True)
class Stage:
    """A stage to be done: its name, what it depends on, and (for tasks) its kind and suite inputs."""

    name: str
    inputs: dict[str, Any]
    kind: str = ""
    suite_inputs: dict[str, Any] = field(default_factory=dict)
    order_seed: int | None = None
    sequential: bool = False

    @property
    def fingerprint(self) -> str:
        """sha256 of the inputs."""
        return fingerprint(self.inputs)


class VariantWorker:
    """Brings one variant's stages up to date through child processes."""

    def __init__(self, context: RunContext, job: VariantJob, notify: Notify) -> None:
        self.plan = context.plan
        self.source = context.source
        self.run_dir = context.run
        self.job = job
        self.name = job.name
        self.notify = notify
        self.folder: VariantDirectory = context.run.variant(job.name)
        self.is_baseline = job.name == context.plan.baseline
        self.stages = self._stages(context.suites)
        self.rounds = self._rounds()

    def run(self) -> VariantResult:
        """Do the missing stages, the rounds of the bench left out, and return the stored result."""
        kept = self._kept(self.stages)
        kept |= self._kept(self.rounds)
        if self.job.stored is not None:
            self._refuse_other_conditions(kept)
        if all(stage.name in kept for stage in self.stages):
            self.notify("reused")
            return self._finish("ok", kept)
        self._finish("running", kept)
        try:
            artifact_dir = self._artifact_dir()
            if not (artifact_dir / "artifact.json").exists():
                self.notify("quantize")
                self._child({"mode": "quantize"})
            missing = [stage for stage in self.stages if stage.name not in kept]
            self.notify("serve, then " + ", ".join(stage.name for stage in missing[1:] or missing))
            self._evaluate([s for s in self.stages if s.name not in kept or s.name == "artifact"])
        except ChildFailedError as failure:
            return self._failed(failure)
        except KeyboardInterrupt:
            self._finish("interrupted", self._stored_stages(), "interrupted by the user")
            raise
        return self._done()

    def forget_other_stages(self) -> None:
        """Take back a result of another configuration: this run may end before it is measured again."""
        old = self.folder.load_result()
        if old is not None and set(old.stages) != set(self._stored_stages()):
            self._finish("running", self._stored_stages())

    def run_round(self, number: int) -> VariantResult:
        """Do one interleaved round of the bench unless it is there, and return the stored result."""
        stage = self.rounds[number - 1]
        kept = self._stored_stages()
        result = self.folder.load_result()
        if result is None or result.status != "ok" or stage.name in kept:
            return result or self._finish("failed", kept, "it was never served")
        self._finish("running", kept)
        try:
            self.notify(f"round {number} of {len(self.rounds)}")
            self._evaluate([stage])
        except ChildFailedError as failure:
            return self._failed(failure)
        except KeyboardInterrupt:
            self._finish("interrupted", self._stored_stages(), "interrupted by the user")
            raise
        return self._done()

    def _evaluate(self, stages: Sequence[Stage]) -> None:
        """Serve the artifact in a child process and do these stages there."""
        self._child(
            {
                "mode": "evaluate",
                "stages": [vars(stage) for stage in stages],
            }
        )

    def _failed(self, failure: ChildFailedError) -> VariantResult:
        self.notify(f"{failure.status}: {failure}")
        return self._finish(failure.status, self._stored_stages(), str(failure), failure.exit_code)

    def _done(self) -> VariantResult:
        result = self._finish("ok", self._stored_stages())
        for stage in result.stages.values():
            # Rounds are worth something only beside the others of their own run.
            if stage.reused_from is None and not stage.name.startswith("bench:"):
                remember_stage(self.plan.output_root.absolute(), self.folder, stage)
        return result

    # ---- what there is to do

    def _stages(self, suites: Mapping[str, dict[str, Any]]) -> list[Stage]:
        serving = self._serving_inputs()
        stages = [Stage("artifact", serving)]
        if self.job.rounds == 0:
            stages.append(Stage("bench", self._bench_inputs()))
        for name, task in self.plan.tasks.items():
            inputs = {"serving": serving, "suite": suites[name], "seed": self.plan.runtime.seed}
            seed, sequential = self.job.order_seed, self._may_stop(name)
            if sequential:
                # Where a task stops depends on all of the policy.
                inputs["sequential"] = self.plan.policy.sha256
            if seed is not None:
                inputs["order_seed"] = seed
            if task.object.uses_baseline or sequential:
                inputs["baseline"] = self._serving_inputs(of_baseline=True)
            kind = task.object.kind
            stages.append(Stage(f"task:{name}", inputs, kind, suites[name], seed, sequential))
        return stages

    def _rounds(self) -> list[Stage]:
        """Return the interleaved rounds; each depends on who else takes turns in it."""
        others = {name: fingerprint(self._artifact_inputs(name)) for name in self.plan.variants}
        inputs = {**self._bench_inputs(), "in_turns_with": others}
        numbers = range(1, (self.job.rounds or 0) + 1)
        return [Stage(f"bench:{number}", {**inputs, "round": number}) for number in numbers]

    def _bench_inputs(self) -> dict[str, Any]:
        return {"serving": self._serving_inputs(), "bench": self.plan.bench.object.fingerprint()}

    def _may_stop(self, task: str) -> bool:
        policy, device = self.plan.policy, self.plan.engine.object.device
        is_candidate = not self.is_baseline and self.name != self.plan.again
        return is_candidate and may_stop(policy, device, task, self.plan.tasks[task].object.kind)

    def _artifact_inputs(self, scheme: str) -> dict[str, Any]:
        return artifact_inputs(self.plan, self.source, scheme)

    def _serving_inputs(self, *, of_baseline: bool = False) -> dict[str, Any]:
        scheme = self.plan.baseline if of_baseline else self.job.scheme
        lasting = getattr(self.plan.variants[scheme].object, "lasting", True)
        engine = self.plan.engine if of_baseline else self.job.engine
        return {
            "artifact": fingerprint(self._artifact_inputs(scheme)),
            "engine": engine.node,
            "device": engine.object.device,
            "cpu": cpu_model(),
            "threads": self.plan.runtime.thread_count,
            "packages": result_packages(),
            **({} if lasting else {"measured_by": THIS_PROCESS}),
        }

    def _artifact_dir(self) -> Path:
        return artifact_place(self.plan, self.source, self.job.scheme)

    def _kept(self, stages: Sequence[Stage]) -> dict[str, StageRecord]:
        """Return the finished stages with the right fingerprint, here or in another run."""
        here = self._stored_stages()
        kept = {}
        for stage in stages:
            mine = here.get(stage.name)
            if mine is not None and mine.fingerprint == stage.fingerprint:
                kept[stage.name] = mine
                continue
            root, wanted = (
                self.plan.output_root.absolute(),
                (stage.name, stage.fingerprint, stage.kind),
            )
            if self.job.stored is not None:
                found = adopt_stage(VariantDirectory(self.job.stored), self.folder, *wanted)
            else:
                found = reuse_stage(root, self.folder, *wanted)
            if found is not None:
                kept[stage.name] = found
        return kept

    def _refuse_other_conditions(self, kept: Mapping[str, StageRecord]) -> None:
        """Raise NotComparableError when a stored baseline was not measured as this run would measure it."""
        stored = VariantDirectory(self.job.stored or Path())
        result = stored.load_result()
        for stage in self.stages:
            if stage.name in kept:
                continue
            there = result.stages.get(stage.name) if result else None
            why = (
                ", ".join(text for _, text in differences(there.inputs, stage.inputs))
                if there
                else "it is not there"
            )
            raise NotComparableError(
                f'the stored baseline "{stored.path}" cannot be taken: {stage.name}: {why}; '
                f"measure it in this run (baseline={self.name})"
            )

    def _stored_stages(self) -> dict[str, StageRecord]:
        wanted = {stage.name: stage.fingerprint for stage in (*self.stages, *self.rounds)}
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
            comparable=self._comparable(stages),
            stages=dict(stages),
            environment=old.environment if old else {},
            started_at=old.started_at if old else now(),
            finished_at="" if status == "running" else now(),
            exit_code=exit_code,
        )
        write_record(self.folder.result, result)
        return result

    def _comparable(self, stages: Mapping[str, StageRecord]) -> dict[str, Any]:
        serving = self._serving_inputs()
        served = stages.get("artifact")
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
            **(served.observed if served else {}),
        }

    # ---- child processes

    def _child(self, order: Mapping[str, Any]) -> None:
        """Run one child to its end. ChildFailedError says how it failed."""
        spec = {
            **quantize_spec(self.plan, self.source, self.job.scheme),
            **order,
            "variant": self.name,
            "is_baseline": self.is_baseline,
            "variant_dir": str(self.folder.path),
            "baseline_dir": str(self.run_dir.variant(self.plan.baseline).path),
            "engine": self.job.engine.node,
            "bench": self.plan.bench.node,
            "tasks": {name: task.node for name, task in self.plan.tasks.items()},
            "policy": self.plan.policy.node,
            "seed": self.plan.runtime.seed,
            "threads": self.plan.runtime.thread_count,
            "parent_pid": os.getpid(),
        }
        run_child(spec, self.folder, self.plan.runtime.thread_count)

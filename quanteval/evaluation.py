"""What a child process does with one variant: serve its artifact, then the bench and the tasks that are missing."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TypeVar

from tqdm import tqdm

from quanteval.environment import (
    describe_environment,
    now,
    peak_rss_bytes,
    release_free_memory,
    reset_peak_rss,
)
from quanteval.errors import ConfigError, EngineError
from quanteval.evidence import VariantEvidence
from quanteval.failures import explain, is_out_of_memory
from quanteval.gate import is_decided
from quanteval.interfaces import OwnsProcesses, Sample, Session, Task, TaskContext
from quanteval.looks import sample_order
from quanteval.modelshape import read_shape
from quanteval.policy import load_policy
from quanteval.process_memory import ProcessMemory, before_load, explain_peak, snapshot
from quanteval.records import (
    Artifact,
    LoadPointRecord,
    MemoryUse,
    ModelShape,
    RequestTrace,
    StageRecord,
    TaskRecord,
    VariantResult,
)
from quanteval.store import (
    Journal,
    VariantDirectory,
    device_lock,
    done_samples,
    file_sha256,
    fingerprint,
    load_baseline,
    read_journal,
    read_record,
    read_scores,
    write_atomic,
    write_record,
)
from quanteval.targets import build

M = TypeVar("M", RequestTrace, LoadPointRecord)


class Evaluation:
    """Serves one artifact and does the stages that are missing."""

    def __init__(self, spec: dict[str, Any], folder: VariantDirectory, terminal: IO[str]) -> None:
        self.spec = spec
        self.folder = folder
        self.terminal = terminal
        self.stages = {stage["name"]: stage for stage in spec["stages"]}
        self.peaks: dict[str, int] = {}
        self.failures: list[str] = []
        self.session: Any = None
        self.snapshots: dict[str, ProcessMemory | None] = {}

    def run(self) -> None:
        """Serve, then bench and tasks; a task that fails does not keep the others from running."""
        artifact = read_record(Path(self.spec["artifact_dir"]) / "artifact.json", Artifact)
        engine = build(self.spec["engine"], where="engine", prefixes=self.spec["prefixes"])
        engine.check(artifact)
        reset_peak_rss()
        started = time.perf_counter()
        with engine.serve(artifact) as session:
            self.session = session
            self._end_phase("load")
            told = {"effective": session.describe(), "shape": _shape(Path(artifact.path))}
            served = artifact.model_copy(update=told)
            write_record(self.folder.artifact, served)
            if "artifact" in self.stages:
                self._finish_stage("artifact", started, {"batch_policy": session.batch_policy})
            for name in self.stages:
                if name.partition(":")[0] == "bench":
                    self._bench(session, engine.device, name)
            for name, node in self.spec["tasks"].items():
                if f"task:{name}" in self.stages:
                    self._task_or_failure(session, name, node)
            if not self.folder.memory.exists():
                write_record(self.folder.memory, self._with_phases(session.memory()))
        if self.failures:
            raise EngineError("; ".join(self.failures))

    # ---- bench

    def _bench(self, session: Session, device: str, stage: str) -> None:
        """Measure a load plan; `stage` is 'bench', or 'bench:3' for the third of interleaved rounds."""
        number = int(stage.partition(":")[2] or 0)
        bench = build(self.spec["bench"], where="bench", prefixes=self.spec["prefixes"])
        traces: list[RequestTrace] = []
        points: list[LoadPointRecord] = []
        started = time.perf_counter()
        phase = "warmup"
        reset_peak_rss()
        with device_lock(device), self._bar("bench", None) as bar:
            for item in bench.run(session):
                if isinstance(item, LoadPointRecord):
                    points.append(item.model_copy(update={"round": number}))
                    continue
                if phase == "warmup" and not item.warmup:
                    self._end_phase("warmup")
                    phase = "bench"
                traces.append(item.model_copy(update={"round": number}))
                bar.set_postfix_str(item.load_point, refresh=False)
                bar.update()
        self._end_phase(phase)
        self._refuse_gone_server("during the bench")
        self._write_peaks(device)
        self._write_lines(self.folder.traces, RequestTrace, number, traces)
        self._write_lines(self.folder.load_points, LoadPointRecord, number, points)
        write_record(self.folder.memory, self._with_phases(session.memory()))
        self._finish_stage(stage, started)

    def _write_lines(self, path: Path, model: type[M], number: int, fresh: Sequence[M]) -> None:
        """Write records of a round after those earlier rounds left; a bench without rounds starts anew."""
        done = read_record(self.folder.result, VariantResult).stages if number else {}
        stored = read_journal(path, model) if number and path.exists() else []
        kept: list[M] = [r for r in stored if r.round != number and f"bench:{r.round}" in done]
        write_atomic(path, "".join(r.model_dump_json() + "\n" for r in (*kept, *fresh)))

    def _with_phases(self, memory: MemoryUse) -> MemoryUse:
        before: dict[str, int] = {}
        if "artifact" not in self.stages and self.folder.memory.exists():
            # A round of the bench: loading and tasks had a process of their own.
            before = read_record(self.folder.memory, MemoryUse).phase_peak_bytes
        use = memory.model_copy(update={"phase_peak_bytes": {**before, **self.peaks}})
        # Loading has a peak of its own (source weights, repacking) that serving never sees again.
        serving = [phase for phase in self.peaks if phase != "load"]
        if not isinstance(self.session, OwnsProcesses):
            return explain_peak(use, before_load(), self.snapshots, serving or list(self.peaks))
        peak = max([use.process_peak_bytes, *(self.peaks[phase] for phase in serving)])
        rest = peak - sum(use.parts.values())
        return use.model_copy(update={"process_peak_bytes": peak, "unaccounted_bytes": rest})

    def _refuse_gone_server(self, when: str) -> None:
        """A server that died leaves failed requests: they measure its death and not its speed."""
        if isinstance(self.session, OwnsProcesses) and (why := self.session.gone()):
            raise EngineError(f"the server ended {when}: {why}")

    def _write_peaks(self, device: str) -> None:
        """Measure what the machine can do at best, where the model computes on this machine."""
        if device in ("cpu", "cuda"):
            from quanteval.engines.machine import measure_peaks

            write_record(self.folder.machine, measure_peaks(device))

    def _end_phase(self, name: str) -> None:
        if isinstance(self.session, OwnsProcesses):
            self.peaks[name] = self.session.take_peak_bytes()
            return
        self.peaks[name] = peak_rss_bytes()
        self.snapshots[name] = snapshot()
        release_free_memory()
        reset_peak_rss()

    # ---- tasks

    def _task_or_failure(self, session: Session, name: str, node: dict[str, Any]) -> None:
        try:
            self._task(session, name, node)
        except (KeyboardInterrupt, SystemExit):
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            traceback.print_exc()
            self.failures.append(f"task {name}: {explain(error)[1]}")
        self._end_phase(f"task:{name}")
        if self.folder.memory.exists():
            memory = read_record(self.folder.memory, MemoryUse)
            phases = {**memory.phase_peak_bytes, f"task:{name}": self.peaks[f"task:{name}"]}
            write_record(self.folder.memory, memory.model_copy(update={"phase_peak_bytes": phases}))

    def _task(self, session: Session, name: str, node: dict[str, Any]) -> None:
        stage = self.stages[f"task:{name}"]
        task: Task = build(node, where=f"task.{name}", prefixes=self.spec["prefixes"])
        samples = task.samples()
        stage_fingerprint = fingerprint(stage["inputs"])
        started = time.perf_counter()
        done = done_samples(self.folder, name, stage_fingerprint)
        if not done:
            self.folder.scores(name).unlink(missing_ok=True)
        record = TaskRecord(
            task=name,
            kind=task.kind,
            suite_version=str(stage["suite_inputs"].get("version", "")),
            fingerprint=fingerprint(stage["suite_inputs"]),
            inputs=stage["suite_inputs"],
            stage_fingerprint=stage_fingerprint,
            status="running",
            samples_expected=len(samples),
            category_of={
                s.sample_id: str(s.data["category"]) for s in samples if "category" in s.data
            },
        )
        write_record(self.folder.task_record(name), record)
        stop: dict[str, Any] = {}
        if stage["sequential"]:
            stop = self._score_in_blocks(session, task, samples, record, done)
        else:
            self._score(session, task, self._ordered(samples, stage), len(samples), done)
        complete = record.model_copy(
            update={
                **stop,
                "status": "complete",
                "elapsed_s": time.perf_counter() - started,
                "journal_sha256": file_sha256(self.folder.scores(name)),
            }
        )
        write_record(self.folder.task_record(name), complete)
        self._finish_stage(f"task:{name}", started)

    def _ordered(self, samples: Sequence[Sample], stage: dict[str, Any]) -> Sequence[Sample]:
        """Return the samples in the order in which they are evaluated."""
        if stage["order_seed"] is None:
            return samples
        by_id = {sample.sample_id: sample for sample in samples}
        return [by_id[i] for i in sample_order(list(by_id), stage["order_seed"])]

    def _score_in_blocks(
        self,
        session: Session,
        task: Task,
        samples: Sequence[Sample],
        record: TaskRecord,
        done: Collection[str],
    ) -> dict[str, Any]:
        """Evaluate up to each look and stop when the policy's rules are decided; return the record's changes."""
        policy = load_policy(self.spec["policy"], prefixes=self.spec["prefixes"])
        plan = policy.sequential
        if plan is None:
            raise EngineError(f"task {task.name} was to stop early, but its policy has no looks")
        baseline = load_baseline(Path(self.spec["baseline_dir"]))
        ordered = self._ordered(samples, {"order_seed": plan.seed})
        known = set(done)
        stop: dict[str, Any] = {}
        for look, size in enumerate(plan.sizes(len(samples)), 1):
            self._score(session, task, ordered[:size], len(samples), known)
            known |= {sample.sample_id for sample in ordered[:size]}
            stop = {"sequential": plan.at(len(samples), look), "samples_expected": size}
            seen = record.model_copy(update={**stop, "status": "complete"})
            scores = replace(read_scores(record, self.folder.scores(task.name)), record=seen)
            candidate = VariantEvidence(
                name=self.spec["variant"],
                result=read_record(self.folder.result, VariantResult),
                artifact=read_record(self.folder.artifact, Artifact),
                memory=None,
                traces=(),
                scores={task.name: scores},
            )
            if is_decided(policy, baseline, candidate, task.name):
                break
        return stop

    def _score(
        self,
        session: Session,
        task: Task,
        samples: Sequence[Sample],
        total: int,
        done: Collection[str],
    ) -> None:
        """Journal each score as it ends, those done left out; every sample must get exactly one."""
        todo = [sample for sample in samples if sample.sample_id not in done]
        open_ids = {sample.sample_id for sample in todo}
        context = TaskContext(
            variant_dir=self.folder.path,
            baseline_dir=Path(self.spec["baseline_dir"]),
            is_baseline=self.spec["is_baseline"],
            seed=self.spec["seed"],
        )
        with Journal(self.folder.scores(task.name)) as journal, self._bar(task.name, total) as bar:
            bar.update(total - len(todo))
            if not todo:
                return
            for score in task.evaluate(session, todo, context):
                if score.sample_id not in open_ids:
                    raise EngineError(
                        f'sample "{score.sample_id}" was scored twice or never asked for'
                    )
                open_ids.remove(score.sample_id)
                journal.append(score)
                bar.update()
        if open_ids:
            raise EngineError(f"{len(open_ids)} samples got no score, the first: {min(open_ids)}")

    # ---- records and progress

    def _finish_stage(
        self, name: str, started: float, observed: dict[str, Any] | None = None
    ) -> None:
        stage = self.stages[name]
        record = StageRecord(
            name=name,
            fingerprint=fingerprint(stage["inputs"]),
            inputs=stage["inputs"],
            started_s=time.time() - (time.perf_counter() - started),
            finished_at=now(),
            elapsed_s=time.perf_counter() - started,
            observed=observed or {},
        )
        result = read_record(self.folder.result, VariantResult)
        update = {
            "stages": {**result.stages, name: record},
            "comparable": {**result.comparable, **record.observed},
            "environment": describe_environment(),
        }
        write_record(self.folder.result, result.model_copy(update=update))

    def _bar(self, name: str, total: int | None) -> Any:
        return tqdm(
            desc=f"{self.spec['variant']} {name}",
            total=total,
            file=self.terminal,
            disable=not self.terminal.isatty(),
            leave=False,
            dynamic_ncols=True,
        )


def _shape(folder: Path) -> ModelShape | None:
    """Return the model's dimensions from its configuration, None where they are not known."""
    try:
        return read_shape(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, ConfigError):
        return None

"""The order of things: resolve, quantize, serve, bench, tasks, gate, report.

A run goes through its variants, the baseline first, brings each up to date (see `variant`), then
gates and reports what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quanteval.environment import cpu_model, describe_environment, now
from quanteval.interfaces import ModelSource
from quanteval.judge import judge, remember_attempts, report, store_verdicts
from quanteval.models import resolve_model
from quanteval.records import Manifest, VariantResult, Verdict
from quanteval.report import Table
from quanteval.runplan import RunPlan
from quanteval.store import RunDirectory, file_lock, fingerprint, write_record
from quanteval.variant import RunContext, VariantWorker, jobs_of

Notify = Callable[[str], None]


@dataclass(frozen=True)
class RunOutcome:
    """What a run left behind."""

    path: Path
    results: tuple[VariantResult, ...]
    verdicts: tuple[Verdict, ...]
    table: Table

    @property
    def complete(self) -> bool:
        """Whether every variant ended in a status that is an answer (ok, or unsupported here)."""
        return all(result.status in ("ok", "unsupported") for result in self.results)


# --------------------------------------------------------------------------- the whole run


def execute(plan: RunPlan, notify: Notify, command: Sequence[str] = ()) -> RunOutcome:
    """Do everything a plan asks for that is not done yet, then gate and report.

    `notify` gets one line a step. KeyboardInterrupt passes through after the state is recorded.
    """
    notify(f"model: {plan.model.name}")
    source = resolve_model(
        plan.model.name,
        revision=plan.model.revision,
        gguf_file=plan.model.gguf_file,
        trust_remote_code=plan.model.trust_remote_code,
    )
    suites = {
        name: task.object.fingerprint(task.object.samples()) for name, task in plan.tasks.items()
    }
    manifest = _manifest(plan, source, suites, command)
    run = RunDirectory((plan.run_dir or plan.output_root / manifest.run_id).absolute())
    busy = f'another quanteval process is working on "{run.path}": wait for it or end it'
    with file_lock(run.path / ".lock", wait=False, busy=busy):
        if (
            run.manifest.exists()
            and (old := run.load_manifest()).fingerprint == manifest.fingerprint
        ):
            manifest = manifest.model_copy(update={"created_at": old.created_at})
        write_record(run.manifest, manifest)
        notify(f"run: {run.path}")
        context = RunContext(plan, source, suites, run)
        jobs = jobs_of(plan)
        workers = [
            VariantWorker(context, job, _prefixed(notify, f"[{index}/{len(jobs)}] {job.name}"))
            for index, job in enumerate(jobs, 1)
        ]
        for worker in workers:
            worker.forget_other_stages()
        results = []
        for worker in workers:
            results.append(worker.run())
            # At once: a run that is broken off here has asked its question all the same.
            remember_attempts(run)
        results = _take_turns(workers, results)
        notify("gate")
        verdicts = judge(run, plan.policy) if len(plan.variants) > 1 else []
        store_verdicts(run, verdicts)
        table = report(run)
    return RunOutcome(run.path, tuple(results), tuple(verdicts), table)


def _take_turns(
    workers: Sequence[VariantWorker], results: Sequence[VariantResult]
) -> list[VariantResult]:
    """Measure the rounds of the bench, every variant once before any of them again."""
    found = list(results)
    rounds = max(len(worker.rounds) for worker in workers)
    for number in range(1, rounds + 1):
        for place, worker in enumerate(workers):
            if worker.rounds and found[place].status == "ok":
                found[place] = worker.run_round(number)
    return found


def _manifest(
    plan: RunPlan, source: ModelSource, suites: Mapping[str, Any], command: Sequence[str]
) -> Manifest:
    environment = describe_environment()
    identity = {
        "config": _without_places(plan.config),
        "model": source.weights_digest,
        "suites": suites,
        "packages": environment["packages"],
        "cpu": cpu_model(),
        "threads": plan.runtime.thread_count,
    }
    digest = fingerprint(identity)
    slug = "".join(c if c.isalnum() or c in "._-" else "-" for c in source.id.rsplit("/", 1)[-1])
    return Manifest(
        run_id=f"{slug}-{digest[:10]}",
        created_at=now(),
        command=list(command),
        config=plan.config,
        baseline=plan.baseline,
        variants=list(plan.variants),
        tasks=list(plan.tasks),
        again=plan.again,
        policy_name=plan.policy.name,
        policy=plan.config["gate"],
        environment=environment,
        fingerprint=digest,
    )


def _without_places(config: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what says where things lie: the same work elsewhere is the same run."""
    kept = {key: value for key, value in config.items() if key not in ("output_root", "run_dir")}
    kept["task"] = {
        name: {key: value for key, value in node.items() if key != "folder"}
        for name, node in config["task"].items()
    }
    return kept


def _prefixed(notify: Notify, label: str) -> Notify:
    return lambda message: notify(f"{label}: {message}")

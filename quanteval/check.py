"""`quanteval check`: everything about a configuration that can be known before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from quanteval.config import compose, make_plan
from quanteval.errors import QuantevalError
from quanteval.interfaces import ModelSource
from quanteval.models import classify, resolve_model
from quanteval.runplan import RunPlan


def check(overrides: Sequence[str]) -> tuple[list[str], list[QuantevalError]]:
    """Compose, build and check; return a line for each thing that holds and all errors at once.

    A scheme that cannot run on this machine is an error here, though a run would go on without it.
    A model on a hub is not fetched, so its shapes are not checked.
    """
    errors: list[QuantevalError] = []
    try:
        plan = make_plan(compose(overrides), collect=errors)
    except QuantevalError as error:
        return [], [*errors, error]
    lines: list[str] = []
    attempts: list[tuple[str, Callable[[], str]]] = [("model", lambda: _model(plan))]
    attempts += [(f"task {name}", partial(_task, plan, name)) for name in plan.tasks]
    if plan.engine is not None:
        attempts += [(f"scheme {name}", partial(_scheme, plan, name)) for name in plan.variants]
    if plan.policy is not None:
        attempts.append(("gate", lambda: f"{plan.policy.name}: {len(plan.policy.rules)} rules"))
    for what, attempt in attempts:
        try:
            lines.append(f"{what}: {attempt()}")
        except QuantevalError as error:
            errors.append(type(error)(f"{what}: {error}"))
    return lines, errors


def _model(plan: RunPlan) -> str:
    known = classify(plan.model.name, plan.model.gguf_file)
    return f"{known.name} ({known.kind})"


def _task(plan: RunPlan, name: str) -> str:
    task = plan.tasks[name].object
    return f"{len(task.samples())} samples, kind {task.kind}"


def _scheme(plan: RunPlan, name: str) -> str:
    """Check shapes too where the model is already a local folder."""
    device = plan.engine.object.device
    plan.variants[name].object.check(_local_source(plan), device)
    role = "baseline" if name == plan.baseline else "candidate"
    return f"can run on {device} ({role})"


def _local_source(plan: RunPlan) -> ModelSource | None:
    """Return the model when it is a folder here; None also for a name that means nothing (said once)."""
    try:
        known = classify(plan.model.name, plan.model.gguf_file)
    except QuantevalError:
        return None
    return resolve_model(plan.model.name) if known.kind == "folder" else None

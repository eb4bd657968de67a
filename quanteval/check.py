"""`quanteval check`: everything about a configuration that can be known before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from quanteval.config import compose, make_plan
from quanteval.errors import ConfigError, QuantevalError
from quanteval.evidence import SuiteFacts
from quanteval.interfaces import ModelSource, Scheme
from quanteval.models import classify, resolve_model
from quanteval.planning import blocking, forecasts, idle_text, unknown_tasks
from quanteval.policy import Policy
from quanteval.records import Artifact
from quanteval.runplan import RunPlan


def check(overrides: Sequence[str]) -> tuple[list[str], list[QuantevalError]]:
    """Compose, build and check; return a line for each thing that holds and all errors at once.

    A scheme that cannot run on this machine is an error here, though a run would go on without it.
    A model on a hub is not fetched, so its shapes are not checked. Lines that begin with "warning" say
    which rules of the policy have nothing to check, and which cannot accept at these sizes.
    """
    errors: list[QuantevalError] = []
    try:
        plan = make_plan(compose(overrides), collect=errors)
    except QuantevalError as error:
        return [], [*errors, error]
    lines: list[str] = []
    facts: dict[str, SuiteFacts] = {}
    attempts: list[tuple[str, Callable[[], str]]] = [("model", lambda: _model(plan))]
    attempts += [(f"task {name}", partial(_task, plan, name, facts)) for name in plan.tasks]
    if plan.engine is not None:
        attempts += [(f"scheme {name}", partial(_scheme, plan, name)) for name in plan.variants]
    if plan.policy is not None:
        attempts.append(("gate", lambda: f"{plan.policy.name}: {len(plan.policy.rules)} rules"))
    for what, attempt in attempts:
        try:
            lines.append(f"{what}: {attempt()}")
        except QuantevalError as error:
            errors.append(type(error)(f"{what}: {error}"))
    if plan.policy is not None and plan.engine is not None:
        chosen = list(plan.config["task"])
        warnings, wrong = check_policy(plan.policy, facts, chosen, plan.engine.object.device)
        lines += [f"warning: gate: {text}" for text in warnings]
        errors += [ConfigError(f"gate: {text}") for text in wrong]
    return lines, errors


def check_policy(
    policy: Policy, facts: Mapping[str, SuiteFacts], chosen: Sequence[str], device: str
) -> tuple[list[str], list[str]]:
    """Return warnings and errors of a policy for the chosen tasks; `facts` are those of the tasks that load.

    An error is a required rule on a task that is not chosen, since it could only end invalid. Flips are
    as the facts assume: what is said of a rule that cannot accept does not depend on them.
    """
    warnings: list[str] = []
    errors: list[str] = []
    kinds = {name: facts[name].kind if name in facts else "" for name in chosen}
    whole = len(facts) == len(kinds)
    for name, rule in policy.rules_on(device).items():
        named = bool(unknown_tasks(rule, kinds))
        if text := idle_text(name, rule, kinds):
            # A kind may belong to a task that could not be loaded, which is an error of its own.
            if named and rule.required:
                errors.append(text)
            elif named or whole:
                warnings.append(text)
    for forecast in forecasts(policy, facts, device):
        if policy.rules_on(device)[forecast.rule].required:
            warnings += [
                f"{forecast.rule} on {forecast.task} (n={forecast.n}, margin {forecast.margin}): {text}"
                for text in blocking(forecast)
            ]
    return warnings, errors


def _model(plan: RunPlan) -> str:
    known = classify(plan.model.name, plan.model.gguf_file)
    return f"{known.name} ({known.kind})"


def _task(plan: RunPlan, name: str, facts: dict[str, SuiteFacts]) -> str:
    task = plan.tasks[name].object
    samples = len(task.samples())
    facts[name] = SuiteFacts(name, task.kind, samples)
    return f"{samples} samples, kind {task.kind}"


def _scheme(plan: RunPlan, name: str) -> str:
    """Check shapes too where the model is already a local folder."""
    device = plan.engine.object.device
    scheme = plan.variants[name].object
    source = _local_source(plan)
    scheme.check(source, device)
    plan.engine.object.check(_provisional(name, scheme, source))
    role = "baseline" if name == plan.baseline else "candidate"
    return f"can run on {device} ({role})"


def _provisional(name: str, scheme: Scheme, source: ModelSource | None) -> Artifact:
    """Return what is known of an artifact before it is built: enough for an engine to refuse its format."""
    return Artifact(
        scheme=name,
        scheme_config={},
        precision=scheme.precision,
        model_id=source.id if source else "",
        model_revision=None,
        model_provenance="",
        weights_digest="",
        path="" if source is None or scheme.precision.quantized else str(source.path),
        format=getattr(scheme, "artifact_format", "transformers"),
        bytes_on_disk=0,
        build_s=0.0,
    )


def _local_source(plan: RunPlan) -> ModelSource | None:
    """Return the model when it is a folder here; None also for a name that means nothing (said once)."""
    try:
        known = classify(plan.model.name, plan.model.gguf_file)
    except QuantevalError:
        return None
    return resolve_model(plan.model.name) if known.kind == "folder" else None

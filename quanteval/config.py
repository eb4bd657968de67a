"""From Hydra's composed configuration to a validated plan of built objects.

Composition and overrides are Hydra's; types, unknown keys and dotted targets are checked here, and
nothing is measured, loaded or written. Suites are read from tasks/<name>/task.yaml and offered to
Hydra as the group `task`, so that a folder is all it takes to add one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quanteval.errors import ConfigError, QuantevalError
from quanteval.interfaces import Scheme
from quanteval.judge import locate_variant
from quanteval.policy import load_policy
from quanteval.resources import presets, resource_dir, task_folders
from quanteval.runplan import Component, ModelRequest, RunPlan, Runtime
from quanteval.targets import DEFAULT_PREFIXES, allow, build, near

CONFIG_NAME = "config"


@dataclass
class ModelOptions:
    """How `model` is to be read, where its name alone does not say."""

    revision: str | None = None
    gguf_file: str | None = None
    trust_remote_code: bool = False


@dataclass
class RuntimeConfig:
    """How the child processes run."""

    threads: int | None = None
    seed: int = 0
    bench_rounds: int = 1


@dataclass
class TrustConfig:
    """Which dotted targets may be built, besides those of quanteval itself."""

    targets: list[str] = field(default_factory=list)


@dataclass
class RunConfig:
    """Schema of `quanteval run`: what may be set, and its types."""

    model: str = "smollm2_135m"
    model_options: ModelOptions = field(default_factory=ModelOptions)
    baseline: str | None = None
    scheme: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    bench: dict[str, Any] = field(default_factory=dict)
    # Keys that a policy may leave out, so that they can be set on the command line for any of them.
    gate: dict[str, Any] = field(
        default_factory=lambda: {"sequential": False, "max_missing": 0.0, "alpha": 0.05}
    )
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)
    aa: bool = False
    output_root: str = "outputs"
    run_dir: str | None = None


def register() -> None:
    """Make the schema and the suites known to Hydra."""
    store = ConfigStore.instance()
    store.store(name="schema", node=RunConfig)
    for name, folder in task_folders().items():
        store.store(group="task", name=name, node={name: load_task_node(folder)})


def load_task_node(folder: Path) -> dict[str, Any]:
    """Read tasks/<name>/task.yaml and fill in where it lies. ConfigError when it is no mapping."""
    path = folder / "task.yaml"
    try:
        node = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f'"{path}" is not YAML: {str(error).splitlines()[0]}') from None
    if not isinstance(node, dict) or "_target_" not in node:
        raise ConfigError(f'"{path}" has no "_target_": it must say which task kind it is')
    return {**node, "folder": str(folder)}


def launch(arguments: Sequence[str], job: Callable[[RunPlan], None]) -> list[QuantevalError]:
    """Hand the arguments to Hydra, which calls `job` with a plan: once, or once a cell with -m.

    Returns the errors of cells, so that one does not keep the others of a sweep from running. Raises
    ConfigError for what Hydra itself refuses.
    """
    register()
    # With this set Hydra lets exceptions through, instead of printing them and ending the process.
    os.environ["HYDRA_FULL_ERROR"] = "1"

    errors: list[QuantevalError] = []

    def task(cfg: DictConfig) -> None:
        try:
            job(make_plan(cfg))
        except QuantevalError as error:
            errors.append(error)

    before = sys.argv
    sys.argv = ["quanteval run", *arguments]
    try:
        hydra.main(
            version_base="1.3", config_path=str(resource_dir("conf")), config_name=CONFIG_NAME
        )(task)()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_hydra_line(error)) from None
    finally:
        sys.argv = before
    return errors


def _hydra_line(error: Exception) -> str:
    """Return the telling lines of Hydra's message as one."""
    missing = getattr(error, "missing_cfg_file", None)
    if isinstance(missing, str) and "/" in missing:
        group, _, name = missing.removesuffix(".yaml").rpartition("/")
        known: Mapping[str, object] = task_folders() if group == "task" else presets(group)
        return f'no {group} "{name}"; {near(name, known)}'
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    kept = [
        line
        for line in lines
        if not line.startswith(("full_key", "object_type", "Set the", "See "))
    ]
    return " ".join(kept) or type(error).__name__


def compose(overrides: Sequence[str]) -> DictConfig:
    """Compose the configuration as `quanteval run` would, for a look at it."""
    register()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(resource_dir("conf")), version_base="1.3"):
            return hydra_compose(CONFIG_NAME, overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_hydra_line(error)) from None


def make_plan(cfg: DictConfig, collect: list[QuantevalError] | None = None) -> RunPlan:
    """Turn a composed configuration into built objects, without any effect.

    With `collect`, errors are gathered there (so that `check` can show all of them at once) and the
    parts in error are left out; otherwise the first one is raised.
    """
    config: RunConfig = OmegaConf.to_object(cfg)
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)
    plain.pop("experiment", None)
    prefixes = (*DEFAULT_PREFIXES, *config.trust.targets)
    attempt = _Attempts(collect)
    # Suites look up loaders when their samples are read, long after they were built.
    allow(prefixes)

    plain["scheme"] = attempt(lambda: _chosen(plain["scheme"], "scheme", presets("scheme"))) or {}
    plain["task"] = attempt(lambda: _chosen(plain["task"], "task", task_folders())) or {}
    schemes = _components(plain["scheme"], "scheme", prefixes, Scheme, attempt)
    tasks = _components(plain["task"], "task", prefixes, None, attempt)
    engine = attempt(lambda: _component(plain["engine"], "engine", prefixes))
    bench = attempt(lambda: _component(plain["bench"], "bench", prefixes))
    policy = attempt(lambda: load_policy(plain["gate"], prefixes=prefixes))
    stored = attempt(lambda: _stored_baseline(config.baseline, plain["scheme"]))
    if stored:
        plain["scheme"] = {stored.name: stored.node, **plain["scheme"]}
        kept = _components({stored.name: stored.node}, "scheme", prefixes, Scheme, attempt)
        schemes = {**kept, **schemes}
    asked = stored.name if stored else config.baseline
    baseline = attempt(lambda: _baseline(asked, plain["scheme"]))
    if config.runtime.bench_rounds < 1:
        attempt(
            _raiser(f'runtime.bench_rounds: "{config.runtime.bench_rounds}" must be at least 1')
        )
    if config.runtime.threads is not None and config.runtime.threads < 1:
        attempt(_raiser(f'runtime.threads: "{config.runtime.threads}" must be at least 1'))
    if baseline in schemes:
        schemes = {baseline: schemes.pop(baseline), **schemes}
    again = f"{baseline}_again" if config.aa and baseline else ""
    if again in schemes:
        attempt(_raiser(f'scheme "{again}" has the name of the repeated baseline; rename it'))
    other = attempt(lambda: _component(_other_batch(plain["engine"]), "engine", prefixes))
    return RunPlan(
        model=ModelRequest(config.model, **vars(config.model_options)),
        baseline=baseline or "",
        variants=schemes,
        engine=engine,
        tasks=tasks,
        bench=bench,
        policy=policy,
        runtime=Runtime(**vars(config.runtime)),
        prefixes=prefixes,
        again=again,
        other_engine=other,
        stored_baseline=stored.folder if stored else None,
        output_root=Path(config.output_root),
        run_dir=Path(config.run_dir) if config.run_dir else None,
        config=plain,
    )


def _other_batch(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine in another batch size, where it has one: what may differ in production."""
    rows = engine.get("max_batch_rows")
    if not isinstance(rows, int):
        return dict(engine)
    return {**engine, "max_batch_rows": rows // 2 if rows > 1 else 2}


class _Attempts:
    """Runs steps; raises the first error, or gathers all when given a list."""

    def __init__(self, collect: list[QuantevalError] | None) -> None:
        self.collect = collect

    def __call__(self, step: Callable[[], Any]) -> Any:
        if self.collect is None:
            return step()
        try:
            return step()
        except QuantevalError as error:
            self.collect.append(error)
            return None


def _raiser(message: str) -> Callable[[], None]:
    def step() -> None:
        raise ConfigError(message)

    return step


def _chosen(nodes: Mapping[str, Any], group: str, known: Mapping[str, object]) -> dict[str, Any]:
    """Drop what an experiment adjusts but the command line did not choose (it has no target)."""
    for name, node in nodes.items():
        if "_target_" not in node and name not in known:
            raise ConfigError(f'no {group} "{name}"; {near(name, known)}')
    return {name: node for name, node in nodes.items() if "_target_" in node}


def _component(node: Mapping[str, Any], where: str, prefixes: Sequence[str]) -> Component[Any]:
    return Component(dict(node), build(node, where=where, prefixes=prefixes))


def _components(
    nodes: Mapping[str, Any],
    group: str,
    prefixes: Sequence[str],
    protocol: type | None,
    attempt: _Attempts,
) -> dict[str, Component[Any]]:
    out: dict[str, Component[Any]] = {}
    for name, node in nodes.items():
        made = attempt(partial(_component, node, f"{group}.{name}", prefixes))
        if made is None:
            continue
        if protocol is not None and not isinstance(made.object, protocol):
            attempt(_raiser(f'{group}.{name}: "{node["_target_"]}" is not a {group}'))
            continue
        if group == "task" and made.object.name != name:
            # Scores are filed under the task's own name, and looked for under this one.
            attempt(_raiser(f'task.{name}: name "{made.object.name}" must be "{name}"'))
            continue
        out[name] = made
    if not nodes:
        attempt(_raiser(f"{group}: none is chosen; write {group}=[name,...]"))
    return out


@dataclass(frozen=True)
class _Stored:
    """A baseline of another run: its scheme's name and node, and the variant's folder."""

    name: str
    node: dict[str, Any]
    folder: Path


def _stored_baseline(asked: str | None, schemes: Mapping[str, Any]) -> _Stored | None:
    """Return the variant that baseline=RUN[:variant] names; None for the name of a scheme."""
    if asked is None or asked in schemes or not ("/" in asked or ":" in asked or asked == "latest"):
        return None
    run, name = locate_variant(asked)
    manifest = run.load_manifest()
    node = (manifest.config.get("scheme") or {}).get(name)
    if not isinstance(node, dict):
        raise ConfigError(
            f'baseline "{asked}": "{run.path}" does not record the scheme of "{name}"'
        )
    if name in schemes and schemes[name] != node:
        raise ConfigError(
            f'baseline "{asked}": the scheme "{name}" is another one here; leave it out'
        )
    return _Stored(name, node, run.variant(name).path.absolute())


def _baseline(asked: str | None, schemes: Mapping[str, Any]) -> str:
    if not schemes:
        return ""
    if asked is None:
        return next(iter(schemes))
    if asked not in schemes:
        raise ConfigError(f'baseline "{asked}" is not among the schemes; {near(asked, schemes)}')
    return asked

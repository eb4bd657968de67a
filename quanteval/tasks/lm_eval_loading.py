"""Tasks of lm-evaluation-harness by name or from a folder of its YAML files, loaded once a process.

A task that executes generated code is refused before anything of it is imported. What the library prints
goes to standard error, and its log is kept to errors.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import inspect
import json
import logging
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from quanteval.errors import ConfigError, QuantevalError, UnsupportedError
from quanteval.store import file_sha256

LOCAL_BUILDERS = ("json", "csv", "parquet", "text", "arrow", "pandas", "xml")
NOT_SCORING = ("tag", "task_alias", "dataset_kwargs", "custom_dataset")
"""Fields of a task's configuration that change names or where its data come from, not its scores."""


def library_version() -> str:
    """Return lm_eval's version. ConfigError when it is not installed."""
    try:
        import lm_eval.api.task
        import lm_eval.tasks
    except ImportError as error:
        raise ConfigError(
            f"lm_eval tasks need the package \"{error.name or 'lm_eval'}\": pip install 'quanteval[lm-eval]'"
        ) from None
    return str(lm_eval.__version__)


def load_tasks(name: str, include_path: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return lm_eval's task objects by name: one, or all those of a group or tag, with their data.

    `include_path` is a folder of YAML files, or ''. `overrides` is merged into each task's configuration.
    ConfigError for a name that is not known, UnsupportedError for tasks that run generated code or look at
    pictures, QuantevalError when the data cannot be had.
    """
    library_version()
    return _load(name, include_path, json.dumps(dict(overrides), sort_keys=True, default=str))


@functools.lru_cache(maxsize=8)
def _load(name: str, include_path: str, overrides_json: str) -> dict[str, Any]:
    with quiet():
        manager, spec = _find(name, include_path)
        configs = _configs(manager.task_index, name) if spec == name else [_raw_config(spec)]
    for config in configs:
        if config and config.get("unsafe_code"):
            raise _runs_code(str(config.get("task", name)))
    try:
        with quiet(), seeded(), _merging(manager, json.loads(overrides_json)):
            tasks: dict[str, Any] = manager.load(spec)["tasks"]
    except QuantevalError:
        raise
    except Exception as error:
        raise QuantevalError(_why_not_loaded(name, configs, error)) from error
    if not tasks:
        raise ConfigError(f'lm_eval group "{name}" has no tasks')
    for each, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False):
            raise _runs_code(each)
        if getattr(task, "MULTIMODAL", False):
            raise UnsupportedError(
                f'lm_eval task "{each}" has pictures or sound; only text is served'
            )
    return tasks


def _runs_code(name: str) -> UnsupportedError:
    return UnsupportedError(
        f'lm_eval task "{name}" executes generated code without a sandbox; use a suite of the kind code, '
        "such as task=[humaneval]"
    )


def _why_not_loaded(name: str, configs: list[Any], error: Exception) -> str:
    path = str((configs[0] or {}).get("dataset_path") or "") if configs else ""
    cause = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if path and path not in LOCAL_BUILDERS and isinstance(error, OSError | ValueError):
        return (
            f'cannot load the data "{path}" of lm_eval task "{name}": {cause}; overrides.dataset_path and '
            "overrides.dataset_kwargs can name local files"
        )
    return f'cannot load lm_eval task "{name}": {cause}'


# --------------------------------------------------------------------------- finding


def _find(name: str, include_path: str) -> tuple[Any, str]:
    """Return a task manager and what to ask it for: the name, or the path of the one file that defines it.

    Parsing all of the library's files takes ten seconds, so that is done for groups and tags only.
    """
    from lm_eval.tasks import TaskManager

    own: list[str] = []
    if include_path:
        if not Path(include_path).is_dir():
            raise ConfigError(f'include_path "{include_path}" is not a folder')
        manager = TaskManager(include_path=include_path, include_defaults=False)
        _refuse_suites(manager, include_path)
        own = manager.all_tasks
        if name in own:
            complete = None not in _configs(manager.task_index, name)
            return (manager if complete else _whole_library(include_path)), name
    found = _search_library(name)
    if found.path:
        return TaskManager(include_defaults=False), found.path
    if found.mentioned and name in (manager := _whole_library("")).task_index:
        return manager, name
    close = difflib.get_close_matches(name, {*own, *found.names}, n=3, cutoff=0.6)
    known = ", ".join(f'"{each}"' for each in close)
    hint = f"did you mean {known}?" if close else "`lm-eval ls tasks` lists all names"
    raise ConfigError(f'lm_eval has no task "{name}"; {hint}')


@functools.lru_cache(maxsize=2)
def _whole_library(include_path: str) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path or None)


@dataclass(frozen=True)
class _Search:
    """What the library's files say about a name, read as text."""

    path: str
    """The one file that defines a task of this name, '' unless there is exactly one."""
    mentioned: bool
    names: frozenset[str]
    """Tasks and groups that could have been meant."""


@functools.lru_cache(maxsize=64)
def _search_library(name: str) -> _Search:
    import lm_eval.tasks

    says = re.compile(rb"^[\"']?(?:task|group)[\"']?[ \t]*:[ \t]*[\"']?([\w.+-]+)", re.MULTILINE)
    names: set[str] = set()
    defining: list[str] = []
    mentioned = False
    folder = Path(inspect.getfile(lm_eval.tasks)).parent
    for path in sorted(folder.rglob("*yaml")):
        if not path.is_file():
            continue
        text = path.read_bytes()
        mentioned = mentioned or name.encode() in text
        said = {each.decode() for each in says.findall(text)}
        names |= said
        if name in said and path.suffix == ".yaml":
            defining.append(str(path))
    one = defining[0] if len(defining) == 1 else ""
    if one and _raw_config(one).get("task") != name:
        one = ""
    return _Search(one, mentioned, frozenset(names))


def _refuse_suites(manager: Any, include_path: str) -> None:
    for entry in manager.task_index.values():
        if entry.cfg and "_target_" in entry.cfg:
            raise ConfigError(
                f'include_path "{include_path}" holds "{Path(entry.yaml_path).name}", which is a suite of '
                "quanteval: put the YAML files of lm_eval into a folder of their own"
            )


def _raw_config(path: str) -> dict[str, Any]:
    """Return a file's configuration, includes merged; functions stay names and are not imported."""
    from lm_eval.tasks._yaml_loader import load_yaml

    return dict(load_yaml(path, resolve_func=False))


def _configs(index: Mapping[str, Any], name: str) -> list[dict[str, Any] | None]:
    """Return the configurations of all tasks that a name stands for; None for each that is not in the index."""
    entry = index.get(name)
    if entry is None:
        return [None]
    if entry.kind.name == "TAG":
        return [config for each in sorted(entry.tags) for config in _configs(index, each)]
    members = (entry.cfg or {}).get("task")
    if entry.kind.name != "GROUP" or not isinstance(members, list):
        return [entry.cfg or {}]
    return [config for member in members for config in _member_configs(index, member)]


def _member_configs(index: Mapping[str, Any], member: Any) -> list[dict[str, Any] | None]:
    if isinstance(member, str):
        return _configs(index, member)
    key = member.get("group") or member.get("task")
    if isinstance(key, str) and key in index:
        return _configs(index, key)
    if isinstance(member.get("task"), list):
        return [config for each in member["task"] for config in _member_configs(index, each)]
    return [None]


@contextlib.contextmanager
def _merging(manager: Any, overrides: Mapping[str, Any]) -> Iterator[None]:
    """Merge `overrides` into each task's configuration as it is loaded; groups have none of their own."""
    if not overrides:
        yield
        return
    factory = manager._factory
    load = factory._load_full_config

    def load_merged(entry: Any, given: dict[str, Any] | None = None) -> Any:
        config = load(entry, given)
        return config if entry.kind.name == "GROUP" else merged(config, overrides)

    factory._load_full_config = load_merged
    try:
        yield
    finally:
        del factory._load_full_config


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with `overrides` in it: mappings are merged key by key, all else is replaced."""
    out = dict(config)
    for key, value in overrides.items():
        old = out.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            out[key] = merged(old, value)
        else:
            out[key] = value
    return out


# --------------------------------------------------------------------------- surroundings


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Send what the library prints to standard error, and keep its log to errors and its bars hidden."""
    import datasets

    log = logging.getLogger("lm_eval")
    level, bars = log.level, datasets.are_progress_bars_disabled()
    log.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        log.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Seed the global generators as lm_eval does before it loads tasks (some shuffle answers), and restore them."""
    import numpy as np

    before, before_numpy = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(1234)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(before_numpy)


# --------------------------------------------------------------------------- plain JSON


def describe_config(task: Any) -> dict[str, Any]:
    """Return a task's configuration as plain JSON without paths; functions by the digest of their source."""
    config = {field.name: getattr(task.config, field.name) for field in fields(task.config)}
    config = {k: v for k, v in config.items() if v is not None and k not in NOT_SCORING}
    metadata = dict(config.pop("metadata", None) or {})
    metadata.pop("config_source", None)
    if (path := config.get("dataset_path")) and Path(str(path)).exists():
        del config["dataset_path"]
    out: dict[str, Any] = plain({**config, "metadata": metadata})
    if type(task).__name__ != "ConfigurableTask":
        out["class"] = _source(type(task))
    return out


def plain(value: Any) -> Any:
    """Return any value of a document or configuration as plain JSON."""
    out: Any = value
    if isinstance(value, Mapping):
        out = {str(key): plain(each) for key, each in value.items()}
    elif isinstance(value, list | tuple):
        out = [plain(each) for each in value]
    elif isinstance(value, set | frozenset):
        out = sorted((plain(each) for each in value), key=str)
    elif isinstance(value, bytes):
        out = {"sha256": hashlib.sha256(value).hexdigest()}
    elif hasattr(value, "tolist"):
        out = plain(value.tolist())
    elif is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        out = {key: plain(each) for key, each in parts.items() if each is not None}
    elif callable(value):
        out = _source(value)
    elif value is not None and not isinstance(value, str | bool | int | float):
        out = str(value)
    return out


def _source(function: Callable[..., Any]) -> dict[str, str]:
    """Name a function or class and digest the file that defines it, with the helpers beside it."""
    while isinstance(function, functools.partial):
        function = function.func
    name = str(getattr(function, "__qualname__", type(function).__name__))
    try:
        path = inspect.getsourcefile(function)
    except TypeError:
        path = None
    digest = file_sha256(Path(path)) if path and Path(path).is_file() else ""
    return {"function": name, "sha256": digest}

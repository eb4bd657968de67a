"""A validated run: what was asked for, as built objects, before anything is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from quanteval.environment import usable_cores
from quanteval.interfaces import Bench, Engine, Scheme, Task
from quanteval.policy import Policy

T = TypeVar("T")


@dataclass(frozen=True)
class Component(Generic[T]):
    """A built object and the node it was built from (the node travels to the child process)."""

    node: dict[str, Any]
    object: T


@dataclass(frozen=True)
class ModelRequest:
    """Which model was asked for; see `models.resolve_model`."""

    name: str
    revision: str | None = None
    gguf_file: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Runtime:
    """How child processes run: numeric threads (None: one a usable core), the seed, and the bench's rounds.

    With more than one round, all variants take turns: a process of its own for each, round by round.
    """

    threads: int | None = None
    seed: int = 0
    bench_rounds: int = 1

    @property
    def thread_count(self) -> int:
        """Threads a child really gets."""
        return self.threads or usable_cores()


@dataclass(frozen=True)
class RunPlan:
    """A validated run; the baseline is the first of `variants`."""

    model: ModelRequest
    baseline: str
    variants: Mapping[str, Component[Scheme]]
    engine: Component[Engine]
    tasks: Mapping[str, Component[Task]]
    bench: Component[Bench]
    policy: Policy
    runtime: Runtime
    prefixes: tuple[str, ...]
    again: str
    """Name of the baseline's repetition, '' for none."""
    other_engine: Component[Engine]
    """The engine that serves the repetition: the same in another batch size, where it has one."""
    stored_baseline: Path | None
    """Folder of the baseline's variant in another run, to be taken instead of measured; None to measure it."""
    output_root: Path
    run_dir: Path | None
    config: dict[str, Any]

"""What is measured on a session: benches and tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from quanteval.interfaces.sessions import Session
from quanteval.records import LoadPointRecord, RequestTrace, Score


class Bench(Protocol):
    """A measuring plan; a frozen dataclass that is its own config."""

    def fingerprint(self) -> dict[str, Any]:
        """Everything, as plain JSON, that the traces depend on besides the served model."""
        ...

    def run(self, session: Session) -> Iterator[RequestTrace | LoadPointRecord]:
        """Yield one trace a request as each ends, warm-up first (marked as such), and a record a load point."""
        ...


@dataclass(frozen=True)
class Sample:
    """One item of a suite: an id that is stable between runs, and its fields as loaded."""

    sample_id: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class TaskContext:
    """What a task may use besides the session.

    `variant_dir` is the variant's own folder, `baseline_dir` the baseline's (the same folder when
    the variant is the baseline); a task keeps its own files under `<variant_dir>/<kind>/<task>/`.
    """

    variant_dir: Path
    baseline_dir: Path
    is_baseline: bool
    seed: int = 0


class Task(Protocol):
    """A suite with a kind; a frozen dataclass that is its own config, built from tasks/<name>/task.yaml."""

    @property
    def name(self) -> str:
        """Folder name under tasks/."""
        ...

    @property
    def kind(self) -> str:
        """'code', 'perplexity', 'divergence', ...: decides which metrics and rules apply."""
        ...

    @property
    def uses_baseline(self) -> bool:
        """Whether a candidate's scores also depend on what the baseline's run stored."""
        ...

    def samples(self) -> list[Sample]:
        """Load the samples (after `limit`), ids unique; ConfigError when there are none."""
        ...

    def fingerprint(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Everything, as plain JSON, that the scores depend on besides the served model."""
        ...

    def evaluate(
        self, session: Session, samples: Sequence[Sample], context: TaskContext
    ) -> Iterator[Score]:
        """Yield exactly one score a sample, as each is known, in any order."""
        ...

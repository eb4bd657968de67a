"""The run directory: where each record lies, and everything stored about a variant as evidence."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from quanteval.errors import RecordError
from quanteval.evidence import ScoreSet, VariantEvidence
from quanteval.records import (
    Artifact,
    LoadPointRecord,
    MachinePeaks,
    Manifest,
    MemoryUse,
    RequestTrace,
    Score,
    TaskRecord,
    VariantResult,
    Verdict,
)
from quanteval.store.columns import load_columns, save_columns
from quanteval.store.files import read_journal, read_record


@dataclass(frozen=True)
class VariantDirectory:
    """Paths of one variant's files."""

    path: Path

    @property
    def artifact(self) -> Path:
        """artifact.json."""
        return self.path / "artifact.json"

    @property
    def traces(self) -> Path:
        """traces.jsonl."""
        return self.path / "traces.jsonl"

    @property
    def load_points(self) -> Path:
        """load_points.jsonl."""
        return self.path / "load_points.jsonl"

    @property
    def machine(self) -> Path:
        """machine.json: what the machine can do at best."""
        return self.path / "machine.json"

    @property
    def memory(self) -> Path:
        """memory.json."""
        return self.path / "memory.json"

    @property
    def result(self) -> Path:
        """result.json."""
        return self.path / "result.json"

    @property
    def spec(self) -> Path:
        """spec.json: what the child process was asked to do."""
        return self.path / "spec.json"

    @property
    def log(self) -> Path:
        """child.log: what libraries printed in the child process."""
        return self.path / "child.log"

    def task_record(self, task: str) -> Path:
        """scores/<task>.json."""
        return self.path / "scores" / f"{task}.json"

    def scores(self, task: str) -> Path:
        """scores/<task>.jsonl."""
        return self.path / "scores" / f"{task}.jsonl"

    def load_result(self) -> VariantResult | None:
        """Return the stored result, None when there is none yet."""
        return read_record(self.result, VariantResult) if self.result.exists() else None


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run's files."""

    path: Path

    @property
    def manifest(self) -> Path:
        """manifest.json."""
        return self.path / "manifest.json"

    def variant(self, name: str) -> VariantDirectory:
        """The folder of one variant."""
        return VariantDirectory(self.path / "variants" / name)

    def verdict(self, candidate: str) -> Path:
        """verdicts/<candidate>.json."""
        return self.path / "verdicts" / f"{candidate}.json"

    def load_manifest(self) -> Manifest:
        """Read the manifest. RecordError when this is no run directory."""
        if not self.manifest.exists():
            raise RecordError(f'"{self.path}" is not a run directory: it has no manifest.json')
        return read_record(self.manifest, Manifest)

    def load_verdicts(self) -> list[Verdict]:
        """Read the stored verdicts, in the manifest's order."""
        names = [name for name in self.load_manifest().variants if self.verdict(name).exists()]
        return [read_record(self.verdict(name), Verdict) for name in names]


def load_evidence(run: RunDirectory, variant: str) -> VariantEvidence:
    """Read everything stored about one variant. RecordError when something is torn."""
    folder = run.variant(variant)
    result = folder.load_result()
    if result is None:
        raise RecordError(f'"{folder.path}" has no result.json: the variant was never run')
    scores: dict[str, ScoreSet] = {}
    for path in sorted((folder.path / "scores").glob("*.json")):
        record = read_record(path, TaskRecord)
        if f"task:{record.task}" in result.stages or record.status == "running":
            scores[record.task] = read_scores(record, folder.scores(record.task))
    return VariantEvidence(
        name=variant,
        result=result,
        artifact=read_record(folder.artifact, Artifact) if folder.artifact.exists() else None,
        memory=read_record(folder.memory, MemoryUse) if folder.memory.exists() else None,
        traces=read_journal(folder.traces, RequestTrace),
        scores=scores,
        load_points=read_journal(folder.load_points, LoadPointRecord),
        peaks=read_record(folder.machine, MachinePeaks) if folder.machine.exists() else None,
    )


def load_baseline(folder: Path) -> VariantEvidence:
    """Read the evidence of the variant whose own folder (<run>/variants/<name>) this is."""
    return load_evidence(RunDirectory(folder.parent.parent), folder.name)


def done_samples(folder: VariantDirectory, task: str, stage_fingerprint: str) -> dict[str, Score]:
    """Return the scores a killed run left for exactly this stage, {} when there are none."""
    path = folder.task_record(task)
    if not path.exists():
        return {}
    record = read_record(path, TaskRecord)
    if record.stage_fingerprint != stage_fingerprint:
        return {}
    return {score.sample_id: score for score in read_journal(folder.scores(task), Score)}


def read_scores(record: TaskRecord, path: Path) -> ScoreSet:
    """Read a journal as columns. RecordError when it is complete and not what the record says."""
    if record.status == "complete":
        stored = load_columns(path, record)
        if stored is not None:
            return stored
    scores = _parse_scores(record, path)
    if record.status == "complete":
        save_columns(path, scores)
    return scores


def _parse_scores(record: TaskRecord, path: Path) -> ScoreSet:
    raw = path.read_bytes() if path.exists() else b""
    if record.status == "complete" and hashlib.sha256(raw).hexdigest() != record.journal_sha256:
        raise RecordError(f'"{path}" was changed after it was completed: run the task again')
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(raw[: raw.rfind(b"\n") + 1].splitlines(), 1):
        try:
            row = from_json(line, cache_strings="keys")
            missing = [key for key in _SCORE_COLUMNS if key not in row]
        except (ValueError, TypeError):
            raise RecordError(f'"{path}" line {number} is not JSON') from None
        if missing:
            raise RecordError(f'"{path}" line {number} has no "{missing[0]}"')
        rows.append(row)
    names = sorted({key for row in rows for key in row.get("numbers", ())})
    series = sorted({key for row in rows for key in row.get("series", ())})
    try:
        return ScoreSet(
            record=record,
            sample_ids=tuple(row["sample_id"] for row in rows),
            prompt_sha256=tuple(row["prompt_sha256"] for row in rows),
            value=np.array([float(row["value"]) for row in rows], dtype=np.float64),
            weight=np.array([float(row["weight"]) for row in rows], dtype=np.float64),
            status=tuple(row["status"] for row in rows),
            finish_reason=tuple(row["finish_reason"] for row in rows),
            output_tokens=np.array([int(row["output_tokens"]) for row in rows], dtype=np.int64),
            outcome=tuple(row.get("outcome", "") for row in rows),
            problem_ids=_if_any(row.get("problem_id", "") for row in rows),
            output_sha256=_if_any(_text_hash(row.get("output")) for row in rows),
            numbers={
                name: np.array([float(row.get("numbers", {}).get(name, "nan")) for row in rows])
                for name in names
            },
            series={
                name: tuple(
                    np.array([float(x) for x in row.get("series", {}).get(name, ())])
                    for row in rows
                )
                for name in series
            },
        )
    except (TypeError, ValueError) as error:
        raise RecordError(f'"{path}" holds a value that is not a number: {error}') from None


def _if_any(column: Iterable[str]) -> tuple[str, ...]:
    """Return a column, or nothing where all of it is empty."""
    values = tuple(column)
    return values if any(values) else ()


def _text_hash(text: str | None) -> str:
    """Return a hash that tells outputs apart, '' where there is none."""
    if text is None:
        return ""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


_SCORE_COLUMNS = (
    "sample_id", "prompt_sha256", "value", "weight", "status", "finish_reason", "output_tokens",
)  # fmt: skip

"""Reuse of a finished stage between runs: by equal fingerprint, never because a file exists."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from quanteval.errors import RecordError
from quanteval.records import StageRecord
from quanteval.store.columns import columns_path
from quanteval.store.files import write_atomic
from quanteval.store.run import VariantDirectory


def stage_files(folder: VariantDirectory, stage: str, kind: str = "") -> list[Path]:
    """Return what a stage wrote: files and folders, all inside the variant's folder."""
    if stage == "artifact":
        return [folder.artifact, folder.memory]
    if stage == "bench":
        return [folder.traces, folder.load_points, folder.machine, folder.memory]
    task = stage.removeprefix("task:")
    scores = folder.scores(task)
    return [folder.task_record(task), scores, columns_path(scores), folder.path / kind / task]


def remember_stage(root: Path, folder: VariantDirectory, stage: StageRecord) -> None:
    """Note under the output root where a finished stage with this fingerprint lies."""
    write_atomic(
        root / ".stages" / stage.fingerprint,
        json.dumps({"variant_dir": str(folder.path.resolve()), "stage": stage.name}),
    )


def reuse_stage(
    root: Path, folder: VariantDirectory, stage: str, stage_fingerprint: str, kind: str = ""
) -> StageRecord | None:
    """Bring a stage with this fingerprint from another run into `folder`; None when there is none."""
    note = root / ".stages" / stage_fingerprint
    try:
        origin = VariantDirectory(Path(json.loads(note.read_text())["variant_dir"]))
        return adopt_stage(origin, folder, stage, stage_fingerprint, kind)
    except (OSError, ValueError, KeyError, RecordError):
        return None


def adopt_stage(
    origin: VariantDirectory,
    folder: VariantDirectory,
    stage: str,
    stage_fingerprint: str,
    kind: str = "",
) -> StageRecord | None:
    """Bring a stage from one variant's folder into another's; None when it has another fingerprint.

    Files are hard-linked (finished files are only ever replaced, never changed) or copied.
    """
    result = origin.load_result()
    found = result.stages.get(stage) if result else None
    if found is None or found.fingerprint != stage_fingerprint:
        return None
    if origin.path.resolve() == folder.path.resolve():
        return found
    for source in stage_files(origin, stage, kind):
        target = folder.path / source.relative_to(origin.path)
        if source.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, copy_function=_link_or_copy)
        elif source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            _link_or_copy(str(source), str(target))
    return found.model_copy(update={"reused_from": str(origin.path)})


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target

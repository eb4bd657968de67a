"""Running again until it passes does not work: earlier runs of the same question are found and their samples added.

The question is which candidate against which baseline on which suite; seed, batch size and order are
not part of it. Every finished run notes where it lies, and a gate averages each problem's scores over
all attempts that are still there. Whoever deletes runs, or moves to another machine, deletes the memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quanteval.errors import RecordError
from quanteval.evidence import ScoreSet, VariantEvidence
from quanteval.models.cache import cache_dir
from quanteval.records import SampleStatus
from quanteval.store import RunDirectory, file_lock, fingerprint, load_evidence, write_atomic

SHARES = ("code", "generate", "multiple_choice")
_WORST: tuple[SampleStatus, ...] = ("error", "timeout", "truncated", "ok")


@dataclass(frozen=True)
class Attempt:
    """A baseline and a candidate of one run."""

    run: RunDirectory
    baseline: VariantEvidence
    candidate: VariantEvidence


def question(baseline: VariantEvidence, candidate: VariantEvidence) -> str:
    """Return what is asked of a pair, as a hash: two runs with the same one are attempts at the same release.

    Whole numbers among an engine's settings (rows of a batch, sizes of caches and pages) say how it is
    asked and are left out, as seeds and threads are.
    """
    return fingerprint({"baseline": _identity(baseline), "candidate": _identity(candidate)})


def _identity(evidence: VariantEvidence) -> dict[str, Any]:
    comparable = evidence.result.comparable
    stage = evidence.result.stages.get("artifact")
    engine = comparable.get("engine")
    settings = engine if isinstance(engine, Mapping) else {}
    return {
        "weights": comparable.get("model_weights"),
        "revision": comparable.get("model_revision"),
        "artifact": stage.inputs.get("artifact") if stage else None,
        "device": comparable.get("device"),
        "engine": {k: v for k, v in settings.items() if type(v) is not int},
    }


def remember(attempt: Attempt) -> None:
    """Note where an attempt lies; a note that cannot be written is let go, since the run itself is safe."""
    path = _note(attempt.baseline, attempt.candidate)
    entry = [str(attempt.run.path.resolve()), attempt.baseline.name, attempt.candidate.name]
    try:
        with file_lock(path.with_suffix(".lock"), wait=True, busy=""):
            entries = _entries(path)
            if entry not in entries:
                write_atomic(path, json.dumps([*entries, entry], indent=1))
    except RecordError:
        return


def _note(baseline: VariantEvidence, candidate: VariantEvidence) -> Path:
    return cache_dir() / "attempts" / f"{question(baseline, candidate)}.json"


def _entries(path: Path) -> list[list[str]]:
    try:
        entries: list[list[str]] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return entries


def others(attempt: Attempt) -> Iterator[Attempt]:
    """Yield the other attempts at an attempt's question that are still on this machine."""
    wanted = question(attempt.baseline, attempt.candidate)
    mine = [str(attempt.run.path.resolve()), attempt.baseline.name, attempt.candidate.name]
    for entry in _entries(_note(attempt.baseline, attempt.candidate)):
        run = RunDirectory(Path(entry[0]))
        if entry == mine or not run.manifest.exists():
            continue
        try:
            found = Attempt(run, load_evidence(run, entry[1]), load_evidence(run, entry[2]))
        except RecordError:
            continue
        if question(found.baseline, found.candidate) == wanted:
            yield found


def with_earlier(attempt: Attempt) -> Attempt:
    """Return an attempt with the samples of all others at its question added, problem by problem.

    Where a task may have stopped early, samples cannot be added afterwards: the first attempt decides.
    """
    found = [attempt, *others(attempt)]
    if len(found) == 1:
        return attempt
    base, cand = dict(attempt.baseline.scores), dict(attempt.candidate.scores)
    for task in sorted(set(base) & set(cand)):
        mine = (base[task], cand[task])
        sets = [pair for one in found[1:] if (pair := _scores_of(one, task))]
        same = [mine, *(p for p in sets if _same_suite(p, mine) and not _errored(p))]
        if len(same) < 2:
            continue
        if any(pair[1].record.sequential for pair in same):
            base[task], cand[task] = _first(found, task, same)
        else:
            base[task], cand[task] = _averaged(same)
    return replace(
        attempt,
        baseline=replace(attempt.baseline, scores=base),
        candidate=replace(attempt.candidate, scores=cand),
    )


Sides = tuple[ScoreSet, ScoreSet]


def _scores_of(attempt: Attempt, task: str) -> Sides | None:
    base, cand = attempt.baseline.scores.get(task), attempt.candidate.scores.get(task)
    if base is None or cand is None:
        return None
    complete = base.record.status == cand.record.status == "complete"
    return (base, cand) if complete else None


def _same_suite(one: Sides, other: Sides) -> bool:
    return all(
        a.record.fingerprint == b.record.fingerprint for a, b in zip(one, other, strict=True)
    )


def _errored(pair: Sides) -> bool:
    """Whether an attempt failed in part: what the machine did wrong may be done again, and is no answer."""
    return any("error" in scores.status for scores in pair)


def _first(found: Sequence[Attempt], task: str, same: Sequence[Sides]) -> Sides:
    """Return the scores of the attempt that was begun first."""
    ordered = sorted(found, key=lambda one: one.run.load_manifest().created_at)
    pairs = (pair for one in ordered if (pair := _scores_of(one, task)))
    return next(pair for pair in pairs if any(pair[1] is cand for _, cand in same))


def _averaged(sets: Sequence[Sides]) -> Sides:
    """Average each problem over the attempts; copies of one attempt count once."""
    different: dict[tuple[str, str], Sides] = {}
    for base, cand in sets:
        different.setdefault((base.record.journal_sha256, cand.record.journal_sha256), (base, cand))
    chosen = list(different.values())
    first = chosen[0]
    ids = [set(scores.sample_ids) for pair in chosen for scores in pair]
    if len(chosen) == 1 or any(one != ids[0] for one in ids):
        return first
    return _mean([b for b, _ in chosen], lost=1.0), _mean([c for _, c in chosen], lost=0.0)


def _mean(sets: Sequence[ScoreSet], lost: float) -> ScoreSet:
    """Return the first set with every value the mean over all; an errored share counts as `lost`."""
    first = sets[0]
    rows = [_rows(first, scores) for scores in sets]
    values = []
    for scores, order in zip(sets, rows, strict=True):
        value = scores.value[order]
        if first.record.kind in SHARES:
            errored = np.array([scores.status[row] == "error" for row in order])
            value = np.where(errored, lost, value)
        values.append(value)
    statuses = [
        min((s.status[o[i]] for s, o in zip(sets, rows, strict=True)), key=_WORST.index)
        for i in range(len(first.sample_ids))
    ]
    tokens = np.mean([s.output_tokens[o] for s, o in zip(sets, rows, strict=True)], axis=0)
    return replace(
        first,
        value=np.mean(values, axis=0),
        status=tuple(statuses),
        output_tokens=np.rint(tokens).astype(np.int64),
        attempts=sum(s.attempts for s in sets),
    )


def _rows(first: ScoreSet, scores: ScoreSet) -> NDArray[np.intp]:
    where = {sample_id: row for row, sample_id in enumerate(scores.sample_ids)}
    return np.array([where[i] for i in first.sample_ids], dtype=np.intp)

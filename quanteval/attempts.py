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
from typing import Any, cast

import numpy as np

from quanteval.errors import RecordError
from quanteval.evidence import ScoreSet, VariantEvidence
from quanteval.models.cache import cache_dir
from quanteval.records import SampleStatus
from quanteval.store import RunDirectory, file_lock, fingerprint, load_evidence, write_atomic

SHARES = ("code", "cloze", "generate", "multiple_choice", "needle")
_WORST: tuple[SampleStatus, ...] = ("error", "timeout", "truncated", "ok")


@dataclass(frozen=True)
class Attempt:
    """A candidate of a run, and a baseline of the same run or another."""

    run: RunDirectory
    baseline: VariantEvidence
    candidate: VariantEvidence
    baseline_run: RunDirectory | None = None
    """Where the baseline lies, when in another run."""

    @property
    def entry(self) -> list[str]:
        """What a note holds of it: the candidate's run, both names, and the baseline's run."""
        runs = [str((one or self.run).path.resolve()) for one in (self.run, self.baseline_run)]
        return [runs[0], self.baseline.name, self.candidate.name, runs[1]]


def question(baseline: VariantEvidence, candidate: VariantEvidence) -> str:
    """Return what is asked of a pair, as a hash: two runs with the same one are attempts at the same release.

    Numbers among an engine's settings (rows of a batch, sizes of caches and pages) say how it is asked and
    are left out, as seeds and threads are.
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
        "engine": {k: v for k, v in settings.items() if not _says_how(k, v)},
    }


def _says_how(key: str, value: Any) -> bool:
    """Whether a setting is a size or a way of batching, however it is written, or left out."""
    if key == "batching" or value is None:
        return True
    if isinstance(value, str):
        return value.strip().isdecimal()
    return isinstance(value, int | float) and not isinstance(value, bool)


def remember(attempt: Attempt) -> None:
    """Note where an attempt lies; a note that cannot be written is let go, since the run itself is safe."""
    path = _note(attempt.baseline, attempt.candidate)
    entry = attempt.entry
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
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [[str(part) for part in entry] for entry in entries if len(entry) == 4]
    except (OSError, ValueError, TypeError):
        return []


def others(attempt: Attempt) -> Iterator[Attempt]:
    """Yield the other attempts at an attempt's question that are still on this machine."""
    wanted = question(attempt.baseline, attempt.candidate)
    mine = attempt.entry
    for entry in _entries(_note(attempt.baseline, attempt.candidate)):
        run, other = RunDirectory(Path(entry[0])), RunDirectory(Path(entry[3]))
        if entry == mine or not (run.manifest.exists() and other.manifest.exists()):
            continue
        try:
            base, cand = load_evidence(other, entry[1]), load_evidence(run, entry[2])
            found = Attempt(run, base, cand, other)
        except RecordError:
            continue
        if question(found.baseline, found.candidate) == wanted:
            yield found


def with_earlier(attempt: Attempt) -> Attempt:
    """Return an attempt with the samples of all others at its question added, problem by problem.

    A task that may have stopped early adds the samples it has to attempts that evaluated all of them;
    where every attempt may have stopped early, the first one decides, since no later one can undo a stop.
    """
    found = [attempt, *others(attempt)]
    if len(found) == 1:
        return attempt
    base, cand = dict(attempt.baseline.scores), dict(attempt.candidate.scores)
    for task in sorted(set(base) & set(cand)):
        mine = (base[task], cand[task])
        sets = [pair for one in found[1:] if (pair := _scores_of(one, task))]
        # A whole run is not held to one that failed in part; one that failed in part itself is.
        fair = [p for p in sets if _errored(mine) or not _errored(p)]
        same = [mine, *(p for p in fair if _same_suite(p, mine))]
        if len(same) < 2:
            continue
        whole = [pair for pair in same if pair[1].record.sequential is None]
        if whole:
            base[task], cand[task] = _averaged(whole[0], same)
        else:
            base[task], cand[task] = _first(found, task, same)
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


def _averaged(whole: Sides, sets: Sequence[Sides]) -> Sides:
    """Average each problem over the attempts that have it; copies of one attempt count once."""
    different: dict[tuple[str, str], Sides] = {}
    for base, cand in (whole, *sets):
        different.setdefault((base.record.journal_sha256, cand.record.journal_sha256), (base, cand))
    ids = set(whole[0].sample_ids)
    chosen = [
        (b, c)
        for b, c in different.values()
        if ids == set(b.sample_ids)
        and (set(c.sample_ids) == ids or c.record.sequential is not None)
    ]
    if len(chosen) < 2:
        return whole
    pairs = [(b, c, [i for i in b.sample_ids if i in set(c.sample_ids)]) for b, c in chosen]
    return (
        _mean(whole[0], [(b, shared) for b, _, shared in pairs], lost=1.0),
        _mean(whole[1], [(c, shared) for _, c, shared in pairs], lost=0.0),
    )


def _mean(first: ScoreSet, sets: Sequence[tuple[ScoreSet, Sequence[str]]], lost: float) -> ScoreSet:
    """Return the first set with every value the mean over all that have it; an errored share counts as `lost`."""
    at = {sample_id: row for row, sample_id in enumerate(first.sample_ids)}
    n = len(at)
    value, tokens, count = np.zeros(n), np.zeros(n), np.zeros(n)
    worst = [len(_WORST) - 1] * n
    for scores, shared in sets:
        where = {sample_id: row for row, sample_id in enumerate(scores.sample_ids)}
        for sample_id in shared:
            row, mine = where[sample_id], at[sample_id]
            errored = scores.status[row] == "error" and first.record.kind in SHARES
            value[mine] += lost if errored else scores.value[row]
            tokens[mine] += scores.output_tokens[row]
            count[mine] += 1
            worst[mine] = min(worst[mine], _WORST.index(cast(SampleStatus, scores.status[row])))
    return replace(
        first,
        value=value / count,
        status=tuple(_WORST[i] for i in worst),
        output_tokens=np.rint(tokens / count).astype(np.int64),
        samples=int(count.sum()),
    )

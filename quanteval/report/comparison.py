"""Two variants side by side: their tasks, the samples that flipped, and one sample in full."""

from __future__ import annotations

import numpy as np

from quanteval.comparability import incomparable
from quanteval.errors import ConfigError, EvidenceError
from quanteval.evidence import ScoreSet, VariantEvidence
from quanteval.metrics.quality import SUMMED, Metric, metrics_of
from quanteval.records import Score
from quanteval.report.render import cell_text
from quanteval.report.table import Cell, paired_difference
from quanteval.report.text import line, number, plain, wrap
from quanteval.targets import near

SHOWN = 20


def comparison_text(first: VariantEvidence, second: VariantEvidence) -> str:
    """Return, for each common task, both values, their paired difference, and the samples lost and gained.

    Conditions that differ are named first; a task whose suite differs has no values.
    """
    names = [name for name in first.scores if name in second.scores]
    if not names:
        raise EvidenceError(f"{first.name} and {second.name} have no task in common")
    lines = [f"{line(first.name)} -> {line(second.name)}"]
    if differing := incomparable(first, second):
        lines.append(f"not measured alike: {line(differing)}")
    for name in names:
        lines += ["", *_task_lines(line(name), first.scores[name], second.scores[name])]
    return "\n".join(part for text in lines for part in wrap(text, 4))


def _task_lines(name: str, a: ScoreSet, b: ScoreSet) -> list[str]:
    if a.record.fingerprint != b.record.fingerprint or a.record.kind != b.record.kind:
        return [f"{name}: not comparable, the suites differ (see quanteval gate)"]
    try:
        before, after = metrics_of(a), {metric.name: metric for metric in metrics_of(b)}
    except EvidenceError as error:
        return [f"{name}: {line(str(error))}"]
    lines = [f"{name}: {_change(x, after[x.name])}" for x in before if x.name in after]
    if difference := paired_difference(a, b):
        lines.append(f"  paired difference of {before[0].name}: {difference}")
    if a.record.kind not in SUMMED:
        lines += _flips(a, b)
    return lines


def _change(x: Metric, y: Metric) -> str:
    n = f"n={y.n}" if x.n == y.n else f"n={x.n} and {y.n}"
    unit = "" if x.unit == "share" else f"{x.unit} "
    return f"{x.name} {_value(x)} -> {_value(y)} {unit}({n} {y.units})"


def _value(metric: Metric) -> str:
    cell = Cell(metric.value, metric.lower, metric.upper)
    return cell_text(cell, "share" if metric.unit == "share" else "number")


def _flips(a: ScoreSet, b: ScoreSet) -> list[str]:
    where = {sample_id: row for row, sample_id in enumerate(b.sample_ids)}
    lost: list[str] = []
    gained: list[str] = []
    for row, sample_id in enumerate(a.sample_ids):
        other = where.get(sample_id)
        if other is not None and a.value[row] != b.value[other]:
            entry = f"{line(sample_id)} ({_outcome(a, row)} -> {_outcome(b, other)})"
            (lost if a.value[row] > b.value[other] else gained).append(entry)
    same = int(np.isin(a.sample_ids, b.sample_ids).sum()) - len(lost) - len(gained)
    return [
        f"  {same} the same, {len(lost)} lost, {len(gained)} gained",
        *(f"  lost    {entry}" for entry in lost[:SHOWN]),
        *([f"  ... and {len(lost) - SHOWN} more"] if len(lost) > SHOWN else []),
        *(f"  gained  {entry}" for entry in gained[:SHOWN]),
        *([f"  ... and {len(gained) - SHOWN} more"] if len(gained) > SHOWN else []),
    ]


def _outcome(scores: ScoreSet, row: int) -> str:
    return line(scores.outcome[row]) if scores.outcome else number(scores.value[row])


def sample_text(sample_id: str, sides: dict[str, list[Score]]) -> str:
    """Return one sample of both variants in full. ConfigError naming near ids when neither has it."""
    out = []
    for name, scores in sides.items():
        for score in scores:
            if score.sample_id == sample_id:
                head = f"{line(name)}: {line(score.outcome) or score.status}, value {number(score.value)}"
                out += [f"{head}, {score.output_tokens} tokens, {score.finish_reason}"]
                out += [f"  {line(score.detail)}"] if score.detail else []
                out += [plain(score.output or "(no output)"), ""]
    if not out:
        known = {score.sample_id for scores in sides.values() for score in scores}
        raise ConfigError(f'no sample "{sample_id}"; {near(sample_id, known)}')
    return "\n".join(out).rstrip()

"""The accuracy-against-cost table as values: every cell with its n, interval and unit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quanteval.errors import EvidenceError
from quanteval.evidence import RuleContext, ScoreSet, VariantEvidence
from quanteval.looks import stopped_early
from quanteval.metrics.latency import Distribution, LoadPointSummary, best_point, point, summarize
from quanteval.metrics.quality import metrics_of
from quanteval.records import Finding, Manifest, Verdict
from quanteval.rules._rounds import interleaving, rounds_of
from quanteval.rules.speed import Speed, SpeedMetric
from quanteval.stats import clustered_ratio, score_interval


@dataclass(frozen=True)
class Cell:
    """One value; `lower` and `upper` are its interval, `n` what it rests on, `note` goes behind it.

    Intervals are two-sided 95 %, those of latency quantiles two one-sided 95 % bounds.
    """

    value: float | str | None
    lower: float | None = None
    upper: float | None = None
    n: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Column:
    """What a column holds; `kind` decides how its values are written, `section` where it is shown."""

    key: str
    label: str
    kind: str
    section: str
    meaning: str = ""


@dataclass(frozen=True)
class Row:
    """One variant."""

    variant: str
    is_baseline: bool
    status: str
    reason: str
    cells: dict[str, Cell] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """All variants, with what a reader must know to read it."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    facts: dict[str, str]
    footnotes: tuple[str, ...]


SIZE = "Size"
SPEED = "Speed"
QUALITY = "Quality"
VERDICT = "Verdict"

FIXED = (
    Column("scheme", "weights/activations", "text", SIZE, "bits asked for: weights/activations"),
    Column("bits", "bits/weight", "number", SIZE, "resident bits over logical weights of the whole model, as served"),
    Column("linear_bits", "bits/linear", "number", SIZE, "the same over the linear layers without the output head"),
    Column("weights", "weights MB", "bytes", SIZE, "resident weights, 10^6 bytes"),
    Column("weights_ratio", "weights ratio", "ratio", SIZE, "weights relative to the baseline's"),
    Column("disk", "disk MB", "bytes", SIZE, "weight files of the artifact"),
    Column("peak", "peak MB", "bytes", SIZE, "peak resident memory of the serving process while serving"),
    Column("kv", "KV bytes/token", "number", SIZE, "allocated KV cache over the tokens it holds"),
    Column("ttft_p50", "TTFT p50 ms", "seconds", SPEED, "time to first token, one stream"),
    Column("ttft_p95", "TTFT p95 ms", "seconds", SPEED),
    Column("tpot_p50", "TPOT p50 ms", "seconds", SPEED, "time per output token after the first, one stream"),
    Column("tpot_p95", "TPOT p95 ms", "seconds", SPEED),
    Column("tps_1", "tok/s, 1 stream", "rate", SPEED, "output tokens/s of the median stream, first token left out"),
    Column("tps_1_ratio", "1 stream ratio", "ratio", SPEED, "relative to the baseline's"),
    Column("tps_best", "tok/s, best load", "rate", SPEED, "output tokens/s of all streams, at the load named"),
    Column("tps_best_ratio", "best load ratio", "ratio", SPEED, "relative to the baseline's"),
)  # fmt: skip


def build_table(
    manifest: Manifest, variants: Sequence[VariantEvidence], verdicts: Sequence[Verdict]
) -> Table:
    """Return the table of a run; a variant or a figure that is missing leaves its cells empty."""
    baseline = next((v for v in variants if v.name == manifest.baseline), None)
    tasks = _task_columns(manifest, variants)
    columns = (
        *FIXED,
        *tasks,
        Column("verdict", "verdict", "text", VERDICT),
        Column("reason", "main reason", "text", VERDICT),
    )
    by_candidate = {verdict.candidate: verdict for verdict in verdicts}
    rows = tuple(
        _row(v, baseline, tasks, by_candidate.get(v.name), manifest.again) for v in variants
    )
    return Table(columns, rows, _facts(manifest, variants), _footnotes(manifest, variants))


def _row(
    variant: VariantEvidence,
    baseline: VariantEvidence | None,
    tasks: Sequence[Column],
    verdict: Verdict | None,
    again: str,
) -> Row:
    cells = {**dict(_size_cells(variant, baseline)), **dict(_speed_cells(variant, baseline))}
    for column in tasks:
        task, metric = column.key.split("/", 1)
        cells[column.key] = _quality_cell(variant, baseline, task, metric)
    is_baseline = baseline is not None and variant.name == baseline.name
    role = "baseline" if is_baseline else "noise floor" if variant.name == again else "not gated"
    cells["verdict"] = Cell(verdict.outcome if verdict else role)
    cells["reason"] = Cell(verdict.reason if verdict else "")
    result = variant.result
    return Row(variant.name, is_baseline, result.status, result.reason, cells)


# --------------------------------------------------------------------------- size and speed


def _size_cells(
    variant: VariantEvidence, baseline: VariantEvidence | None
) -> Iterator[tuple[str, Cell]]:
    artifact, memory = variant.artifact, variant.memory
    if artifact is not None:
        asked = artifact.precision
        note = "" if artifact.effective is None or not artifact.effective.emulated else "emulated"
        yield (
            "scheme",
            Cell(
                f"{asked.weight_format}, {asked.weight_bits:g}/{asked.activation_bits:g}", note=note
            ),
        )
        yield "disk", Cell(artifact.bytes_on_disk)
        if artifact.effective is not None:
            yield "bits", Cell(_known(artifact.effective.bits_per_weight))
            yield "linear_bits", Cell(_known(artifact.effective.linear_bits_per_weight))
    if memory is not None:
        yield "weights", Cell(memory.weights_bytes or None)
        # Peaks are those of serving a load; a process that had none is no comparison.
        if any(stage.partition(":")[0] == "bench" for stage in variant.result.stages):
            yield "peak", Cell(memory.process_peak_bytes or None)
        yield "kv", Cell(memory.kv_bytes_per_token_measured or None)
        if baseline is not None and baseline.memory is not None:
            yield "weights_ratio", Cell(_ratio(memory.weights_bytes, baseline.memory.weights_bytes))


def _speed_cells(
    variant: VariantEvidence, baseline: VariantEvidence | None
) -> Iterator[tuple[str, Cell]]:
    summaries = summarize(variant.traces)
    base = summarize(baseline.traces) if baseline is not None else []
    single, base_single = point(summaries, "single_stream"), point(base, "single_stream")
    if single is not None:
        yield from _quantile_cells("ttft", single.ttft)
        yield from _quantile_cells("tpot", single.tpot)
        yield "tps_1", Cell(single.stream_tps, n=single.steady_requests)
        if baseline is not None and base_single is not None:
            seen = Cell(_ratio(single.stream_tps, base_single.stream_tps))
            yield "tps_1_ratio", _over_rounds("stream_tps", baseline, variant) or seen
    best, base_best = best_point(summaries), best_point(base)
    if best is not None:
        yield (
            "tps_best",
            Cell(best.output_tps, n=best.steady_requests, note=f"at {_load_text(best)}"),
        )
        if baseline is not None and base_best is not None:
            seen = Cell(_ratio(best.output_tps, base_best.output_tps))
            yield "tps_best_ratio", _over_rounds("output_tps", baseline, variant) or seen


def _load_text(summary: LoadPointSummary) -> str:
    return f"{summary.rate:.3g}/s" if summary.rate else str(summary.concurrency)


def _over_rounds(
    metric: SpeedMetric, baseline: VariantEvidence, variant: VariantEvidence
) -> Cell | None:
    """Return a ratio of speeds with its interval where interleaved rounds allow one, else None."""
    if variant.name == baseline.name:
        return None
    rule = Speed(metric, min_ratio=1.0, alpha=0.025, min_rounds=2)
    (found,) = rule.check("", baseline, variant, RuleContext())
    if found.lower is None:
        return None
    return Cell(found.estimate, found.lower, found.upper, found.n)


def _quantile_cells(name: str, found: Distribution) -> Iterator[tuple[str, Cell]]:
    for label, q in (("p50", 0.5), ("p95", 0.95)):
        quantile = found.at(q)
        if quantile is not None:
            yield (
                f"{name}_{label}",
                Cell(quantile.value, quantile.lower, quantile.upper, quantile.n),
            )


def _known(value: float) -> float | None:
    """A remote endpoint tells nothing of its weights."""
    return None if math.isnan(value) else value


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if not value or not base else value / base


# --------------------------------------------------------------------------- quality


def _task_columns(manifest: Manifest, variants: Sequence[VariantEvidence]) -> list[Column]:
    """Return a column for each task's main metric (and top-1 agreement beside a mean KL)."""
    columns = []
    for task in manifest.tasks:
        sets = [v.scores[task] for v in variants if task in v.scores]
        kind = sets[0].record.kind if sets else ""
        for metric, form in _SHOWN.get(kind, (("mean", "number"),)):
            columns.append(
                Column(
                    f"{task}/{metric}", f"{task} {metric}", form, QUALITY, _MEANING.get(metric, "")
                )
            )
    return columns


_SHOWN: dict[str, tuple[tuple[str, str], ...]] = {
    "code": (("pass@1", "share"),),
    "perplexity": (("token perplexity", "number"),),
    "divergence": (("mean KL", "number"), ("top-1 agreement", "share")),
    "multiple_choice": (("accuracy", "share"),),
    "cloze": (("accuracy", "share"),),
    "generate": (("accuracy", "share"),),
    "needle": (("accuracy", "share"),),
}
_PAIRED = "in brackets the paired difference to the baseline with its score (Tango) interval, samples lost/gained"
_MEANING = {
    "pass@1": f"share of problems whose answer passes all tests, Wilson interval for one answer each; {_PAIRED}",
    "accuracy": f"share of samples answered right, Wilson interval; {_PAIRED}",
    "token perplexity": "exp(summed negative log-likelihood / tokens), clustered by document; in brackets "
    "the ratio to the baseline, paired by document",
    "mean KL": "KL(baseline || variant) in nats per token over the full vocabulary, clustered by document",
    "top-1 agreement": "share of tokens at which both have the same most likely token",
}


def _quality_cell(
    variant: VariantEvidence, baseline: VariantEvidence | None, task: str, name: str
) -> Cell:
    scores = variant.scores.get(task)
    if scores is None:
        return Cell(None)
    try:
        metric = next((m for m in metrics_of(scores) if m.name == name), None)
    except EvidenceError as error:
        return Cell(None, note=str(error))
    if metric is None:
        return Cell(None)
    base = (
        baseline.scores.get(task)
        if baseline is not None and baseline.name != variant.name
        else None
    )
    note = paired_difference(base, scores) if base is not None else ""
    return Cell(metric.value, metric.lower, metric.upper, metric.n, note)


def paired_difference(base: ScoreSet, scores: ScoreSet) -> str:
    """Return the paired difference to the baseline as text, '' where it means nothing."""
    if scores.record.kind == "divergence" or base.record.fingerprint != scores.record.fingerprint:
        return ""
    where = {sample_id: row for row, sample_id in enumerate(scores.sample_ids)}
    rows = [(row, where[i]) for row, i in enumerate(base.sample_ids) if i in where]
    if len(rows) < 2:
        return ""
    x, tokens = (column[[a for a, _ in rows]] for column in (base.value, base.weight))
    y, same = (column[[b for _, b in rows]] for column in (scores.value, scores.weight))
    if not (np.isfinite(x).all() and np.isfinite(y).all() and np.array_equal(tokens, same)):
        return ""
    if scores.record.kind == "perplexity":
        found = clustered_ratio(y - x, tokens, 0.025)
        with np.errstate(over="ignore"):
            low, mid, high = (np.exp(v) for v in (found.lower, found.estimate, found.upper))
        return f"x{mid:.3f} [{low:.3f}, {high:.3f}]"
    if base.problem_ids:
        # Samples of one problem are no independent evidence: a problem counts once, with their mean.
        names = [base.problem_ids[a] or base.sample_ids[a] for a, _ in rows]
        _, of = np.unique(names, return_inverse=True)
        x, y = (np.bincount(of, weights=v) / np.bincount(of) for v in (x, y))
    if len(x) < 2 or (np.abs(x - y) > 1).any():
        return ""
    interval = score_interval(x - y, 0.95)
    # Adding 0.0 turns a negative zero into a plain one.
    low, mid, high = (-100 * v + 0.0 for v in (interval.upper, interval.point, interval.lower))
    lost, gained = int((x > y).sum()), int((x < y).sum())
    return f"{mid:+.1f} points [{low:+.1f}, {high:+.1f}], {lost}/{gained}"


# --------------------------------------------------------------------------- what a reader must know


def _facts(manifest: Manifest, variants: Sequence[VariantEvidence]) -> dict[str, str]:
    environment: dict[str, Any] = manifest.environment
    first = next((v.artifact for v in variants if v.artifact is not None), None)
    model = str(manifest.config.get("model", ""))
    facts = {
        "model": f"{model} ({first.model_provenance})"
        if first and first.model_provenance
        else model,
        "weights": first.weights_digest[:16] if first else "",
        "device": str(environment.get("cpu", "")),
        "threads": str(_comparable(variants, "threads")),
        "timing": timing_text(variants),
        "batching": str(_comparable(variants, "batch_policy")),
        "versions": ", ".join(f"{k} {v}" for k, v in dict(environment.get("packages", {})).items()),
        "policy": manifest.policy_name,
        "date": manifest.created_at,
        "run": manifest.run_id,
    }
    return {key: value for key, value in facts.items() if value}


def _comparable(variants: Sequence[VariantEvidence], key: str) -> Any:
    values = {str(v.result.comparable[key]) for v in variants if key in v.result.comparable}
    return "; ".join(sorted(values))


def timing_text(variants: Sequence[VariantEvidence]) -> str:
    """Return how the variants' timings were taken: in interleaved rounds, or one after the other; '' for none."""
    timed = [v for v in variants if v.traces]
    if not timed:
        return ""
    reasons = [why for v in timed[1:] if (why := interleaving(timed[0], v))]
    rounds = len(rounds_of(timed[0]))
    if reasons or len(timed) < 2:
        return f"indicative: {reasons[0]}" if reasons else "one variant alone"
    return f"{rounds} interleaved rounds"


def _footnotes(manifest: Manifest, variants: Sequence[VariantEvidence]) -> tuple[str, ...]:
    notes = [
        "Intervals in square brackets are two-sided 95 %; those of latency quantiles are two one-sided 95 % bounds, "
        "left out where n is too small for one. n is what a value rests on.",
    ]
    timing = timing_text(variants)
    if timing.startswith("indicative"):
        notes.append(
            "Latency and throughput come from one run a variant, one after the other on this machine: "
            "read their ratios as indicative."
        )
    elif timing:
        notes.append(
            f"Latency and throughput come from {timing}: every variant in a process of its own, all of them "
            "once before any of them again."
        )
    if any(v.name == manifest.again for v in variants):
        notes.append(
            f"{manifest.again} is the baseline served and evaluated once more, in another batch size and order: "
            "how far it strays from the baseline is the noise floor."
        )
    for v in variants:
        notes += [
            f"{v.name}, {task}: {s.record.samples_expected} of {s.record.sequential.samples_planned} samples, "
            "then it was decided."
            for task, s in v.scores.items()
            if s.record.sequential is not None and stopped_early(s.record)
        ]
    notes += [
        f"{v.name}: {v.result.status}, {v.result.reason}"
        for v in variants
        if v.result.status != "ok"
    ]
    return tuple(notes)


def finding_rows(verdict: Verdict) -> list[Finding]:
    """Return a verdict's findings, those that decided first."""
    order = {"invalid": 0, "reject": 1, "inconclusive": 2, "accept": 3, "skipped": 4}
    return sorted(verdict.findings, key=lambda f: (not f.required, order[f.outcome]))

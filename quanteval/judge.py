"""Stored runs, read again: finding them, gating them, and writing their tables. Nothing heavy is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quanteval.attempts import Attempt, remember, with_earlier
from quanteval.errors import ConfigError, EvidenceError, RecordError
from quanteval.evidence import VariantEvidence
from quanteval.gate import decide
from quanteval.policy import Policy, load_policy
from quanteval.records import Score, Verdict
from quanteval.report import (
    Table,
    build_table,
    details_markdown,
    details_text,
    load_files,
    openmetrics_text,
    render_csv,
    render_json,
    render_markdown,
)
from quanteval.resources import preset
from quanteval.store import RunDirectory, load_evidence, read_journal, write_atomic, write_record
from quanteval.targets import DEFAULT_PREFIXES, near

OUTPUTS = Path("outputs")
RESULTS = Path("results")
PUBLISHED = (
    *(f"{name}.{kind}" for name in ("table", "load") for kind in ("md", "csv", "json")),
    "trend.csv",
    "trend_slopes.csv",
)


@dataclass(frozen=True)
class StoredVariant:
    """One variant of a stored run."""

    run: RunDirectory
    name: str
    evidence: VariantEvidence


def runs_under(root: Path) -> Iterator[RunDirectory]:
    """Yield the run directories under an output root, oldest first."""
    manifests = root.glob("*/manifest.json")
    for path in sorted(manifests, key=lambda p: p.stat().st_mtime_ns):
        yield RunDirectory(path.parent)


def find_run(name: str, root: Path = OUTPUTS) -> RunDirectory:
    """Return a run by its path, its id under the output root, or 'latest'.

    Raises ConfigError when there is none of that name.
    """
    if name == "latest":
        runs = list(runs_under(root))
        if not runs:
            raise ConfigError(f'no run under "{root}": start one with quanteval run')
        return runs[-1]
    for path in (Path(name), root / name):
        if (path / "manifest.json").exists():
            return RunDirectory(path)
    if Path(name).is_dir():
        raise ConfigError(f'"{name}" is not a run directory: it has no manifest.json')
    known = [run.path.name for run in runs_under(root)]
    raise ConfigError(f'no run "{name}"; {near(name, [*known, "latest"])}')


def find_variant(name: str, *, last: bool = False) -> StoredVariant:
    """Return the variant that RUN[:variant] names; without a name the baseline, or the last one."""
    run, chosen = locate_variant(name, last=last)
    return StoredVariant(run, chosen, load_evidence(run, chosen))


def locate_variant(name: str, *, last: bool = False) -> tuple[RunDirectory, str]:
    """Return the run and the variant that RUN[:variant] names, nothing of it read but the manifest."""
    place, separator, variant = name.rpartition(":")
    if not separator or "/" in variant:
        place, variant = name, ""
    run = find_run(place)
    manifest = run.load_manifest()
    names = [*manifest.variants, *filter(None, [manifest.again])]
    if last and not variant:
        variant = manifest.variants[-1]
    chosen = variant or names[0]
    if chosen not in names:
        raise ConfigError(f'"{place}" has no variant "{chosen}"; {near(chosen, names)}')
    return run, chosen


def outputs_of(variant: StoredVariant) -> list[Score]:
    """Return every score of a variant with its output, task after task."""
    folder = variant.run.variant(variant.name)
    return [
        score
        for task in variant.evidence.scores
        for score in read_journal(folder.scores(task), Score)
    ]


def read_policy(name: str, prefixes: Sequence[str] = DEFAULT_PREFIXES) -> Policy:
    """Read a policy file, or a preset of conf/gate by its name."""
    path = Path(name)
    is_file = path.suffix in (".yaml", ".yml") or path.is_file()
    return load_policy(path if is_file else preset("gate", name), prefixes=prefixes)


def policy_of(run: RunDirectory, name: str | None = None) -> Policy:
    """Return the policy named, or the one a run was started with; the run's trusted prefixes hold for both."""
    manifest = run.load_manifest()
    extra = (manifest.config.get("trust") or {}).get("targets") or []
    prefixes = (*DEFAULT_PREFIXES, *extra)
    if not name:
        return load_policy(manifest.policy, prefixes=prefixes)
    policy = read_policy(name, prefixes)
    if policy.sequential is None and (looks := manifest.policy.get("sequential")):
        # How a run was looked at is settled; bounds at its looks hold for any margin.
        own = load_policy({**policy.node, "sequential": looks}, prefixes=prefixes)
        return replace(policy, sequential=own.sequential)
    return policy


def gate_run(name: str, policy: str | None, candidate: str | None) -> list[Verdict]:
    """Gate a stored run's candidates, or the one named, against its baseline; nothing is written."""
    run = find_run(name)
    return judge(run, policy_of(run, policy), candidate)


def judge(run: RunDirectory, policy: Policy, candidate: str | None = None) -> list[Verdict]:
    """Return the verdict on each candidate of a run.

    Raises ConfigError for a candidate that is not there, and EvidenceError when there is none at all:
    a gate that compared nothing must not pass.
    """
    manifest = run.load_manifest()
    names = [variant for variant in manifest.variants if variant != manifest.baseline]
    if not names:
        raise EvidenceError(
            f'"{run.path}" has no candidate, only the baseline "{manifest.baseline}"'
        )
    if candidate is not None:
        if candidate not in names:
            raise ConfigError(
                f'"{run.path}" has no candidate "{candidate}"; {near(candidate, names)}'
            )
        names = [candidate]
    baseline = load_evidence(run, manifest.baseline)
    again = load_again(run)
    tasks = tuple(manifest.tasks)
    verdicts = []
    for name in names:
        attempt = with_earlier(Attempt(run, baseline, load_evidence(run, name)))
        verdicts.append(
            decide(policy, attempt.baseline, attempt.candidate, tasks=tasks, again=again)
        )
    return verdicts


def remember_attempts(run: RunDirectory) -> None:
    """Note a run's candidates as attempts at their questions, so that no later one starts afresh."""
    manifest = run.load_manifest()
    if not run.variant(manifest.baseline).result.exists():
        return
    baseline = load_evidence(run, manifest.baseline)
    for name in manifest.variants:
        if name != manifest.baseline and run.variant(name).result.exists():
            candidate = load_evidence(run, name)
            if baseline.result.status == candidate.result.status == "ok":
                remember(Attempt(run, baseline, candidate))


def load_again(run: RunDirectory) -> VariantEvidence | None:
    """Return the evidence of the baseline's repetition, None when there is none that ended well."""
    name = run.load_manifest().again
    if not name or not run.variant(name).result.exists():
        return None
    found = load_evidence(run, name)
    return found if found.result.status == "ok" else None


def gate_pair(baseline: str, candidate: str, policy: str | None) -> Verdict:
    """Gate a variant of one run against a variant of another, when their conditions allow it."""
    first, second = find_variant(baseline), find_variant(candidate, last=True)
    tasks = tuple(second.run.load_manifest().tasks)
    stages = [v.evidence.result.stages.get("artifact") for v in (first, second)]
    artifacts = [stage.inputs.get("artifact") if stage else None for stage in stages]
    if artifacts[0] and artifacts[0] == artifacts[1]:
        raise EvidenceError(
            f'"{candidate}" is the baseline itself and no candidate: name one as RUN:variant'
        )
    attempt = Attempt(second.run, first.evidence, second.evidence, first.run)
    if first.evidence.result.status == second.evidence.result.status == "ok":
        remember(attempt)
    joined = with_earlier(attempt)
    again = load_again(first.run) if first.name == first.run.load_manifest().baseline else None
    return decide(
        policy_of(second.run, policy), joined.baseline, joined.candidate, tasks=tasks, again=again
    )


def load_run(run: RunDirectory) -> list[VariantEvidence]:
    """Load the evidence of every variant of a run, the baseline first."""
    manifest = run.load_manifest()
    names = [manifest.variants[0], manifest.again, *manifest.variants[1:]]
    evidence = [
        load_evidence(run, name) for name in names if name and run.variant(name).result.exists()
    ]
    if not evidence:
        raise RecordError(f'"{run.path}" holds no variant yet')
    return evidence


def store_verdicts(run: RunDirectory, verdicts: Sequence[Verdict]) -> None:
    """Write verdicts/<candidate>.json."""
    for verdict in verdicts:
        write_record(run.verdict(verdict.candidate), verdict)


def report(run: RunDirectory) -> Table:
    """Write a run's table.md, table.csv and table.json from its records, and return the table."""
    variants = load_run(run)
    table = build_table(run.load_manifest(), variants, run.load_verdicts())
    baseline = run.load_manifest().baseline
    text = render_markdown(table) + "\n" + details_markdown(variants, baseline)
    write_atomic(run.path / "table.md", text)
    write_atomic(run.path / "table.csv", render_csv(table))
    write_atomic(run.path / "table.json", render_json(table))
    for name, content in load_files(variants, baseline).items():
        write_atomic(run.path / name, content)
    return table


def details(run: RunDirectory, *, markdown: bool) -> str:
    """Return latency and throughput by load, capacity, memory by part and utilization of a run's variants."""
    render = details_markdown if markdown else details_text
    return render(load_run(run), run.load_manifest().baseline)


def openmetrics(run: RunDirectory) -> str:
    """Return a run's results as OpenMetrics text."""
    manifest = run.load_manifest()
    return openmetrics_text(
        load_run(run), run.load_verdicts(), run_id=manifest.run_id, baseline=manifest.baseline
    )


def publish(run: RunDirectory, name: str, root: Path = RESULTS) -> Path:
    """Write a run's tables and verdicts to results/<name>/ and return that folder.

    Raises ConfigError for a name that is not one.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ConfigError(f'"{name}" cannot name a folder: use letters, digits, ".", "_" and "-"')
    report(run)
    folder = root / name
    for file in PUBLISHED:
        if (run.path / file).exists():
            write_atomic(folder / file, (run.path / file).read_bytes())
    for verdict in run.load_verdicts():
        write_record(folder / "verdicts" / f"{verdict.candidate}.json", verdict)
    return folder

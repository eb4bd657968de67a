"""Verbs that read what is stored: gate, report, compare, ls, show; and doctor."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quanteval.errors import ConfigError

if TYPE_CHECKING:
    from quanteval.records import Verdict


def gate(parsed: argparse.Namespace) -> int:
    """Print the verdicts and exit with the worst."""
    from quanteval.gate import exit_code, worst
    from quanteval.judge import gate_pair, gate_run

    if parsed.run:
        if parsed.baseline:
            raise ConfigError("--baseline goes with --candidate RUN[:variant], not with a run")
        verdicts = gate_run(parsed.run, parsed.policy, parsed.candidate)
    elif parsed.baseline and parsed.candidate:
        verdicts = [gate_pair(parsed.baseline, parsed.candidate, parsed.policy)]
    else:
        raise ConfigError(
            "gate needs a run, or both --baseline RUN[:variant] and --candidate RUN[:variant]"
        )
    _publish_verdicts(parsed, verdicts)
    return exit_code(worst(verdicts))


def _publish_verdicts(parsed: argparse.Namespace, verdicts: Sequence[Verdict]) -> None:
    from quanteval.report import junit_xml, summary_markdown, verdict_text
    from quanteval.store import write_atomic

    if parsed.junit:
        write_atomic(Path(parsed.junit), junit_xml(verdicts))
    if parsed.summary:
        write_atomic(Path(parsed.summary), summary_markdown(verdicts))
    if parsed.json:
        print(json.dumps([verdict.model_dump(mode="json") for verdict in verdicts], indent=1))
    else:
        print("\n".join(verdict_text(verdict) for verdict in verdicts))


def report(parsed: argparse.Namespace) -> int:
    """Write and print a run's table."""
    from quanteval.judge import details, find_run, openmetrics, publish
    from quanteval.judge import report as make_report
    from quanteval.report import render_csv, render_json, render_markdown, render_terminal

    run = find_run(parsed.run)
    table = make_report(run)
    if parsed.details:
        print(details(run, markdown=parsed.format == "md"), end="")
        return 0
    if parsed.publish:
        print(f"published: {publish(run, parsed.publish)}")
        return 0
    if parsed.format == "openmetrics":
        print(openmetrics(run), end="")
        return 0
    renderers: dict[str, Callable[[Any], str]] = {
        "text": render_terminal,
        "md": render_markdown,
        "csv": render_csv,
        "json": render_json,
    }
    print(renderers["json" if parsed.json else parsed.format](table))
    return 0


def compare(parsed: argparse.Namespace) -> int:
    """Print two variants side by side."""
    from quanteval.judge import find_variant, outputs_of
    from quanteval.report import comparison_text, sample_text

    first, second = find_variant(parsed.first), find_variant(parsed.second, last=True)
    if parsed.drift or parsed.fail_on_drift:
        return _drift(parsed)
    if parsed.sample:
        sides = {f"{v.run.path.name}:{v.name}": outputs_of(v) for v in (first, second)}
        print(sample_text(parsed.sample, sides))
    else:
        print(comparison_text(first.evidence, second.evidence))
    return 0


def _drift(parsed: argparse.Namespace) -> int:
    """Compare one variant of a fresh run with the same of a stored one."""
    from quanteval.judge import find_variant
    from quanteval.metrics.drift import drift
    from quanteval.report import drift_json, drift_text

    fresh = find_variant(parsed.first)
    named = ":" in parsed.second.rpartition("/")[2]
    stored = find_variant(parsed.second if named else f"{parsed.second}:{fresh.name}")
    found = drift(stored=stored.evidence, fresh=fresh.evidence)
    print(drift_json(found) if parsed.json else drift_text(found, every=parsed.all))
    return found.exit_code if parsed.fail_on_drift else 0


def ls(parsed: argparse.Namespace) -> int:
    """Print presets, suites or runs."""
    from quanteval.catalog import list_group

    for line in list_group(parsed.what):
        print(line)
    return 0


def show(parsed: argparse.Namespace) -> int:
    """Print one of them."""
    from quanteval.catalog import show

    print(show(parsed.what, parsed.name))
    return 0


def doctor(parsed: argparse.Namespace) -> int:
    """Print what this machine can do."""
    if parsed.load_client:
        from quanteval.client_overhead import client_overhead, overhead_lines

        print("\n".join(overhead_lines(client_overhead())))
        return 0
    from quanteval.doctor import diagnose

    checks = diagnose()
    if parsed.json:
        print(json.dumps([vars(check) for check in checks], indent=1))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(f"{check.status:4}  {check.name:{width}}  {check.text}")
    return 1 if any(check.status == "fail" for check in checks) else 0

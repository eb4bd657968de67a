"""Verdicts for a terminal and for a CI job's summary."""

from __future__ import annotations

from collections.abc import Sequence

from quanteval.records import Finding, Verdict
from quanteval.report.table import finding_rows
from quanteval.report.text import line, markdown, wrap

MARKS = {"accept": "+", "reject": "x", "inconclusive": "?", "invalid": "!", "skipped": "-"}


def verdict_text(verdict: Verdict) -> str:
    """Return a verdict with a line for each finding."""
    outcome = verdict.outcome.upper().replace("_", " ")
    head = f"{line(verdict.candidate)} against {line(verdict.baseline)}: {outcome}"
    lines = wrap(f"{head} (policy {line(verdict.policy_name)})")
    lines += wrap(f"  {line(verdict.reason)}")
    if verdict.degraded:
        lines += wrap(f"  {_degraded(verdict)}", 4)
    for finding in finding_rows(verdict):
        lines += wrap(f"  {_mark(finding):3} {line(finding.rule)}: {line(told(finding))}", 6)
    return "\n".join(lines)


def told(finding: Finding) -> str:
    """Return a finding's sentence, and who waived it where somebody did."""
    return f"{finding.sentence} [{finding.waived}]" if finding.waived else finding.sentence


def _degraded(verdict: Verdict) -> str:
    return (
        f"shown to have lost anything at all: {', '.join(line(t) for t in verdict.degraded)} (Holm)"
    )


def _mark(finding: Finding) -> str:
    mark = MARKS[finding.outcome]
    return mark if finding.required and not finding.waived else f"({mark})"


def _required(finding: Finding) -> str:
    return "waived" if finding.waived else "yes" if finding.required else "no"


def summary_markdown(verdicts: Sequence[Verdict]) -> str:
    """Return a Markdown summary: a table of the verdicts, then each one's findings."""
    lines = ["# quanteval", "", "| candidate | verdict | main reason |", "| --- | --- | --- |"]
    lines += [
        f"| {markdown(v.candidate)} | {v.outcome.replace('_', ' ')} | {markdown(v.reason)} |"
        for v in verdicts
    ]
    for verdict in verdicts:
        lines += ["", f"## {markdown(verdict.candidate)} against {markdown(verdict.baseline)}", ""]
        if verdict.degraded:
            lines += [markdown(_degraded(verdict)), ""]
        lines += ["| rule | required | outcome | finding |", "| --- | --- | --- | --- |"]
        lines += [
            f"| {markdown(f.rule)} | {_required(f)} | {f.outcome} | {markdown(told(f))} |"
            for f in finding_rows(verdict)
        ]
        lines += [
            "",
            f"Policy {markdown(verdict.policy_name)}, sha256 {verdict.policy_sha256[:16]}.",
        ]
    return "\n".join(lines) + "\n"

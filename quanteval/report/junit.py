"""Verdicts as JUnit XML: a suite for each candidate, a case for each rule."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as Xml

from quanteval.records import Verdict
from quanteval.report.text import plain
from quanteval.report.verdicts import told


def junit_xml(verdicts: Sequence[Verdict]) -> str:
    """Return the XML. Required findings that do not accept are failures, invalid ones errors, waived ones skipped.

    A verdict without findings (a variant that failed, or is not comparable) is one failing case.
    """
    root = Xml.Element("testsuites", name="quanteval")
    for verdict in verdicts:
        suite = Xml.SubElement(root, "testsuite", name=plain(verdict.candidate))
        counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
        if not verdict.findings:
            _case(suite, verdict, "verdict", "", "error", verdict.reason, counts)
        for finding in verdict.findings:
            kind = {"invalid": "error", "reject": "failure", "inconclusive": "failure"}.get(
                finding.outcome, ""
            )
            if finding.outcome == "skipped" or (kind and (finding.waived or not finding.required)):
                kind = "skipped"
            _case(suite, verdict, finding.rule, finding.task, kind, told(finding), counts)
        if verdict.findings and verdict.outcome != "accept" and not _failed(verdict, counts):
            kind = "error" if verdict.outcome in ("error", "not_comparable") else "failure"
            _case(suite, verdict, "verdict", "", kind, verdict.reason, counts)
        suite.attrib |= {key: str(value) for key, value in counts.items()}
    Xml.indent(root)
    return Xml.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _failed(verdict: Verdict, counts: dict[str, int]) -> bool:
    """Whether a case says already what the verdict does."""
    return bool(counts["errors"] or (verdict.outcome != "error" and counts["failures"]))


def _case(
    suite: Xml.Element,
    verdict: Verdict,
    rule: str,
    task: str,
    kind: str,
    sentence: str,
    counts: dict[str, int],
) -> None:
    name = f"{rule} ({task})" if task else rule
    case = Xml.SubElement(suite, "testcase", classname=plain(verdict.candidate), name=plain(name))
    counts["tests"] += 1
    if kind:
        counts[{"failure": "failures", "error": "errors", "skipped": "skipped"}[kind]] += 1
        Xml.SubElement(case, kind, message=plain(sentence))
    else:
        Xml.SubElement(case, "system-out").text = plain(sentence)

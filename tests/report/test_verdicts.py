"""Verdicts for people and for CI: text, summary and JUnit say what the exit code says."""

from __future__ import annotations

from xml.etree import ElementTree as Xml

import numpy as np
import pytest

from quanteval.errors import ConfigError, EvidenceError
from quanteval.gate import decide, exit_code, worst
from quanteval.policy import load_policy
from quanteval.records import VERDICT_EXIT_CODES, Finding, Score
from quanteval.report import comparison_text, junit_xml, sample_text, summary_markdown, verdict_text
from quanteval.resources import presets
from tests.gate import evidence as make
from tests.report.conftest import make_run, sets


def candidates():
    few = make.scores(values=np.ones(20))
    other = {**make.CONDITIONS, "threads": 1}
    return {
        "accept": (make.variant("c", *sets()), None),
        "reject": (make.variant("c", *sets(lost=40)), None),
        "inconclusive": (
            make.variant("c", few, *sets()[1:]),
            make.variant("base", few, *sets(kl=0.0, agree=100)[1:]),
        ),
        "error": (make.variant("c", status="out_of_memory", reason="signal 9"), None),
        "not_comparable": (make.variant("c", *sets(), comparable=other), None),
    }


@pytest.mark.parametrize("outcome", list(VERDICT_EXIT_CODES))
def test_text_summary_junit_and_exit_code_agree(outcome):
    candidate, baseline = candidates()[outcome]
    run = make_run(candidate, baseline=baseline)
    (verdict,) = run.verdicts
    assert verdict.outcome == outcome
    code = exit_code(worst(run.verdicts))
    assert code == VERDICT_EXIT_CODES[outcome] == verdict.exit_code
    word = outcome.replace("_", " ")
    assert f": {word.upper()} (policy default)" in verdict_text(verdict).splitlines()[0]
    assert f"| c | {word} |" in summary_markdown(run.verdicts)
    suite = Xml.fromstring(junit_xml(run.verdicts)).find("testsuite")
    failed = int(suite.get("failures")) + int(suite.get("errors"))
    assert (failed == 0) == (code == 0)
    assert (int(suite.get("errors")) > 0) == (outcome in ("error", "not_comparable"))


@pytest.mark.parametrize("outcome", list(VERDICT_EXIT_CODES))
def test_the_text_gives_the_reason_and_every_finding(outcome):
    candidate, baseline = candidates()[outcome]
    (verdict,) = make_run(candidate, baseline=baseline).verdicts
    text = verdict_text(verdict)
    assert all(len(shown) <= 100 for shown in text.splitlines())
    flat = " ".join(text.split())
    assert " ".join(verdict.reason.split()) in flat
    for finding in verdict.findings:
        assert f"{finding.rule}: {' '.join(finding.sentence.split())}" in flat


def test_long_names_stay_in_a_hundred_columns():
    name = "candidate-with-a-long-name-" * 6
    (verdict,) = make_run(make.variant(name, *sets())).verdicts
    text = verdict_text(verdict)
    assert all(len(shown) <= 100 for shown in text.splitlines())
    assert f"{name}againstbase:ACCEPT(policydefault)" in "".join(text.split())


def test_what_decided_comes_first_and_advice_is_in_brackets():
    (verdict,) = make_run(make.variant("c", *sets(lost=40, kl=20.0))).verdicts
    lines = [shown.strip() for shown in verdict_text(verdict).splitlines()]
    marks = [
        shown[:3].strip()
        for shown in lines
        if shown[:3].strip() in ("x", "+", "?", "(x)", "(+)", "(-)")
    ]
    assert marks[0] == "x"
    assert marks == sorted(marks, key=["x", "?", "+", "(x)", "(+)", "(-)"].index)


def test_junit_has_one_case_for_each_finding_with_its_sentence():
    run = make_run(make.variant("good", *sets()), make.variant("bad", *sets(lost=40, kl=20.0)))
    root = Xml.fromstring(junit_xml(run.verdicts))
    suites = root.findall("testsuite")
    assert [suite.get("name") for suite in suites] == ["good", "bad"]
    for suite, verdict in zip(suites, run.verdicts, strict=True):
        cases = suite.findall("testcase")
        assert len(cases) == int(suite.get("tests")) == len(verdict.findings)
        for kind, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            assert len(suite.findall(f"testcase/{kind}")) == int(suite.get(count))
        for case, finding in zip(cases, verdict.findings, strict=True):
            said = [part.get("message") or part.text for part in case]
            assert said == [finding.sentence]
    (failure,) = suites[1].findall("testcase/failure")
    assert "40 worse" in failure.get("message")


def test_an_advisory_reject_fails_nothing_but_says_so():
    run = make_run(make.variant("c", *sets(kl=20.0)))
    assert run.verdicts[0].outcome == "accept"
    suite = Xml.fromstring(junit_xml(run.verdicts)).find("testsuite")
    assert suite.get("failures") == suite.get("errors") == "0"
    said = [case.get("message") for case in suite.findall("testcase/skipped")]
    assert any("mean KL" in message for message in said)


EVIL = "\x1b[2J]]>\x00\ud800\ufffe<b>|`"


def evil_verdict():
    (verdict,) = make_run(make.variant("c", *sets(lost=40))).verdicts
    finding = verdict.findings[1].model_copy(update={"sentence": EVIL, "rule": EVIL, "task": EVIL})
    return verdict.model_copy(update={"candidate": EVIL, "reason": EVIL, "findings": [finding]})


def test_foreign_text_stays_text():
    verdict = evil_verdict()
    Xml.fromstring(junit_xml([verdict]).encode("utf-8"))
    for text in (verdict_text(verdict), summary_markdown([verdict]), junit_xml([verdict])):
        assert not set(text) & {"\x1b", "\x00", "\ud800", "\ufffe"}
        text.encode("utf-8")
    summary = summary_markdown([verdict])
    assert "<b>" not in summary
    assert "`" not in summary


def test_no_verdict_at_all_passes_nowhere():
    assert exit_code(worst([])) == 1
    assert Xml.fromstring(junit_xml([])).findall("testsuite") == []
    assert summary_markdown([]).startswith("# quanteval")


# --------------------------------------------------------------------------- comparison


def test_a_comparison_names_the_samples_that_flipped():
    text = comparison_text(make.variant("base", *sets()), make.variant("c", *sets(lost=25)))
    assert "base -> c" in text
    assert "175 the same, 25 lost, 0 gained" in text
    assert "lost    s0 (passed -> wrong)" in text
    assert "... and 5 more" in text
    assert "prose: token perplexity" in text
    assert (
        "code: pass@1 100.0 % [98.1 %, 100.0 %] -> 87.5 % [82.2 %, 91.4 %] (n=200 problems)" in text
    )
    assert "paired difference of pass@1: -12.5 points [" in text
    assert "not measured alike" not in text
    assert all(len(shown) <= 100 for shown in text.splitlines())
    back = comparison_text(make.variant("c", *sets(lost=25)), make.variant("base", *sets()))
    assert "0 lost, 25 gained" in back


def test_a_comparison_names_conditions_that_differ_and_shows_foreign_names_harmlessly():
    other = {**make.CONDITIONS, "threads": 1}
    odd = make.scores("\x1b[2Jtask", values=[1, 0, 1])
    text = comparison_text(make.variant("a", odd), make.variant("b", odd, comparable=other))
    assert (
        text.splitlines()[1]
        == "not measured alike: measured on different hardware or threads: threads (2 and 1)"
    )
    assert "\x1b" not in text
    rating = make.scores(kind="rating", values=[1, 0, 1])
    text = comparison_text(make.variant("a", make.scores()), make.variant("b", rating))
    assert "code: not comparable, the suites differ" in text


def test_a_comparison_copes_with_what_only_one_side_has():
    prose = make.perplexity(np.linspace(200, 300, 40))
    bare = make.perplexity(np.linspace(200, 300, 40), numbers={})
    plain = make.scores(values=np.ones(200), outcome=())
    lost = make.scores(values=np.r_[0, np.ones(199)], outcome=())
    text = comparison_text(make.variant("a", prose, plain), make.variant("b", bare, lost))
    assert "token perplexity" in text
    assert "bits per byte" not in text
    assert "lost    s0 (1.00 -> 0)" in text
    nan = make.variant("b", make.perplexity([np.nan] * 40))
    assert '"s0"' in comparison_text(make.variant("a", prose), nan)
    with pytest.raises(EvidenceError, match="no task in common"):
        comparison_text(make.variant("a", prose), make.variant("b"))


def score(sample_id, output):
    return Score(
        sample_id=sample_id, prompt_sha256="p", value=1.0, weight=1.0, status="ok", finish_reason="stop",
        output_tokens=3, output=output, outcome="passed",
    )  # fmt: skip


def test_one_sample_is_shown_in_full_and_harmless():
    odd = score("s1", None).model_copy(update={"outcome": "\x1b[2J"})
    sides = {"base": [score("s1", "def f():\n    return '\x1b[2J'")], "c": [odd]}
    text = sample_text("s1", sides)
    assert "\x1b" not in text
    assert "def f():\n    return '\\x1b[2J'" in text
    assert "(no output)" in text
    with pytest.raises(ConfigError, match='did you mean "s1"'):
        sample_text("s11", sides)


def test_waived_findings_are_shown_with_who_waived_them_and_fail_no_job():
    waived = Finding(
        rule="code", required=True, outcome="reject", sentence="code lost 9 points", task="code",
        waived="waived by Ada until 2027-01-31: known",
    )  # fmt: skip
    (made,) = make_run(make.variant("c", *sets())).verdicts
    verdict = made.model_copy(
        update={"findings": [waived], "degraded": ["code"], "outcome": "accept"}
    )
    text = " ".join(verdict_text(verdict).split())
    assert "(x) code: code lost 9 points [waived by Ada until 2027-01-31: known]" in text
    assert "shown to have lost anything at all: code (Holm)" in text
    summary = summary_markdown([verdict])
    assert "| code | waived | reject | code lost 9 points [waived by Ada" in summary
    (case,) = Xml.fromstring(junit_xml([verdict]).encode()).iter("testcase")
    (skipped,) = case.findall("skipped")
    assert "waived by Ada" in skipped.get("message")


def test_a_verdict_that_no_finding_gives_away_fails_the_junit_file_too():
    prose = make.perplexity(np.linspace(200, 300, 20))
    policy = load_policy(presets("gate")["default"])
    verdict = decide(
        policy, make.variant("base", prose), make.variant("c", prose), tasks=("prose",)
    )
    assert verdict.outcome == "inconclusive"
    suite = Xml.fromstring(junit_xml([verdict])).find("testsuite")
    assert suite.get("failures") == "1"
    assert "no task of kind code" in junit_xml([verdict])

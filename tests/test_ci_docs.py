"""docs/ci.md: its pipelines are valid, and their commands were run as far as that goes without a CI service."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from quanteval.policy import KEYS, Waiver
from quanteval.records import VERDICT_EXIT_CODES

TEXT = (Path(__file__).parent.parent / "docs" / "ci.md").read_text(encoding="utf-8")


def block(language: str, first_line: str) -> str:
    for body in re.findall(rf"```{language}\n(.*?)```", TEXT, re.S):
        if body.startswith(first_line):
            return body
    raise AssertionError(first_line)


def github_commands() -> list[str]:
    workflow = yaml.safe_load(block("yaml", "# .github"))
    (job,) = workflow["jobs"].values()
    return [step["run"] for step in job["steps"] if "run" in step]


def gitlab() -> dict:
    (job,) = yaml.safe_load(block("yaml", "# .gitlab-ci.yml")).values()
    return job


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder):
    """Return a folder and an environment in which `quanteval` is on the path and the demo is tiny."""
    cwd = tmp_path_factory.mktemp("ci")
    bin_dir = cwd / "bin"
    bin_dir.mkdir()
    # The documented commands with a scripted engine and a tiny model instead of minutes of computing.
    small = (
        f"engine=fake bench=none model={tiny_folder} task=[pydoc] task.pydoc.limit=12 scheme=[fp32,bf16] "
        "gate.rules.code.required=false"
    )
    (bin_dir / "quanteval").write_text(
        "#!/bin/bash\n"
        f'if [ "$1" = run ] || [ "$1" = check ]; then set -- "$1" {small}; fi\n'
        f'exec {sys.executable} -m quanteval "$@"\n'
    )
    (bin_dir / "quanteval").chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{bin_dir}:{os.environ['PATH']}",
        "GITHUB_STEP_SUMMARY": str(cwd / "step summary.md"),
    }
    return cwd, env


def shell(place, command: str) -> subprocess.CompletedProcess[str]:
    cwd, env = place
    return subprocess.run(
        ["bash", "-c", command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )


def test_the_github_workflow_runs_and_leaves_a_summary_and_a_junit_file(place):
    cwd, env = place
    commands = [c for c in github_commands() if c.startswith("quanteval")]
    assert [shlex.split(c)[1] for c in commands] == ["check", "run", "gate"]
    for command in commands:
        done = shell(place, command)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "| bf16 | accept |" in Path(env["GITHUB_STEP_SUMMARY"]).read_text()
    suites = ElementTree.parse(cwd / "verdict.xml").getroot()
    cases = suites.findall("./testsuite/testcase")
    assert {case.get("classname") for case in cases} == {"bf16"}
    assert any(case.get("name") == "perplexity (pydoc)" for case in cases)


def test_the_gitlab_job_and_the_plain_shell_run_too(place):
    cwd, _ = place
    job = gitlab()
    for command in job["script"]:
        if command.startswith("quanteval"):
            done = shell(place, command)
            assert done.returncode == 0, done.stderr
    assert (cwd / job["artifacts"]["reports"]["junit"]).exists()
    assert (cwd / job["artifacts"]["paths"][0]).exists()
    assert job["allow_failure"]["exit_codes"] == [VERDICT_EXIT_CODES["inconclusive"]]
    done = shell(place, block("bash", "quanteval gate latest"))
    assert (done.returncode, done.stdout.strip()) == (0, "release")


def test_the_table_of_exit_codes_is_the_codes():
    table = dict(re.findall(r"^\| (\d) \| ([^|]*) \|", TEXT, re.M))
    assert set(table) == {str(code) for code in VERDICT_EXIT_CODES.values()} | {"2"}
    for outcome, word in (
        ("accept", "accepted"), ("reject", "rejected"), ("inconclusive", "inconclusive"),
        ("not_comparable", "not comparable"), ("error", "error"),
    ):  # fmt: skip
        assert word in table[str(VERDICT_EXIT_CODES[outcome])]


def test_the_waiver_shown_is_one():
    node = yaml.safe_load(block("yaml", "# in a policy"))
    assert set(node) <= set(KEYS)
    (waiver,) = node["waivers"]
    assert Waiver(**waiver).text.startswith("waived by ada@example.org until 2026-12-31")

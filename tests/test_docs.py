"""What the documents show is what the code does: README's table, and the examples of extending.md."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from quanteval.config import compose, make_plan
from quanteval.records import Verdict
from quanteval.report import Table, render_terminal, verdict_text
from quanteval.resources import presets
from quanteval.store import read_record

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "results" / "demo"


def readme_block(name: str) -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- {name}: .*? -->\n```text\n(.*?)```\n", text, re.S)
    assert found, name
    return found.group(1)


def published_verdicts() -> list[Verdict]:
    table = TypeAdapter(Table).validate_json((RESULT / "table.json").read_bytes())
    files = [RESULT / "verdicts" / f"{row.variant}.json" for row in table.rows]
    return [read_record(path, Verdict) for path in files if path.exists()]


def test_the_readme_shows_the_published_table():
    table = TypeAdapter(Table).validate_json((RESULT / "table.json").read_bytes())
    assert readme_block("table").strip("\n") == render_terminal(table).strip("\n")


def test_the_readme_shows_the_published_verdicts():
    verdicts = published_verdicts()
    assert {v.outcome for v in verdicts} >= {"accept", "reject"}
    shown = readme_block("verdicts")
    for verdict in verdicts:
        # Head and deciding sentence; the findings are in the file.
        head = verdict_text(verdict).splitlines()[0]
        assert head in shown.splitlines()
        assert " ".join(verdict.reason.split()) in " ".join(shown.split())


@pytest.fixture
def examples(tmp_path) -> dict[str, str]:
    """Write every file that extending.md shows, and return its environment."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    for body in re.findall(r"```(?:python|yaml)\n(.*?)```", text, re.S):
        first, _, rest = body.partition("\n")
        path = tmp_path / first.removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(rest)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def test_the_examples_of_extending_work(examples, tmp_path, tiny_folder):
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^quanteval (run .*)$", text, re.M)
    arguments = [
        *shlex.split(command), f"model={tiny_folder}", "engine=fake", "bench=none", "task=[pydoc]",
        "task.pydoc.limit=12",
    ]  # fmt: skip
    for call in (arguments, ["gate", "latest", "--policy", "policy.yaml"]):
        done = subprocess.run(
            [sys.executable, "-m", "quanteval", *call],
            cwd=tmp_path, env=examples, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + done.stdout
    assert "served16 against fp32: ACCEPT" in done.stdout
    assert "answers: 0 answers are empty" in done.stdout


def test_every_suite_has_its_row_in_tasks_md():
    from quanteval.resources import task_folders

    text = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    assert {name for name in task_folders() if f"`{name}`" not in rows} == set()


def test_every_metric_is_explained_in_metrics_md():
    source = (ROOT / "quanteval" / "metrics" / "quality.py").read_text(encoding="utf-8")
    names = set(re.findall(r'(?:Metric|_shares|_exponential)\(\s*"([^"]+)"', source))
    assert {"pass@1", "batch noise", "greedy agreement", "token perplexity"} <= names
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert {name for name in names if name not in text} == set()


def test_the_default_suite_is_what_a_run_takes():
    from quanteval.config import compose

    assert list(compose([]).task) == list(compose(["suite=default"]).task)
    for name in ("smoke", "code", "full"):
        assert compose([f"suite={name}"]).task
    assert list(compose(["suite=code", "task=[pydoc]"]).task) == ["pydoc"]


def test_the_runs_of_serving_md_compose_and_its_tables_name_what_there_is():
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.S)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    runs = [command[2:] for command in commands if command[:2] == ["quanteval", "run"]]
    assert len(runs) >= 4
    for overrides in runs:
        plan = make_plan(compose(overrides))
        assert plan.variants
    engines = set(re.findall(r"^\| `(\w+)` \|", text.partition("## Workloads")[0], re.M))
    assert engines == set(presets("engine"))
    workloads = set(re.findall(r"^\| `(\w+)` \|", text.partition("## Workloads")[2], re.M))
    assert workloads == set(presets("workload"))

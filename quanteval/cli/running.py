"""Verbs that compose a configuration: run, check, plan."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from quanteval.cli.output import notify, say_error
from quanteval.errors import ConfigError

if TYPE_CHECKING:
    from quanteval.pipeline import RunOutcome
    from quanteval.runplan import RunPlan

RUN_HELP = """\
usage: quanteval run [-m] [--json] [--task-dir DIR] [OVERRIDE ...]

Build, serve, measure and gate each scheme against the baseline, then print the table.

overrides are Hydra's:
  model=NAME                preset, local folder, GGUF file, or hub id (with model_options.revision=...)
  scheme=[bf16,nf4_bnb]     the first is the baseline (or baseline=NAME, or a stored one: baseline=RUN:NAME)
  scheme.nf4_bnb.double_quant=true
  task=[pyeasy,pydoc]       task.pyeasy.limit=20
  engine=transformers  bench=default  gate=default  experiment=demo
  aa=true                   measure the baseline twice: the noise floor
  gate.sequential=true      end a candidate's task as soon as it is decided
  runtime.bench_rounds=5    variants take turns, so that speed can be compared
  runtime.threads=2  runtime.seed=0  output_root=outputs  run_dir=PATH

options:
  -m, --multirun    sweep over comma-separated values: -m model=a,b
  --json            print the table as JSON
  --task-dir DIR    also look for suites under DIR/<name>/task.yaml (may be repeated)
  --config-dir DIR  add presets of your own (Hydra); --cfg job shows the composed configuration
  -h, --help        this text; --hydra-help for Hydra's own options

examples:
  quanteval run scheme=[bf16,int8_bnb] task=[pyeasy,pydoc]
  quanteval run model=./my-model scheme=[bf16,w8a8_torchao] task.humaneval.limit=50
  quanteval run baseline=outputs/nightly:bf16 scheme=[nf4_bnb] aa=true
  quanteval run -m model=./a,./b experiment=smoke

A second identical run reuses every finished stage; a killed one goes on where it was.
`run` exits 0 when every variant was measured, whatever the verdicts: `quanteval gate` is for CI.
"""


def run(arguments: list[str]) -> int:
    """Run Hydra's job on the arguments."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(RUN_HELP, end="")
        return 0
    as_json = "--json" in arguments
    arguments = _take_task_dirs([a for a in arguments if a != "--json"])
    signal.signal(signal.SIGTERM, _interrupt)

    from quanteval.config import launch
    from quanteval.pipeline import execute

    command = ["quanteval", "run", *arguments]
    cells: list[RunOutcome] = []

    def job(plan: RunPlan) -> None:
        outcome = execute(plan, notify, command)
        cells.append(outcome)
        _show_run(outcome, as_json)

    errors = launch(arguments, job)
    for error in errors:
        say_error(str(error))
    incomplete = not all(cell.complete for cell in cells)
    return max([int(incomplete), *(error.exit_code for error in errors)])


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _take_task_dirs(arguments: list[str]) -> list[str]:
    """Move --task-dir options into the environment, where child processes see them too."""
    from quanteval.resources import TASK_PATH_VARIABLE

    kept: list[str] = []
    folders: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--task-dir":
            folders.append(next(rest, ""))
        elif argument.startswith("--task-dir="):
            folders.append(argument.partition("=")[2])
        else:
            kept.append(argument)
    for folder in folders:
        if not Path(folder).is_dir():
            raise ConfigError(f'--task-dir "{folder}" is not a folder')
    if folders:
        before = os.environ.get(TASK_PATH_VARIABLE)
        places = [str(Path(f).resolve()) for f in folders] + ([before] if before else [])
        os.environ[TASK_PATH_VARIABLE] = os.pathsep.join(places)
    return kept


def check(parsed: argparse.Namespace) -> int:
    """Print what a configuration composes to and every problem of it."""
    from quanteval.check import check

    _take_task_dirs([part for folder in parsed.task_dir for part in ("--task-dir", folder)])
    lines, errors = check(parsed.overrides)
    for line in lines:
        print(line)
    for error in errors:
        say_error(str(error))
    if errors:
        say_error(f"{len(errors)} problem{'s' if len(errors) > 1 else ''} found")
    return max((error.exit_code for error in errors), default=0)


def plan(parsed: argparse.Namespace) -> int:
    """Print what a policy can decide, or (`plan memory`) whether a model fits a device."""
    if parsed.overrides[:1] == ["memory"]:
        from quanteval.memory_plan import plan_memory_text

        text, code = plan_memory_text(parsed.overrides[1:], parsed.json)
        print(text)
        return code
    from quanteval.planning import plan_text

    _take_task_dirs([part for folder in parsed.task_dir for part in ("--task-dir", folder)])
    print(plan_text(parsed.overrides, parsed.run, parsed.flips, as_json=parsed.json))
    return 0


def _show_run(outcome: RunOutcome, as_json: bool) -> None:
    from quanteval.report import render_json, render_terminal, verdict_text

    if as_json:
        print(render_json(outcome.table))
        return
    print(render_terminal(outcome.table))
    for verdict in outcome.verdicts:
        print(verdict_text(verdict))
    print(f"\nrun directory: {outcome.path}")

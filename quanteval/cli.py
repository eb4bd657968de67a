"""The command line: verbs, exit codes, errors as one line. The only module that prints.

Each verb imports what it needs when it runs, so that `--help`, `gate` and `report` start at once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from quanteval import __version__
from quanteval.errors import ConfigError, QuantevalError

if TYPE_CHECKING:
    from quanteval.pipeline import RunOutcome
    from quanteval.records import Verdict
    from quanteval.runplan import RunPlan

EXIT_CODES = """\
exit codes:
  0  accepted (gate), or done (other verbs)
  1  internal or infrastructure error; missing, torn or unusable evidence
  2  usage or configuration error
  3  rejected
  4  inconclusive
  5  not comparable: measured under different conditions
  With several candidates the worst one decides: 1, then 5, 3, 4, 0.
"""

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["run"]:
            return _run(arguments[1:])
        parsed = _parser().parse_args(arguments)
        verb: Callable[[argparse.Namespace], int] = parsed.verb
        return verb(parsed)
    except QuantevalError as error:
        _say_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _say_error("interrupted; what was measured is kept, the same command goes on from there")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _say_error(message: str) -> None:
    print(f"quanteval: {message}", file=sys.stderr)


def _notify(message: str) -> None:
    if sys.stderr.isatty():
        print(message, file=sys.stderr)


# --------------------------------------------------------------------------- run and check (Hydra)


def _run(arguments: list[str]) -> int:
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
        outcome = execute(plan, _notify, command)
        cells.append(outcome)
        _show_run(outcome, as_json)

    errors = launch(arguments, job)
    for error in errors:
        _say_error(str(error))
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


def _check(parsed: argparse.Namespace) -> int:
    from quanteval.check import check

    _take_task_dirs([part for folder in parsed.task_dir for part in ("--task-dir", folder)])
    lines, errors = check(parsed.overrides)
    for line in lines:
        print(line)
    for error in errors:
        _say_error(str(error))
    if errors:
        _say_error(f"{len(errors)} problem{'s' if len(errors) > 1 else ''} found")
    return max((error.exit_code for error in errors), default=0)


def _plan(parsed: argparse.Namespace) -> int:
    from quanteval.planning import plan_text

    _take_task_dirs([part for folder in parsed.task_dir for part in ("--task-dir", folder)])
    print(plan_text(parsed.overrides, parsed.run, parsed.flips, as_json=parsed.json))
    return 0


# --------------------------------------------------------------------------- gate, report, compare


def _show_run(outcome: RunOutcome, as_json: bool) -> None:
    from quanteval.report import render_json, render_terminal, verdict_text

    if as_json:
        print(render_json(outcome.table))
        return
    print(render_terminal(outcome.table))
    for verdict in outcome.verdicts:
        print(verdict_text(verdict))
    print(f"\nrun directory: {outcome.path}")


def _gate(parsed: argparse.Namespace) -> int:
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


def _report(parsed: argparse.Namespace) -> int:
    from quanteval.judge import details, find_run, publish
    from quanteval.judge import report as make_report
    from quanteval.report import render_csv, render_json, render_markdown, render_terminal

    run = find_run(parsed.run)
    table = make_report(run)
    if parsed.details:
        print(details(run), end="")
        return 0
    if parsed.publish:
        print(f"published: {publish(run, parsed.publish)}")
        return 0
    renderers: dict[str, Callable[[Any], str]] = {
        "text": render_terminal,
        "md": render_markdown,
        "csv": render_csv,
        "json": render_json,
    }
    print(renderers["json" if parsed.json else parsed.format](table))
    return 0


def _compare(parsed: argparse.Namespace) -> int:
    from quanteval.judge import find_variant, outputs_of
    from quanteval.report import comparison_text, sample_text

    first, second = find_variant(parsed.first), find_variant(parsed.second, last=True)
    if parsed.sample:
        sides = {f"{v.run.path.name}:{v.name}": outputs_of(v) for v in (first, second)}
        print(sample_text(parsed.sample, sides))
    else:
        print(comparison_text(first.evidence, second.evidence))
    return 0


# --------------------------------------------------------------------------- ls, show, doctor


def _ls(parsed: argparse.Namespace) -> int:
    from quanteval.catalog import list_group

    for line in list_group(parsed.what):
        print(line)
    return 0


def _show(parsed: argparse.Namespace) -> int:
    from quanteval.catalog import show

    print(show(parsed.what, parsed.name))
    return 0


def _doctor(parsed: argparse.Namespace) -> int:
    from quanteval.doctor import diagnose

    checks = diagnose()
    if parsed.json:
        print(json.dumps([vars(check) for check in checks], indent=1))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(f"{check.status:4}  {check.name:{width}}  {check.text}")
    return 1 if any(check.status == "fail" for check in checks) else 0


# --------------------------------------------------------------------------- the parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    from quanteval.resources import GROUPS

    parser = _Parser(
        prog="quanteval",
        description="Decides whether a quantized language model may ship.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"quanteval {__version__}")
    verbs = parser.add_subparsers(
        title="verbs", required=True, metavar="VERB", parser_class=_Parser
    )

    def verb(
        name: str, run: Callable[[argparse.Namespace], int], text: str, example: str
    ) -> argparse.ArgumentParser:
        made = verbs.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"example:\n  {example}\n\n{EXIT_CODES if name == 'gate' else ''}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(verb=run)
        return made

    # `run` is dispatched before parsing, since its arguments are Hydra's; it is here for --help.
    verb(
        "run",
        _check,
        "build, serve, measure and gate schemes (Hydra)",
        "quanteval run experiment=demo",
    )

    gate = verb(
        "gate",
        _gate,
        "compare candidates with their baseline and exit with the verdict",
        "quanteval gate latest --policy strict --junit verdict.xml",
    )
    gate.add_argument("run", nargs="?", help="run directory, run id under outputs/, or 'latest'")
    gate.add_argument("--policy", help="policy file or preset (default: the one of the run)")
    gate.add_argument("--candidate", help="one candidate of the run, or RUN[:variant] without RUN")
    gate.add_argument("--baseline", help="RUN[:variant], to join runs made apart")
    gate.add_argument("--junit", help="write JUnit XML here")
    gate.add_argument("--summary", help="write a Markdown summary here (e.g. $GITHUB_STEP_SUMMARY)")
    gate.add_argument("--json", action="store_true", help="print the verdicts as JSON")

    report = verb(
        "report",
        _report,
        "write and print a run's table again",
        "quanteval report latest --format md",
    )
    report.add_argument("run", help="run directory, run id under outputs/, or 'latest'")
    report.add_argument("--format", choices=("text", "md", "csv", "json"), default="text")
    report.add_argument("--json", action="store_true", help="the same as --format json")
    report.add_argument(
        "--publish", metavar="NAME", help="write tables and verdicts to results/NAME/"
    )
    report.add_argument(
        "--details",
        action="store_true",
        help="latency by load point and prompt length, memory by part (Markdown)",
    )

    compare = verb(
        "compare",
        _compare,
        "compare two variants sample by sample",
        "quanteval compare latest:bf16 latest:nf4_bnb --sample pyeasy/3",
    )
    compare.add_argument("first", metavar="A", help="RUN[:variant] (default variant: the baseline)")
    compare.add_argument(
        "second", metavar="B", help="RUN[:variant] (default variant: the last one)"
    )
    compare.add_argument("--sample", help="show this sample's two outputs in full")

    ls = verb("ls", _ls, "list presets, suites or runs", "quanteval ls schemes")
    ls.add_argument("what", nargs="?", choices=sorted(GROUPS), help="default: everything")

    show = verb(
        "show",
        _show,
        "print a preset, a suite, a run's manifest, or a record's JSON Schema",
        "quanteval show scheme nf4_bnb",
    )
    show.add_argument(
        "what", help="scheme, engine, task, bench, gate, models, experiment, schema or run"
    )
    show.add_argument("name", nargs="?", default="", help="which one")

    check = verb(
        "check",
        _check,
        "compose and build a configuration, check what this machine can do, run nothing",
        "quanteval check scheme=[bf16,nf4_bnb] task=[humaneval]",
    )
    check.add_argument("--task-dir", action="append", default=[], help="as for run")
    check.add_argument("overrides", nargs="*", help="as for run")

    plan = verb(
        "plan",
        _plan,
        "say what a policy can decide on the chosen suites, before anything is run",
        "quanteval plan task=[humaneval,pydoc] gate=strict",
    )
    plan.add_argument(
        "--run", help="stored run to learn from (default: the newest of this model and suite)"
    )
    plan.add_argument(
        "--flips",
        type=float,
        metavar="SHARE",
        help="share of problems a harmless variant changes (default: a run's, or 0.05)",
    )
    plan.add_argument("--task-dir", action="append", default=[], help="as for run")
    plan.add_argument("--json", action="store_true", help="print as JSON")
    plan.add_argument("overrides", nargs="*", help="as for run")

    doctor = verb(
        "doctor", _doctor, "say what this machine and installation can do", "quanteval doctor"
    )
    doctor.add_argument("--json", action="store_true", help="print as JSON")
    return parser

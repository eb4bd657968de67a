"""The parser: verbs, their options and help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from quanteval import __version__
from quanteval.cli import reading, running, servers
from quanteval.errors import ConfigError

Verb = Callable[[str, Callable[[argparse.Namespace], int], str, str], argparse.ArgumentParser]
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; the chosen verb's function is in `verb`."""
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

    _composing(verb)
    _judging(verb)
    _looking(verb)
    _serving(verb)
    return parser


def _composing(verb: Verb) -> None:
    # `run` is dispatched before parsing, since its arguments are Hydra's; it is here for --help.
    verb(
        "run",
        running.check,
        "build, serve, measure and gate schemes (Hydra)",
        "quanteval run experiment=demo",
    )

    check = verb(
        "check",
        running.check,
        "compose and build a configuration, check what this machine can do, run nothing",
        "quanteval check scheme=[bf16,nf4_bnb] task=[humaneval]",
    )
    check.add_argument("--task-dir", action="append", default=[], help="as for run")
    check.add_argument("overrides", nargs="*", help="as for run")

    plan = verb(
        "plan",
        running.plan,
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


def _judging(verb: Verb) -> None:
    gate = verb(
        "gate",
        reading.gate,
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
        reading.report,
        "write and print a run's table again",
        "quanteval report latest --format md",
    )
    report.add_argument("run", help="run directory, run id under outputs/, or 'latest'")
    report.add_argument(
        "--format", choices=("text", "md", "csv", "json", "openmetrics"), default="text"
    )
    report.add_argument("--json", action="store_true", help="the same as --format json")
    report.add_argument(
        "--publish", metavar="NAME", help="write tables and verdicts to results/NAME/"
    )
    report.add_argument(
        "--details",
        action="store_true",
        help="latency by load and prompt length, capacity, memory by part, utilization (text or md)",
    )

    compare = verb(
        "compare",
        reading.compare,
        "compare two variants sample by sample",
        "quanteval compare latest:bf16 latest:nf4_bnb --sample pyeasy/3",
    )
    compare.add_argument("first", metavar="A", help="RUN[:variant] (default variant: the baseline)")
    compare.add_argument(
        "second", metavar="B", help="RUN[:variant] (default variant: the last one)"
    )
    compare.add_argument("--sample", help="show this sample's two outputs in full")
    compare.add_argument(
        "--drift",
        action="store_true",
        help="A is a fresh run and B a stored one of the same variant: what left its noise band",
    )
    compare.add_argument(
        "--fail-on-drift",
        action="store_true",
        help="the same, exiting 3 when something drifted, 4 undecided, 5 under other conditions",
    )
    compare.add_argument("--all", action="store_true", help="with --drift: every metric")
    compare.add_argument("--json", action="store_true", help="with --drift: as JSON")


def _looking(verb: Verb) -> None:
    from quanteval.resources import GROUPS

    ls = verb("ls", reading.ls, "list presets, suites or runs", "quanteval ls schemes")
    ls.add_argument("what", nargs="?", choices=sorted(GROUPS), help="default: everything")

    show = verb(
        "show",
        reading.show,
        "print a preset, a suite, a run's manifest, or a record's JSON Schema",
        "quanteval show scheme nf4_bnb",
    )
    show.add_argument(
        "what", help="scheme, engine, task, bench, gate, models, experiment, schema or run"
    )
    show.add_argument("name", nargs="?", default="", help="which one")

    doctor = verb(
        "doctor",
        reading.doctor,
        "say what this machine and installation can do",
        "quanteval doctor",
    )
    doctor.add_argument("--json", action="store_true", help="print as JSON")
    doctor.add_argument(
        "--load-client",
        action="store_true",
        help="measure what the load client adds to its figures here (about 20 seconds)",
    )


def _serving(verb: Verb) -> None:
    serve = verb(
        "serve",
        servers.serve,
        "put an OpenAI-compatible server on one scheme of a model",
        "quanteval serve model=smollm2_135m scheme=[nf4_bnb] --port 8000",
    )
    _listening(serve, 8000)
    serve.add_argument("--name", default="", help="name of the model (default: the scheme's)")
    serve.add_argument("overrides", nargs="*", help="model, scheme, engine, runtime: as for run")

    mock = verb(
        "mock-server",
        servers.mock_server,
        "serve scripted timings, faults and answers, to try load clients against",
        "quanteval mock-server ttft_s=0.1 itl_s=0.02 tokens_per_chunk=4 --port 8000",
    )
    _listening(mock, 8000)
    mock.add_argument(
        "settings", nargs="*", metavar="NAME=VALUE", help="see docs/serving.md for all of them"
    )


def _listening(parser: argparse.ArgumentParser, port: int) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=port, help="0 picks a free one (%(default)s)")

"""The command line: verbs, exit codes, errors as one line. The only package that prints.

Each verb imports what it needs when it runs, so that `--help`, `gate` and `report` start at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from quanteval.cli import running
from quanteval.cli.output import say_error
from quanteval.cli.parser import make_parser
from quanteval.errors import QuantevalError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["run"]:
            return running.run(arguments[1:])
        parsed = make_parser().parse_args(arguments)
        verb: Callable[[argparse.Namespace], int] = parsed.verb
        return verb(parsed)
    except QuantevalError as error:
        say_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        say_error("interrupted; what was measured is kept, the same command goes on from there")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1

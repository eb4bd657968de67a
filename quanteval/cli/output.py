"""What every verb prints with: errors and steps go to standard error."""

from __future__ import annotations

import sys


def say_error(message: str) -> None:
    """Print one line to standard error."""
    print(f"quanteval: {message}", file=sys.stderr)


def notify(message: str) -> None:
    """Print a step to a terminal's standard error; elsewhere nothing."""
    if sys.stderr.isatty():
        print(message, file=sys.stderr)

"""Which layers: patterns for the names of linear layers, the same grammar for every family."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

from quanteval.errors import ConfigError
from quanteval.interfaces import ModelSource
from quanteval.schemes._common import linear_shapes

HEAD = "lm_head"
EXPRESSION = "re:"


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a module's full name fits one of the patterns.

    A pattern is one or several whole parts of the name ('down_proj', 'layers.0', a full name), a glob over the full
    name ('model.layers.1?.*', where * also crosses dots), or 're:' and an expression that the full name must match.
    Raises ConfigError for an expression that does not compile.
    """
    return any(_fits(name, pattern) for pattern in patterns)


def _fits(name: str, pattern: str) -> bool:
    if pattern.startswith(EXPRESSION):
        try:
            return re.fullmatch(pattern.removeprefix(EXPRESSION), name) is not None
        except re.error as error:
            raise ConfigError(f'pattern "{pattern}" is no regular expression: {error}') from None
    return f".{pattern}." in f".{name}." or fnmatch.fnmatchcase(name, pattern)


def linear_names(source: ModelSource) -> list[str]:
    """Return the full names of a model's linear layers, the output head last, from the headers of its weights."""
    return [*linear_shapes(source), HEAD]


def expand(source: ModelSource, patterns: Sequence[str]) -> list[str]:
    """Return the full names of the layers that the patterns name, in the model's order.

    ConfigError for a pattern that names no layer at all: it is a misspelling more often than a wish.
    """
    names = linear_names(source)
    for pattern in patterns:
        if not any(_fits(name, pattern) for name in names):
            raise ConfigError(
                f'pattern "{pattern}" fits no linear layer; they are named like "{names[0]}" and "{names[-1]}"'
            )
    return [name for name in names if matches(name, patterns)]


def chosen(source: ModelSource, skip: Sequence[str]) -> list[str]:
    """Return the full names of the layers that are quantized when those fitting `skip` are left alone."""
    left = set(expand(source, skip))
    return [name for name in linear_names(source) if name not in left]

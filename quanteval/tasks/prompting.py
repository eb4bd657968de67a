"""What task kinds share in making prompts: Jinja templates over a row's fields, and solved examples.

Templates run in Jinja's sandbox, since suites may come from anywhere. A template's trailing line
break is kept, and a field that a row lacks is an error, never an empty string.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quanteval.errors import ConfigError
from quanteval.store import fingerprint
from quanteval.tasks.loading import Row, Source, load_rows


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        keep_trailing_newline=True, undefined=StrictUndefined, autoescape=False
    )


@lru_cache(maxsize=256)
def _compiled(template: str) -> Template:
    try:
        return _environment().from_string(template)
    except TemplateError as error:
        raise ConfigError(f'template "{_short(template)}": {error}') from None


def check_template(name: str, template: str) -> None:
    """Raise ValueError, naming the field, for a template that does not compile."""
    try:
        _compiled(template)
    except ConfigError as error:
        raise ValueError(f"{name}: {error}") from None


def render(template: str, row: Mapping[str, Any], **more: Any) -> str:
    """Fill in a template from a row's fields and `more`. ConfigError names the template and why it failed."""
    try:
        return _compiled(template).render({**row, **more})
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f'template "{_short(template)}": {error}') from None


def _short(template: str) -> str:
    line = " ".join(template.split())
    return line if len(line) <= 60 else line[:57] + "..."


@dataclass(frozen=True)
class FewShot:
    """Solved examples that precede each question.

    `source` is where they come from (its rows have the fields of the suite's own). `first` takes the
    first `count` of them, `random` draws them anew for each question from `seed` and the question's id;
    with `group_field` only examples of the question's own group are used (MMLU: its subject). An example
    that is the question itself is left out. `description` is a template that opens the prompt.
    """

    count: int = 0
    source: Source | None = None
    select: Literal["first", "random"] = "first"
    seed: int = 1234
    group_field: str | None = None
    separator: str = "\n\n"
    description: str = ""

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f'count "{self.count}" must be at least 0')
        if self.count and self.source is None:
            raise ValueError(f'count "{self.count}": give the source of the examples')
        check_template("description", self.description)

    def load(self, folder: str) -> list[Row]:
        """Return the rows that examples are chosen from; none without examples."""
        return load_rows(self.source, folder) if self.count and self.source else []

    def choose(self, row: Mapping[str, Any], sample_id: str, pool: Sequence[Row]) -> list[Row]:
        """Return the examples for one question. ConfigError when there are fewer than `count`."""
        if not self.count:
            return []
        group = row.get(self.group_field) if self.group_field else None
        usable = (
            other
            for other in pool
            if (self.group_field is None or other.get(self.group_field) == group) and other != row
        )
        chosen = list(islice(usable, self.count) if self.select == "first" else usable)
        if len(chosen) < self.count:
            raise ConfigError(
                f'sample "{sample_id}": {len(chosen)} examples to choose from, {self.count} are asked for'
            )
        if self.select == "first":
            return chosen
        return random.Random(f"{self.seed} {sample_id}").sample(chosen, self.count)


def load_examples(shots: FewShot, source: Source, folder: str) -> list[Row]:
    """Load the rows that examples are chosen from.

    Where examples and questions come from one loader, a local folder given as `path` of the questions holds
    for the examples too, unless they have a path of their own. ConfigError when it is a file: that is the
    questions' split.
    """
    other, path = shots.source, (source.arguments or {}).get("path")
    if not (shots.count and other and path and other.loader == source.loader):
        return shots.load(folder)
    if (other.arguments or {}).get("path"):
        return shots.load(folder)
    if not Path(path).is_dir():
        raise ConfigError(
            f'path "{path}" is no folder that could also hold the {shots.count} examples: give one, or '
            "shots.source.arguments.path=FILE, or shots.count=0"
        )
    other = replace(other, arguments={**(other.arguments or {}), "path": path})
    return replace(shots, source=other).load(folder)


def describe_shots(shots: FewShot, pool: Sequence[Row]) -> dict[str, Any]:
    """Return what prompts depend on in `shots`, as plain JSON: the examples' contents, not their place."""
    fields = asdict(shots)
    del fields["source"]
    if not shots.count:
        return {"count": 0, "description": shots.description}
    return {**fields, "examples": fingerprint({"rows": [dict(row) for row in pool]})}

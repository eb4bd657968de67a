"""Public sets whose answers are written out: GSM8K's word problems, MBPP's functions, IFEval's instructions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from quanteval.errors import ConfigError
from quanteval.tasks.loading import Row
from quanteval.tasks.public.reading import need, read_rows

# MBPP's splits are ranges of task ids; its own files hold all of them.
MBPP_SPLITS = {
    "prompt": range(1, 11),
    "test": range(11, 511),
    "validation": range(511, 601),
    "train": range(601, 975),
}


def gsm8k(
    path: str | None = None,
    hub: str = "openai/gsm8k",
    name: str = "main",
    split: str = "test",
    revision: str | None = None,
) -> Iterator[Row]:
    """Yield GSM8K's word problems (Cobbe et al., 2021): `answer` is the solution, `target` its final number.

    Thousands separators are taken out of the target.
    """
    for number, row in enumerate(read_rows(path, hub, name, split, revision)):
        answer = str(need(row, "answer", number, "GSM8K"))
        _, mark, target = answer.rpartition("#### ")
        if not mark:
            raise ConfigError(f'row {number} of GSM8K has no "#### " before its final answer')
        yield {
            "id": str(number),
            "question": str(need(row, "question", number, "GSM8K")),
            "answer": answer,
            "target": target.strip().replace(",", ""),
            "origin": "GSM8K, MIT",
        }


def mbpp(
    path: str | None = None,
    hub: str = "google-research-datasets/mbpp",
    name: Literal["full", "sanitized"] = "full",
    split: str = "test",
    revision: str | None = None,
    exclude: Sequence[int] = (),
) -> Iterator[Row]:
    """Yield MBPP's problems (Austin et al., 2021), all as first published (full) or those edited by hand (sanitized).

    `test_list` are assert statements; `test_setup_code` (full) or `test_imports` (sanitized) go before them.
    `split` is prompt (task ids 1-10), test (11-510), validation (511-600), train (601-974) or all; task ids
    in `exclude` are left out.
    """
    if split != "all" and split not in MBPP_SPLITS:
        raise ConfigError(f'split "{split}" of MBPP must be all or one of {", ".join(MBPP_SPLITS)}')
    if path is None and split == "all":
        rows = [row for part in MBPP_SPLITS for row in read_rows(None, hub, name, part, revision)]
    else:
        rows = read_rows(path, hub, name, split, revision)
    for number, row in enumerate(rows):
        task_id = int(need(row, "task_id", number, "MBPP"))
        if task_id in exclude or (split != "all" and task_id not in MBPP_SPLITS[split]):
            continue
        yield {
            "id": f"mbpp/{task_id}",
            "task_id": task_id,
            "text": str(row.get("text") or need(row, "prompt", number, "MBPP")),
            "code": str(need(row, "code", number, "MBPP")),
            "test_list": [str(test) for test in need(row, "test_list", number, "MBPP")],
            "test_setup_code": str(row.get("test_setup_code") or ""),
            "test_imports": [str(line) for line in row.get("test_imports") or ()],
            "challenge_test_list": [str(test) for test in row.get("challenge_test_list") or ()],
            "origin": "MBPP, CC-BY-4.0",
        }


def ifeval(
    path: str | None = None,
    hub: str = "google/IFEval",
    name: str | None = None,
    split: str = "train",
    revision: str | None = None,
) -> Iterator[Row]:
    """Yield IFEval's prompts (Zhou et al., 2023) with the instructions in each that a program can check.

    `kwargs` has a mapping for each of `instruction_id_list`, without the empty fields that the hub's table adds.
    """
    for number, row in enumerate(read_rows(path, hub, name, split, revision)):
        instructions = _plain(need(row, "instruction_id_list", number, "IFEval"))
        options = _plain(need(row, "kwargs", number, "IFEval"))
        if len(options) != len(instructions):
            raise ConfigError(
                f"row {number} of IFEval has {len(options)} kwargs for {len(instructions)}"
            )
        yield {
            "id": str(need(row, "key", number, "IFEval")),
            "prompt": str(need(row, "prompt", number, "IFEval")),
            "instruction_id_list": [str(each) for each in instructions],
            "kwargs": [{k: v for k, v in each.items() if v is not None} for each in options],
            "origin": "IFEval, Apache-2.0",
        }


def _plain(value: Any) -> list[Any]:
    """Return a list; tables hold it as JSON text."""
    return list(json.loads(value) if isinstance(value, str) else value)

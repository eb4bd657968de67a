"""MMLU (Hendrycks et al., 2021): questions of 57 subjects with four answers each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from quanteval.errors import ConfigError
from quanteval.tasks.loading import Row
from quanteval.tasks.public.reading import is_saved, need, read_cells, read_rows

ORIGIN = "MMLU, MIT"
LETTERS = "ABCD"


def mmlu(
    path: str | None = None,
    hub: str = "cais/mmlu",
    name: str = "all",
    split: str = "test",
    revision: str | None = None,
    subjects: Sequence[str] | None = None,
) -> Iterator[Row]:
    """Yield the questions by subject, which is also their `category`; `subjects` keeps some of them.

    `path` is the set's own folder of tables (test/SUBJECT_test.csv, dev/SUBJECT_dev.csv), one such table, or a
    copy of the hub's rows. ConfigError for a subject that is not there.
    """
    rows = _from_tables(Path(path), split) if path and _has_tables(Path(path)) else None
    if rows is None:
        rows = read_rows(path, hub, name, split, revision)
    known = dict.fromkeys(str(row.get("subject") or "") for row in rows)
    for subject in subjects or ():
        if subject not in known:
            raise ConfigError(f'MMLU has no subject "{subject}" in the split "{split}"')
    numbers = dict.fromkeys(known, 0)
    for number, row in enumerate(rows):
        subject = str(need(row, "subject", number, "MMLU"))
        if subjects is None or subject in subjects:
            yield _row(row, subject, numbers[subject], number)
        numbers[subject] += 1


def _row(row: Row, subject: str, within: int, number: int) -> Row:
    choices = [str(choice) for choice in need(row, "choices", number, "MMLU")]
    if len(choices) != len(LETTERS):
        raise ConfigError(f"row {number} of MMLU has {len(choices)} answers, not {len(LETTERS)}")
    return {
        "id": f"{subject}/{within}",
        "question": str(need(row, "question", number, "MMLU")),
        "choices": choices,
        "answer": _index(str(need(row, "answer", number, "MMLU"))),
        "subject": subject,
        "category": subject,
        "origin": ORIGIN,
    }


def _index(answer: str) -> int:
    return LETTERS.index(answer) if answer in tuple(LETTERS) else int(answer)


def _has_tables(path: Path) -> bool:
    return path.suffix == ".csv" or (
        path.is_dir() and not is_saved(str(path)) and next(path.rglob("*_*.csv"), None) is not None
    )


def _from_tables(path: Path, split: str) -> list[Row]:
    """Read SUBJECT_SPLIT.csv files, with or without a line of column names."""
    ending = "val" if split == "validation" else split
    files = [path] if path.is_file() else sorted(path.rglob(f"*_{ending}.csv"))
    if not files:
        raise ConfigError(f'path "{path}" has no tables *_{ending}.csv')
    rows: list[Row] = []
    for file in files:
        subject = file.stem.removesuffix(f"_{file.stem.rpartition('_')[2]}")
        for cells in read_cells(file):
            if len(cells) != 6:
                raise ConfigError(f'"{file}": {len(cells)} columns instead of 6: "{cells[0][:40]}"')
            if cells[0] == "question" and not _is_answer(cells[5]):
                continue
            rows.append(
                {
                    "question": cells[0],
                    "choices": cells[1:5],
                    "answer": cells[5],
                    "subject": subject,
                }
            )
    return rows


def _is_answer(cell: str) -> bool:
    return cell in ("0", "1", "2", "3", *LETTERS)

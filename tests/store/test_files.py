"""Records are whole or absent; journals lose at most the line in flight."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from quanteval.errors import QuantevalError, RecordError
from quanteval.records import Part
from quanteval.store import (
    Journal,
    canonical_json,
    file_lock,
    fingerprint,
    read_journal,
    read_record,
    write_atomic,
    write_record,
)


class Line(Part):
    n: int
    text: str = ""
    number: float = 0.0


def test_a_record_comes_back_equal_with_nan_and_infinity(tmp_path):
    path = tmp_path / "deep" / "r.json"
    write_record(path, Line(n=1, text='é\n"', number=float("inf")))
    assert read_record(path, Line) == Line(n=1, text='é\n"', number=float("inf"))
    write_record(path, Line(n=1, number=float("nan")))
    assert read_record(path, Line).number != read_record(path, Line).number


def test_unknown_fields_are_ignored_and_missing_ones_refused(tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{"n": 3, "from_a_later_version": true}')
    assert read_record(path, Line) == Line(n=3)
    path.write_text('{"m": 3}')
    with pytest.raises(RecordError, match="n: Field required"):
        read_record(path, Line)
    path.write_text('{"n": 3')
    with pytest.raises(RecordError, match="not a readable Line"):
        read_record(path, Line)
    with pytest.raises(RecordError, match="does not exist"):
        read_record(tmp_path / "none.json", Line)


def test_a_failed_write_leaves_the_old_content_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    write_atomic(path, "old")

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError, match="no space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_a_torn_last_line_is_dropped_and_the_journal_goes_on(tmp_path):
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        journal.append(Line(n=1))
        journal.append(Line(n=2))
    with path.open("ab") as file:
        file.write(b'{"n": 3, "te')
    assert [line.n for line in read_journal(path, Line)] == [1, 2]
    with Journal(path) as journal:
        journal.append(Line(n=4))
    assert [line.n for line in read_journal(path, Line)] == [1, 2, 4]
    assert path.read_bytes().endswith(b"\n")


@given(cut=st.integers(0, 200))
def test_cutting_a_journal_anywhere_leaves_whole_lines(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("j") / "j.jsonl"
    with Journal(path) as journal:
        for n in range(4):
            journal.append(Line(n=n, text="x\u2028y"))
    whole = path.read_bytes()
    path.write_bytes(whole[: min(cut, len(whole))])
    with Journal(path) as journal:
        journal.append(Line(n=9))
    kept = [line.n for line in read_journal(path, Line)]
    assert kept[-1] == 9
    assert kept[:-1] == list(range(len(kept) - 1))


def test_a_full_disk_takes_the_line_back_whole(tmp_path, monkeypatch):
    path = tmp_path / "j.jsonl"
    with Journal(path) as journal:
        journal.append(Line(n=1))

        def full(_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fdatasync", full)
        with pytest.raises(RecordError, match="no space left"):
            journal.append(Line(n=2))
    assert [line.n for line in read_journal(path, Line)] == [1]


def test_a_damaged_whole_line_is_named(tmp_path):
    path = tmp_path / "j.jsonl"
    path.write_text('{"n": 1}\nnot json\n{"n": 2}\n')
    with pytest.raises(RecordError, match="line 2 is not a Line"):
        read_journal(path, Line)
    assert read_journal(tmp_path / "none", Line) == []


def test_kill_minus_nine_loses_only_the_line_in_flight(tmp_path):
    path = tmp_path / "j.jsonl"
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from pydantic import BaseModel\n"
        "from quanteval.store import Journal\n"
        "class Line(BaseModel):\n    n: int\n"
        f"with Journal(Path({str(path)!r})) as j:\n"
        "    for n in range(10**6):\n"
        "        j.append(Line(n=n)); print(n, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    said = [int(process.stdout.readline()) for _ in range(20)][-1]
    process.kill()
    rest = process.stdout.read().split()
    process.wait()
    last = int(rest[-1]) if rest and rest[-1].isdigit() else said
    with Journal(path):
        pass
    kept = [line.n for line in read_journal(path, Line)]
    assert kept == list(range(len(kept)))
    assert len(kept) >= last


def test_a_lock_is_exclusive_and_ends_with_its_holder(tmp_path):
    path = tmp_path / "lock"
    with (
        file_lock(path, wait=False, busy="taken"),
        pytest.raises(QuantevalError, match="taken"),
        file_lock(path, wait=False, busy="taken"),
    ):
        pass
    code = (
        "import time\nfrom pathlib import Path\nfrom quanteval.store import file_lock\n"
        f"with file_lock(Path({str(path)!r}), wait=True, busy=''):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with pytest.raises(QuantevalError), file_lock(path, wait=False, busy="taken"):
        pass
    process.kill()
    process.wait()
    for _ in range(100):
        try:
            with file_lock(path, wait=False, busy="taken"):
                return
        except QuantevalError:
            time.sleep(0.05)
    pytest.fail("the lock outlived its holder")


def test_fingerprints_ignore_order_and_see_every_value():
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": "1"})
    assert fingerprint({"a": 1.0}) != fingerprint({"a": 1.0000000001})
    assert canonical_json({"b": None, "a": "é"}) == '{"a":"é","b":null}'


def test_journal_lines_are_any_model(tmp_path):
    class Other(BaseModel):
        x: int

    with Journal(tmp_path / "o.jsonl") as journal:
        journal.append(Other(x=1))
    assert read_journal(tmp_path / "o.jsonl", Other) == [Other(x=1)]
    with pytest.raises(ValueError, match="not open"):
        Journal(tmp_path / "o.jsonl").append(Other(x=1))

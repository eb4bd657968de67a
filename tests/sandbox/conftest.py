"""Sandboxes shared by a module's tests, and a look at what is left behind."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import psutil
import pytest

from quanteval.sandbox import LAYERS, Limits, Problem, Sandbox, probe


def problem(code, test="assert candidate(2) == 4", **more):
    """Return a Problem for a function f whose check has one body line or more."""
    body = test.replace("\n", "\n    ")
    return Problem("p", code, "f", f"def check(candidate):\n    {body}\n", **more)


# Finds the descriptor over which calls come and answers go.
CHANNEL = """
import os, stat
def is_socket(fd):
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False
channel = next(fd for fd in range(3, 64) if is_socket(fd))
def write(data):
    while data:
        data = data[os.write(channel, data):]
"""


def samples(name):
    """Return the programs of a file under samples/ by their headings."""
    text = (Path(__file__).parent / "samples" / f"{name}.txt").read_text(encoding="utf-8")
    found = {}
    for section in text.split("### ")[1:]:
        heading, _, code = section.partition("\n")
        assert heading not in found
        found[heading] = code.replace("# with the channel\n", CHANNEL)
    return found


def zygotes(of=None):
    """Return the zygotes that are children of a process."""
    found = []
    for child in psutil.Process(of).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("_zygote.py" in part for part in child.cmdline()):
                found.append(child)
    return found


def families(sandbox=None):
    """Return, for each zygote, its referees with the processes below them: those that wait for a job, too.

    The zygotes of a sandbox, or all.
    """
    found = []
    mine = None if sandbox is None else {z._process.pid for z in sandbox._all if z._process}
    for zygote in zygotes():
        if mine is not None and zygote.pid not in mine:
            continue
        referees = {}
        for referee in zygote.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                referees[referee] = referee.children(recursive=True)
        found.append(referees)
    return found


def left_over(before):
    """Return what is left of processes that there were before, and what is more than there should be.

    Between two jobs a zygote has at most two referees that wait, each with at most one process.
    """
    left = [process for process in before if process.is_running()]
    for referees in families():
        left += list(referees)[2:]
        left += [process for below in referees.values() for process in below[1:]]
    return left


@pytest.fixture(scope="module", autouse=True)
def temporary_folder(tmp_path_factory):
    """Have the sandbox make its files where they can be counted."""
    before = tempfile.tempdir
    tempfile.tempdir = str(tmp_path_factory.mktemp("sandbox"))
    yield tempfile.tempdir
    tempfile.tempdir = before


@pytest.fixture(scope="session", autouse=True)
def isolated_here():
    """Skip where this system cannot isolate a candidate."""
    level = probe()
    if not level.isolated:
        pytest.skip("; ".join(level.notes))


@pytest.fixture(scope="module")
def sandbox(temporary_folder):
    with Sandbox(Limits(cpu_s=5, wall_s=30), measure_factor=lambda: 1.0) as opened:
        yield opened


def layer_sets():
    """Return the full set, and those where one layer has to do without the others."""
    return [LAYERS, ("landlock", "seccomp"), ("namespaces", "seccomp"), ("namespaces", "landlock")]

"""Sandboxes shared by a module's tests, and a look at what is left behind."""

from __future__ import annotations

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


def descendants():
    """Return the processes below this one that run a sandbox, but for the zygotes themselves."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = process.cmdline()
            below_a_zygote = any("_zygote.py" in part for part in process.parent().cmdline())
        except (psutil.NoSuchProcess, AttributeError):
            continue
        if below_a_zygote and command:
            found.append(process)
    return found


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
    with Sandbox(Limits(cpu_s=5, wall_s=30)) as opened:
        yield opened


def layer_sets():
    """Return the full set, and those where one layer has to do without the others."""
    return [LAYERS, ("landlock", "seccomp"), ("namespaces", "seccomp"), ("namespaces", "landlock")]

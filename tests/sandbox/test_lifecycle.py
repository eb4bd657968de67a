"""Sandboxes begin, end and break without leaving a process, a folder or a caller behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from quanteval.errors import QuantevalError, UnsupportedError
from quanteval.sandbox import LAYERS, Limits, Sandbox, probe
from tests.sandbox.conftest import families, problem, zygotes

GOOD = problem("def f(x):\n    return x * x")
SLEEP = problem("import time\ndef f(x):\n    time.sleep(600)")


def until(condition, seconds=20.0):
    """Wait for a condition and return whether it came true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def sleeping():
    """Return the referee that judges SLEEP and its candidate, once it sleeps."""
    for referees in families():
        for referee, below in referees.items():
            # The candidate of one that waits, waits for its program.
            if any(p.status() == psutil.STATUS_SLEEPING and asleep(p) for p in below):
                return [referee, *below]
    return []


def asleep(process):
    """Return whether a process is within time.sleep: its system call, where the kernel tells."""
    wchan = Path(f"/proc/{process.pid}/wchan").read_text()
    return "nanosleep" in wchan


def gone(processes):
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def test_nothing_runs_after_the_end():
    with Sandbox(workers=2) as sandbox:
        assert {o.status for _, o in sandbox.check_all([GOOD] * 4)} == {"passed"}
        started = zygotes()
        assert 1 <= len(started) <= 2
    assert gone(started)


def test_a_sandbox_is_open_only_within_with():
    sandbox = Sandbox()
    with pytest.raises(QuantevalError, match='use it in a "with" statement'):
        sandbox.check(GOOD)
    with sandbox:
        assert sandbox.check(GOOD).status == "passed"
    with pytest.raises(QuantevalError):
        sandbox.check(GOOD)
    assert zygotes() == []
    with sandbox:
        assert sandbox.check(GOOD).status == "passed"


def test_no_problems_give_no_outcomes():
    with Sandbox() as sandbox:
        assert list(sandbox.check_all([])) == []


def test_a_sandbox_needs_a_worker():
    with pytest.raises(ValueError, match='workers "0"'):
        Sandbox(workers=0)


def test_closing_the_iterator_runs_no_further_problem():
    with Sandbox(Limits(wall_s=600)) as sandbox:
        outcomes = sandbox.check_all([GOOD, SLEEP, SLEEP])
        assert next(outcomes)[1].status == "passed"
        outcomes.close()
    assert zygotes() == []


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.002, 0.005])
def test_a_sandbox_ends_when_asked_to_while_it_begins_a_check(delay_s, monkeypatch):
    # Without this patience it would be killed, and leave its folder.
    monkeypatch.setattr("quanteval.sandbox.runner.END_GRACE_S", 120.0)
    for _ in range(5):
        with Sandbox(Limits(wall_s=600)) as sandbox:
            outcomes = sandbox.check_all([GOOD, SLEEP])
            assert next(outcomes)[1].status == "passed"
            time.sleep(delay_s)
            outcomes.close()
        assert zygotes() == []
        assert list(Path(tempfile.gettempdir()).glob("quanteval-*/")) == []


def test_a_check_in_another_thread_ends_when_the_sandbox_does():
    results = []
    with Sandbox(Limits(wall_s=600)) as sandbox:
        thread = threading.Thread(target=lambda: results.append(sandbox.check(SLEEP)))
        thread.start()
        assert until(sleeping)
        started = zygotes()[0].children(recursive=True)
    thread.join(20)
    assert [r.status for r in results] == ["error"]
    assert gone(started)
    assert zygotes() == []


def test_a_zygote_that_dies_costs_one_problem():
    with Sandbox(Limits(wall_s=600)) as sandbox:
        assert sandbox.check(GOOD).status == "passed"
        family = []

        def kill():
            assert until(sleeping)
            family.extend(zygotes()[0].children(recursive=True))
            zygotes()[0].kill()

        killer = threading.Thread(target=kill)
        killer.start()
        assert sandbox.check(SLEEP).status == "error"
        killer.join()
        # The two that judge, and the two that wait for the next job.
        assert len(family) == 4
        assert until(lambda: gone(family))
        assert sandbox.check(GOOD).status == "passed"


def test_a_referee_that_dies_costs_one_problem():
    with Sandbox(Limits(wall_s=600)) as sandbox:

        def kill():
            assert until(sleeping)
            zygotes()[0].children()[0].kill()

        killer = threading.Thread(target=kill)
        killer.start()
        assert sandbox.check(SLEEP).status == "error"
        killer.join()
        assert sandbox.check(GOOD).status == "passed"


PARENT = """
import sys, tempfile
from quanteval.sandbox import Limits, Problem, Sandbox
code = "import time\\ndef f(x):\\n    time.sleep(600)"
sleep = Problem("p", code, "f", "def check(f):\\n    f(1)")
if __name__ == "__main__":
    with Sandbox(Limits(wall_s=600), workers=2, allow_weak=True, layers=sys.argv[1].split(",")) as sandbox:
        for _, outcome in sandbox.check_all([sleep] * 4):
            pass
"""


@pytest.mark.parametrize("layers", [LAYERS, ("landlock", "seccomp"), ("landlock",)], ids="+".join)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=str)
def test_nothing_outlives_the_parent(layers, number, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    root = Path(__file__).parent.parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(temporary)}
    parent = subprocess.Popen(
        [sys.executable, str(script), ",".join(layers)],
        env=environment,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        # Two zygotes, each with a referee and a candidate.
        assert until(lambda: len(psutil.Process(parent.pid).children(recursive=True)) == 6)
        family = psutil.Process(parent.pid).children(recursive=True)
        parent.send_signal(number)
        parent.wait(30)
        assert until(lambda: gone(family))
        assert until(lambda: list(temporary.iterdir()) == [])
    finally:
        parent.kill()
        parent.wait()


def test_the_level_is_measured_layer_by_layer():
    assert probe() is probe()
    full = probe()
    assert (full.name, full.isolated, full.notes) == ("isolated", True, ())
    assert {"landlock", "seccomp", "files", "network", "processes"} <= set(full.layers)
    files_only = probe(("landlock",))
    assert files_only.name == "partial"
    assert files_only.filesystem_isolated
    assert not files_only.network_isolated
    assert not files_only.processes_contained
    nothing = probe(())
    assert (nothing.name, nothing.isolated) == ("rlimits", False)
    assert len(nothing.notes) == 4


@pytest.mark.parametrize("layers", [(), ("landlock",), ("seccomp",)], ids="+".join)
def test_a_weak_level_is_refused_unless_it_is_allowed(layers):
    with (
        pytest.raises(UnsupportedError, match="cannot be isolated here") as caught,
        Sandbox(layers=layers),
    ):
        pass
    assert "\n" not in str(caught.value)
    with Sandbox(layers=layers, allow_weak=True) as sandbox:
        assert sandbox.check(GOOD).status == "passed"

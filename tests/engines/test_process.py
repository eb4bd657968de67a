"""A server ends with its owner, whatever happens to either of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from quanteval.engines.process import ServerProcess, free_port, telling_line
from quanteval.errors import EngineError

PATIENCE_S = 60
SERVER = "import time; print('up', flush=True); time.sleep(600)"
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print('daemon', os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
os.wait()
print('up', flush=True)
time.sleep(600)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('up', flush=True)
time.sleep(600)
"""

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="daemons are adopted on Linux alone"
)


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-c", code]


def is_up(server: ServerProcess) -> bool:
    return "up" in server.log_text()


def wait_for(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def ended(pid: int) -> bool:
    """Whether a process is gone; a zombie that only waits for its parent counts as gone."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def daemon_of(server: ServerProcess) -> int:
    return int(server.log_text().partition("daemon ")[2].split()[0])


def test_it_runs_and_is_ended(tmp_path):
    server = ServerProcess(python(SERVER), tmp_path / "log")
    assert server.alive() == "the server was not started"
    with server:
        server.wait_until(lambda: is_up(server), PATIENCE_S)
        assert server.alive() is None
        assert server.processes() == [server.pid]
        assert os.getsid(server.pid) == server.pid
        assert 1e6 < server.rss_bytes() <= server.peak_rss_bytes()
        server.start()
    assert ended(server.pid)
    assert server.alive() == "the server was stopped: up"
    assert server.processes() == []
    assert server.rss_bytes() == server.peak_rss_bytes() == 0
    server.stop()


def test_environment_and_log_are_its_own(tmp_path):
    log = tmp_path / "new folder" / "log"
    for word in ("first", "second"):
        code = "import os, time; print(os.environ['WORD'], 'up', flush=True); time.sleep(600)"
        with ServerProcess(python(code), log, {"WORD": word}) as server:
            server.wait_until(lambda s=server: is_up(s), PATIENCE_S)
            assert server.log_text() == f"{word} up\n"
            assert server.log_text(tail_bytes=3) == "up\n"
    assert log.read_text() == "first up\nsecond up\n"
    assert "WORD" not in os.environ


def test_a_daemon_is_ended_too(tmp_path):
    with ServerProcess(python(DAEMON), tmp_path / "log") as server:
        server.wait_until(lambda: is_up(server), PATIENCE_S)
        daemon = daemon_of(server)
        assert sorted(server.processes()) == sorted([server.pid, daemon])
    assert ended(daemon)
    assert ended(server.pid)


def test_a_server_that_ignores_sigterm_is_killed(tmp_path):
    with ServerProcess(python(STUBBORN), tmp_path / "log", grace_s=0.2) as server:
        server.wait_until(lambda: is_up(server), PATIENCE_S)
    assert ended(server.pid)


@pytest.mark.parametrize("code", [SERVER, DAEMON, STUBBORN], ids=["plain", "daemon", "stubborn"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_nothing_is_left_when_its_owner_is_ended(tmp_path, code, number):
    log = tmp_path / "log"
    owner = f"""
import subprocess, sys, time
from pathlib import Path
from quanteval.engines.process import ServerProcess
command = {python(code)!r}
with ServerProcess(command, Path({str(log)!r}), grace_s=0.2) as server:
    server.wait_until(lambda: 'up' in server.log_text(), 60)
    # Another child that holds every pipe open must not keep the server alive.
    other = subprocess.Popen(['sleep', '600'], close_fds=False)
    print(other.pid, *server.processes(), flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", owner], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    other, *pids = map(int, process.stdout.readline().split())
    try:
        assert len(pids) == (2 if code == DAEMON else 1)
        process.send_signal(number)
        process.wait(PATIENCE_S)
        for pid in pids:
            wait_for(lambda pid=pid: ended(pid))
    finally:
        os.kill(other, signal.SIGKILL)
        process.communicate()


def test_the_pipe_s_end_alone_is_enough(tmp_path):
    """Where the kernel tells of no process ending, a closed pipe must do."""
    server = ServerProcess(python(SERVER), tmp_path / "log")
    with server:
        server.wait_until(lambda: is_up(server), PATIENCE_S)
        server._supervisor.stdin.close()
        wait_for(lambda: ended(server.pid))
        server._supervisor.wait(PATIENCE_S)


def test_a_killed_supervisor_takes_the_server_along(tmp_path):
    code = "import subprocess, time; subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"
    with ServerProcess(python(code), tmp_path / "log") as server:
        server.wait_until(lambda: is_up(server), PATIENCE_S)
        pids = server.processes()
        assert len(pids) == 2
        server._supervisor.kill()
        wait_for(lambda: ended(server.pid))
        wait_for(lambda: server.alive() is not None)
        assert server.alive().startswith("the server lost its supervisor")
    for pid in pids:
        wait_for(lambda pid=pid: ended(pid))


def test_a_server_that_dies_says_why(tmp_path):
    code = "import sys; print('loading', flush=True); raise ValueError('no such model')"
    with ServerProcess(python(code), tmp_path / "log") as server:
        with pytest.raises(EngineError) as caught:
            server.wait_until(lambda: False, PATIENCE_S)
        reason = "the server ended with exit code 1: ValueError: no such model"
        assert str(caught.value) == f"{reason} (log: {tmp_path / 'log'})"
        assert server.alive() == reason
    assert server.alive() == reason


def test_a_server_that_is_killed_says_so(tmp_path):
    with ServerProcess(python(DAEMON), tmp_path / "log") as server:
        server.wait_until(lambda: is_up(server), PATIENCE_S)
        daemon = daemon_of(server)
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: server.alive() is not None)
        assert "was ended by SIGKILL (the kernel does so when memory runs out)" in server.alive()
        wait_for(lambda: ended(daemon))


def test_what_cannot_be_executed_is_an_engine_error(tmp_path):
    with (
        pytest.raises(EngineError, match=r'"/no/such/server" could not be started: .*No such file'),
        ServerProcess(["/no/such/server"], tmp_path / "log"),
    ):
        pass


def test_waiting_ends_when_time_is_up(tmp_path):
    with ServerProcess(python(SERVER), tmp_path / "log") as server:
        server.wait_until(lambda: is_up(server), PATIENCE_S)
        with pytest.raises(
            EngineError, match=r"was not ready after 0.05 s: its log ends with 'up' \(log: "
        ):
            server.wait_until(lambda: False, 0.05, interval_s=0.01)


def test_peaks_count_from_a_reset(tmp_path):
    code = """
import pathlib, time
big = bytearray(b'x') * 200_000_000
del big
print('up', flush=True)
time.sleep(600)
"""
    with ServerProcess(python(code), tmp_path / "log") as server:
        server.wait_until(lambda: is_up(server), PATIENCE_S)
        assert server.peak_rss_bytes() > 200_000_000 > server.rss_bytes()
        server.reset_peak_rss()
        assert server.peak_rss_bytes() < 200_000_000


def test_free_ports_are_free():
    assert 1024 <= free_port() < 65536


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", ""),
        ("\n \n", ""),
        ("listening", "listening"),
        ("loading\nTraceback (most recent call last):\n  File x\nKeyError: 'a'\nbye", "KeyError: 'a'"),
        (
            "(Engine pid=3) ERROR 01-01 [core.py:1] ValueError: too long\n"
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "ValueError: too long",
        ),
        ("\x1b[31mError: no such file\x1b[0m\nexiting", "Error: no such file"),
        ("a\n" + "torch.OutOfMemoryError: " + "x" * 999, "torch.OutOfMemoryError: " + "x" * 216),
        ("segfault at \x07 0\nmain: failed to load\nbye", "main: failed to load"),
    ],
)  # fmt: skip
def test_the_telling_line_of_a_log(log, line):
    assert telling_line(log) == line


def test_the_supervisor_needs_nothing_but_the_standard_library():
    source = Path(__file__).parents[2] / "quanteval" / "engines" / "_supervise.py"
    code = f"""
import runpy, sys
sys.modules['psutil'] = None
runpy.run_path({str(source)!r})
assert 'quanteval' not in sys.modules
"""
    subprocess.run([sys.executable, "-I", "-c", code], check=True)

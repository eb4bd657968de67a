"""Candidates that cheat or attack: none passes, none is blamed on the sandbox, nothing is left behind."""

from __future__ import annotations

import os
import site
import socket
from pathlib import Path

import psutil
import pytest

from quanteval.sandbox import LAYERS, Limits, Problem, Sandbox, _isolate
from tests.sandbox.conftest import families, layer_sets, left_over, problem, samples

TRICKS = samples("tricks")

# "name -> the status it must get, or any that is neither a pass nor an error"
HARMS = samples("harms")

# Those that do not have to run into a limit of time.
SHORT_HARMS = {name: code for name, code in HARMS.items() if not name.endswith("-> timeout")}

LIMITS = Limits(cpu_s=1, wall_s=2.5, memory_bytes=1 << 28)


def opened_with(limits, **options):
    """Return a sandbox with exactly these limits, that does not try again."""
    return Sandbox(limits, measure_factor=lambda: 1.0, retry_timeouts=False, **options)


@pytest.fixture(scope="module", params=layer_sets(), ids="+".join)
def opened(request, temporary_folder):
    with opened_with(LIMITS, layers=request.param) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def full(temporary_folder):
    with opened_with(Limits(cpu_s=1.0, wall_s=3.0, memory_bytes=1 << 28)) as sandbox:
        yield sandbox


def judge(sandbox, code):
    """Run a hostile candidate; it must end, leave nothing, and the next one must be served as usual."""
    # The first referee of each zygote judges the next job.
    before = [process for referees in families(sandbox) for process in list(referees.items())[:1]]
    outcome = sandbox.check(problem(code, "'canary-in-the-tests'\nassert candidate(2) == 4"))
    assert outcome.status not in ("passed", "error"), outcome
    assert left_over([process for first, below in before for process in (first, *below)]) == []
    assert sandbox.check(problem("def f(x):\n    return x * x")).status == "passed"
    return outcome


@pytest.mark.parametrize("name", TRICKS)
def test_no_trick_passes(opened, name):
    judge(opened, TRICKS[name])


@pytest.mark.parametrize("name", HARMS)
def test_no_limit_is_outlived(full, name):
    outcome = judge(full, HARMS[name])
    assert name.rpartition(" -> ")[2] in (outcome.status, "any"), outcome


def test_an_answer_that_the_tests_never_get_done_with_is_a_timeout():
    code = "def f(x):\n    return range(10**18)"
    with opened_with(Limits(cpu_s=0.2, wall_s=0.2)) as sandbox:
        # One operation without end, in which Python handles no signal.
        outcome = sandbox.check(problem(code, "assert sum(candidate(2)) == 4"))
        assert outcome.status == "timeout"
        assert "do not end" in outcome.detail
        assert sandbox.check(problem("def f(x):\n    return 4")).status == "passed"


# Each of these has to be refused: f returns what it got, and 4 is what it must not return.
FORBIDDEN = samples("forbidden")


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_is_forbidden_fails(opened, name, tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTEVAL_TEST_TOKEN", "secret")
    file = tmp_path / "file"
    file.write_text("contents")
    unix = socket.socket(socket.AF_UNIX)
    abstract = socket.socket(socket.AF_UNIX)
    datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    abstract_datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        unix,
        abstract,
        datagram,
        abstract_datagram,
    ):
        udp.bind(("127.0.0.1", 0))
        unix.bind(str(tmp_path / "socket"))
        unix.listen()
        abstract.bind(f"\0quanteval-test-{os.getpid()}")
        abstract.listen()
        datagram.bind(str(tmp_path / "datagram"))
        abstract_datagram.bind(f"\0quanteval-test-datagram-{os.getpid()}")
        before = sorted(path.name for path in tmp_path.iterdir())
        values = {
            "file": str(file),
            "folder": str(tmp_path),
            "home_file": str(next((p for p in Path.home().iterdir() if p.is_file()), file)),
            "tcp": tcp.getsockname()[1],
            "udp": udp.getsockname()[1],
            "unix": str(tmp_path / "socket"),
            "abstract": f"quanteval-test-{os.getpid()}",
            "datagram": str(tmp_path / "datagram"),
            "abstract_datagram": f"quanteval-test-datagram-{os.getpid()}",
            "pid": os.getpid(),
            "packages": [*_isolate.package_folders(), *site.getsitepackages()],
        }
        judge(opened, FORBIDDEN[name].format(**values))
        for receiver in (udp, datagram, abstract_datagram):
            receiver.setblocking(False)
            with pytest.raises(BlockingIOError):
                receiver.recv(10)
        assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert file.read_text() == "contents"
    assert file.stat().st_mode & 0o777 != 0o777


# Refused by seccomp alone; without it, namespaces and Landlock hold in what these would start.
REFUSED = samples("refused")


@pytest.mark.parametrize("layers", [LAYERS, ("landlock", "seccomp")], ids="+".join)
def test_no_process_and_no_way_around_the_filter_is_to_be_had(layers):
    with opened_with(LIMITS, layers=layers) as sandbox:
        for name, code in REFUSED.items():
            assert judge(sandbox, code).status == "wrong", name


BOMB = "import os\ndef f(x):\n    while True:\n        os.fork()"


@pytest.mark.parametrize("layers", [LAYERS, ("landlock", "seccomp")], ids="+".join)
def test_a_fork_bomb_does_not_start(layers):
    with opened_with(LIMITS, layers=layers) as sandbox:
        outcome = judge(sandbox, BOMB)
    assert outcome.status == "wrong"
    assert "PermissionError" in outcome.detail


FORKS = """
import os, time
def f(x):
    for _ in range(20):
        if os.fork() == 0:
            {}
            time.sleep(600)
            os._exit(0)
    return 5
"""


@pytest.mark.parametrize("layers", [("namespaces", "landlock"), ("landlock",), ()], ids="+".join)
@pytest.mark.parametrize("first", ["pass", "os.setsid()", "os.setsid(); os.fork()"])
def test_forked_processes_end_with_the_candidate_even_without_seccomp(layers, first):
    with opened_with(LIMITS, layers=layers, allow_weak=True) as sandbox:
        outcome = judge(sandbox, FORKS.format(first))
    assert outcome.status == "wrong"
    assert "assertion failed" in outcome.detail


def test_the_weakest_level_lets_through_what_the_others_stop(tmp_path):
    """Shows that the attempts above can succeed at all, so that their failing means something."""
    file = tmp_path / "file"
    file.write_text("contents")
    with socket.create_server(("127.0.0.1", 0)) as tcp:
        values = {"file": str(file), "folder": str(tmp_path), "tcp": tcp.getsockname()[1]}
        with opened_with(LIMITS, layers=(), allow_weak=True) as sandbox:
            values["packages"] = site.getsitepackages()
            names = ("read", "files of packages", "list a folder", "make a folder", "rename", "TCP")
            programs = {name: FORBIDDEN[name].format(**values) for name in names}
            programs |= {name: REFUSED[name] for name in ("fork", "clone")}
            for name, code in programs.items():
                outcome = sandbox.check(problem(code))
                assert outcome.status == "passed", (name, outcome)


def test_nothing_is_left_in_the_temporary_folder(temporary_folder):
    for layers in ((), LAYERS):
        with opened_with(Limits(wall_s=1), layers=layers, allow_weak=True) as sandbox:
            sandbox.check(problem("def f(x):\n    open('new', 'w').close()\n    return 5"))
            sandbox.check(problem("import time\ndef f(x):\n    time.sleep(60)"))
        assert list(Path(temporary_folder).glob("quanteval-*")) == []


def footprint(folder):
    """Return what a run could leave: processes, shared memory, files in the temporary folders."""
    return {
        "processes": {p.pid for p in psutil.Process().children(recursive=True)},
        "segments": Path("/proc/sysvipc/shm").read_text(),
        "shared memory": set(Path("/dev/shm").iterdir()),
        "temporary files": {str(p) for p in Path(folder).rglob("*")},
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


def test_the_machine_is_clean_after_all_of_them(temporary_folder):
    programs = [*TRICKS.values(), *REFUSED.values(), *SHORT_HARMS.values(), BOMB]
    tests = "def check(candidate):\n    assert candidate(2) == 4\n"
    problems = [Problem(str(i), code, "f", tests) for i, code in enumerate(programs)]
    before = footprint(temporary_folder)
    with opened_with(Limits(cpu_s=0.3, wall_s=1, memory_bytes=1 << 28), workers=2) as sandbox:
        statuses = {outcome.status for _, outcome in sandbox.check_all(problems)}
    assert not statuses & {"passed", "error"}
    assert footprint(temporary_folder) == before

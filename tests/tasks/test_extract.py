"""The program in an answer, however the answer is written."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quanteval.tasks.extract import (
    CODE_START,
    _defines,
    _is_definition,
    extract_chat,
    extract_raw,
    longest_valid,
    preamble,
)

PROMPT = 'import math\nSCALE = 2\n\ndef helper(x):\n    return x\n\ndef f(a, b):\n    """Add."""\n'
FUNCTION = "def f(a, b):\n    return a + b\n"


def run(found, *arguments):
    namespace: dict = {}
    exec(found.code, namespace)
    return namespace["f"](*arguments)


@pytest.mark.parametrize(
    "answer",
    [
        f"```python\n{FUNCTION}```",
        f"```\n{FUNCTION}```",
        f"Here it is:\n\n```py\n{FUNCTION}```\nIt adds a and b.",
        f"```python\n{FUNCTION}",
        FUNCTION,
        f"Sure!\n{FUNCTION}\nThis works because addition works.",
        f"```python\nimport os\n```\nand then\n```python\n{FUNCTION}```",
        f"```python\n# a comment\nif True:\n    X = 1\n\n{FUNCTION}\n# the end\n```",
        f"```python\ntry:\n    import nothing_at_all\nexcept ImportError:\n    pass\n{FUNCTION}```",
        f"```python\n{FUNCTION}\nprint(f(1, 'x'))\nassert f(1, 2) == 4\n```",
        f"```python\n{FUNCTION}\nif __name__ == '__main__':\n    raise SystemExit\n```",
        f"```python\n{FUNCTION}```\n\n```python\nprint(f(1, 2))\n```",
        FUNCTION.replace("\n", "\r\n"),
        "```python\ndef f(a, b):\n\treturn a + b\n```",
        "```python\n    return a + b\n```",
        "```python\nf = lambda a, b: a + b\n```",
        "```python\nclass Adder:\n    def add(self, a, b):\n        return a + b\n\n"
        "def f(a, b):\n    return Adder().add(a, b)\n```",
        f"~~~python\n{FUNCTION}~~~",
        f"```python\n{FUNCTION}def g(:\n```",
        f"```python\n{FUNCTION}\n\ndef broken(x):\n    return (",
    ],
)
def test_the_function_is_found(answer):
    found = extract_chat(answer, PROMPT, "f")
    assert found.status == "ok"
    assert run(found, 2, 3) == 5


@pytest.mark.parametrize("answer", ["", "  \n\t\n"])
def test_an_empty_answer_is_empty(answer):
    assert extract_chat(answer, PROMPT, "f").status == "empty"
    assert extract_raw(answer, PROMPT, "f").status == "empty"


@pytest.mark.parametrize(
    "answer",
    [
        "I cannot do that.",
        "```python\ndef g(a, b):\n    return a\n```",
        "```python\ndef f(a, b:\n```",
        "\x00",
    ],
)
def test_an_answer_without_the_function_is_unparsable(answer):
    assert extract_chat(answer, PROMPT, "f").status == "unparsable"


def test_the_prompts_own_helpers_come_first_and_are_not_the_function():
    text = preamble(PROMPT, "f")
    assert "import math" in text
    assert "def helper" in text
    assert "SCALE = 2" in text
    assert "def f(" not in text
    found = extract_chat(
        "```python\ndef f(a, b):\n    return math.floor(helper(a) * SCALE)\n```", PROMPT, "f"
    )
    assert run(found, 1.5, 0) == 3
    assert (
        preamble("from typing import List\n\ndef f(x: List[int]):", "f")
        == "from typing import List\n"
    )


def test_a_completion_continues_the_prompt():
    prompt = 'def f(a, b):\n    """Add."""'
    assert run(extract_raw("\n    return a + b\n", prompt, "f"), 2, 3) == 5
    cut = extract_raw("\n    return a + b\n\ndef g(x):\n    return (", prompt, "f")
    assert run(cut, 2, 3) == 5
    # A docstring alone is a function: the answer is wrong, not unparsable.
    assert run(extract_raw("\n    return (", prompt, "f"), 2, 3) is None


def test_unicode_and_the_longest_piece():
    code = longest_valid("café!\ndef f(a, b):\n    ü = a\n    return ü + b\nné ?", "f")
    assert "return ü + b" in code
    two = "def f(a, b):\n    return 0\n\n???\n\ndef f(a, b):\n    c = a\n    return c + b\n"
    assert "c + b" in longest_valid(two, "f")


@pytest.mark.parametrize(
    "answer",
    [
        "1. Here it is:\n\n   ```python\n   def f(a, b):\n       return a + b\n   ```\n",
        "    def f(a, b):\n        return a + b\n",
        "```python\n\n    c = a\n    return c + b\n```",
        "```python\nfrom __future__ import annotations\ndef f(a: Any, b: Any):\n    return a + b\n```",
        "```python\r\ndef f(a, b):\r\n    return a + b\r\n```\r\nThen:\r\n```\r\nprint(f(1, 2)\r\n```\r\n",
    ],
    ids=["fence in a list", "indented", "body after a blank line", "future import", "CRLF"],
)
def test_the_dress_of_a_right_answer_does_not_matter(answer):
    found = extract_chat(answer, PROMPT, "f")
    assert found.status == "ok"
    assert run(found, 2, 3) == 5


@pytest.mark.parametrize(
    "expression",
    [" + ".join(["a"] * 1500), "a" + ".x()" * 1500, "[" * 1500 + "]" * 1500],
    ids=["sum", "calls", "lists"],
)
@pytest.mark.parametrize("place", ["    return {}", "    pass\nif {}:\n    pass"])
def test_an_endless_expression_is_an_answer_without_a_program(expression, place):
    answer = "def f(a, b):\n" + place.format(expression)
    assert extract_chat(f"```python\n{answer}\n```", PROMPT, "f").status in ("ok", "unparsable")
    assert extract_chat(f"```python\n{answer}", PROMPT, "f").status in ("ok", "unparsable")
    raw = extract_raw("\n" + place.format(expression), PROMPT.rstrip(), "f")
    assert raw.status in ("ok", "unparsable")


@pytest.mark.parametrize("line", ["x = 1", "def g(f):\n    return f\n", "f(", "f: (", "'''f"])
def test_a_long_useless_answer_takes_few_attempts(line, monkeypatch):
    text = "# f\n" + f"{line}\n" * 200
    attempts = 0
    parse = ast.parse

    def counted(source):
        nonlocal attempts
        attempts += 1
        return parse(source)

    monkeypatch.setattr(ast, "parse", counted)
    assert longest_valid(text, "f") in ("", "f: (\n")
    assert 0 < attempts <= 3 * len(text.splitlines())


JUNK = [
    "(", "'''", "x = [", "else:", "    return (", "Sure:", ")", "x = 1 \\", "try:", "def g(", "class A:",
    "@deco", "  odd", "\tx", "if True:", "print(1); y = 2", "é = 1", "x = 'abc", "match a:", "    case 1:",
    "", "    return a", "def f(a):", "f = lambda a: (", "f: int", "    pass", "async def f(a): pass",
]  # fmt: skip


def exhaustively(text):
    """Return the longest run of lines, of the first such ones, that parses and defines f."""
    lines = text.split("\n")
    best = ""
    for start in range(len(lines)):
        if start and not CODE_START.match(lines[start]):
            continue
        for end in range(len(lines), start, -1):
            try:
                body = ast.parse("\n".join(lines[start:end])).body
                compile("\n".join(lines[start:end]), "<lines>", "exec")
            except (SyntaxError, ValueError):
                continue
            if any(_defines(node, "f") for node in body) and end - start > best.count("\n"):
                best = "\n".join(lines[start:end]) + "\n"
    return "".join(ast.unparse(n) + "\n" for n in ast.parse(best).body if _is_definition(n))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(JUNK), max_size=14))
def test_the_longest_run_is_found_as_by_trying_all(lines):
    assert longest_valid("\n".join(lines), "f") == exhaustively("\n".join(lines))


# --------------------------------------------------------------------------- odd answers

BODY = "    c = a\n    return c + b"


@pytest.mark.parametrize(
    "answer",
    [
        f'```python\ndef f(a, b):\n    """Add.\n\n```\n>>> f(1, 2)\n```\n    """\n{BODY}\n```\nDone.',
        f"````\n```\nnot this\n```\ndef f(a, b):\n{BODY}\n````",
        f"```python title=x\ndef f(a, b):\n{BODY}\n```",
        f"~~~\ndef f(a, b):\n{BODY}\n",
        "```python\nclass Solution:\n    def f(self, a, b):\n        return a + b\n```",
        "```python\nclass Solution:\n    @staticmethod\n    def f(a, b):\n        return a + b\n```",
        f"```python\ndef f(a, b):\n    return 0\n\ndef f(a, b):\n{BODY}\n```",
        f"```python\ndef f(a, b):\n{BODY}\nreturn f\n```",
        f"def f(a, b):\r\n{BODY}\r\n".replace("\n    ", "\r\n    "),
    ],
    ids=["fence in a string", "fence in a fence", "info", "unclosed", "class", "static", "twice",
         "return outside", "CRLF"],
)  # fmt: skip
def test_odd_answers_hold_the_function(answer):
    found = extract_chat(answer, PROMPT, "f")
    assert found.status == "ok", found
    assert run(found, 2, 3) == 5


def test_an_async_function_is_one_that_the_tests_then_find_wrong():
    found = extract_chat("```\nasync def f(a, b):\n    return a + b\n```", PROMPT, "f")
    assert found.status == "ok"
    assert "async def f" in found.code


@pytest.mark.parametrize(
    "answer",
    ["def f(a, a):\n    return a", "def f(a):\n    nonlocal b", "f = 0x" + "f" * 9000,
     "def f(a):\n    return 0x" + "f" * 9000],
    ids=["argument twice", "nonlocal", "huge", "huge inside"],
)  # fmt: skip
def test_what_parses_but_is_no_program_is_unparsable(answer):
    assert extract_chat(f"```\n{answer}\n```", "", "f").status == "unparsable"
    assert extract_raw(answer, "", "f").status == "unparsable"


LINES = [*JUNK, "```", "```python", "~~~", "````", "class Solution:", "    def f(self, a):", "        return a",
         "\r", "def f(a, a): pass", "return f", "from __future__ import annotations", "nonlocal f", '"""',
         "f = 1; f", "\x00", "\ud800", "\x0c", "await f", "yield", "break", "x: f = 1"]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(LINES) | st.text(max_size=12), max_size=12),
    st.sampled_from([PROMPT, "", "(", "def f(a):"]),
)
def test_whatever_the_answer_what_is_returned_compiles_and_defines_the_name(lines, prompt):
    answer = "\n".join(lines)
    for found in (extract_chat(answer, prompt, "f"), extract_raw(answer, prompt, "f")):
        assert found.status in ("ok", "empty", "unparsable")
        assert (found.status == "ok") == bool(found.code)
        if found.code:
            compile(found.code, "<found>", "exec")
            assert any(_defines(node, "f") for node in ast.parse(found.code).body)

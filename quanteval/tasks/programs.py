"""What a code task's rows hold, whatever their format, and the language that answers are written in.

An `Exercise` is one problem to solve: the text to show, the function asked for, and its tests. HumanEval's
and MBPP's rows become exercises here. A `Language` takes the program out of an answer and checks it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from quanteval.errors import ConfigError
from quanteval.sandbox import Limits, Outcome, Problem, Sandbox, probe
from quanteval.tasks.extract import Extraction, extract_chat, extract_raw

Format = Literal["humaneval", "mbpp"]
Form = Literal["chat", "raw"]

INSTRUCTIONS: dict[Format, str] = {
    "humaneval": (
        "Complete the following Python function. Reply with the whole function in a code block.\n\n"
        "```python\n{prompt}\n```"
    ),
    "mbpp": "{prompt}\n\nReply with the whole function in a code block.",
}
STOPS: dict[Format, tuple[str, ...]] = {
    "humaneval": ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert "),
    # The program is still to come, with its imports and helpers.
    "mbpp": ("\nassert ", '\n"""', "\nprint(", "\nif __name__"),
}


@dataclass(frozen=True)
class Exercise:
    """A problem to solve.

    `prompt` is what the model sees in the chat form, `completed` what it continues in the raw form;
    `test` defines check(candidate); `context` is trusted text whose imports and helpers both the tests
    and the answer may use.
    """

    prompt: str
    completed: str
    entry_point: str
    test: str
    context: str


def read_exercise(form: Format, row: Mapping[str, Any], label: str) -> Exercise:
    """Return the exercise of a row; ConfigError, naming `label`, when the row cannot be used."""
    return _human_eval(row, label) if form == "humaneval" else _mbpp(row, label)


# --------------------------------------------------------------------------- formats


def _human_eval(row: Mapping[str, Any], label: str) -> Exercise:
    missing = [key for key in ("prompt", "entry_point", "test") if not row.get(key)]
    if missing:
        raise ConfigError(f'problem "{label}" has no "{missing[0]}"')
    prompt = str(row["prompt"])
    return Exercise(prompt, prompt, str(row["entry_point"]), str(row["test"]), prompt)


def _mbpp(row: Mapping[str, Any], label: str) -> Exercise:
    """Read a row of MBPP, of the full set or of the sanitized one (Austin et al., 2021)."""
    text = str(row.get("text") or row.get("prompt") or "").strip()
    tests = [str(test).strip() for test in row.get("test_list") or ()]
    if not text or not tests:
        raise ConfigError(f'problem "{label}" has no "{"test_list" if text else "text"}"')
    imports = row.get("test_imports") or ()
    setup = "\n".join(
        [*([imports] if isinstance(imports, str) else imports), row.get("test_setup_code") or ""]
    )
    setup = setup.replace("\r\n", "\n").strip()
    code = str(row.get("code") or "").replace("\r\n", "\n")
    entry_point = _entry_point(tests, code, label)
    # Tests are written to stand below the reference solution and its imports.
    before = f"{_imports(code)}{setup}"
    shown = "\n".join(tests)
    return Exercise(
        prompt=f"{text}\n\nYour code should pass these tests:\n\n{shown}",
        completed=f'"""\n{text}\n{shown}\n"""\n',
        entry_point=entry_point,
        # As they are written: a test may hold a string of several lines.
        test=f"{before}\n\ndef check(candidate):\n    for test in {tests!r}:\n        exec(test, globals())\n",
        context=_imports(setup),
    )


def _entry_point(tests: Sequence[str], code: str, label: str) -> str:
    """Return the name that the most tests call of those that the reference solution defines."""
    try:
        defined = {name for node in ast.parse(code).body for name in _names_defined(node)}
        called: Counter[str] = Counter()
        for test in tests:
            calls = (n for n in ast.walk(ast.parse(test)) if isinstance(n, ast.Call))
            called.update({c.func.id: 1 for c in calls if isinstance(c.func, ast.Name)})
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f'problem "{label}": code or tests do not parse: {error}') from None
    usable = [name for name, _ in called.most_common() if name in defined]
    if not usable:
        raise ConfigError(f'problem "{label}": no test calls a function that its code defines')
    return usable[0]


def _names_defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _imports(code: str) -> str:
    """Return the import statements of a program, at its top level."""
    try:
        nodes = ast.parse(code).body
    except (SyntaxError, ValueError):
        return ""
    return "".join(
        ast.unparse(node) + "\n" for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)
    )


# --------------------------------------------------------------------------- languages


class Checker(Protocol):
    """Runs programs against their tests; `check` may be called from several threads."""

    def check(self, problem: Problem) -> Outcome:
        """Run one program."""
        ...

    @property
    def factor(self) -> float:
        """By how much the time limits are stretched on this machine."""
        ...


@runtime_checkable
class Language(Protocol):
    """The language that answers are written in; a frozen dataclass that is its own config."""

    def fingerprint(self) -> dict[str, Any]:
        """Everything, as plain JSON, that extraction and checking depend on; no measured figures."""
        ...

    def extract(self, answer: str, shown: str, exercise: Exercise, form: Form) -> Extraction:
        """Return the program in an answer to the prompt `shown`. Raises nothing."""
        ...

    def checker(self, limits: Limits, workers: int) -> AbstractContextManager[Checker]:
        """Return what checks programs, up to `workers` at once. UnsupportedError where it cannot run."""
        ...


@dataclass(frozen=True)
class Python:
    """Python, checked in the sandbox; its processes give way to the model's (`nice`)."""

    nice: int = 5

    def fingerprint(self) -> dict[str, Any]:
        """The name, and what the sandbox keeps programs from here."""
        return {"language": "python", "level": probe().name}

    def extract(self, answer: str, shown: str, exercise: Exercise, form: Form) -> Extraction:
        """By fences and by parsing in the chat form, as a continuation in the raw form."""
        if form == "raw":
            return extract_raw(answer, shown, exercise.entry_point)
        return extract_chat(answer, exercise.context, exercise.entry_point)

    def checker(self, limits: Limits, workers: int) -> Sandbox:
        """A sandbox."""
        return Sandbox(limits, workers=workers, nice=self.nice)


# --------------------------------------------------------------------------- prompts


@dataclass(frozen=True)
class PromptForm:
    """How a problem is put to the model.

    `chat` sends `instruction`, with {prompt} filled in, as one user message (null: the format's own);
    `raw` sends the text itself for completion. `strip` takes white space off the prompt's end: many models
    continue a raw prompt that ends in a line break with nothing at all.
    """

    form: Form = "chat"
    instruction: str | None = None
    strip: bool = True

    def __post_init__(self) -> None:
        if self.instruction is not None and "{prompt}" not in self.instruction:
            raise ValueError(f'instruction "{self.instruction[:40]}" must contain {{prompt}}')


@dataclass(frozen=True)
class Draws:
    """How the samples of a problem are drawn: their number, and how tokens are chosen."""

    count: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f'samples_per_problem "{self.count}" must be at least 1')
        if not 0 <= self.temperature < 1e3:
            raise ValueError(f'temperature "{self.temperature}" must be at least 0')
        if not 0 < self.top_p <= 1:
            raise ValueError(f'top_p "{self.top_p}" must be above 0 and at most 1')
        if self.top_k < 0:
            raise ValueError(f'top_k "{self.top_k}" must be at least 0, which is no limit')
        if self.count > 1 and self.temperature == 0:
            raise ValueError(
                f'samples_per_problem "{self.count}" at temperature 0 are all the same: '
                "set a temperature, or samples_per_problem=1"
            )


def inside_fence(text: str) -> bool:
    """Return whether a text ends inside a fenced block."""
    opened = ""
    for mark in re.findall(r"^[ \t]*(```+|~~~+)", text, re.M):
        opened = "" if opened and mark.startswith(opened) else opened or mark
    return bool(opened)

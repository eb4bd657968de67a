"""The program in a model's answer: by its code fences, and by what parses and defines the function.

Only definitions are kept: calls, asserts and `if __name__ == "__main__"` at module level show how a
function is used and are not part of it.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})(.*)$")
CODE_START = re.compile(r"^(import |from |def |async def |class |@|#|[A-Za-z_]\w*\s*[:=])")
BODY_START = re.compile(r"(?:[ \t]*\n)*[ \t]+\S")
MAX_LINES = 600
MAX_ENDS = 20


@dataclass(frozen=True)
class Extraction:
    """The program, or why there is none: the answer was empty, or no part of it parses as the function."""

    status: Literal["ok", "empty", "unparsable"]
    code: str = ""


def extract_chat(answer: str, prompt: str, entry_point: str) -> Extraction:
    """Return the program in a chat answer, after the imports and helpers of the prompt.

    Tried in this order: each fenced block, all fenced blocks together, the whole text; then the
    same pieces as a body that continues the prompt; then a class with a method of that name. The longest
    piece that compiles and defines the function counts, within the first of these that has one. Pieces
    may be indented as a whole.
    """
    if not answer.strip():
        return Extraction("empty")
    answer = answer.replace("\r\n", "\n")
    blocks = fenced_blocks(answer)
    pieces = [*blocks, "\n".join(blocks), answer]
    whole = [textwrap.dedent(piece) for piece in pieces]
    found = [code for piece in whole[:-1] if (code := longest_valid(piece, entry_point))]
    if not found and (code := longest_valid(whole[-1], entry_point)):
        found = [code]
    if not found:
        bodies = [piece for piece in pieces if BODY_START.match(piece)]
        continued = [prompt.rstrip("\n") + "\n" + body for body in bodies]
        found = [code for text in continued if (code := longest_valid(text, entry_point))]
    if not found:
        found = [code for piece in whole if (code := _method(piece, entry_point))]
    if not found:
        return Extraction("unparsable")
    program = _parse(preamble(prompt, entry_point) + max(found, key=len))
    code = _program(program.body if program else [])
    return Extraction("ok", code) if _parse(code) and code else Extraction("unparsable")


def fenced_blocks(text: str) -> list[str]:
    """Return the contents of fenced blocks; the last may have no end.

    A fence within a string does not end a block that is a program as far as a later one.
    """
    lines = text.split("\n")
    blocks, at = [], 0
    while at < len(lines):
        opening = FENCE.match(lines[at])
        at += 1
        if opening is None:
            continue
        mark = opening.group(1)
        ends = [i for i in range(at, len(lines)) if _closes(lines[i], mark)][:MAX_ENDS]
        end = ends[0] if ends else len(lines)
        if ends and _parse(textwrap.dedent("\n".join(lines[at:end]))) is None:
            later = (i for i in ends[1:] if _parse(textwrap.dedent("\n".join(lines[at:i]))))
            end = next(later, end)
        blocks.append("\n".join(lines[at:end]) + "\n")
        at = end + 1
    return blocks


def _closes(line: str, mark: str) -> bool:
    found = FENCE.match(line)
    return bool(found and found.group(1).startswith(mark) and not found.group(2).strip())


def _method(text: str, entry_point: str) -> str:
    """Return a program with a class that has a method of that name, and a function that calls it; or ''."""
    for name in dict.fromkeys(re.findall(r"^class[ \t]+(\w+)", text, re.M)):
        code = longest_valid(text, name)
        if any(_has_method(node, name, entry_point) for node in ast.parse(code).body):
            return (
                f"{code}\ndef {entry_point}(*args, **kwargs):\n"
                f"    return {name}().{entry_point}(*args, **kwargs)\n"
            )
    return ""


def _has_method(node: ast.stmt, name: str, method: str) -> bool:
    return (
        isinstance(node, ast.ClassDef)
        and node.name == name
        and any(isinstance(n, ast.FunctionDef) and n.name == method for n in node.body)
    )


def extract_raw(completion: str, prompt: str, entry_point: str) -> Extraction:
    """Return the program that a completion of the prompt makes."""
    if not completion.strip():
        return Extraction("empty")
    code = longest_valid(prompt + completion.replace("\r\n", "\n"), entry_point)
    return Extraction("ok", code) if code else Extraction("unparsable")


def preamble(prompt: str, entry_point: str) -> str:
    """Return the prompt's own imports, constants and helpers: all but the function asked for."""
    tree = _parse(prompt) or _parse(prompt.rstrip() + "\n    pass\n")
    if tree is None:
        return ""
    kept = [node for node in tree.body if _is_definition(node) and not _defines(node, entry_point)]
    return _program(kept)


def longest_valid(text: str, entry_point: str) -> str:
    """Return the definitions of the longest run of lines that parses and defines `entry_point`, or ''."""
    lines = text.replace("\r\n", "\n").split("\n")[:MAX_LINES]
    if not any(entry_point in line for line in lines):
        return ""
    best: tuple[int, ast.Module] | None = None
    for start, line in enumerate(lines):
        if start and not CODE_START.match(line):
            continue
        if best is not None and len(lines) - start <= best[0]:
            break
        length, tree = _longest_prefix(lines[start:])
        longer = best is None or length > best[0]
        if tree and longer and any(_defines(node, entry_point) for node in tree.body):
            best = (length, tree)
    if best is None:
        return ""
    code = _program(node for node in best[1].body if _is_definition(node))
    tree = _parse(code)
    return code if tree and any(_defines(node, entry_point) for node in tree.body) else ""


def _longest_prefix(lines: list[str]) -> tuple[int, ast.Module | None]:
    """Return how many lines from the first parse together, and their tree.

    No shorter text that still holds the line of the first error parses, so the next to try ends before
    it: a few attempts instead of one for every line, which a long useless answer would make minutes.
    """
    end = len(lines)
    while end > 0:
        try:
            return end, _parse_or_raise("\n".join(lines[:end]))
        except SyntaxError as error:
            end = min(end, error.lineno or end) - 1
        except (ValueError, RecursionError, MemoryError):
            end -= 1
    return 0, None


def _parse(text: str) -> ast.Module | None:
    try:
        return _parse_or_raise(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _parse_or_raise(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
        # What parses need not compile: a return outside of a function, an argument's name twice.
        ordered = ast.Module(_future_first(tree.body), [])
        compile(ordered, "<answer>", "exec", dont_inherit=True)
        return tree


def _program(nodes: Iterable[ast.stmt]) -> str:
    """Return the source of statements, __future__ imports first; '' when they cannot be written out."""
    try:
        return "".join(ast.unparse(node) + "\n" for node in _future_first(nodes))
    except (RecursionError, ValueError):
        # The latter for an integer of thousands of digits.
        return ""


def _future_first(nodes: Iterable[ast.stmt]) -> list[ast.stmt]:
    return sorted(nodes, key=lambda node: not _is_future(node))


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _defines(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.Assign):
        return any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
    return False


def _is_definition(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr | ast.Assert):
        return False
    if isinstance(node, ast.If):
        names = (n.id for n in ast.walk(node.test) if isinstance(n, ast.Name))
        return "__name__" not in names
    return True

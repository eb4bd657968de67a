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

FENCE = re.compile(
    r"^[ \t]*(```+|~~~+)[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.M | re.S
)
CODE_START = re.compile(r"^(import |from |def |async def |class |@|#|[A-Za-z_]\w*\s*[:=])")
BODY_START = re.compile(r"(?:[ \t]*\n)*[ \t]+\S")
MAX_LINES = 600


@dataclass(frozen=True)
class Extraction:
    """The program, or why there is none: the answer was empty, or no part of it parses as the function."""

    status: Literal["ok", "empty", "unparsable"]
    code: str = ""


def extract_chat(answer: str, prompt: str, entry_point: str) -> Extraction:
    """Return the program in a chat answer, after the imports and helpers of the prompt.

    Tried in this order: each fenced block, all fenced blocks together, the whole text; then the
    same pieces as a body that continues the prompt. The longest piece that parses and defines the
    function counts, within the first of these that has one. Pieces may be indented as a whole.
    """
    if not answer.strip():
        return Extraction("empty")
    answer = answer.replace("\r\n", "\n")
    blocks = [match.group(3) for match in FENCE.finditer(answer)]
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
        return Extraction("unparsable")
    program = _parse(preamble(prompt, entry_point) + max(found, key=len))
    code = _program(program.body if program else [])
    return Extraction("ok", code) if code else Extraction("unparsable")


def extract_raw(completion: str, prompt: str, entry_point: str) -> Extraction:
    """Return the program that a completion of the prompt makes."""
    if not completion.strip():
        return Extraction("empty")
    code = longest_valid(prompt + completion, entry_point)
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
    return _program(node for node in best[1].body if _is_definition(node))


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
        return ast.parse(text)


def _program(nodes: Iterable[ast.stmt]) -> str:
    """Return the source of statements, __future__ imports first; '' when they are nested too deeply."""
    ordered = sorted(nodes, key=lambda node: not _is_future(node))
    try:
        return "".join(ast.unparse(node) + "\n" for node in ordered)
    except RecursionError:
        return ""


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

"""The program in a model's answer: by its code fences, and by what parses and defines the function.

Only definitions are kept: calls, asserts and `if __name__ == "__main__"` at module level show how a
function is used and are not part of it.
"""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass
from typing import Literal

FENCE = re.compile(
    r"^[ \t]*(```+|~~~+)[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.M | re.S
)
CODE_START = re.compile(r"^(import |from |def |async def |class |@|#|[A-Za-z_]\w*\s*[:=])")
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
    function counts, within the first of these that has one.
    """
    if not answer.strip():
        return Extraction("empty")
    blocks = [match.group(3) for match in FENCE.finditer(answer)]
    pieces = [*blocks, "\n".join(blocks), answer]
    found = [code for piece in pieces[:-1] if (code := longest_valid(piece, entry_point))]
    if not found and (code := longest_valid(answer, entry_point)):
        found = [code]
    if not found:
        bodies = [
            prompt.rstrip("\n") + "\n" + piece for piece in pieces if piece.startswith((" ", "\t"))
        ]
        found = [code for body in bodies if (code := longest_valid(body, entry_point))]
    if not found:
        return Extraction("unparsable")
    return Extraction("ok", preamble(prompt, entry_point) + max(found, key=len))


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
    return "".join(ast.unparse(node) + "\n" for node in kept)


def longest_valid(text: str, entry_point: str) -> str:
    """Return the definitions of the longest run of lines that parses and defines `entry_point`, or ''."""
    lines = text.replace("\r\n", "\n").split("\n")[:MAX_LINES]
    if not any(entry_point in line for line in lines):
        return ""
    starts = [i for i, line in enumerate(lines) if i == 0 or CODE_START.match(line)]
    best: tuple[int, ast.Module] | None = None
    for start in starts:
        for end in range(len(lines), start, -1):
            if best is not None and end - start <= best[0]:
                break
            tree = _parse("\n".join(lines[start:end]))
            if tree is not None and any(_defines(node, entry_point) for node in tree.body):
                best = (end - start, tree)
                break
    if best is None:
        return ""
    kept = [node for node in best[1].body if _is_definition(node)]
    return "".join(ast.unparse(node) + "\n" for node in kept)


def _parse(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _defines(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.Assign):
        return any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
    return False


def _is_definition(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr | ast.Assert):
        return False
    return not (isinstance(node, ast.If) and "__name__" in ast.dump(node.test))

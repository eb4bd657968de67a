"""Numbers and foreign text made safe and readable."""

from __future__ import annotations

import math
import re
import unicodedata

WIDTH = 100


def wrap(text: str, indent: int = 2) -> list[str]:
    """Break a line at spaces so that none is longer than the width; the rest is indented."""
    out = []
    indent = min(indent, WIDTH // 2)  # a longer one would leave no room and never end
    while len(text) > WIDTH:
        cut = text.rfind(" ", indent + 1, WIDTH + 1)
        if cut <= indent:
            cut = WIDTH
        out.append(text[:cut].rstrip())
        text = " " * indent + text[cut:].lstrip()
    return [*out, text]


def plain(text: str) -> str:
    """Return text without control, format and surrogate characters: they can move a terminal's cursor."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c)[0] != "C" else f"\\x{ord(c):02x}" for c in text
    )


def line(text: str) -> str:
    """Return text as one safe line."""
    return " ".join(plain(text).split())


def markdown(text: str) -> str:
    """Return one safe line in which Markdown and HTML have no meaning, readable as it is too."""
    return _ACTIVE.sub(lambda found: f"&#{ord(found[0])};", line(text))


# Characters that always mean something; a ] that could end a link; what begins a block; an underscore at the edge
# of a word. Intervals in brackets, arrows, and underscores inside names stay as they are.
_ACTIVE = re.compile(r"[&<`*|\\~$]|\](?=[\[(:])|!(?=\[)|^[>#]|(?<!\w)_|_(?!\w)")


def number(value: float, digits: int = 3) -> str:
    """Return a number with about `digits` significant digits, never in scientific notation."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    # Of the rounded value: 9.9996 shown with three digits is 10.0, not 10.00.
    places = max(digits - 1 - int(f"{value:.{digits - 1}e}".partition("e")[2]), 0)
    return f"{value:.{min(places, 6)}f}"


def megabytes(value: float) -> str:
    """Return bytes as MB (10^6 bytes)."""
    return f"{value / 1e6:.0f}"


def milliseconds(value: float) -> str:
    """Return seconds as ms."""
    return number(1000 * value)

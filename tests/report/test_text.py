"""Numbers and foreign text: readable, and without power over the place where they are shown."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quanteval.report.text import (
    WIDTH,
    line,
    markdown,
    megabytes,
    milliseconds,
    number,
    plain,
    wrap,
)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0, 3, "0"), (28.86, 3, "28.9"), (269, 3, "269"), (1366.4, 3, "1366"), (0.005354, 4, "0.005354"),
        (-16.25, 3, "-16.2"), (1e-9, 3, "0.000000"), (1e12, 3, "1000000000000"), (math.nan, 3, "nan"),
        (-math.inf, 3, "-inf"),
    ],
)  # fmt: skip
def test_numbers_have_significant_digits_and_no_exponent(value, digits, text):
    assert number(value, digits) == text


def test_units():
    assert megabytes(269_030_000) == "269"
    assert milliseconds(0.0347) == "34.7"


@given(st.text())
def test_no_text_moves_a_cursor_or_starts_a_line(text):
    safe = line(text)
    assert "\n" not in safe
    assert "\x1b" not in safe
    assert all(c.isprintable() for c in safe)
    assert plain(plain(text)) == plain(text)


@pytest.mark.parametrize(
    "text", ["\x1b[2Jgone", "a\rb", "\x9b31m", "\u202eevil", "\u200bhidden", "\x00", "\ud800"]
)
def test_control_and_format_characters_are_spelled_out(text):
    assert "\\x" in line(text) or line(text) == "a b"
    line(text).encode("utf-8")


@pytest.mark.parametrize(
    "text",
    [
        "a | b", "<script>alert(1)</script>", "[x](javascript:alert(1))", "![x](http://e/t.png)", "`code`", "*bold*",
        "_emphasis_", "~~gone~~", "$math$", "> quote", "# heading", "&lt;", "back\\|slash", "[x]: http://e", "[x][y]",
    ],
)  # fmt: skip
def test_markdown_has_no_power(text):
    safe = markdown(text)
    assert safe != text
    for active in ("|", "<", "`", "*", "](", "][", "]:", "![", "\\", "~", "$"):
        assert active not in safe
    assert not safe.startswith((">", "# "))


@pytest.mark.parametrize(
    "text",
    ["14.58 [13.31, 15.97] n=60", "14.58 -> 19.04 (n=60), ratio 1.306", "smollm2_135m-1", "-2.5 %"],
)
def test_what_is_harmless_stays_readable(text):
    assert markdown(text) == text


@given(st.text(alphabet="ab ", max_size=400), st.integers(0, 300))
def test_wrapping_ends_keeps_every_word_and_the_width(text, indent):
    lines = wrap(text, indent)
    assert all(len(part) <= WIDTH for part in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_wrapping_breaks_at_spaces():
    lines = wrap("word " * 40, 4)
    assert all(set(part.split()) == {"word"} for part in lines)
    assert all(part.startswith("    word") for part in lines[1:])

"""Numbers as answers write them, with their exact values; English notation only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

MOST_DIGITS = 400
"""Longer numbers are no answers, and exact arithmetic on them would take its time."""

_DIGITS = r"(?:[0-9]{1,3}(?:[,'’\u00a0\u2009\u202f][0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER = re.compile(
    # A sign counts unless it stands between two operands: 10-5 holds no -5.
    r"(?:(?<![A-Za-z0-9_)\]])(?P<sign>[-+−]))?(?:[$€£¥₹] ?(?P<inner>[-+−])?)?"
    # Not inside a word (H2O), nor the rest of a version or a date (1.2.3).
    r"(?<![A-Za-z0-9_])(?<![0-9]\.)"
    rf"(?P<number>{_DIGITS}(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)(?![0-9])(?!\.[0-9])"
    r"(?:[eE](?P<exponent>[-+−]?[0-9]+)(?![A-Za-z0-9_])"
    r"| ?(?:[x×*·]|\\times) ?10 ?(?:\^|\*\*) ?\{?(?P<power>[-+−]?[0-9]+)\}?"
    rf"| ?/ ?(?P<divisor>{_DIGITS}(?:\.[0-9]+)?)(?![0-9])(?!\.[0-9]))?"
    r"(?P<percent> ?\\?%| ?per ?cent\b)?"
)


@dataclass(frozen=True)
class Number:
    """A number as it was written, and its exact value (a percentage's before division by 100)."""

    text: str
    value: Fraction
    percent: bool = False


def numbers_in(text: str) -> Iterator[Number]:
    """Yield the numbers of a text in English notation, in order.

    Signs, decimals, thousands separators (comma, apostrophe, thin or no-break space), currency signs,
    percentages, fractions a/b and scientific notation (1.5e3, 1.5 x 10^3) are understood. Digits inside
    words, the parts of versions and dates with stops, and numbers of over 400 digits are not numbers.
    """
    for found in _NUMBER.finditer(text):
        value = _value(found)
        if value is not None:
            yield Number(found.group().strip(), value, found["percent"] is not None)


def _value(found: re.Match[str]) -> Fraction | None:
    power = (found["exponent"] or found["power"] or "0").replace("−", "-")
    parts = [re.sub(r"[^0-9.]", "", found[name] or "1") for name in ("number", "divisor")]
    if len(power) > 5 or abs(int(power)) > MOST_DIGITS or max(map(len, parts)) > MOST_DIGITS:
        return None
    above, below = (Fraction(part) for part in parts)
    if not below:
        return None
    sign = -1 if "-" in (found["sign"] or found["inner"] or "").replace("−", "-") else 1
    return sign * above / below * Fraction(10) ** int(power)

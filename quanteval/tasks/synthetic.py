"""Generated suites of any size: arithmetic and copying.

Rows depend on the seed alone, on every Python: the first n rows of a larger suite are the suite of n.
Categories take turns; one that has no more distinct items drops out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from quanteval.errors import ConfigError
from quanteval.targets import near

Row = dict[str, Any]

_WORDS = (
    "apple bread chair cloud crown dance eagle earth field flame fruit ghost glass grape green heart "
    "honey horse house juice knife lemon light metal money month mouse music night ocean onion paint "
    "paper peach pearl piano plant plate queen radio river robot salad shell shirt smoke snake spoon "
    "stone storm sugar table tiger tooth tower train truck uncle water whale wheel woman world zebra"
)
WORDS = tuple(_WORDS.split())
ALPHABETS: dict[str, Sequence[str]] = {
    "words": WORDS,
    "letters": "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "digits": "0123456789",
}


@dataclass(frozen=True)
class _Category:
    """Distinct items: how many there are, and how the k-th is made."""

    name: str
    size: int
    make: Callable[[int], Row]


def arithmetic(
    n: int = 100,
    operations: Sequence[str] = ("addition", "subtraction", "multiplication"),
    digits: Sequence[int] = (1, 2),
    seed: int = 0,
) -> Iterator[Row]:
    """Yield n distinct sums, differences and products of two numbers with `digits` digits each.

    Rows have id, category (operation and digits), expression ("12 + 7"), a, b, operator and target (a
    string). Numbers do not begin with 0; differences are not negative. ConfigError when there are fewer than n.
    """
    for operation in operations:
        if operation not in _OPERATIONS:
            raise ConfigError(f'operations: no "{operation}"; {near(str(operation), _OPERATIONS)}')
    if any(not _is_count(d) for d in digits):
        raise ConfigError(f'digits "{list(digits)}" must be whole numbers of at least 1')
    categories = [_operands(o, d) for d in _distinct(digits) for o in _distinct(operations)]
    return _take(n, categories, seed)


def copying(
    n: int = 100, lengths: Sequence[int] = (4, 8, 16), alphabet: str = "words", seed: int = 0
) -> Iterator[Row]:
    """Yield n distinct sequences of `lengths` words, letters or digits, which are to be repeated.

    Rows have id, category (the length), length and target: the items with a space between two. ConfigError
    when there are fewer than n.
    """
    if alphabet not in ALPHABETS:
        raise ConfigError(f'alphabet: no "{alphabet}"; {near(str(alphabet), ALPHABETS)}')
    if any(not _is_count(length) for length in lengths):
        raise ConfigError(f'lengths "{list(lengths)}" must be whole numbers of at least 1')
    return _take(n, [_sequences(length, alphabet) for length in _distinct(lengths)], seed)


# --------------------------------------------------------------------------- items

_OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "addition": ("+", lambda a, b: a + b),
    "subtraction": ("-", lambda a, b: a - b),
    "multiplication": ("*", lambda a, b: a * b),
}


def _operands(operation: str, digits: int) -> _Category:
    operator, compute = _OPERATIONS[operation]
    category = f"{operation} {digits} digit{'s' if digits > 1 else ''}"
    low = 10 ** (digits - 1)
    numbers = 9 * low

    def make(k: int) -> Row:
        a, b = _ordered_pair(k) if operation == "subtraction" else divmod(k, numbers)
        a, b = a + low, b + low
        expression = f"{a} {operator} {b}"
        return {
            "id": expression.replace(" ", ""),
            "category": category,
            "expression": expression,
            "a": a,
            "b": b,
            "operator": operator,
            "target": str(compute(a, b)),
        }

    ordered = numbers * (numbers + 1) // 2
    return _Category(category, ordered if operation == "subtraction" else numbers**2, make)


def _ordered_pair(k: int) -> tuple[int, int]:
    """Return the k-th of (0, 0), (1, 0), (1, 1), (2, 0), ...: pairs whose first is not the smaller."""
    first = (math.isqrt(8 * k + 1) - 1) // 2
    return first, k - first * (first + 1) // 2


def _sequences(length: int, alphabet: str) -> _Category:
    items = ALPHABETS[alphabet]

    def make(k: int) -> Row:
        picked = []
        for _ in range(length):
            k, item = divmod(k, len(items))
            picked.append(items[item])
        target = " ".join(picked)
        name = hashlib.sha256(target.encode()).hexdigest()[:16]
        return {
            "id": f"{alphabet}-{length}-{name}",
            "category": str(length),
            "length": length,
            "target": target,
        }

    return _Category(str(length), len(items) ** length, make)


# --------------------------------------------------------------------------- choosing


def _take(n: int, categories: Sequence[_Category], seed: int) -> Iterator[Row]:
    if not categories:
        raise ConfigError("a generated suite needs at least one category")
    if not _is_count(n):
        raise ConfigError(f'n "{n}" must be a whole number of at least 1')
    most = sum(category.size for category in categories)
    if n > most:
        raise ConfigError(f'n "{n}": there are only {most} distinct items in these categories')
    return islice(_in_turns(categories, seed), n)


def _in_turns(categories: Sequence[_Category], seed: int) -> Iterator[Row]:
    """Yield every item of every category once, the categories in turns."""
    streams = {c.name: map(c.make, shuffled(c.size, f"{seed} {c.name}")) for c in categories}
    while streams:
        for name, stream in list(streams.items()):
            row = next(stream, None)
            if row is None:
                del streams[name]
            else:
                yield row


def shuffled(size: int, key: str) -> Iterator[int]:
    """Yield 0..size-1 in an order that depends on `key` alone, without holding them.

    A Feistel network of four rounds over the next even number of bits permutes the numbers; those that
    are too large are left out (Black and Rogaway, 2002: ciphers with arbitrary finite domains).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1

    def mixed(value: int, turn: int) -> int:
        text = f"{key} {turn} {value}".encode()
        # As many bytes as the half needs: items may be far more than 2**512.
        return int.from_bytes(hashlib.shake_256(text).digest(half // 8 + 1), "big") & mask

    for number in range(1 << 2 * half):
        left, right = number >> half, number & mask
        for turn in range(4):
            left, right = right, left ^ mixed(right, turn)
        if (value := left << half | right) < size:
            yield value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(values))

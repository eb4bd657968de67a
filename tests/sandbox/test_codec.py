"""What may cross between the tests and the function under test, and what may not."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import IntEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quanteval.sandbox import _codec

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
hashable = scalars | st.tuples(scalars, scalars) | st.frozensets(scalars)
values = st.recursive(
    scalars | st.sets(hashable),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(hashable, inner),
)


def cross(value):
    return _codec.decode(json.loads(_codec.pack(_codec.encode(value), 1 << 24)[4:]))


def types(value):
    if isinstance(value, dict):
        return [dict, [(types(k), types(v)) for k, v in value.items()]]
    if isinstance(value, (list, tuple)):
        return [type(value), [types(item) for item in value]]
    return type(value)


@given(values)
def test_builtin_values_cross_with_their_types(value):
    assert cross(value) == value
    assert types(cross(value)) == types(value)


@pytest.mark.parametrize(
    "value",
    [True, 1, 1.0, -0.0, math.inf, 10**5000, -(10**5000), "\ud800\x00", bytearray(b"x"), range(5, 1, -2)],
    ids=lambda v: repr(v)[:20] if not isinstance(v, int) or abs(v) < 10 else "huge",
)  # fmt: skip
def test_corner_values_keep_type_and_sign(value):
    back = cross(value)
    assert type(back) is type(value)
    assert back == value
    if isinstance(value, float):
        assert math.copysign(1, back) == math.copysign(1, value)


def test_nan_crosses_as_nan():
    assert math.isnan(cross(math.nan))


@pytest.mark.parametrize("kind", [Counter, OrderedDict, lambda x: defaultdict(int, x)])
def test_the_librarys_dicts_cross_as_plain_ones(kind):
    back = cross(kind({"a": 1, "b": 0}))
    assert type(back) is dict
    assert back == {"a": 1, "b": 0}


class Liar(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


class Colour(IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [Liar(1), [Liar(1)], {"a": Liar(1)}, {Liar(1): 2}, Colour.RED, Point(1, 2), object(), (x for x in "a"),
     lambda: 1, int, {}.keys(), memoryview(b"x")],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_nothing_else_crosses(value):
    with pytest.raises(_codec.CannotCrossError):
        _codec.encode(value)


@pytest.mark.parametrize(
    "data",
    [{}, [], 5, 1.5, ["?", 1], ["i"], ["i", 5], ["i", "0x"], ["f", "wide"], ["f", "0x1p99999"], ["b", 1], ["l", 5],
     ["s", [["l", []]]], ["d", [[1]]], ["d", [["l", []], None]], [["i"], "0x1"], ["l", [], []],
     ["r", "0x1", "0x2", "0x0"], ["__class__"]],
    ids=repr,
)  # fmt: skip
def test_forged_data_is_refused(data):
    with pytest.raises(ValueError):
        _codec.decode(data)


def test_a_message_over_the_limit_is_refused():
    assert len(_codec.pack("x" * 98, 100)) == 104
    with pytest.raises(_codec.CannotCrossError, match="101 bytes, more than 100"):
        _codec.pack("x" * 99, 100)

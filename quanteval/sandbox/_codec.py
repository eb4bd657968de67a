"""Values that cross between the tests and the function under test: exact builtin types, as tagged JSON.

The receiving side decodes data alone, never objects, so nothing that the sender defines runs there.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from typing import Any


class CannotCrossError(ValueError):
    """A value is not of an exact builtin type, or too long."""


def encode(value: Any) -> Any:
    """Return JSON data for a value. CannotCrossError for anything but exact builtin types."""
    encoder = _ENCODERS.get(type(value))
    if encoder is None:
        raise CannotCrossError(f"a value of type {type(value).__name__}"[:80])
    return encoder(value)


def _encode_dict(value: dict[Any, Any]) -> Any:
    return ["d", [[encode(key), encode(item)] for key, item in value.items()]]


# Integers in hexadecimal: decimal conversion of huge ones is limited, and slow. The three dict types
# of the standard library compare with a dict as a dict does, so they may cross as one.
_ENCODERS: dict[type, Any] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    str: lambda value: value,
    int: lambda value: ["i", hex(value)],
    float: lambda value: ["f", value.hex()],
    complex: lambda value: ["c", value.real.hex(), value.imag.hex()],
    bytes: lambda value: ["b", value.hex()],
    bytearray: lambda value: ["a", value.hex()],
    list: lambda value: ["l", [encode(item) for item in value]],
    tuple: lambda value: ["t", [encode(item) for item in value]],
    set: lambda value: ["s", [encode(item) for item in value]],
    frozenset: lambda value: ["z", [encode(item) for item in value]],
    dict: _encode_dict,
    Counter: _encode_dict,
    OrderedDict: _encode_dict,
    defaultdict: _encode_dict,
    range: lambda value: ["r", hex(value.start), hex(value.stop), hex(value.step)],
}


def decode(data: Any) -> Any:
    """Return the value of JSON data. ValueError when it is not of this module's making."""
    if data is None or type(data) in (bool, str):
        return data
    if type(data) is not list or not data or type(data[0]) is not str:
        raise ValueError("malformed data")
    tag, *rest = data
    try:
        return _DECODERS[tag](*rest)
    except (KeyError, TypeError, AttributeError, OverflowError):
        raise ValueError("malformed data") from None


_DECODERS: dict[str, Any] = {
    "i": lambda x: int(x, 16),
    "f": float.fromhex,
    "c": lambda re, im: complex(float.fromhex(re), float.fromhex(im)),
    "b": bytes.fromhex,
    "a": bytearray.fromhex,
    "l": lambda items: [decode(item) for item in items],
    "t": lambda items: tuple(decode(item) for item in items),
    "s": lambda items: {decode(item) for item in items},
    "z": lambda items: frozenset(decode(item) for item in items),
    "d": lambda items: {decode(key): decode(value) for key, value in items},
    "r": lambda a, b, c: range(int(a, 16), int(b, 16), int(c, 16)),
}


def pack(data: Any, limit_bytes: int) -> bytes:
    """Return a message: 4 bytes of length, then JSON. CannotCrossError when it is longer than the limit."""
    raw = json.dumps(data).encode("ascii")
    if len(raw) > limit_bytes:
        raise CannotCrossError(f"{len(raw)} bytes, more than {limit_bytes}")
    return len(raw).to_bytes(4, "big") + raw

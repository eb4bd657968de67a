"""Input checks shared by the statistics: every one raises `ValueError` with one line that names the value."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Side = Literal["lower", "upper"]
FloatArray = NDArray[np.float64]


def finite_vector(name: str, values: ArrayLike, *, minimum: int = 1) -> FloatArray:
    """Return the values as a one-dimensional float array; refuse NaN, infinities and too few of them."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"'{name}' must be one-dimensional, got shape {array.shape}")
    if array.size < minimum:
        raise ValueError(f"'{name}' holds {array.size} values; at least {minimum} needed")
    bad = np.flatnonzero(~np.isfinite(array))
    if bad.size:
        raise ValueError(
            f"'{name}' is '{array[bad[0]]}' at index {bad[0]}; only finite values can be tested"
        )
    return array


def same_length(first: str, a: FloatArray, second: str, b: FloatArray) -> None:
    """Refuse two vectors that cannot be paired."""
    if a.size != b.size:
        raise ValueError(
            f"'{first}' has {a.size} values and '{second}' has {b.size}; they must be paired"
        )


def probability(name: str, value: float, *, below: float = 1.0) -> float:
    """Return the value when it lies strictly between 0 and `below`."""
    if not 0.0 < value < below:
        raise ValueError(f"'{name}' is '{value}'; it must lie strictly between 0 and {below:g}")
    return float(value)


def level_alpha(alpha: float) -> float:
    """Return a one-sided error level; above one half a bound would fall on the wrong side of the estimate."""
    return probability("alpha", alpha, below=0.5)


def side_sign(side: Side) -> float:
    """Return +1 for the upper side and -1 for the lower."""
    if side not in ("lower", "upper"):
        raise ValueError(f"side is '{side}'; use 'lower' or 'upper'")
    return 1.0 if side == "upper" else -1.0


def margin_inside(margin: float, lo: float, hi: float) -> float:
    """Return the margin when it lies strictly inside the range of the differences."""
    if not lo < margin < hi:
        raise ValueError(f"margin is '{margin}'; it must lie strictly between {lo:g} and {hi:g}")
    return float(margin)


def pair_table(b: int, c: int, n: int) -> None:
    """Refuse counts of discordant pairs that no set of n pairs can have."""
    if n < 1:
        raise ValueError(f"n is '{n}'; at least one pair is needed")
    if b < 0 or c < 0 or b + c > n:
        raise ValueError(f"b={b} and c={c} discordant pairs do not fit into n={n} pairs")

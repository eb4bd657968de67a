"""A bracketing root finder: a bound costs a dozen evaluations and no import of `scipy.optimize`."""

from __future__ import annotations

from collections.abc import Callable

_TOLERANCE = 1e-13


def bracketed_root(f: Callable[[float], float], a: float, b: float, fa: float, fb: float) -> float:
    """Return a root of f between a and b, given values of opposite sign at the ends.

    Chandrupatla, Advances in Engineering Software 28 (1997): inverse quadratic interpolation where the three last
    points allow it, bisection otherwise. Only the signs of `fa` and `fb` have to be right, which lets a caller stand
    in a finite value for an end where f is infinite.
    """
    if fa == 0.0:
        return a
    if fb == 0.0:
        return b
    if (fa > 0.0) == (fb > 0.0):
        raise ValueError(f"no sign change between '{a}' and '{b}'")
    t = 0.5
    for _ in range(200):
        x = a + t * (b - a)
        fx = f(x)
        if (fx > 0.0) == (fa > 0.0):
            c, fc = a, fa
        else:
            c, fc, b, fb = b, fb, a, fa
        a, fa = x, fx
        best = a if abs(fa) < abs(fb) else b
        if fa == 0.0:
            return a
        limit = (_TOLERANCE + 4e-16 * abs(best)) / abs(b - a) if b != a else 1.0
        if limit > 0.5:
            return best
        xi, phi = (a - b) / (c - b), (fa - fb) / (fc - fb)
        if phi * phi < xi and (1.0 - phi) ** 2 < 1.0 - xi:
            t = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (
                fc - fb
            )
        else:
            t = 0.5
        t = min(1.0 - limit, max(limit, t))
    return 0.5 * (a + b)

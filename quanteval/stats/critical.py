"""Critical values of the exact test that ship with the package, for the sizes of common suites and usual margins.

Each is what `exact.search_critical_z` finds; looking one up saves the search, up to half a second. The file also holds
them for negative margins, which decide a rejection: the swapped table is judged at minus the margin.
`python -m quanteval.stats.critical` computes the file anew (about a minute); do so after changing the exact test.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

FILE = Path(__file__).with_name("critical_z.json")

SIZES = (
    *(20, 30, 50, 80, 100, 150, 164, 200, 250, 378, 399, 500, 541, 974),
    *(1000, 1172, 1267, 1319, 1500, 2000),
)
MARGINS = (0.01, 0.02, 0.03, 0.05, 0.10)
ALPHA = 0.05


def key(n: int, margin: float, alpha: float) -> str:
    """Return the key of an entry, n/margin/alpha; only exactly these numbers find it."""
    return f"{n}/{float(margin)!r}/{float(alpha)!r}"


@lru_cache(maxsize=1)
def shipped() -> dict[str, float]:
    """Return the shipped critical values by `key`."""
    values: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8"))
    return values


def regenerate() -> None:
    """Search all critical values again and overwrite the file."""
    from quanteval.stats.exact import search_critical_z

    values = {
        key(n, signed, ALPHA): search_critical_z(n, signed, ALPHA)
        for n in SIZES
        for margin in MARGINS
        for signed in (margin, -margin)
    }
    FILE.write_text(json.dumps(values, indent=0, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    regenerate()

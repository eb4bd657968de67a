"""How often the gate accepts: exactly for 0/1 scores, by simulation for fractions and perplexity. Prints Markdown.

Every verdict is that of `quanteval.gate.decide`. Run from a checkout; takes some minutes on one core.

    python benchmarks/gate_grid.py [replicates]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.gate import operating

REPLICATES = 3000


def main() -> None:
    replicates = int(sys.argv[1]) if len(sys.argv) > 1 else REPLICATES
    print("Simulated\n")
    table(
        ("population", "n", "samples", "margin", "gate %", "+-", "point rule %", "accepted at 0 %"),
        [*fractions(replicates), *documents(replicates)],
    )
    print("\n0/1 scores, exactly\n")
    columns = (
        "n", "margin", "flips", "gate %", "point rule %", "not significantly worse %", "power at 0 %",
    )  # fmt: skip
    table(columns, grid())


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    header = tuple(header)
    for line in (header, ("---",) * len(header)):
        print("| " + " | ".join(line) + " |")
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}"


def fractions(count: int) -> Iterable[tuple[object, ...]]:
    for seed, cell in enumerate(operating.FRACTIONS):
        loss = cell.points / 100
        wrong = cell.accepted(count, loss, seed)
        yield (
            cell.draw.__name__.replace("_", " "),
            cell.problems,
            cell.samples,
            f"{cell.points:g}",
            percent(wrong),
            percent(2 * operating.standard_error(wrong, count)),
            percent(cell.within(count, loss, seed)),
            percent(cell.accepted(count, 0.0, seed)),
        )


def documents(count: int) -> Iterable[tuple[object, ...]]:
    for seed, cell in enumerate(operating.DOCUMENTS):
        wrong, within = cell.accepted(count, cell.max_ratio, seed)
        lengths = "equal" if cell.uneven == 0 else "unequal"
        yield (
            f"documents, {lengths}, {cell.effect.__name__.replace('_', ' ')} effects",
            cell.documents,
            "",
            f"ratio {cell.max_ratio:g}",
            percent(wrong),
            percent(2 * operating.standard_error(wrong, count)),
            percent(within),
            percent(cell.accepted(count, 1.0, seed)[0]),
        )


def grid() -> Iterable[tuple[object, ...]]:
    found: dict[tuple[int, int], operating.Enumeration] = {}
    started = time.perf_counter()
    for n, points, flips in operating.cells():
        asked = found.setdefault((n, points), operating.Enumeration(n, points))
        r = operating.rates(asked, flips)
        yield (
            n, points, f"{100 * flips:g}%", percent(r.gate, 2), percent(r.point),
            percent(r.not_worse), percent(r.power),
        )  # fmt: skip
    calls, seconds = sum(e.calls for e in found.values()), time.perf_counter() - started
    print(f"\n{calls} tables asked in {seconds:.0f} s")


if __name__ == "__main__":
    main()

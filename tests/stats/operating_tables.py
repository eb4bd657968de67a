"""The tables of docs/gate.md, computed by the package: `python -m tests.stats.operating_tables` prints them.

Every figure is a sum over all possible tables of flips, so running it again gives the same digits.
"""

from quanteval import stats
from quanteval.stats.exact import accept_region, region_size

SIZES = (20, 50, 164, 500, 1319)
FLIPS = (0.01, 0.02, 0.05, 0.10, 0.20)
Z95 = 1.6448536269514722


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def percent(x):
    return f"{100 * x:.1f}"


def verdicts():
    """Accept / inconclusive / reject in percent, exact rule on both sides."""
    drops = (0.0, 0.01, 0.02, 0.04, 0.05)
    cells = [(n, m, f) for n in SIZES[1:] for m in (0.02, 0.05) for f in (0.05, 0.10)]
    rows = []
    for n, margin, flips in cells:
        row = [n, f"{100 * margin:g}", f"{100 * flips:g}%"]
        for drop in drops:
            oc = stats.operating_characteristics(n, flips, drop, margin)
            row.append(
                " / ".join(f"{100 * x:.0f}" for x in (oc.accept, oc.inconclusive, oc.reject))
            )
        rows.append(row)
    return table(["n", "margin", "flips", *(f"drop {100 * d:g}" for d in drops)], rows)


def wrong_releases():
    """P(accept) in percent when the true drop is the margin."""
    rows = []
    for margin, flips in ((0.01, 0.01), (0.02, 0.02), (0.02, 0.05), (0.02, 0.10), (0.05, 0.10)):
        for n in SIZES:
            accept = [
                percent(stats.accept_probability(n, flips, margin, margin, rule=rule))
                for rule in ("point", "tango", "exact")
            ]
            rows.append([f"{100 * margin:g}", f"{100 * flips:g}%", n, *accept])
    return table(["margin", "flips", "n", "drop seen <= margin", "Tango", "exact"], rows)


def certifiable():
    """Smallest margin in points certified with 80% power at true drop 0: exact rule, (Tango), [normal]."""
    rows = []
    for flips in FLIPS:
        row = [f"{100 * flips:g}%"]
        for n in SIZES:
            exact = stats.certifiable_margin(n, flips, rule="exact")
            tango, normal = (
                stats.certifiable_margin(n, flips),
                stats.certifiable_margin_approx(n, flips),
            )
            row.append(f"{100 * exact:.1f} ({100 * tango:.1f}) [{100 * normal:.1f}]")
        rows.append(row)
    return table(["flips", *(f"n = {n}" for n in SIZES)], rows)


def needed():
    """Pairs from which on Tango's rule has 80% power at true drop 0, and (the normal approximation)."""
    rows = []
    for margin in (0.01, 0.02, 0.03, 0.05, 0.10):
        row = [f"{100 * margin:g}"]
        for flips in FLIPS:
            exact, normal = (
                stats.pairs_needed(margin, flips),
                stats.pairs_needed_approx(margin, flips),
            )
            row.append(f"{exact} ({normal})")
        rows.append(row)
    return table(["margin", *(f"flips {100 * f:g}%" for f in FLIPS)], rows)


def no_flips():
    """Upper bound of the drop in points when nothing flipped."""
    rows = [
        [
            n,
            f"{100 * stats.tango_bound(0, 0, n, 0.05, 'upper'):.2f}",
            f"{100 * stats.exact_bound(0, 0, n):.2f}",
        ]
        for n in SIZES
    ]
    return table(["n", "Tango", "exact"], rows)


def worst_tango():
    """Largest P(accept) at the margin over all flip rates, in percent."""
    rows = []
    for n, margin in (
        (52, 0.05),
        (133, 0.02),
        (268, 0.01),
        (300, 0.02),
        (2000, 0.02),
        (5000, 0.02),
    ):
        tango = region_size(accept_region(n, margin, -Z95), n, margin)
        limit = stats.exact_critical_z(n, margin)
        exact = region_size(accept_region(n, margin, limit), n, margin)
        rows.append([n, f"{100 * margin:g}", percent(tango), percent(exact), f"{limit:.3f}"])
    return table(["n", "margin", "Tango", "exact", "critical z"], rows)


def detectable():
    """Smallest drop in points found with 80% power by the one-sided exact McNemar test."""
    rows = [
        [n, *(f"{100 * stats.detectable_drop(n, f):.1f}" for f in FLIPS[:4])]
        for n in (164, 500, 1319)
    ]
    return table(["n", *(f"A/A flips {100 * f:g}%" for f in FLIPS[:4])], rows)


ALL = (verdicts, wrong_releases, worst_tango, no_flips, certifiable, needed, detectable)

if __name__ == "__main__":
    for make in ALL:
        print(make.__doc__, make(), sep="\n\n", end="\n\n")

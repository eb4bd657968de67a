"""Where the time goes: the layers of every load point, and what is slowest."""

from __future__ import annotations

from collections.abc import Sequence

from quanteval.evidence import VariantEvidence
from quanteval.metrics.layers import UNATTRIBUTED, Breakdown, breakdowns, grew_most
from quanteval.report.sheet import Field, Sheet
from quanteval.report.table import Cell
from quanteval.report.text import milliseconds

NAMES = {
    "client": "client (sent late)",
    "network": "network",
    "queue": "queueing",
    "tokenize": "tokenization",
    "prefill": "prefill",
    "decode": "decode",
    "detokenize": "detokenization",
    UNATTRIBUTED: "unattributed",
}
FIELDS = (
    Field("variant", "variant"),
    Field("load_point", "load point"),
    Field("layer", "layer"),
    Field("mean", "mean ms", "seconds"),
    Field("p50", "p50 ms", "seconds"),
    Field("p99", "p99 ms", "seconds"),
    Field("share", "share of E2E", "share"),
    Field("source", "measured by"),
)
SOURCES = {"requests": "request", "server": "server metrics"}
NOTES = (
    "n are requests. Shares are of the summed E2E; they add up to 100 % with what no layer explains, which is negative "
    "where layers overlap. What a server's metrics tell covers every request of the load point, warm-up and fillers "
    "too, and its quantiles are interpolated in the server's histograms.",
)


def layer_sheet(variants: Sequence[VariantEvidence]) -> Sheet:
    """Return a row for each layer of each load point, with a sentence a variant on what is slow."""
    rows: list[dict[str, Cell]] = []
    statements: list[str] = []
    for variant in variants:
        found = breakdowns(variant)
        rows += [row for told in found for row in _rows(variant.name, told)]
        statements += [text for text in [layer_sentence(variant.name, found)] if text]
    return Sheet("layers", "Where the time goes", FIELDS, tuple(rows), tuple(statements), NOTES, 3)


def _rows(variant: str, told: Breakdown) -> list[dict[str, Cell]]:
    return [
        {
            "variant": Cell(variant),
            "load_point": Cell(told.load_point),
            "layer": Cell(NAMES.get(item.layer, item.layer)),
            "mean": Cell(item.mean_s, n=item.n),
            "p50": Cell(item.p50_s),
            "p99": Cell(item.p99_s),
            "share": Cell(item.share),
            "source": Cell(SOURCES.get(told.source, told.source)),
        }
        for item in told.layers
    ]


def layer_sentence(variant: str, found: Sequence[Breakdown]) -> str:
    """Return which layer is slowest at the load with the longest E2E, and which grew most up to there; '' for none."""
    if not found:
        return ""
    first, last = found[0], max(found, key=lambda told: told.e2e_mean_s)
    slowest = last.slowest
    if slowest is None:
        return ""
    name = NAMES.get(slowest.layer, slowest.layer)
    spread = f"mean {milliseconds(slowest.mean_s)} ms"
    if slowest.p50_s is not None and slowest.p99_s is not None:
        spread = f"p50 {milliseconds(slowest.p50_s)} ms, p99 {milliseconds(slowest.p99_s)} ms"
    text = (
        f"{variant}: at {last.load_point} {name} takes {100 * slowest.share:.0f} % of E2E "
        f"({spread}, n={slowest.n} requests)"
    )
    rest = last.at(UNATTRIBUTED)
    if rest is not None and rest.share > slowest.share:
        text += f"; {100 * rest.share:.0f} % are unattributed"
    growth = grew_most(first, last) if last is not first and first.source == last.source else None
    if growth is None:
        return text
    return (
        f"{text}; {NAMES.get(growth.layer, growth.layer)} grew most since {growth.first}, from "
        f"{milliseconds(growth.before_s)} to {milliseconds(growth.after_s)} ms a request"
    )

"""The capacity statements as sentences and rows."""

from __future__ import annotations

from collections.abc import Sequence

from quanteval.metrics.capacity import RATIO_LEVEL, Estimate, Statement
from quanteval.metrics.knee import LEVEL
from quanteval.metrics.operating import KNEE_SHARE
from quanteval.report.sheet import Field, Sheet
from quanteval.report.table import Cell
from quanteval.report.text import number

FIELDS = (
    Field("variant", "variant"),
    Field("request_rate", "requests/s", "rate"),
    Field("output_tps", "output tok/s", "rate"),
    Field("limit", "limit"),
    Field("at_knee_share", f"requests/s at {100 * KNEE_SHARE:g} % of the knee", "rate"),
    Field("ratio", "ratio to the baseline", "ratio"),
    Field("device", "device"),
    Field("reason", "remark"),
)
NOTES = (
    "Requests/s at the load where the first promise of the SLO breaks, or at the knee where there is no SLO; "
    f"intervals are {100 * LEVEL:.0f} %, of ratios {100 * RATIO_LEVEL:.0f} % (from the ends of both). n are the "
    "steady requests of all loads.",
)


def capacity_sheet(found: Sequence[Statement], timing: str = "") -> Sheet:
    """Return a row and a sentence a variant; empty when no variant had its load raised.

    `timing` says how the variants' timings were taken: ratios of what did not take turns are marked.
    """
    if all(one.reason == "not measured: no search stage" for one in found):
        found = ()
    rows = tuple(_row(one) for one in found)
    statements = tuple(capacity_sentence(one) for one in found)
    notes: tuple[str, ...] = NOTES
    if timing.startswith("indicative") and any(one.ratio is not None for one in found):
        notes = (*NOTES, f"Ratios are {timing}.")
    return Sheet("capacity", "Capacity", FIELDS, rows, statements, notes)


def _row(one: Statement) -> dict[str, Cell]:
    remarks = [one.reason]
    remarks += ["nothing broke up to the highest load"] if one.at_least else []
    remarks += [f"no ratio: {one.ratio_reason}"] if one.ratio_reason else []
    share = one.at_knee_share
    return {
        "variant": Cell(one.variant),
        "request_rate": _cell(one.request_rate, one.n),
        "output_tps": _cell(one.output_tps, one.n),
        "limit": Cell(one.limit or None),
        "at_knee_share": Cell(share.request_rate if share else None),
        "ratio": _cell(one.ratio),
        "device": Cell(one.device or None),
        "reason": Cell("; ".join(filter(None, remarks)) or None),
    }


def _cell(found: Estimate | None, n: int | None = None) -> Cell:
    if found is None:
        return Cell(None)
    known = found.lower is not None and found.upper is not None
    note = "" if known else _ends(found.lower, found.upper)
    return Cell(found.value, found.lower, found.upper, n, note)


def _ends(lower: float | None, upper: float | None) -> str:
    """Return an interval that lacks an end as words, '' when it lacks both."""
    if lower is None and upper is None:
        return "no bounds"
    return f"from {number(lower)}" if lower is not None else f"up to {number(upper or 0)}"


def capacity_sentence(one: Statement) -> str:
    """Return what a variant serves as one sentence, or why that is not known."""
    if one.request_rate is None:
        what = f" within {one.limit}" if one.limit else ""
        text = f"{one.variant}: capacity{what} unknown, {one.reason}"
    else:
        rate = f"{number(one.request_rate.value)} requests/s{_bounds(one.request_rate)}"
        tokens = f" and {number(one.output_tps.value)} tokens/s" if one.output_tps else ""
        within = "up to its knee" if one.limit == "knee" else f"with {one.limit}"
        least = "at least " if one.at_least else ""
        text = f"{one.variant} serves {least}{rate}{tokens} {within}"
    share = one.at_knee_share
    if share is not None and share.request_rate is not None:
        of = "its knee" if one.knee and one.knee.load is not None else "the highest load (no knee)"
        text += f"; at {100 * KNEE_SHARE:g} % of {of} {number(share.request_rate)} requests/s"
    if one.ratio is not None:
        low, high = (
            "?" if end is None else f"{end:.2f}" for end in (one.ratio.lower, one.ratio.upper)
        )
        text += f"; {one.ratio.value:.2f}x the baseline [{low}, {high}]"
    counted = [f"n={one.n} requests"] if one.n else []
    where = ", ".join(counted + ([f"on {one.device}"] if one.device else []))
    return f"{text} ({where})" if where else text


def _bounds(found: Estimate) -> str:
    if found.lower is not None and found.upper is not None:
        return f" ({number(found.lower)} to {number(found.upper)})"
    return f" ({_ends(found.lower, found.upper)})"

"""What a variant serves, as a statement an operator can use: requests/s and tokens/s within the SLO, with bounds.

The figures are those at the load where the first promise of the SLO breaks (without an SLO, at the knee), which is
estimated with an interval; beside them those at 70 % of the knee, and the ratio to the baseline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quanteval.evidence import VariantEvidence
from quanteval.metrics.knee import LEVEL, Break, usable
from quanteval.metrics.load import Load, loads_of
from quanteval.metrics.operating import Capacity, Operating, at_load, capacity
from quanteval.metrics.slo import Slo

SLO_FIELDS = ("ttft", "itl", "tpot", "e2e", "per_request")
RATIO_LEVEL = 2 * LEVEL - 1
"""Level of a ratio's interval: each end fails when an end of either variant's does (Bonferroni)."""


@dataclass(frozen=True)
class Estimate:
    """A value with its interval; a bound is None where it is not known."""

    value: float
    lower: float | None
    upper: float | None


@dataclass(frozen=True)
class Statement:
    """The capacity of one variant. What was not measured is None, and `reason` says why."""

    variant: str
    device: str
    loop: str
    """'open' or 'closed': the loop that the loads were driven in; '' without any."""
    limit: str
    """What ends it: the SLO in one line, or 'knee'."""
    request_rate: Estimate | None
    """Requests/s at the break, interval at `LEVEL`."""
    at_least: bool
    """Nothing broke up to the highest load: the true value may be larger."""
    output_tps: Estimate | None
    n: int
    """Steady requests that the break is judged from."""
    at_knee_share: Operating | None
    knee: Break | None
    reason: str = ""
    ratio: Estimate | None = None
    """Requests/s over the baseline's, interval at `RATIO_LEVEL`."""
    ratio_reason: str = ""
    """Why there is no ratio; '' for the baseline itself."""


def slo_of(variant: VariantEvidence) -> Slo:
    """Return the SLO that a variant's bench was asked to keep, one without promises where it had none."""
    bench = variant.result.comparable.get("bench")
    node: Any = bench.get("slo") if isinstance(bench, Mapping) else None
    if not isinstance(node, Mapping):
        return Slo()
    fields = {name: node[name] for name in SLO_FIELDS if isinstance(node.get(name), Mapping)}
    try:
        return Slo(**fields)
    except ValueError:
        return Slo()


def device_of(variant: VariantEvidence) -> str:
    """Return what a variant was measured on: the processor's name, or the device of its engine."""
    cpu = variant.result.comparable.get("cpu") or variant.result.environment.get("cpu") or ""
    device = variant.memory.device if variant.memory is not None else ""
    return str(cpu) if device in ("", "cpu") and cpu else device


def capacities(
    variants: Sequence[VariantEvidence],
    baseline: str | None = None,
    loads: Mapping[str, Sequence[Load]] | None = None,
) -> list[Statement]:
    """Return a statement for each variant that was served, ratios to the baseline's.

    `loads` are the variants' load points by name, where they are known already.
    """
    found = [
        statement(v, (loads or {}).get(v.name))
        for v in variants
        if v.result.status == "ok" or v.traces
    ]
    name = baseline or next((v.name for v in variants if v.result.is_baseline), None)
    base = next((one for one in found if one.variant == name), None)
    return [one if base is None or one is base else with_ratio(one, base) for one in found]


def statement(variant: VariantEvidence, loads: Sequence[Load] | None = None) -> Statement:
    """Return what one variant serves."""
    slo = slo_of(variant)
    if loads is None:
        loads = loads_of(variant.traces, variant.load_points, slo)
    nothing = Statement(
        variant.name, device_of(variant), "", "", None, False, None, 0, None, None,
    )  # fmt: skip
    # Benches without records drive a few fixed concurrencies: no load was raised to find anything.
    searched = [p for p in loads if p.stage in ("rising", "search")] if variant.load_points else []
    if not searched:
        return replace(nothing, reason="not measured: no search stage")
    loop = "open" if any(load.loop == "open" for load in searched) else "closed"
    points = usable([load for load in searched if load.loop == loop])
    found = capacity(points, slo)
    if found is None:
        why = next((text for load in searched for text in load.excluded), "no steady state")
        return replace(nothing, loop=loop, reason=f"not measured: {why}")
    return _stated(nothing, points, found)


def _stated(nothing: Statement, points: Sequence[Load], found: Capacity) -> Statement:
    breaks = found.breaks or (found.knee,)
    known = replace(
        nothing,
        loop=found.loop,
        limit=found.slo if found.breaks else "knee",
        n=sum(load.requests for load in points),
        at_knee_share=found.at_knee_share,
        knee=found.knee,
    )
    lowest = points[0]
    if any(_broken_at_once(item) for item in breaks):
        what = "SLO is broken" if found.breaks else "linear range is left"
        return replace(known, reason=f"the {what} at the lowest load, {_load_text(lowest)}")
    broken = [item for item in breaks if item.load is not None]
    ends = [item.lower for item in breaks]
    lower = None if None in ends else min(end for end in ends if end is not None)
    upper = min((item.upper for item in breaks if item.upper is not None), default=None)
    value = min((item.load for item in broken if item.load is not None), default=points[-1].load)
    rates = [_at(points, end, "request_rate") for end in (value, lower, upper)]
    tokens = [_at(points, end, "output_tps") for end in (value, lower, upper)]
    return replace(
        known,
        request_rate=_estimate(rates),
        output_tps=_estimate(tokens),
        at_least=not broken,
        reason="" if rates[0] is not None else "not measured: no rate at the break",
    )


def _broken_at_once(item: Break) -> bool:
    known = [judged for judged in item.judged if judged.value == judged.value]
    return item.load is None and (not known or not known[0].holds)


def _load_text(load: Load) -> str:
    return f"{load.load:g} {'requests/s' if load.loop == 'open' else 'in flight'}"


def _at(points: Sequence[Load], load: float | None, what: str) -> float | None:
    found = None if load is None else at_load(points, load)
    value = None if found is None else getattr(found, what)
    return None if value is None else float(value)


def _estimate(values: Sequence[float | None]) -> Estimate | None:
    """Return the estimate of (value, lower, upper); rates do not always rise with the load."""
    value, *ends = values
    if value is None:
        return None
    lower, upper = ends
    return Estimate(
        value,
        None if lower is None else min(lower, value),
        None if upper is None else max(upper, value),
    )


def with_ratio(one: Statement, base: Statement) -> Statement:
    """Return a statement with its ratio to the baseline's; without one where they are not alike."""
    mine, theirs = one.request_rate, base.request_rate
    if mine is None or theirs is None:
        which = one.variant if mine is None else base.variant
        return replace(one, ratio_reason=f"{which} has no capacity")
    if (one.limit, one.loop) != (base.limit, base.loop):
        return replace(one, ratio_reason="not measured under the same SLO and loop")
    if one.device != base.device:
        return replace(one, ratio_reason=f"measured on {one.device} and {base.device}")
    if one.at_least or base.at_least:
        which = one.variant if one.at_least else base.variant
        return replace(one, ratio_reason=f"{which} broke nothing up to its highest load")
    if theirs.value <= 0:
        return replace(one, ratio_reason=f"{base.variant} serves nothing")
    return replace(
        one,
        ratio=Estimate(
            mine.value / theirs.value,
            _quotient(mine.lower, theirs.upper),
            _quotient(mine.upper, theirs.lower),
        ),
    )


def _quotient(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below

"""What a policy can decide before anything is run, for a terminal of 100 columns and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from quanteval.evidence import Forecast, SuiteFacts
from quanteval.report.text import line, number, wrap

POWER = 0.8
"""Probability behind every "smallest" and "needed" of a forecast."""

UNITS = {"perplexity": "documents", "divergence": "documents"}


@dataclass(frozen=True)
class Together:
    """What the required rules decide together: all must accept."""

    accept_harmless: float
    """Product of the rules' probabilities: exact where they do not depend on each other, else too low."""
    at_most: float
    """Smallest of them: what it would be if the rules depended on each other as much as they can."""
    shared: tuple[str, ...]
    """Tasks that more than one of these rules decide on."""
    counted: tuple[str, ...]
    """The rules in it, with their tasks."""
    unknown: tuple[str, ...] = ()
    """Required rules that have no probability yet."""


@dataclass(frozen=True)
class Planning:
    """Everything that `quanteval plan` says."""

    policy: str
    alpha: float
    device: str
    suites: tuple[SuiteFacts, ...]
    forecasts: tuple[Forecast, ...]
    required: tuple[bool, ...]
    """Whether the rule of each forecast is required."""
    together: Together | None
    unplanned: tuple[str, ...] = ()
    """Rules that decide on what is measured."""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def planning_text(plan: Planning) -> str:
    """Return a block for the suites, one a rule and task, and what holds for the whole policy."""
    out = wrap(
        f"policy {line(plan.policy)} on {line(plan.device)}, {100 * (1 - plan.alpha):g} % confidence; "
        f'"smallest" and "needed" are with {100 * POWER:g} % probability'
    )
    out += ["", "suites"]
    for suite in plan.suites:
        out += wrap(f"  {_suite(suite)}", 6)
    kinds = {suite.task: suite.kind for suite in plan.suites}
    for forecast, required in zip(plan.forecasts, plan.required, strict=True):
        out += ["", *_block(forecast, required, kinds)]
    out.append("")
    out += _together(plan.together) if plan.together else []
    if plan.unplanned:
        names = ", ".join(line(name) for name in plan.unplanned)
        out += wrap(f"decided by what is measured, nothing to plan: {names}")
    out += [text for warning in plan.warnings for text in wrap(f"warning: {line(warning)}")]
    out += [text for note in plan.notes for text in wrap(f"note: {line(note)}")]
    return "\n".join(out).rstrip()


def planning_json(plan: Planning) -> str:
    """Return the same as JSON: shares and ratios as they are, not per cent."""
    whole = asdict(plan)
    whole["power"] = POWER
    whole["forecasts"] = [
        {**asdict(forecast), "required": required}
        for forecast, required in zip(plan.forecasts, plan.required, strict=True)
    ]
    del whole["required"]
    return json.dumps(_finite(whole), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _suite(suite: SuiteFacts) -> str:
    parts = [f"{line(suite.task)}: {suite.n} {_units(suite.kind)}"]
    if suite.kind == "perplexity":
        parts.append(
            "spread between documents not known"
            if suite.spread is None
            else f"standard error of ln ratio {suite.spread:.4f} ({line(suite.source)})"
        )
    elif suite.kind != "divergence":
        score = "not known" if suite.score is None else _percent(suite.score)
        parts.append(f"baseline's score {score}")
        parts.append(f"{_percent(suite.flip_rate)} flips ({line(suite.source)})")
    return ", ".join(parts)


def _units(kind: str) -> str:
    return UNITS.get(kind, "problems")


def _block(forecast: Forecast, required: bool, kinds: dict[str, str]) -> list[str]:
    units = _units(kinds.get(forecast.task, ""))
    advisory = "" if required else ", advisory"
    out = wrap(
        f"{line(forecast.rule)}: {line(forecast.task)} ({forecast.n} {units}), "
        f"margin {line(forecast.margin)}{advisory}"
    )
    is_test = forecast.certifiable is not None or forecast.n_needed is not None
    rows = [
        ("harmless variant accepted", _chance(forecast.accept_harmless)),
        ("loss of twice the margin rejected", _chance(forecast.reject_double)),
    ]
    if is_test:
        needed = forecast.n_needed
        rows += [
            ("smallest margin certified", _amount(forecast.certifiable, forecast.margin)),
            ("smallest loss detected", _amount(forecast.detectable, forecast.margin)),
            (f"{units} needed at this margin", "-" if needed is None else f"about {needed}"),
        ]
    if any(value != "-" for _, value in rows):
        out += [f"  {label:34} {value:>12}" for label, value in rows]
    out += wrap(f"  rests on: {line(forecast.assumed)}", 4)
    out += [text for remark in forecast.remarks for text in wrap(f"  {line(remark)}", 4)]
    out += [
        text for warning in forecast.warnings for text in wrap(f"  warning: {line(warning)}", 4)
    ]
    return out


def _together(found: Together) -> list[str]:
    rules = "; ".join(line(label) for label in found.counted)
    chance = f"{_percent(found.accept_harmless)} of runs"
    if found.shared and found.at_most > found.accept_harmless:
        chance = (
            f"{_percent(found.accept_harmless)} to {_percent(found.at_most)} of runs (rules that share "
            f"{', '.join(line(task) for task in found.shared)} depend on each other)"
        )
    out = wrap(f"all required rules together accept a harmless variant in {chance}: {rules}")
    if found.unknown:
        unknown = "; ".join(line(label) for label in found.unknown)
        out += wrap(f"not in it, since nothing is known of them yet: {unknown}")
    return out


def _amount(value: float | None, margin: str) -> str:
    """Return a margin or a loss in the unit that the rule's margin is given in."""
    if value is None:
        return "-"
    if margin.startswith("ratio"):
        return f"ratio {value:.4f}"
    unit = "% of baseline" if margin.endswith("of the baseline") else "points"
    return f"{number(100 * value, 2)} {unit}"


def _chance(value: float | None) -> str:
    return "-" if value is None else _percent(value)


def _percent(share: float) -> str:
    """Return per cent; what is not quite none or all is not shown as such."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= share < 1:
        return "> 99.9 %"
    return f"{100 * share:.1f} %"

"""What a rule on paired 0/1 scores can decide before it is run: exact sums over all tables, no simulation."""

from __future__ import annotations

from quanteval.evidence import Forecast, SuiteFacts
from quanteval.rules._common import percent
from quanteval.rules.margin import Margin
from quanteval.stats import (
    accept_probability,
    certifiable_margin,
    detectable_drop,
    operating_characteristics,
    pairs_needed,
    point_rule_error,
)

POWER = 0.8
COMPLETIONS = 4


def forecast_loss(
    name: str, margin: Margin, suite: SuiteFacts, alpha: float, method: str = "auto"
) -> Forecast:
    """Return what a non-inferiority rule decides on one task, if a harmless variant flips as the suite says."""
    n, flips = suite.n, suite.flip_rate
    score = suite.score if suite.score is not None else 0.5
    scale = score if margin.is_relative else 1.0
    limit = margin.value * scale
    assumed = f"{percent(flips)} flips ({suite.source})"
    if margin.is_relative:
        where = "assumed" if suite.score is None else "seen"
        assumed += f", baseline at {percent(score)} ({where})"
    if margin.is_relative and score < max(margin.min_baseline, 1e-9):
        return Forecast(
            name, suite.task, n, margin.text, assumed,
            warnings=(f"can never decide: the baseline scores {percent(score)}, a relative margin needs "
                      f"{percent(margin.min_baseline)}",),
        )  # fmt: skip
    if method == "point":
        wrong = percent(point_rule_error(n, max(flips, limit), limit))
        return Forecast(
            name, suite.task, n, margin.text, assumed,
            accept_harmless=accept_probability(n, flips, 0.0, limit, rule="point"),
            remarks=(f"not a statistical test: it passes a loss exactly at the margin {wrong} of the time",),
        )  # fmt: skip
    harmless = accept_probability(n, flips, 0.0, limit, alpha=alpha)
    double = min(2 * limit, 1.0)
    certifiable = certifiable_margin(n, flips, alpha, POWER) / scale
    needed = pairs_needed(limit, flips, 0.0, alpha, POWER)
    return Forecast(
        rule=name,
        task=suite.task,
        n=n,
        margin=margin.text,
        assumed=assumed,
        certifiable=certifiable,
        detectable=detectable_drop(n, flips, alpha, POWER) / scale,
        n_needed=needed,
        accept_harmless=harmless,
        reject_double=operating_characteristics(
            n, max(flips, double), double, limit, alpha=alpha, reject_alpha=alpha
        ).reject,
        remarks=_remarks(n, flips, limit, alpha, needed),
        warnings=_warnings(n, flips, limit, alpha, harmless),
    )


def _warnings(n: int, flips: float, limit: float, alpha: float, harmless: float) -> tuple[str, ...]:
    found = []
    if accept_probability(n, 0.0, 0.0, limit, alpha=alpha) == 0:
        found.append("can never accept: not even when nothing flips")
    elif harmless < POWER:
        found.append(f"a harmless variant is accepted in {percent(harmless)} of runs only")
    if operating_characteristics(n, 1.0, 1.0, limit, reject_alpha=alpha).reject == 0:
        found.append("can never reject: not even when everything breaks")
    return tuple(found)


def _remarks(n: int, flips: float, limit: float, alpha: float, needed: int) -> tuple[str, ...]:
    if needed <= n or flips == 0:
        return ()
    fewer = pairs_needed(limit, flips / COMPLETIONS, 0.0, alpha, POWER)
    return (
        f"{COMPLETIONS} completions a problem, at {COMPLETIONS} times the generation, would at best do "
        f"with {fewer} problems (if all flips are noise)",
    )

"""Whether a candidate is worth having: at least one of several benefits in bytes or speed is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from quanteval.evidence import RuleContext, VariantEvidence
from quanteval.records import Finding, Outcome
from quanteval.rules._common import confidence
from quanteval.rules.budget import Budget, ByteMetric
from quanteval.rules.speed import ADVICE, UNITS, Speed, SpeedMetric


@dataclass(frozen=True)
class Benefit:
    """One thing to gain: `max_ratio` below 1 for bytes and latencies, `min_ratio` above 1 for rates.

    `load_point` is that of `Speed`; bytes have none.
    """

    metric: ByteMetric | SpeedMetric
    max_ratio: float | None = None
    min_ratio: float | None = None
    load_point: str | None = None

    def __post_init__(self) -> None:
        if self.is_timing:
            self.rule(None)
        elif self.min_ratio is not None or self.load_point is not None:
            raise ValueError(f'metric "{self.metric}": give max_ratio and no load_point')
        else:
            self.rule(None)
        ratio = self.max_ratio if self.max_ratio is not None else self.min_ratio or 0.0
        if ratio == 1 or (ratio > 1) == (self.max_ratio is not None):
            wanted = "below" if self.max_ratio is not None else "above"
            raise ValueError(
                f'ratio "{ratio}" is no benefit of {self.metric}: it must be {wanted} 1'
            )

    @property
    def is_timing(self) -> bool:
        """Whether the metric is tested over rounds; bytes are counted."""
        return not self.metric.endswith("_bytes")

    def rule(self, alpha: float | None) -> Budget | Speed:
        """Return the rule that decides on this benefit, timings at level `alpha`."""
        if not self.is_timing:
            metric = cast("ByteMetric", self.metric)
            return Budget(metric, max_ratio=self.max_ratio, required=True)
        return Speed(
            cast("SpeedMetric", self.metric), max_ratio=self.max_ratio, min_ratio=self.min_ratio,
            load_point=self.load_point, required=True, alpha=alpha,
        )  # fmt: skip


@dataclass(frozen=True)
class WorthIt:
    """Demand at least one of `benefits`.

    Accepted when one is shown, bytes by counting and timings by `Speed` at alpha/k for k timings (Bonferroni), so that
    a candidate without any benefit passes with probability at most alpha. Holm's steps would change nothing: the first
    of them is at alpha/k too, and the others are reached only when that one has shown a benefit, which is all that
    is asked. Rejected when every benefit is shown to be missing; that needs no correction, and the level alpha/k
    is on the safe side. Where none is shown and one was not measured or cannot be compared the finding is invalid.
    """

    benefits: tuple[Benefit, ...]
    required: bool = True

    is_quality = False

    def __post_init__(self) -> None:
        if not self.benefits:
            raise ValueError('benefits "()": name at least one')

    def check(
        self,
        name: str,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        context: RuleContext,
    ) -> list[Finding]:
        """Return one finding; `notes` has the sentence of every benefit, and `n` counts the benefits."""
        timings = sum(benefit.is_timing for benefit in self.benefits)
        alpha = context.alpha / max(1, timings)
        found = [
            finding
            for benefit in self.benefits
            for finding in benefit.rule(alpha).check(name, baseline, candidate, context)
        ]
        outcome = _any_of([finding.outcome for finding in found])
        return [
            Finding(
                rule=name,
                required=self.required,
                outcome=outcome,
                sentence=_sentence(outcome, found),
                method=f"any of {len(found)}"
                + (f", timings at {confidence(alpha)} confidence each" if timings else ""),
                n=len(found),
                confidence=1 - context.alpha if timings else None,
                notes=[finding.sentence for finding in found],
            )
        ]


def _any_of(outcomes: list[Outcome]) -> Outcome:
    """Combine: one shown is enough; what is missing altogether must be shown of every one."""
    for outcome in ("accept", "invalid", "inconclusive"):
        if outcome in outcomes:
            return outcome
    return "reject"


def _sentence(outcome: Outcome, found: list[Finding]) -> str:
    deciding = [f.sentence for f in found if f.outcome == outcome]
    told = "; ".join(deciding)
    if outcome == "accept":
        return f"worth it: {told}"
    if outcome == "reject":
        return f"not worth it: {told}"
    if outcome == "invalid":
        return f"whether it is worth it cannot be said: {told}"
    rest = "; ".join(f.sentence for f in found)
    return f"not shown to be worth it: {rest}"

"""Whether a candidate is worth having: at least one of several benefits in bytes or speed is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from quanteval.evidence import RuleContext, VariantEvidence
from quanteval.records import Finding, Outcome
from quanteval.rules._common import confidence
from quanteval.rules.budget import Budget, ByteMetric
from quanteval.rules.speed import Speed, SpeedMetric


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
        given = (self.max_ratio is None, self.min_ratio is None, self.load_point is None)
        if not self.is_timing and given != (False, True, True):
            raise ValueError(f'metric "{self.metric}": give max_ratio and nothing else')
        self.rule(None)
        if self.max_ratio is not None and not self.max_ratio < 1:
            raise ValueError(f'max_ratio "{self.max_ratio}" is no benefit: it must be below 1')
        if self.min_ratio is not None and not self.min_ratio > 1:
            raise ValueError(f'min_ratio "{self.min_ratio}" is no benefit: it must be above 1')

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


def _any_of(outcomes: Sequence[Outcome]) -> Outcome:
    """Combine: one shown is enough, and that there is none must be shown of every one."""
    order: tuple[Outcome, ...] = ("accept", "invalid", "inconclusive")
    return next((outcome for outcome in order if outcome in outcomes), "reject")


def _sentence(outcome: Outcome, found: Sequence[Finding]) -> str:
    start = {
        "accept": "worth it",
        "invalid": "whether it is worth it cannot be said",
        "inconclusive": "not shown to be worth it",
        "reject": "not worth it",
    }[outcome]
    # What is undecided is undecided because of all of them; else those that decide suffice.
    told = [f.sentence for f in found if outcome in ("inconclusive", f.outcome)]
    return f"{start}: {'; '.join(told)}"

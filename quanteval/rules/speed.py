"""Speed against the baseline's, decided over interleaved rounds, and latency limits of a candidate alone.

A round is a process of its own that serves the variant, warms up and measures every load point; the rounds of both
variants take turns, so that whatever drifts on the machine falls on both. Requests inside a round share its process,
its memory layout and the machine's state of that minute: they depend on each other, and the round is what is
replicated. Timings that did not take turns are shown, but decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quanteval.evidence import RuleContext, VariantEvidence
from quanteval.metrics.latency import best_point, summarize
from quanteval.records import Finding, Outcome, RequestTrace
from quanteval.rules._common import bare, beside, check_alpha, confidence
from quanteval.rules._rounds import (
    failed_requests,
    interleaving,
    latencies,
    oddity,
    rounds_at,
    steady_of,
)
from quanteval.stats import (
    clopper_pearson_bound,
    early_stopping_queries,
    min_n_quantile_bound,
    quantile_ratio,
    throughput_ratio,
)

__all__ = ["LatencyLimit", "Speed", "SpeedMetric", "interleaving"]

SpeedMetric = Literal[
    "output_tps", "request_rate", "stream_tps",
    "ttft_p50_s", "ttft_p95_s", "ttft_p99_s",
    "tpot_p50_s", "tpot_p95_s", "tpot_p99_s",
    "e2e_p50_s", "e2e_p95_s", "e2e_p99_s",
]  # fmt: skip
UNITS = {"output_tps": "tokens/s", "request_rate": "requests/s", "stream_tps": "tokens/s"}
"""Units of the rates, of which more is better; everything else is seconds."""
SINGLE_STREAM = "single_stream"
ADVICE = "run with runtime.bench_rounds=5"


@dataclass(frozen=True)
class Arm:
    """One variant's measurements of one metric: a value a round, and for latencies every steady request's."""

    values: tuple[float, ...] = ()
    pooled: tuple[float, ...] = ()
    value: float = math.nan
    """Rates: geometric mean over rounds. Latencies: the quantile of all requests."""
    problem: str = ""
    """Why this must not be compared, '' when it may."""


# --------------------------------------------------------------------------- speed against the baseline's


@dataclass(frozen=True)
class Speed:
    """Keep a timing on its side of a ratio to the baseline's: `min_ratio` for rates, `max_ratio` for latencies.

    Rates (output_tps, request_rate, stream_tps) give one value a round, compared by Welch's t on the logarithms.
    Latency quantiles are bounded twice: by the order statistics of all steady requests joined on the log scale,
    which assume nothing of the distribution but take requests for independent, and by Welch's t on the logarithms of
    each round's own quantile, which takes only rounds for independent. The wider bound decides on each side: the
    first alone would ignore that requests of a round depend on each other, the second alone would trust a normal
    approximation of a few tails. Since both must agree, neither needs a correction of its level.

    `load_point` is by default 'single_stream' for latencies and stream_tps, and for output_tps and request_rate
    the one with the highest output tokens/s of the baseline that both have. Quantiles that have too few requests on
    either side (p99 needs 299 at alpha 0.05), fewer than `min_rounds` rounds, and rounds that did not take
    turns are inconclusive. Failed requests make a comparison invalid: survivors of a failing server look fast.
    """

    metric: SpeedMetric
    max_ratio: float | None = None
    min_ratio: float | None = None
    load_point: str | None = None
    required: bool = False
    alpha: float | None = None
    min_rounds: int = 3

    is_quality = False

    def __post_init__(self) -> None:
        if (self.max_ratio is None) == (self.min_ratio is None):
            given = f'max_ratio "{self.max_ratio}" and min_ratio "{self.min_ratio}"'
            raise ValueError(f"{given}: give exactly one of them")
        if not 0 < self.limit < math.inf:
            raise ValueError(f'limit "{self.limit}" must be positive')
        if self.is_rate != (self.min_ratio is not None):
            better, wanted = ("more", "min_ratio") if self.is_rate else ("less", "max_ratio")
            raise ValueError(f'metric "{self.metric}": {better} is better, give {wanted}')
        if self.min_rounds < 2:
            raise ValueError(f'min_rounds "{self.min_rounds}" must be at least 2')
        check_alpha(self.alpha)

    @property
    def is_rate(self) -> bool:
        """Whether the metric is a rate, of which more is better."""
        return self.metric in UNITS

    @property
    def limit(self) -> float:
        """The ratio to keep."""
        return float(self.max_ratio if self.max_ratio is not None else self.min_ratio or 0)

    @property
    def wanted(self) -> str:
        """The limit for a person."""
        return f"{'at least' if self.min_ratio is not None else 'at most'} {self.limit:g}x"

    def check(
        self,
        name: str,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        context: RuleContext,
    ) -> list[Finding]:
        """Return one finding; `n` is the rounds of each variant."""
        point = self.load_point or self._usual_point(baseline, candidate)
        where = f"{self.metric} at {point}" if point else self.metric
        arms = []
        for evidence in (baseline, candidate):
            arm = self._arm(evidence, point) if point else None
            if arm is None:
                outcome: Outcome = "invalid" if self.required else "skipped"
                sentence = f"{where} of {evidence.name} was not measured"
                return [bare(name, required=self.required, outcome=outcome, sentence=sentence)]
            arms.append(arm)
        for evidence, arm in zip((baseline, candidate), arms, strict=True):
            if arm.problem:
                sentence = f"{where} of {evidence.name} says nothing: {arm.problem}"
                return [bare(name, required=self.required, outcome="invalid", sentence=sentence)]
        alpha = self.alpha if self.alpha is not None else context.alpha
        return [self._compare(name, where, arms, interleaving(baseline, candidate), alpha)]

    def _usual_point(self, baseline: VariantEvidence, candidate: VariantEvidence) -> str | None:
        if self.metric not in ("output_tps", "request_rate"):
            return SINGLE_STREAM
        common = {trace.load_point for trace in candidate.traces if not trace.warmup}
        known = [s for s in summarize(baseline.traces) if s.load_point in common]
        best = best_point(known)
        return None if best is None else best.load_point

    def _arm(self, evidence: VariantEvidence, load_point: str) -> Arm | None:
        """Return what a variant measured, None when no round has the metric."""
        rounds = rounds_at(evidence, load_point)
        failed = failed_requests(rounds)
        if failed:
            return Arm(problem=f"{len(failed)} of its requests failed")
        return self._rates(rounds) if self.is_rate else self._quantiles(rounds)

    def _rates(self, rounds: Mapping[int, Sequence[RequestTrace]]) -> Arm | None:
        found: dict[int, float | None] = {}
        for number, traces in rounds.items():
            # One round at a time: a summary of all rounds would be one value, whatever they differ by.
            summary = next(iter(summarize(traces)), None)
            found[number] = None if summary is None else getattr(summary, self.metric)
        values = tuple(value for value in found.values() if value is not None)
        if not values:
            return None
        if problem := _missing([n for n, value in found.items() if value is None]) or oddity(
            values
        ):
            return Arm(problem=problem)
        return Arm(values, value=math.exp(float(np.mean(np.log(values)))))

    def _quantiles(self, rounds: Mapping[int, Sequence[RequestTrace]]) -> Arm | None:
        kind, q = self._quantile
        found = {n: latencies(kind, steady_of(traces)) for n, traces in rounds.items()}
        pooled = tuple(value for values in found.values() for value in values)
        if not pooled:
            return None
        if problem := _missing([n for n, values in found.items() if not values]) or oddity(pooled):
            return Arm(problem=problem)
        values = tuple(float(np.quantile(values, q)) for values in found.values())
        return Arm(values, pooled, float(np.quantile(pooled, q)))

    @property
    def _quantile(self) -> tuple[str, float]:
        """Which latency, and which quantile of it."""
        kind, percent, _ = self.metric.split("_")
        return kind, int(percent[1:]) / 100

    # ---- the decision

    def _compare(
        self, name: str, where: str, arms: Sequence[Arm], not_in_turns: str, alpha: float
    ) -> Finding:
        base, cand = arms
        rounds = min(len(base.values), len(cand.values))
        ratio = cand.value / base.value
        doubts = [not_in_turns] if not_in_turns else []
        if not doubts and rounds < self.min_rounds:
            doubts.append(f"{rounds} of at least {self.min_rounds} rounds")
        in_turns = not doubts
        doubts += self._too_few_requests(base, cand, alpha)
        finding = Finding(
            rule=name,
            required=self.required,
            outcome="inconclusive",
            sentence="",
            metric=self.metric,
            unit="ratio",
            method=self._method if in_turns else "indicative comparison",
            n=rounds,
            baseline_value=base.value,
            candidate_value=cand.value,
            estimate=ratio,
            margin=self.limit,
        )
        unit = UNITS.get(self.metric, "s")
        seen = f"{where} {_figure(base.value)} -> {_figure(cand.value)} {unit} ({beside(ratio, self.limit, 2)}x"
        if doubts:
            mark = "" if in_turns else "indicative: "
            advice = "" if in_turns else f"; {ADVICE}"
            told = (
                f"{seen}, {mark}{'; '.join(doubts)}): undecided whether it is {self.wanted}{advice}"
            )
            return finding.model_copy(update={"sentence": told})
        lower, upper = self._bounds(base, cand, ratio, alpha)
        outcome, told = self._outcome(lower, upper, alpha)
        return finding.model_copy(
            update={
                "outcome": outcome,
                "sentence": f"{seen}, {rounds} rounds each, {told}",
                "lower": lower,
                "upper": upper,
                "confidence": 1 - alpha,
            }
        )

    @property
    def _method(self) -> str:
        welch = "Welch's t on logarithms over rounds"
        return welch if self.is_rate else f"wider of order statistics over requests and {welch}"

    def _too_few_requests(self, base: Arm, cand: Arm, alpha: float) -> list[str]:
        """Say how many requests a quantile lacks; [] for rates, and when there are enough."""
        if self.is_rate:
            return []
        needed = min_n_quantile_bound(self._quantile[1], alpha)
        there = len(base.pooled), len(cand.pooled)
        if min(there) >= needed:
            return []
        level = confidence(alpha)
        return [
            f"{there[0]} and {there[1]} steady requests, at least {needed} each needed for {level} confidence"
        ]

    def _bounds(self, base: Arm, cand: Arm, ratio: float, alpha: float) -> tuple[float, float]:
        """Return the lower and the upper bound of the ratio, each at level 1 - alpha."""
        found = [throughput_ratio(base.values, cand.values, alpha)]
        if not self.is_rate:
            found.append(quantile_ratio(base.pooled, cand.pooled, self._quantile[1], alpha))
        # The ratio shown interpolates seconds and not logarithms, so it can lie a hair outside.
        lower = min(ratio, *(bounds.lower for bounds in found))
        return lower, max(ratio, *(bounds.upper for bounds in found))

    def _outcome(self, lower: float, upper: float, alpha: float) -> tuple[Outcome, str]:
        sure = f"with {confidence(alpha)} confidence"
        low, high = (f"{beside(bound, self.limit, 2)}x" for bound in (lower, upper))
        if not (lower > self.limit or upper < self.limit):
            told = f"between {low} and {high} {sure} each): undecided whether it is {self.wanted}"
            return "inconclusive", f"{told}, more rounds would narrow it"
        seen = f"at least {low}" if lower > self.limit else f"at most {high}"
        meets = (lower > self.limit) == self.is_rate
        verb = "meets" if meets else "misses"
        return ("accept" if meets else "reject"), f"{seen} {sure}): {verb} {self.wanted}"


def _figure(value: float) -> str:
    """Return a rate or a time with four digits, and never with an exponent where it is large."""
    return f"{value:.4g}" if value < 9999.5 else f"{value:.0f}"


def _missing(rounds: Sequence[int]) -> str:
    """Name the first of the rounds that have no value, '' when there are none."""
    return f"it has no value in round {rounds[0]}" if rounds else ""


# --------------------------------------------------------------------------- an absolute limit


@dataclass(frozen=True)
class LatencyLimit:
    """Keep the share of requests slower than `limit_s` at or below 1 - `percentile`, for the candidate alone.

    The misses among all steady requests of a load point (default 'single_stream') are counted. A failed request is a
    miss, in a steady state or not; one without a TPOT (a single chunk) is not counted. Accepted when there are as
    many requests as `early_stopping_queries` asks for at that count, which is when the exact upper bound of the share
    of misses (Clopper and Pearson) is at most 1 - percentile; rejected when the exact lower bound is above it. Both
    are at `confidence` and take requests for independent. Nothing is compared, so rounds need not take turns.
    """

    metric: Literal["ttft", "tpot", "e2e"]
    limit_s: float
    percentile: float = 0.99
    load_point: str | None = None
    confidence: float = 0.99
    required: bool = False

    is_quality = False

    def __post_init__(self) -> None:
        if not 0 < self.limit_s < math.inf:
            raise ValueError(f'limit_s "{self.limit_s}" must be positive')
        if not 0 < self.percentile < 1:
            raise ValueError(f'percentile "{self.percentile}" must be between 0 and 1')
        if not 0.5 < self.confidence < 1:
            raise ValueError(f'confidence "{self.confidence}" must be between 0.5 and 1')

    def check(
        self,
        name: str,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        context: RuleContext,
    ) -> list[Finding]:
        """Return one finding; `n` is the requests counted, `estimate` the share of them that missed the limit."""
        point = self.load_point or SINGLE_STREAM
        rounds = rounds_at(candidate, point)
        where = f"{self.metric} at {point} of {candidate.name}"
        steady = [trace for traces in rounds.values() for trace in steady_of(traces)]
        values, failed = latencies(self.metric, steady), len(failed_requests(rounds))
        n = len(values) + failed
        if not n:
            outcome: Outcome = "invalid" if self.required else "skipped"
            sentence = f"{where} was not measured"
            return [bare(name, required=self.required, outcome=outcome, sentence=sentence)]
        if problem := oddity(values):
            sentence = f"{where} says nothing: {problem}"
            return [bare(name, required=self.required, outcome="invalid", sentence=sentence)]
        misses = failed + sum(value > self.limit_s for value in values)
        return [self._judge(name, where, values, failed, misses)]

    def _judge(
        self, name: str, where: str, values: Sequence[float], failed: int, misses: int
    ) -> Finding:
        n, allowed, alpha = len(values) + failed, 1 - self.percentile, 1 - self.confidence
        needed = early_stopping_queries(misses, self.percentile, self.confidence)
        lower = clopper_pearson_bound(misses, n, alpha, "lower")
        outcome: Outcome = (
            "accept" if n >= needed else "reject" if lower > allowed else "inconclusive"
        )
        sure = f"with {confidence(alpha)} confidence"
        share = f"{100 * allowed:.4g} %"
        told = {
            "accept": f"shown to be at most {share} {sure}",
            "reject": f"more than {share} {sure}",
            "inconclusive": f"not shown to be at most {share}: {needed} requests would decide "
            f"if {'none' if not misses else f'no more than {misses}'} of them missed it",
        }[outcome]
        lost = f" ({failed} failed)" if failed else ""
        return Finding(
            rule=name,
            required=self.required,
            outcome=outcome,
            sentence=f"{where}: {misses} of {n} requests missed {self.limit_s:g} s{lost}, {told}",
            metric=self.metric,
            unit="share",
            method="exact binomial (early-stopping counts)",
            n=n,
            candidate_value=None if failed else float(np.quantile(values, self.percentile)),
            estimate=misses / n,
            lower=lower,
            upper=clopper_pearson_bound(misses, n, alpha, "upper"),
            confidence=self.confidence,
            margin=allowed,
            n_needed=needed if outcome == "inconclusive" else None,
        )

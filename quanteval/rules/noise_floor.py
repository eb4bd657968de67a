"""The noise floor: does the baseline, served and evaluated again, agree with itself?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quanteval.evidence import RuleContext, VariantEvidence
from quanteval.records import Finding, Outcome
from quanteval.rules._common import bare, check_share, pair, percent
from quanteval.rules._noise import noise_between
from quanteval.rules.non_inferiority import paired_units, unusable
from quanteval.stats import mcnemar_exact, wilson_bound

DRIFT_ALPHA = 0.001
"""Level at which a drift of the baseline against itself is called a fault; rare, since it stops the gate."""


@dataclass(frozen=True)
class NoiseFloor:
    """Limit the share of problems that change when the baseline is run again (`run aa=true`).

    Where flips lean to one side between two runs of one model, the harness is at fault (an order
    effect, a leak, samples that are not pairs), and nothing else it says can be trusted: that is
    invalid. More flips than `max_flip_rate` leave the question open: take more samples, or serve in a
    way that does not depend on the batch, rather than a looser margin.
    """

    max_flip_rate: float = 0.05
    required: bool = False

    is_quality = False

    def __post_init__(self) -> None:
        check_share("max_flip_rate", self.max_flip_rate)

    def check(
        self,
        name: str,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        context: RuleContext,
    ) -> list[Finding]:
        """Return a finding for each task with scores from 0 to 1."""
        again = context.again
        if again is None:
            sentence = "the baseline was not repeated: run with aa=true"
            outcome: Outcome = "invalid" if self.required else "skipped"
            return [bare(name, required=self.required, outcome=outcome, sentence=sentence)]
        tasks = [
            task
            for task, scores in baseline.scores.items()
            if scores.record.kind not in ("perplexity", "divergence")
        ]
        found = [self._task(name, task, baseline, again) for task in tasks]
        return found or [
            bare(
                name,
                required=self.required,
                outcome="skipped",
                sentence="no task it concerns was run",
            )
        ]

    def _task(
        self, name: str, task: str, baseline: VariantEvidence, again: VariantEvidence
    ) -> Finding:
        pairs = pair(task, baseline, again, 0.0)
        if not pairs.problem and baseline.scores[task].samples != again.scores[task].samples:
            sentence = f"{task}: the scores are means over several runs, the repetition is one run"
            outcome: Outcome = "inconclusive" if self.required else "skipped"
            return bare(name, required=self.required, outcome=outcome, sentence=sentence, task=task)
        problem = pairs.problem or _unusable([baseline, again], task)
        if problem:
            sentence = f"{task}: the repeated baseline cannot be compared, {problem}"
            return bare(
                name, required=self.required, outcome="invalid", sentence=sentence, task=task
            )
        noise = noise_between(*paired_units(baseline.scores[task], again.scores[task], pairs))
        flips = noise.worse + noise.better
        p = mcnemar_exact(noise.worse, noise.better)
        outcome = "accept" if noise.flip_rate <= self.max_flip_rate else "inconclusive"
        says = f"at most {percent(self.max_flip_rate)} may"
        if p <= DRIFT_ALPHA:
            outcome = "invalid"
            says = f"they lean to one side (p = {p:.2g}), so the two runs did not measure the same"
        return Finding(
            rule=name,
            required=self.required,
            outcome=outcome,
            sentence=f"{task}: the repeated baseline flipped {flips} of {noise.n} ({percent(noise.flip_rate)}, "
            f"{noise.worse} worse, {noise.better} better), {says}; two runs of one model differ by up to "
            f"{100 * noise.reach:.1f} points",
            task=task,
            metric="flips of the repeated baseline",
            unit="share",
            method="Wilson bounds, exact McNemar for drift",
            n=noise.n,
            estimate=noise.flip_rate,
            lower=wilson_bound(flips, noise.n, 0.05, "lower"),
            upper=wilson_bound(flips, noise.n, 0.05, "upper"),
            confidence=0.95,
            margin=self.max_flip_rate,
            p_value=p,
            broken=noise.worse,
            fixed=noise.better,
        )


def _unusable(variants: Sequence[VariantEvidence], task: str) -> str:
    return next((why for v in variants if (why := unusable(v.scores[task]))), "")

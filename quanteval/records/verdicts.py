"""What the gate leaves: findings and verdicts."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from quanteval.records.base import Outcome, Record, VerdictOutcome


class Finding(Record):
    """The outcome of one rule, for one task where the rule concerns tasks."""

    rule: str
    """The rule's name in the policy."""
    required: bool
    outcome: Outcome
    sentence: str
    """The finding for a person, with its numbers."""
    task: str = ""
    metric: str = ""
    unit: str = ""
    method: str = ""
    n: int = 0
    """Units compared: samples, documents, requests."""
    baseline_value: float | None = None
    candidate_value: float | None = None
    estimate: float | None = None
    """The loss (positive is worse) in the margin's own unit."""
    lower: float | None = None
    upper: float | None = None
    """One-sided bounds, each at `confidence`."""
    confidence: float | None = None
    margin: float | None = None
    p_value: float | None = None
    """Of "the loss is at least the margin"."""
    p_regression: float | None = None
    """Of "there is no loss"; which tasks degraded is read from these, corrected by Holm."""
    broken: int | None = None
    """Samples the baseline got right and the candidate did not."""
    fixed: int | None = None
    n_needed: int | None = None
    """Samples that would decide at the observed discordance."""
    regression_detected: bool = False
    waived: str = ""
    """Why this finding does not count: a waiver's owner, reason and last day; empty when it counts."""
    notes: list[str] = Field(default_factory=list)


class Verdict(Record):
    """The outcome of all rules for one candidate: verdicts/<candidate>.json."""

    candidate: str
    baseline: str
    outcome: VerdictOutcome
    reason: str
    """The deciding sentence."""
    findings: list[Finding]
    degraded: list[str] = Field(default_factory=list)
    """Tasks shown to have lost anything at all (Holm over the tasks), whether or not that was tolerable."""
    policy_name: str
    policy_sha256: str
    policy: dict[str, Any]
    quanteval_version: str
    created_at: str

    @property
    def exit_code(self) -> int:
        """Exit code this outcome leads to."""
        return VERDICT_EXIT_CODES[self.outcome]


VERDICT_EXIT_CODES: dict[VerdictOutcome, int] = {
    "accept": 0,
    "error": 1,
    "reject": 3,
    "inconclusive": 4,
    "not_comparable": 5,
}

"""What the gate and the report see of a variant, and the seam that a rule implements.

Pure values in memory: nothing here touches torch, files or the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quanteval.records import (
    Artifact,
    Finding,
    LoadPointRecord,
    MachinePeaks,
    MemoryUse,
    RequestTrace,
    TaskRecord,
    VariantResult,
)


@dataclass(frozen=True)
class ScoreSet:
    """The scores of one task of one variant, as columns in journal order.

    `numbers` holds numeric per-sample extras ([n] each); `series` per-token extras (n arrays each).
    """

    record: TaskRecord
    sample_ids: tuple[str, ...]
    prompt_sha256: tuple[str, ...]
    value: NDArray[np.float64]
    weight: NDArray[np.float64]
    status: tuple[str, ...]
    finish_reason: tuple[str, ...]
    output_tokens: NDArray[np.int64]
    outcome: tuple[str, ...] = ()
    problem_ids: tuple[str, ...] = ()
    """What samples of one problem share; empty when every sample is a problem of its own."""
    output_sha256: tuple[str, ...] = ()
    """Hash of each output's text, '' for none; empty when the task has no outputs."""
    numbers: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    series: Mapping[str, tuple[NDArray[np.float64], ...]] = field(default_factory=dict)
    samples: int = 0
    """How many samples the values rest on, where each is the mean over several runs; 0 for one a row."""


@dataclass(frozen=True)
class VariantEvidence:
    """Everything stored about one variant, as the gate and the report see it."""

    name: str
    result: VariantResult
    artifact: Artifact | None
    memory: MemoryUse | None
    traces: Sequence[RequestTrace]
    scores: Mapping[str, ScoreSet]
    load_points: Sequence[LoadPointRecord] = ()
    peaks: MachinePeaks | None = None
    """What the machine can do at best, where it was measured."""


@dataclass(frozen=True)
class RuleContext:
    """What a rule may know besides the two variants: the policy's levels, and the baseline's repetition.

    `again` is the baseline measured a second time under conditions that may vary in production; its
    disagreement with the baseline is the noise floor. None when it was not measured.
    """

    alpha: float = 0.05
    max_missing: float = 0.0
    """Share of a task's samples that may be missing on one side."""
    again: VariantEvidence | None = None


@dataclass(frozen=True)
class SuiteFacts:
    """What is known of a task before it is run, or assumed: its size, the baseline's score, the flips to expect."""

    task: str
    kind: str
    n: int
    """Problems or documents: the units of the tests."""
    score: float | None = None
    """The baseline's mean score, where a stored run tells."""
    flip_rate: float = 0.05
    """Share of problems expected to change, in either direction, for a harmless variant."""
    source: str = "assumed"
    """Where the flip rate comes from."""
    spread: float | None = None
    """Perplexity: standard error of ln ratio at n documents, seen in a stored run."""


@dataclass(frozen=True)
class Forecast:
    """What one rule can decide on one task before anything is run. Losses are in the margin's own unit."""

    rule: str
    task: str
    n: int
    margin: str
    assumed: str
    """What the figures rest on, in words."""
    certifiable: float | None = None
    """Smallest margin accepted with 80 % probability for a harmless variant: the MDE of the decision."""
    detectable: float | None = None
    """Smallest true loss found as a regression with 80 % probability."""
    n_needed: int | None = None
    """Units from which on a harmless variant is accepted with 80 % probability at the rule's margin."""
    accept_harmless: float | None = None
    """Probability that a harmless variant is accepted."""
    reject_double: float | None = None
    """Probability that a loss of twice the margin is rejected."""
    remarks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Rule(Protocol):
    """One named rule of a policy; a frozen dataclass, pure.

    A rule may concern several tasks (all of a kind): it returns one finding for each. A rule that
    finds nothing to check returns a finding with outcome 'skipped'; a rule whose evidence is
    missing or unusable returns 'invalid'. It never returns an empty list.
    """

    @property
    def required(self) -> bool:
        """Whether this rule can keep a candidate from being accepted."""
        ...

    @property
    def is_quality(self) -> bool:
        """Whether acceptance by this rule is evidence that quality was kept."""
        ...

    def check(
        self,
        name: str,
        baseline: VariantEvidence,
        candidate: VariantEvidence,
        context: RuleContext,
    ) -> list[Finding]:
        """Compare; `name` is the rule's key in the policy."""
        ...

"""What tasks leave: a score a sample, and what a journal of them holds."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from quanteval.records.base import FinishReason, Part, Record, SampleStatus


class Score(Part):
    """One sample's score: a line of scores/<task>.jsonl."""

    sample_id: str
    prompt_sha256: str
    """Hash of the prompt's (or scored sequence's) token ids."""
    problem_id: str = ""
    """What samples of one problem share, when a problem has several; empty for a problem of its own."""
    value: float
    """code, multiple_choice, cloze, generate, needle: share that is right, mostly 0 or 1. perplexity: summed negative
    log-likelihood in nats. divergence: summed KL in nats."""
    weight: float
    """perplexity and divergence: number of scored tokens. Every other kind: 1."""
    status: SampleStatus
    finish_reason: FinishReason
    output_tokens: int
    output: str | None = None
    outcome: str = ""
    """code: passed, wrong, timeout, memory, crashed, unparsable, empty, error. Others: right, wrong, empty, no_answer,
    error."""
    detail: str = ""
    numbers: dict[str, float] = Field(default_factory=dict)
    """perplexity: words, bytes. divergence: top1_agree, greedy_same, first_divergence. multiple_choice: acc, acc_norm,
    acc_norm_bytes, acc_norm_tokens, margin, near_tie, batch_noise, gold_logprob, tokens. cloze: logprob, tokens.
    needle: length, depth, prompt_tokens, value_logprob. code: check_cpu_s, limits_factor."""
    series: dict[str, list[float]] = Field(default_factory=dict)
    """perplexity: window_nll, window_tokens, logprobs. divergence: kl. multiple_choice: loglikelihoods, tokens."""
    elapsed_s: float = 0.0


class SequentialLook(Part):
    """How far a task was evaluated that may stop as soon as it is decided."""

    method: Literal["obrien_fleming", "betting"]
    fractions: list[float]
    """Share of the samples evaluated at each planned look; the last is 1."""
    look: int
    """Looks taken, the one that decided included."""
    order_seed: int
    """Draws the order in which samples are evaluated."""
    samples_planned: int


class TaskRecord(Record):
    """What scores/<task>.jsonl holds: scores/<task>.json, written before the first sample."""

    task: str
    kind: str
    suite_version: str
    fingerprint: str
    """Of `inputs`: everything the scores depend on besides the served model."""
    inputs: dict[str, Any]
    stage_fingerprint: str = ""
    """Of `inputs` and the served model together: decides whether the journal may be continued."""
    status: Literal["running", "complete"]
    samples_expected: int
    """Samples the task is complete with: all of the suite, or those up to an early stop."""
    sequential: SequentialLook | None = None
    """None for a task that is always evaluated in full."""
    category_of: dict[str, str] = Field(default_factory=dict)
    elapsed_s: float = 0.0
    journal_sha256: str = ""
    """Of the complete journal; empty while running."""

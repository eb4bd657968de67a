"""What is written to disk: pydantic models with units in their names.

Raw observations are stored and every statistic is recomputed from them. Readers ignore fields
they do not know (a later version may add some) and refuse a record that lacks one they need.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1

SampleStatus = Literal["ok", "timeout", "error", "truncated"]
FinishReason = Literal["stop", "length", "error", "cancelled", "none"]
VariantStatus = Literal["running", "ok", "unsupported", "failed", "out_of_memory", "interrupted"]
Outcome = Literal["accept", "reject", "inconclusive", "invalid", "skipped"]
VerdictOutcome = Literal["accept", "reject", "inconclusive", "error", "not_comparable"]


class Part(BaseModel):
    """A piece of a record. NaN and infinities survive the round trip, as strings."""

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="strings", frozen=True)


class Record(Part):
    """A file, or a line of a journal."""

    schema_version: int = SCHEMA_VERSION


# --------------------------------------------------------------------------- variants


class Precision(Part):
    """What a scheme asks for."""

    weight_bits: float
    """Bits of one quantized weight, scales not counted."""
    activation_bits: float
    """Bits of the activations entering the matrix products."""
    weight_format: str
    """'float32', 'bfloat16', 'int8', 'nf4', 'fp4', ..."""
    compute: str
    """'float', or the integer or float8 format the products are computed in."""
    quantized: bool
    """False for the formats a model is trained or published in."""


class LayerClass(Part):
    """All linear layers of one class and storage format."""

    module_class: str
    weight_class: str
    """Python class of the weight tensor; a subclass where the library uses one."""
    weight_format: str
    count: int
    weights: int
    """Logical weights, biases not counted."""
    stored_bytes: int
    """Bytes held for those weights, scales and zero points included."""
    bits_per_weight: float
    quantized: bool
    kernel: str
    """What computes the product, as far as the loaded module tells."""
    example: str
    """Full name of one of these layers."""


class Effective(Part):
    """What really runs, read back from a loaded model."""

    linear_layers: list[LayerClass]
    dtype_bytes: dict[str, int]
    """Resident bytes by storage dtype, all parameters and buffers, unique storages once."""
    bits_per_weight: float
    """Stored bits over logical weights, whole model (embeddings and head included)."""
    linear_bits_per_weight: float
    """The same over linear layers only, the output head left out."""
    quantized_fraction: float
    """Share of the linear weights (output head left out) that are stored quantized."""
    left_alone: list[str]
    """Names of linear layers that were not quantized."""
    activation_bits: float
    compute_dtype: str
    emulated: bool
    """True when weights or activations are only rounded as the scheme would, and stored or
    multiplied in a wider format than it names (weight-only schemes multiply in float by design)."""
    emulation: str
    """One line: how the products are computed."""
    resident_weight_bytes: int
    parameters: int
    """Logical parameters, tied ones once."""


class Artifact(Record):
    """What a scheme wrote, and, once served, what of it really runs."""

    scheme: str
    scheme_config: dict[str, Any]
    precision: Precision
    model_id: str
    model_revision: str | None
    model_provenance: str
    weights_digest: str
    """sha256 of the source model's weights."""
    path: str
    """Folder that an engine loads."""
    format: str
    """'transformers' (a folder for from_pretrained), later 'gguf', 'openvino', ..."""
    load: dict[str, Any] = Field(default_factory=dict)
    """What the engine needs to know to load it, e.g. {'dtype': 'bfloat16'}."""
    trust_remote_code: bool = False
    bytes_on_disk: int
    """Bytes of the weight files."""
    build_s: float
    packages: dict[str, str] = Field(default_factory=dict)
    fingerprint: str = ""
    effective: Effective | None = None


class MemoryUse(Record):
    """Where the bytes are; the parts and `unaccounted_bytes` add up to `process_peak_bytes`."""

    device: str
    before_load_bytes: int
    """Resident before the model was loaded: interpreter and libraries."""
    weights_bytes: int
    """Unique storages of parameters and buffers."""
    kv_cache_bytes: int
    """Allocated for the KV cache."""
    kv_cache_tokens: int
    """Tokens that allocation holds."""
    kv_bytes_per_token_formula: float
    """2 x layers x kv heads x head dim x element bytes."""
    kv_bytes_per_token_measured: float
    """Allocated bytes over tokens held."""
    activation_peak_bytes: int
    activation_peak_how: str
    process_peak_bytes: int
    """While serving (warm-up and bench). CPU: highest VmHWM. CUDA: peak reserved by the allocator."""
    unaccounted_bytes: int
    """process_peak - (before_load + weights + kv_cache + activation_peak); negative when parts never coincided."""
    phase_peak_bytes: dict[str, int] = Field(default_factory=dict)
    """Peak of the process during load, warmup, bench, tasks."""
    device_total_bytes: int = 0
    """CUDA only: what the driver says is in use on the device."""


class StageRecord(Part):
    """One finished stage of a variant."""

    name: str
    fingerprint: str
    inputs: dict[str, Any]
    """What was hashed into the fingerprint."""
    started_s: float = 0.0
    """Unix time at which the stage's measurements began; 0 where that was not recorded."""
    finished_at: str
    elapsed_s: float
    reused_from: str | None = None
    observed: dict[str, Any] = Field(default_factory=dict)
    """Conditions that only the served model tells, e.g. its batch policy; they travel with the stage."""


class VariantResult(Record):
    """The state of one variant."""

    name: str
    is_baseline: bool
    status: VariantStatus
    reason: str = ""
    """One line when the status is not ok."""
    comparable: dict[str, Any] = Field(default_factory=dict)
    """Conditions that must be equal between variants that are compared."""
    stages: dict[str, StageRecord] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)
    started_at: str = ""
    finished_at: str = ""
    exit_code: int | None = None


# --------------------------------------------------------------------------- measurements


class RequestTrace(Part):
    """One request as the load client saw it; times in seconds since its load point began."""

    round: int = 0
    """Which of the interleaved rounds; each round is served by a process of its own."""
    load_point: str
    """Name, e.g. 'single_stream' or 'closed_loop_4'."""
    concurrency: int
    repetition: int
    warmup: bool
    """True for requests that steady-state figures leave out."""
    request_id: str
    bucket: str
    """Prompt-length bucket, e.g. '0-128'."""
    scheduled_s: float
    sent_s: float
    chunk_times_s: list[float]
    """Arrival of each chunk that carried tokens."""
    chunk_tokens: list[int]
    """Tokens in each of those chunks."""
    end_s: float
    prompt_tokens: int
    output_tokens: int
    status: Literal["ok", "error", "timeout", "cancelled", "out_of_memory"]
    error: str = ""


# --------------------------------------------------------------------------- scores


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


# --------------------------------------------------------------------------- verdicts


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


# --------------------------------------------------------------------------- runs


class Manifest(Record):
    """manifest.json: what a run was asked to do, where and by which versions."""

    run_id: str
    created_at: str
    command: list[str]
    config: dict[str, Any]
    """The resolved configuration; values of secret-looking keys never appear."""
    baseline: str
    variants: list[str]
    """In the order asked, the baseline first."""
    tasks: list[str]
    again: str = ""
    """The baseline's repetition, whose disagreement with it is the noise floor; empty when there is none."""
    policy_name: str
    policy: dict[str, Any]
    environment: dict[str, Any]
    fingerprint: str

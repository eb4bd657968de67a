"""What a scheme asks for and what was served: artifacts, memory, stages, results."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from quanteval.records.base import Part, Record, VariantStatus


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

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
    kv_cache_bits: float = 16
    """Bits of one element of the KV cache, scales not counted."""
    kv_cache_format: str = ""
    """Format of the KV cache where the scheme sets it ('int8', 'fp8', ...); '' where it is the engine's own."""


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
    accuracy_only: str = ""
    """Why memory, latency and throughput of this scheme on this engine say nothing about the scheme (emulated, or
    decompressed at the first forward pass); '' when they do."""
    kv_cache_bits: float = 16
    """Bits of one element of the KV cache as served, scales not counted."""
    kv_cache_format: str = ""
    """Format of the KV cache as served; '' where the engine does not tell."""
    resident_weight_bytes: int
    parameters: int
    """Logical parameters, tied ones once."""


class CalibrationRecord(Part):
    """Texts that a scheme looked at while quantizing."""

    name: str
    digest: str
    """sha256 over the texts, their number, length and seed."""
    samples: int
    length: int
    """Most tokens of one sample."""
    seed: int


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
    """'transformers' (a folder for from_pretrained), 'torch' (one with a loader of its own), 'gguf', 'openvino'."""
    load: dict[str, Any] = Field(default_factory=dict)
    """What the engine needs to know to load it, e.g. {'dtype': 'bfloat16'}. 'loader' is the dotted path of a function
    (artifact, device) -> torch model."""
    trust_remote_code: bool = False
    bytes_on_disk: int
    """Bytes of the weight files."""
    build_s: float
    build_peak_bytes: int = 0
    """Highest resident memory of the process that built it, interpreter and libraries included; 0 where unknown."""
    build_shared: bool = False
    """That process held other schemes' source weights too, since it built several from one load."""
    calibration: CalibrationRecord | None = None
    """What the scheme looked at while quantizing; None for schemes that need nothing."""
    packages: dict[str, str] = Field(default_factory=dict)
    fingerprint: str = ""
    effective: Effective | None = None
    shape: ModelShape | None = None
    """The model's dimensions, once served; None where its configuration does not tell."""


class MemoryUse(Record):
    """Where the bytes are; `parts` and `unaccounted_bytes` add up to `process_peak_bytes`."""

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
    """process_peak - the sum of `parts`; negative when parts never coincided."""
    phase_peak_bytes: dict[str, int] = Field(default_factory=dict)
    """Peak of the process during load, warmup, bench, tasks."""
    device_total_bytes: int = 0
    """CUDA only: what the driver says is in use on the device."""
    library_bytes: int = 0
    """CPU: pages of library and other files that became resident since before the load (not the weights' files)."""
    runtime_bytes: int = 0
    """CPU: in use at rest beyond all of the above: tokenizer, Python objects, prompts, compiled kernels, threads."""
    allocator_bytes: int = 0
    """CPU: freed by the program and not, or only lately, given back to the system, less the activation peak.
    CUDA: reserved by torch's allocator and not allocated at that moment."""
    allocated_peak_bytes: int = 0
    """CUDA: most bytes in live tensors at once."""
    fragmentation_bytes: int = 0
    """CUDA: free pieces of split blocks (inactive_split_bytes), within `allocator_bytes`; no use to large tensors."""
    workspace_bytes: int = 0
    """Kept by libraries for their products (cuBLAS), where it can be told; part of another part, not added."""
    kv_pool_tokens: int = 0
    """Tokens that the KV cache can hold in all, as configured or as the server tells; 0 where unknown."""
    weights_mapped_bytes: int | None = None
    """CPU: the part of `weights_bytes` that lies in mapped files, which the system may drop and read again; None where
    that is not known."""
    weight_file_bytes: int = 0
    """CPU: resident pages of the weights' files that are not weights in use: those were copied or repacked."""
    driver_other_bytes: int = 0
    """CUDA: in use on the device and not reserved by torch here: context, libraries, other processes."""
    account_phase: str = ""
    """The phase whose peak the parts explain; '' where only the parts known from tensors are filled in."""

    @property
    def parts(self) -> dict[str, int]:
        """The parts by name, in the order in which they are shown; parts that this device does not have are 0."""
        return {
            "before_load": self.before_load_bytes,
            "library": self.library_bytes,
            "weights": self.weights_bytes,
            "weight_file": self.weight_file_bytes,
            "kv_cache": self.kv_cache_bytes,
            "activation_peak": self.activation_peak_bytes,
            "runtime": self.runtime_bytes,
            "allocator": self.allocator_bytes,
        }


class ModelShape(Part):
    """A decoder's dimensions and its parameter counts, as its configuration gives them; no weights are read."""

    model_type: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of a dense MLP; of one expert where every layer has experts."""
    vocab_size: int
    tied_head: bool
    """The output head is the embedding table, held once."""
    max_position: int | None = None
    """Longest sequence it was made for, None where it does not say."""
    sliding_window: int | None = None
    """Tokens that the layers with a window attend to, and keep in the cache."""
    window_layers: int = 0
    experts: int = 0
    """Routed experts of a layer that has any."""
    active_experts: int = 0
    """Routed experts that compute one token."""
    embedding_parameters: int
    """Token and position embeddings."""
    attention_parameters: int
    mlp_parameters: int
    """Experts, routers and shared experts included."""
    norm_parameters: int
    head_parameters: int
    """0 when the head is tied."""
    linear_parameters: int
    """Weights of the blocks' linear matrices, experts included: what schemes quantize. No biases, routers or head."""
    linear_rows: int
    """Output features of those matrices in all: as many scales as a scheme with one scale a row stores."""
    expert_parameters: int = 0
    """The part of `linear_parameters` in routed experts."""
    widest_matrix: int
    """Weights of the largest single linear matrix."""
    assumed: str = ""
    """What was taken for granted, '' for a known architecture."""

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        return (
            self.embedding_parameters
            + self.attention_parameters
            + self.mlp_parameters
            + self.norm_parameters
            + self.head_parameters
        )

    @property
    def active_linear_parameters(self) -> int:
        """Weights of the blocks that one token is multiplied with: its own experts only."""
        if not self.experts:
            return self.linear_parameters
        left_out = self.expert_parameters * (self.experts - self.active_experts) // self.experts
        return self.linear_parameters - left_out


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

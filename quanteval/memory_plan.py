"""`quanteval plan memory`: whether a model under a scheme fits a device, from its configuration alone.

Planned for the longest sequence: every user holds a full context at once. What the configuration does not tell
(the CUDA context, the process itself, the allocator's reserve) is an assumption, stated beside its figure.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from quanteval.config import compose, make_plan
from quanteval.errors import ConfigError, QuantevalError
from quanteval.model_config import model_config
from quanteval.modelshape import read_shape
from quanteval.modelwork import ELEMENT_BYTES, element_bytes, kv_bytes, kv_bytes_per_token
from quanteval.records.variants import ModelShape, Precision
from quanteval.report.text import line, wrap
from quanteval.runplan import RunPlan

UNITS = {
    "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
CUDA_OVERHEAD_BYTES = 700_000_000
"""CUDA context, kernels and library workspaces outside torch's allocator: 0.5 to 1 GB on recent devices."""
CPU_BASE_BYTES = 600_000_000
"""A serving process without the model, measured with torch and transformers: 0.41 GB of interpreter and libraries
before the load, 0.12 to 0.14 GB of library pages, tokenizer and Python objects after it, 0.1 GB freed and kept."""
CUDA_RESERVE = 0.05
"""Allocator's blocks that are rounded up or split, as a share of what is allocated."""
CPU_RESERVE = 0.10
FITS, DOES_NOT_FIT = 0, 3


@dataclass(frozen=True)
class WeightStorage:
    """How a scheme keeps a linear weight, and everything else."""

    bits: float
    scale_bits: float
    group: int | None
    """Weights that share a scale; None: one scale a row; 0: none."""
    rest_bytes: int
    """Bytes of an element that is not quantized: embeddings, head, norms, biases, routers."""
    integer: bool = False
    """Products are integer: activations are quantized, sums are int32."""
    note: str = ""

    def linear_bytes(self, shape: ModelShape) -> int:
        """Bytes of the blocks' linear matrices with their scales."""
        scales = shape.linear_rows
        if self.group is not None:
            scales = -(-shape.linear_parameters // self.group) if self.group else 0
        return round((shape.linear_parameters * self.bits + scales * self.scale_bits) / 8)

    def weight_bytes(self, shape: ModelShape) -> int:
        """Bytes of the whole model."""
        rest = shape.parameters - shape.linear_parameters
        return self.linear_bytes(shape) + rest * self.rest_bytes


def storage_of(scheme: Any, device: str) -> WeightStorage:
    """Return how a scheme's artifact is held once it is loaded and has computed once.

    Known exactly for the formats of bitsandbytes and torchao; of others the scales are assumed (one of 16 bits for
    each 64 weights below 8 bits, else one a row), and `note` says so.
    """
    precision: Precision = scheme.precision
    dtype = getattr(scheme, "compute_dtype", None) or getattr(scheme, "dtype", None) or "bfloat16"
    rest = ELEMENT_BYTES.get(str(dtype), 2)
    if not precision.quantized:
        return WeightStorage(precision.weight_bits, 0, 0, round(precision.weight_bits / 8))
    integer = precision.compute != "float"
    library = type(scheme).__module__.rpartition(".")[2]
    if library == "bitsandbytes" and precision.weight_format in ("nf4", "fp4"):
        # On a CPU the scales are cast to bfloat16 when weights are packed; with double quantization they are
        # 8 bits on a GPU, and one float32 for 256 of them.
        on_gpu = 8 + 32 / 256 if getattr(scheme, "double_quant", False) else 32
        return WeightStorage(4, 16 if device == "cpu" else on_gpu, 64, rest)
    if library == "bitsandbytes":
        return WeightStorage(8, 32, None, rest, integer)
    if library == "torchao" and precision.weight_format == "int8":
        # A float32 scale and an int8 zero point a row.
        return WeightStorage(8, 40, None, rest, integer)
    group = 64 if precision.weight_bits < 8 else None
    what = "one of 16 bits for 64 weights" if group else "one of 16 bits a row"
    note = f'scales of format "{precision.weight_format}" are not known here: {what} is assumed'
    return WeightStorage(precision.weight_bits, 16, group, rest, integer, note)


# --------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Demand:
    """What is to be served, on what."""

    context: int
    users: int
    device: str
    available_bytes: int
    kv_format: str
    prefill_tokens: int | None = None
    """Prompt tokens computed in one pass; None: all prompts together."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part, what they add up to, and how far that is from the device."""

    model: str
    scheme: str
    demand: Demand
    shape: ModelShape
    kv_bytes_per_token: float
    parts: Mapping[str, int]
    how: Mapping[str, str]
    most_users: int
    """At this context; 0 when not even one fits."""
    longest_context: int
    """For these users; 0 when none fits."""
    notes: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())

    @property
    def spare_bytes(self) -> int:
        """What is left of the device; negative when it does not fit."""
        return self.demand.available_bytes - self.total_bytes

    @property
    def fits(self) -> bool:
        """Whether all parts fit together."""
        return self.spare_bytes >= 0


def plan_memory(
    shape: ModelShape,
    storage: WeightStorage,
    demand: Demand,
    *,
    model: str = "",
    scheme: str = "",
    notes: Sequence[str] = (),
) -> MemoryPlan:
    """Return the plan of serving `demand.users` sequences of `demand.context` tokens each. Pure."""

    def total(users: int, context: int) -> int:
        changed = dataclasses.replace(demand, users=users, context=context)
        return sum(_parts(shape, storage, changed).values())

    longest = shape.max_position or 2**31
    most_users = _largest(lambda n: total(n, demand.context) <= demand.available_bytes, 2**24)
    longest_context = _largest(lambda n: total(demand.users, n) <= demand.available_bytes, longest)
    notes = [*notes, storage.note, shape.assumed]
    if shape.max_position and demand.context > shape.max_position:
        notes.append(f"the model was made for at most {shape.max_position} tokens")
    if shape.experts:
        notes.append("experts are counted as quantized like the other linear layers")
    return MemoryPlan(
        model=model,
        scheme=scheme,
        demand=demand,
        shape=shape,
        kv_bytes_per_token=kv_bytes_per_token(shape, element_bytes(demand.kv_format)),
        parts=_parts(shape, storage, demand),
        how=_how(shape, storage, demand),
        most_users=most_users,
        longest_context=longest_context,
        notes=tuple(note for note in notes if note),
    )


def _pass_tokens(demand: Demand) -> int:
    together = demand.users * demand.context
    return together if demand.prefill_tokens is None else min(together, demand.prefill_tokens)


def activation_bytes(
    shape: ModelShape, tokens: int, rows: int, rest_bytes: int, integer: bool
) -> int:
    """Estimate the activation peak of a pass over `tokens` tokens that yields `rows` rows of logits.

    tokens x (element x (2 x hidden + widest layer) + 4 x hidden) + rows x vocabulary x (element + 4): the residual
    stream and its norm in float32, the widest layer's inputs and outputs (three MLP widths, or queries three times
    and keys and values four), logits cast to float32. Integer products hold their int32 sums, the rescaled float32
    and the cast result of one MLP width besides. Attention is taken to be fused: no matrix of scores.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    active = max(1, shape.active_experts)
    widest = max(3 * shape.intermediate_size * active, 3 * queries + 4 * keys)
    each = rest_bytes * (2 * shape.hidden_size + widest) + 4 * shape.hidden_size
    if integer:
        each += 10 * shape.intermediate_size * active
    return tokens * each + rows * shape.vocab_size * (rest_bytes + 4)


def _parts(shape: ModelShape, storage: WeightStorage, demand: Demand) -> dict[str, int]:
    on_gpu = demand.device == "cuda"
    weights = storage.weight_bytes(shape)
    cache = round(demand.users * kv_bytes(shape, demand.context, element_bytes(demand.kv_format)))
    activations = activation_bytes(
        shape, _pass_tokens(demand), demand.users, storage.rest_bytes, storage.integer
    )
    # Weight-only formats are unpacked for a product of many rows, one matrix at a time.
    unpacked = storage.bits < 8 * storage.rest_bytes and not storage.integer
    workspace = shape.widest_matrix * storage.rest_bytes if unpacked else 0
    share = CUDA_RESERVE if on_gpu else CPU_RESERVE
    return {
        "weights": weights,
        "KV cache": cache,
        "activations": activations,
        "workspace": workspace,
        "allocator reserve": round(share * (weights + cache + activations + workspace)),
        "CUDA context" if on_gpu else "process": CUDA_OVERHEAD_BYTES if on_gpu else CPU_BASE_BYTES,
    }


def _how(shape: ModelShape, storage: WeightStorage, demand: Demand) -> dict[str, str]:
    on_gpu = demand.device == "cuda"
    bits = 8 * storage.linear_bytes(shape) / shape.linear_parameters
    others = shape.parameters - shape.linear_parameters
    window = (
        f", {shape.window_layers} of {shape.layers} layers keep {shape.sliding_window} tokens"
        if shape.window_layers else ""
    )  # fmt: skip
    return {
        "weights": f"{shape.linear_parameters / 1e6:.1f} M linear at {bits:.3f} bits, "
        f"{others / 1e6:.1f} M others at {8 * storage.rest_bytes}",
        "KV cache": f"{demand.users} x {demand.context} tokens, {demand.kv_format}{window}",
        "activations": f"one pass of {_pass_tokens(demand)} tokens, {demand.users} rows of logits in float32",
        "workspace": "the largest matrix unpacked",
        "allocator reserve": f"assumed: {100 * (CUDA_RESERVE if on_gpu else CPU_RESERVE):g} % of the above",
        "CUDA context": "assumed: context, kernels and library workspaces",
        "process": "assumed: interpreter, libraries and tokenizer",
    }  # fmt: skip


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to `limit` that fits, 0 when 1 does not; `fits` must be monotone."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# --------------------------------------------------------------------------- the verb


def parse_bytes(text: str, name: str) -> int:
    """Return the bytes of '24GB' (10^9), '24GiB' (2^30) or a bare number. ConfigError otherwise."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = found[2] or "B" if found else ""
    if found is None or unit not in UNITS or float(found[1]) <= 0:
        raise ConfigError(
            f'{name} "{text}" is not a size: write 24GB (10^9 bytes each) or 24GiB (2^30)'
        )
    return round(float(found[1]) * UNITS[unit])


def plan_memory_text(overrides: Sequence[str], as_json: bool = False) -> tuple[str, int]:
    """Return what `quanteval plan memory` prints and its exit code: 0 when all schemes fit, 3 otherwise.

    Own keys are gpu, memory, context, users, kv_cache and prefill_tokens; the rest is composed as `run` does.
    Raises ConfigError for wrong input, QuantevalError when a model's configuration cannot be fetched.
    """
    own, others = _split(overrides)
    config, bare = _composed(others)
    plans = [
        _one(config, name, component.object, own, bare)
        for name, component in config.variants.items()
    ]
    text = (
        json.dumps([_plain(plan) for plan in plans], indent=1)
        if as_json
        else "\n\n".join(plan_text(plan) for plan in plans)
    )
    return text, FITS if all(plan.fits for plan in plans) else DOES_NOT_FIT


OWN_KEYS = ("gpu", "memory", "context", "users", "kv_cache", "prefill_tokens")


def _split(overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    own: dict[str, str] = {}
    others = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if equals and key in OWN_KEYS:
            own[key] = value
        elif equals and key == "scheme" and not value.startswith("["):
            others.append(f"scheme=[{value}]")
        else:
            others.append(override)
    return own, others


def _composed(others: Sequence[str]) -> tuple[RunPlan, Mapping[str, Any]]:
    """Build model, schemes and engine; tasks, bench and policy play no part."""
    errors: list[QuantevalError] = []
    made = make_plan(compose(others), errors)
    for error in errors:
        if str(error).startswith(("scheme", "engine", "no scheme", "no engine")):
            raise error
    if not made.variants:
        raise ConfigError("no scheme is chosen: write scheme=nf4_bnb")
    return made, made.config.get("engine") or {}


def _one(
    config: RunPlan, name: str, scheme: Any, own: Mapping[str, str], engine: Mapping[str, Any]
) -> MemoryPlan:
    model = config.model.name
    settings = model_config(model, config.model.revision, config.model.gguf_file)
    if settings.get("quantization_config"):
        raise ConfigError(
            f'model "{model}" is quantized already: plan the unquantized model with the scheme it was made by'
        )
    shape = read_shape(settings)
    device = "cuda" if "gpu" in own else str(engine.get("device", "cpu"))
    if device == "cuda" and "gpu" not in own:
        raise ConfigError("how large is the GPU? write gpu=24GB")
    size = own.get("gpu") or own.get("memory")
    storage = storage_of(scheme, device)
    rest = {4: "float32"}.get(storage.rest_bytes, "bfloat16")
    context = _count(own, "context", min(shape.max_position or 4096, 4096))
    demand = Demand(
        context=context,
        users=_count(own, "users", 1),
        device=device,
        available_bytes=parse_bytes(size, "gpu" if "gpu" in own else "memory")
        if size
        else int(psutil.virtual_memory().total),
        kv_format=own.get("kv_cache", rest),
        prefill_tokens=_count(own, "prefill_tokens", 0) or _pass_of(engine, device),
    )
    return plan_memory(
        shape, storage, demand, model=model, scheme=name, notes=_notes(engine, demand)
    )


def _pass_of(engine: Mapping[str, Any], device: str) -> int | None:
    """Prompt tokens an engine computes at once: a step of continuous batching; whole prompts when it pads."""
    batching = engine.get("batching", "continuous")
    if batching == "continuous" or (batching == "auto" and device == "cuda"):
        step = engine.get("step_tokens") or engine.get("max_num_batched_tokens")
        return int(step) if step else 2048
    capacity = engine.get("kv_cache_tokens")
    return int(capacity) if capacity else None


def _notes(engine: Mapping[str, Any], demand: Demand) -> list[str]:
    capacity, wanted = engine.get("kv_cache_tokens"), demand.users * demand.context
    if isinstance(capacity, int) and capacity < wanted:
        return [
            f"engine.kv_cache_tokens={capacity} holds less: serve with engine.kv_cache_tokens={wanted}"
        ]
    return []


def _count(own: Mapping[str, str], key: str, default: int) -> int:
    if key not in own:
        return default
    if not own[key].isdigit() or int(own[key]) < 1:
        raise ConfigError(f'{key} "{own[key]}" must be a whole number of at least 1')
    return int(own[key])


# --------------------------------------------------------------------------- text


def plan_text(plan: MemoryPlan) -> str:
    """Return the parts as a table, the total against the device, and how far one could go."""
    demand = plan.demand
    device = "GPU" if demand.device == "cuda" else "memory"
    out = wrap(
        f"{line(plan.model)}, {line(plan.scheme)}: {demand.users} users x {demand.context} tokens, "
        f"{plan.kv_bytes_per_token / 1e3:g} kB of KV cache a token"
    )
    for name, size in plan.parts.items():
        out.append(f"  {name:18} {size / 1e9:9.3f} GB  {line(plan.how[name])}"[:120])
    out.append(
        f"  {'total':18} {plan.total_bytes / 1e9:9.3f} GB  of {demand.available_bytes / 1e9:.3f} GB {device}"
    )
    verdict = "fits" if plan.fits else "does not fit"
    left = (
        f"{plan.spare_bytes / 1e9:.3f} GB to spare"
        if plan.fits
        else f"{-plan.spare_bytes / 1e9:.3f} GB too much"
    )
    out.append(f"{verdict}: {left}")
    out += wrap(
        f"at {demand.context} tokens: at most {plan.most_users} users; "
        f"with {demand.users} users: at most {plan.longest_context} tokens"
    )
    return "\n".join(out + [text for note in plan.notes for text in wrap(f"note: {line(note)}")])


def _plain(plan: MemoryPlan) -> dict[str, Any]:
    whole = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    whole["demand"] = dataclasses.asdict(plan.demand)
    whole["shape"] = plan.shape.model_dump()
    return {
        **whole,
        "total_bytes": plan.total_bytes,
        "spare_bytes": plan.spare_bytes,
        "fits": plan.fits,
    }

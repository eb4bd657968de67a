"""What a checkpoint holds, from its safetensors headers and config.json alone: for servers that show no modules.

Knows the layouts of compressed-tensors, GPTQ, AWQ, bitsandbytes and FP8 by the names of their tensors. What the
server makes of them (fused layers, repacked weights) is not seen; float tensors are counted in the dtype in which
they are served. `census` does the same for a loaded model.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quanteval.errors import EngineError
from quanteval.records import Effective, LayerClass

HEADER_LIMIT = 100_000_000
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
NAMES = {**FLOATS, "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32",
         "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}  # fmt: skip
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
PARTS = (
    "weight_packed", "weight_scale_inv", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape",
    "weight_global_scale", "weight_format", "weight", "qweight", "qzeros", "scales", "g_idx", "SCB",
    "input_scale", "input_zero_point", "input_global_scale",
)  # fmt: skip
"""Last parts of the names of what stores one layer's weights; biases belong to no layer's weights."""
_MODULE = re.compile(rf"^(.*)\.({'|'.join(PARTS)})((?:\..+)?)$")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed\w*|wte|wpe|word_embeddings|position_embeddings)$")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output)$")
_CONVOLUTION = re.compile(r"conv\w*$")


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint, as its header says; `data` are its first and last byte in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    data: tuple[int, int]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.data[1] - self.data[0]


def read_headers(folder: Path) -> list[Stored]:
    """Return every tensor of a folder's safetensors files. EngineError when there are none, or one is torn."""
    paths = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        # A folder may hold the same weights a second time, e.g. in one consolidated file.
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        paths = [path for path in paths if path.name in named]
    if not paths:
        raise EngineError(f'"{folder}" holds no safetensors files')
    return [tensor for path in paths for tensor in _read_header(path)]


def _read_header(path: Path) -> list[Stored]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= HEADER_LIMIT:
            raise EngineError(f'"{path}" is no safetensors file, or it is torn')
        raw = file.read(size)
        if len(raw) < size:
            raise EngineError(f'"{path}" is no safetensors file, or it is torn')
        try:
            header = json.loads(raw)
            start = 8 + size
            return [
                Stored(
                    name=name,
                    dtype=NAMES.get(entry["dtype"], entry["dtype"].lower()),
                    shape=tuple(entry["shape"]),
                    path=path,
                    data=(start + entry["data_offsets"][0], start + entry["data_offsets"][1]),
                )
                for name, entry in header.items()
                if name != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineError(f'"{path}" is no safetensors file, or it is torn') from error


@dataclass(frozen=True)
class Layer:
    """One linear layer of a checkpoint."""

    name: str
    layout: str
    weight_format: str
    weights: int
    stored_bytes: int
    quantized: bool
    activation_bits: float
    is_head: bool


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json. EngineError when it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f'"{folder}" has no readable config.json: {error}') from error
    return dict(config)


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config's quantization_config, {} for a model that is not quantized."""
    text = config.get("text_config") or {}
    found = config.get("quantization_config") or text.get("quantization_config") or {}
    return dict(found or config.get("compression_config") or {})


def quant_method(config: Mapping[str, Any]) -> str:
    """Return the quantization method a config names, e.g. 'gptq'; '' for none."""
    return str(quantization_of(config).get("quant_method", "")).lower()


def take_census(
    folder: Path, *, dtype: str | None = None, kernel: str = "not told", emulation: str = ""
) -> Effective:
    """Describe a checkpoint as a server holds it that computes in `dtype` (None: the config's own).

    `kernel` is what computes quantized products, `emulation` the server's own words when it only simulates
    them, '' when it does not. EngineError when the folder's files cannot be read.
    """
    config = read_config(folder)
    compute = dtype or str(config.get("dtype") or config.get("torch_dtype") or "float32")
    tensors = read_headers(folder)
    if config.get("tie_word_embeddings") and any(_is_embedding(t) for t in tensors):
        tensors = [t for t in tensors if not _is_spare_head(t)]
    layers, rest = _split(tensors, config, compute)
    blocks = [layer for layer in layers if not layer.is_head]
    weights = sum(layer.weights for layer in blocks)
    quantized = [layer for layer in blocks if layer.quantized]
    by_dtype = _bytes_by_dtype(tensors, compute)
    parameters = sum(layer.weights for layer in layers) + sum(t.numel for t in rest)
    chosen = quantized or blocks
    activations = sum(layer.activation_bits * layer.weights for layer in chosen)
    plain = f"plain {compute} products"
    return Effective(
        linear_layers=_classes(layers, kernel, plain),
        dtype_bytes=by_dtype,
        bits_per_weight=8 * sum(by_dtype.values()) / max(parameters, 1),
        linear_bits_per_weight=8 * sum(layer.stored_bytes for layer in blocks) / max(weights, 1),
        quantized_fraction=sum(layer.weights for layer in quantized) / max(weights, 1),
        left_alone=[layer.name for layer in layers if not layer.quantized] if quantized else [],
        activation_bits=activations / max(sum(layer.weights for layer in chosen), 1),
        compute_dtype=compute,
        emulated=bool(emulation) and bool(quantized),
        emulation=(emulation or kernel) if quantized else plain,
        resident_weight_bytes=sum(by_dtype.values()),
        parameters=parameters,
    )


def _is_embedding(tensor: Stored) -> bool:
    return bool(_EMBEDDING.search(tensor.name.removesuffix(".weight")))


def _is_spare_head(tensor: Stored) -> bool:
    """Whether a tensor is an output head on disk that a tied model replaces by its embedding."""
    return tensor.name.endswith(".weight") and bool(
        _HEAD.search(tensor.name.removesuffix(".weight"))
    )


def _served_bytes(tensor: Stored, compute: str) -> int:
    return tensor.numel * ITEM_BYTES[compute] if _is_cast(tensor, compute) else tensor.nbytes


def _is_cast(tensor: Stored, compute: str) -> bool:
    """Whether a server converts a tensor to its own dtype: plain weights are, parts of quantized ones are not."""
    if tensor.dtype not in ITEM_BYTES or compute not in ITEM_BYTES:
        return False
    match = _MODULE.match(tensor.name)
    return match is None or (match[2] == "weight" and not match[3])


def _bytes_by_dtype(tensors: Sequence[Stored], compute: str) -> dict[str, int]:
    total: Counter[str] = Counter()
    for tensor in tensors:
        name = compute if _is_cast(tensor, compute) else tensor.dtype
        total[name] += _served_bytes(tensor, compute)
    return dict(total)


def _split(
    tensors: Sequence[Stored], config: Mapping[str, Any], compute: str
) -> tuple[list[Layer], list[Stored]]:
    """Return the linear layers, and the tensors that are no part of one."""
    modules: dict[str, dict[str, Stored]] = defaultdict(dict)
    rest = []
    for tensor in tensors:
        match = _MODULE.match(tensor.name)
        if match is None:
            rest.append(tensor)
        else:
            modules[match[1]][match[2] + match[3]] = tensor
    layers = []
    for name, parts in modules.items():
        layer = _layer(name, parts, config, compute)
        if layer is None:
            rest += parts.values()
        else:
            layers.append(layer)
    return layers, rest


def _layer(
    name: str, parts: Mapping[str, Stored], config: Mapping[str, Any], compute: str
) -> Layer | None:
    weight = parts.get("weight")
    if _EMBEDDING.search(name) or _CONVOLUTION.search(name):
        return None
    found = _quantized(name, parts, config, compute)
    if found is None:
        if weight is None or len(weight.shape) < 2:
            return None
        served = compute if _is_cast(weight, compute) else weight.dtype
        found = ("plain", served, weight.numel, _float_bits(served))
    layout, weight_format, weights, activation_bits = found
    return Layer(
        name=name,
        layout=layout,
        weight_format=weight_format,
        weights=weights,
        stored_bytes=sum(_served_bytes(part, compute) for part in parts.values()),
        quantized=layout != "plain",
        activation_bits=activation_bits,
        is_head=bool(_HEAD.search(name)),
    )


def _quantized(
    name: str, parts: Mapping[str, Stored], config: Mapping[str, Any], compute: str
) -> tuple[str, str, int, float] | None:
    """Return a quantized layer's layout, format, logical weights and activation bits; None for a plain one."""
    settings = quantization_of(config)
    floats = _float_bits(compute)
    if "qweight" in parts:
        bits = int(settings.get("bits") or settings.get("w_bit") or 4)
        method = quant_method(config) or "gptq"
        return method, f"int{bits}", parts["qweight"].numel * 32 // bits, floats
    if "weight_packed" in parts:
        args, activations = _compressed(name, settings, floats)
        packed = parts["weight_packed"]
        per_element = packed.nbytes * 8 // max(packed.numel, 1) // args[1]
        weights = _logical(parts.get("weight_shape")) or packed.numel * per_element
        return "compressed-tensors, packed", f"{args[0]}{args[1]}", weights, activations
    weight = parts.get("weight")
    return None if weight is None else _stored_as_such(name, weight, parts, config, floats)


def _stored_as_such(
    name: str, weight: Stored, parts: Mapping[str, Stored], config: Mapping[str, Any], floats: float
) -> tuple[str, str, int, float] | None:
    """As `_quantized`, for layers whose weights keep the name of plain ones."""
    settings = quantization_of(config)
    states = [part for part in parts if part.startswith("weight.quant_state.bitsandbytes__")]
    if states:
        return "bitsandbytes 4-bit", states[0].rpartition("__")[2], 2 * weight.numel, floats
    if "SCB" in parts:
        return "bitsandbytes int8", "int8", weight.numel, 8
    if weight.dtype in ("int8", "uint8") or weight.dtype.startswith("float8"):
        method = quant_method(config) or "stored scales"
        activations = 8.0
        if settings.get("config_groups"):
            activations = _compressed(name, settings, floats)[1]
        return method, weight.dtype, weight.numel, activations
    return None


def _logical(shape: Stored | None) -> int:
    """Return the product of the two numbers that a `weight_shape` tensor holds; 0 when there is none."""
    if shape is None or shape.dtype not in ("int64", "int32") or shape.numel != 2:
        return 0
    with shape.path.open("rb") as file:
        file.seek(shape.data[0])
        raw = file.read(shape.nbytes)
    half = len(raw) // 2
    return int.from_bytes(raw[:half], "little") * int.from_bytes(raw[half:], "little")


def _compressed(
    name: str, settings: Mapping[str, Any], floats: float
) -> tuple[tuple[str, int], float]:
    """Return ((type, bits) of the weights, bits of the activations) of the group that a layer belongs to."""
    groups = [g for g in (settings.get("config_groups") or {}).values() if isinstance(g, dict)]
    named = [g for g in groups if any(_targets(t, name) for t in g.get("targets") or [])]
    group = (named or groups or [{}])[0]
    weights = group.get("weights") or {}
    activations = group.get("input_activations") or {}
    kind = str(weights.get("type", "int"))
    return (kind, int(weights.get("num_bits") or 4)), float(activations.get("num_bits") or floats)


def _targets(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return name == target or name.endswith("." + target)


def _float_bits(dtype: str) -> float:
    return 8.0 * ITEM_BYTES.get(dtype, 1)


def _classes(layers: Sequence[Layer], kernel: str, plain: str) -> list[LayerClass]:
    groups: dict[tuple[str, str, bool], list[Layer]] = defaultdict(list)
    for layer in layers:
        groups[layer.layout, layer.weight_format, layer.is_head].append(layer)
    found = []
    for (layout, weight_format, is_head), members in groups.items():
        weights = sum(member.weights for member in members)
        stored = sum(member.stored_bytes for member in members)
        found.append(
            LayerClass(
                module_class="output head" if is_head else "linear",
                weight_class=layout,
                weight_format=weight_format,
                count=len(members),
                weights=weights,
                stored_bytes=stored,
                bits_per_weight=8 * stored / max(weights, 1),
                quantized=members[0].quantized,
                kernel=kernel if members[0].quantized else plain,
                example=members[0].name,
            )
        )
    return found

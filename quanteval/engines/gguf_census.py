"""What a GGUF file holds, and what an engine makes of it: the census for engines that load such files.

The file tells the formats; the engine says what it keeps in memory and which precision enters the
products.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quanteval.records import Effective, LayerClass

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
HEADS = ("token_embd.weight", "output.weight")


@dataclass(frozen=True)
class FileTensor:
    """One tensor of the file: `weights` elements in `stored_bytes`."""

    name: str
    format: str
    dimensions: int
    weights: int
    stored_bytes: int

    @property
    def quantized(self) -> bool:
        """Whether it is in a block format."""
        return self.format not in FLOATS.values()

    @property
    def is_linear(self) -> bool:
        """Whether it is a matrix of a block."""
        return self.dimensions > 1 and self.name not in HEADS


@dataclass(frozen=True)
class GGUFCensus:
    """A file's tensors, and of its metadata what sizes a KV cache."""

    tensors: tuple[FileTensor, ...]
    layers: int
    kv_heads: int
    head_dim: int
    context: int
    vocabulary: int

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.stored_bytes for tensor in self.tensors)

    def kv_values_per_token(self) -> int:
        """2 x layers x key-value heads x head dimension."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def has_blocks(self) -> bool:
        """Whether any matrix of a block is quantized."""
        return any(tensor.quantized for tensor in self.tensors if tensor.is_linear)


def read_gguf(path: Path) -> GGUFCensus:
    """Read a GGUF file's header; the weights are mapped and not read."""
    import gguf

    reader = gguf.GGUFReader(path)

    def value(key: str, default: Any = None) -> Any:
        field = reader.fields.get(key)
        return default if field is None else field.contents()

    arch = value("general.architecture")
    heads = int(value(f"{arch}.attention.head_count"))
    width = int(value(f"{arch}.embedding_length"))
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    return GGUFCensus(
        tensors=tuple(
            FileTensor(
                name=tensor.name,
                format=FLOATS.get(tensor.tensor_type.name, tensor.tensor_type.name.lower()),
                dimensions=len(tensor.shape),
                weights=int(tensor.n_elements),
                stored_bytes=int(tensor.n_bytes),
            )
            for tensor in reader.tensors
        ),
        layers=int(value(f"{arch}.block_count")),
        kv_heads=int(value(f"{arch}.attention.head_count_kv", heads)),
        head_dim=int(value(f"{arch}.attention.key_length", width // heads)),
        context=int(value(f"{arch}.context_length")),
        vocabulary=len(tokens.data) if tokens is not None else 0,
    )


def effective(
    census: GGUFCensus,
    *,
    engine: str,
    kernel: str,
    float_kernel: str,
    activation_bits: float,
    compute: str,
    emulated: bool = False,
    notes: str = "",
) -> Effective:
    """Describe a served file. `kernel` computes the products of quantized matrices, `float_kernel` of others.

    `activation_bits` are those that enter the quantized products (all products, when none is quantized).
    """
    linear = [tensor for tensor in census.tensors if tensor.is_linear]
    weights = sum(tensor.weights for tensor in linear)
    quantized = sum(tensor.weights for tensor in linear if tensor.quantized)
    by_format: Counter[str] = Counter()
    for tensor in census.tensors:
        by_format[tensor.format] += tensor.stored_bytes
    parameters = sum(tensor.weights for tensor in census.tensors)
    used = [kernel] if quantized else []
    used += [float_kernel] if quantized < weights else []
    return Effective(
        linear_layers=_classes(census, engine, kernel, float_kernel),
        dtype_bytes=dict(by_format),
        bits_per_weight=8 * census.stored_bytes / max(parameters, 1),
        linear_bits_per_weight=8 * sum(t.stored_bytes for t in linear) / max(weights, 1),
        quantized_fraction=quantized / max(weights, 1),
        left_alone=[t.name for t in linear if not t.quantized] if quantized else [],
        activation_bits=activation_bits,
        compute_dtype=compute,
        emulated=emulated,
        emulation="; ".join([*used, notes] if notes else used),
        resident_weight_bytes=census.stored_bytes,
        parameters=parameters,
    )


def _classes(census: GGUFCensus, engine: str, kernel: str, float_kernel: str) -> list[LayerClass]:
    groups: dict[tuple[str, bool], list[FileTensor]] = defaultdict(list)
    for tensor in census.tensors:
        if tensor.dimensions > 1:
            groups[tensor.format, tensor.is_linear].append(tensor)
    return [
        LayerClass(
            module_class=f"{engine}.{'MatMul' if is_linear else 'Embedding'}",
            weight_class=f"gguf.{kind}",
            weight_format=kind,
            count=len(members),
            weights=sum(t.weights for t in members),
            stored_bytes=sum(t.stored_bytes for t in members),
            bits_per_weight=8 * sum(t.stored_bytes for t in members)
            / max(sum(t.weights for t in members), 1),
            quantized=members[0].quantized,
            kernel=kernel if members[0].quantized else float_kernel,
            example=members[0].name,
        )
        for (kind, is_linear), members in groups.items()
    ]  # fmt: skip

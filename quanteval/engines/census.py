"""What really runs: a walk over a loaded torch model's modules and the bytes they hold.

Knows how bitsandbytes and torchao keep their weights, by the shape of their objects rather than by
importing them. A layer it does not recognize is reported under its own class with what its tensors say.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quanteval.records import Effective, LayerClass

FLOATS = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class LinearLayer:
    """One linear layer as found; `weights` counts logical weights, `stored_bytes` what holds them."""

    name: str
    module_class: str
    weight_class: str
    weight_format: str
    weights: int
    stored_bytes: int
    quantized: bool
    activation_bits: float
    kernel: str
    is_head: bool


def inner_tensors(tensor: Any) -> Iterator[Any]:
    """Yield the plain tensors that hold a tensor's data: itself, or a subclass's parts, recursively."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        quant_state = getattr(tensor, "quant_state", None)
        if quant_state is not None:
            yield from _state_tensors(quant_state)
        for name in ("CB", "SCB"):
            part = getattr(tensor, name, None)
            if part is not None:
                yield part
        return
    for name in flatten()[0]:
        part = getattr(tensor, name)
        if part is not None:
            yield from inner_tensors(part)


def _state_tensors(state: Any) -> Iterator[Any]:
    """Yield the tensors of a bitsandbytes quant state; its shared code book is no weight storage."""
    for name in ("absmax", "offset"):
        part = getattr(state, name, None)
        if hasattr(part, "untyped_storage"):
            yield part
    nested = getattr(state, "state2", None)
    if nested is not None:
        yield from _state_tensors(nested)


def _module_tensors(model: Any) -> Iterator[Any]:
    for parameter in model.parameters():
        yield from inner_tensors(parameter)
    for buffer in model.buffers():
        yield from inner_tensors(buffer)
    for module in model.modules():
        state = getattr(module, "state", None)
        for name in ("CB", "SCB"):
            part = getattr(state, name, None)
            if part is not None and hasattr(part, "untyped_storage"):
                yield part


def storage_bytes(tensors: Iterator[Any]) -> dict[str, int]:
    """Return bytes by dtype over unique storages, so that tied and shared tensors count once."""
    seen: set[tuple[str, int]] = set()
    total: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.device.type == "meta" or tensor.numel() == 0:
            continue
        storage = tensor.untyped_storage()
        key = (str(tensor.device), storage.data_ptr())
        if key not in seen:
            seen.add(key)
            total[dtype_name(tensor)] += storage.nbytes()
    return dict(total)


def model_dtype_bytes(model: Any) -> dict[str, int]:
    """Return the resident bytes of a model's parameters, buffers and quantization state, by dtype."""
    return storage_bytes(_module_tensors(model))


def model_storages(model: Any) -> dict[int, int]:
    """Return the address and size of every storage on the CPU that `model_dtype_bytes` counts."""
    found: dict[int, int] = {}
    for tensor in _module_tensors(model):
        if tensor.device.type == "cpu" and tensor.numel():
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def dtype_name(tensor: Any) -> str:
    """Return 'bfloat16' for torch.bfloat16."""
    return str(tensor.dtype).removeprefix("torch.")


def is_linear(module: Any) -> bool:
    """Whether a module is a linear layer: torch's, a subclass, or one that looks like it."""
    names = {cls.__name__ for cls in type(module).__mro__}
    looks = hasattr(module, "in_features") and hasattr(module, "out_features")
    return "Linear" in names or (looks and "Linear" in type(module).__name__)


def linear_layers(model: Any) -> list[LinearLayer]:
    """Return every linear layer of a model, the output head marked."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [
        _describe(name, module, module is head)
        for name, module in model.named_modules()
        if is_linear(module)
    ]


def _describe(name: str, module: Any, is_head: bool) -> LinearLayer:
    weight = module.weight
    state = getattr(module, "state", None)
    tensors = list(inner_tensors(weight))
    if state is not None and getattr(state, "CB", None) is not None:
        tensors += [state.CB, state.SCB]
    weight_format, activation_bits, kernel = _format(module, weight)
    return LinearLayer(
        name=name,
        module_class=_class_name(module),
        weight_class=_class_name(weight),
        weight_format=weight_format,
        weights=int(module.in_features) * int(module.out_features),
        stored_bytes=sum(storage_bytes(iter(tensors)).values()),
        quantized=weight_format not in FLOATS,
        activation_bits=activation_bits,
        kernel=kernel,
        is_head=is_head,
    )


def _class_name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _format(module: Any, weight: Any) -> tuple[str, float, str]:
    """Return the storage format, the bits of the activations in the product, and the kernel."""
    module_name = type(module).__name__
    if module_name == "Linear4bit":
        return _four_bit(module, weight)
    if module_name == "Linear8bitLt":
        on = weight.device.type
        kernel = f"bitsandbytes LLM.int8(): int8 x int8 products on {on}, outlier features in float"
        return "int8", 8, kernel
    if hasattr(weight, "qdata") and hasattr(weight, "act_quant_kwargs"):
        bits = dtype_name(weight.qdata)
        if weight.act_quant_kwargs is None:
            bits_in = _bits(dtype_name(weight))
            return bits, bits_in, "torchao: dequantized to float for the product (eager)"
        return bits, 8, "torchao: activations quantized per token, int8 x int8 product (eager)"
    if hasattr(weight, "__tensor_flatten__"):
        parts = sorted({dtype_name(part) for part in inner_tensors(weight)})
        return "+".join(parts), _bits(dtype_name(weight)), "not known"
    name = dtype_name(weight)
    return name, _bits(name), f"torch {name} matrix product"


def _four_bit(module: Any, weight: Any) -> tuple[str, float, str]:
    state = weight.quant_state
    bits = _bits(str(getattr(module, "compute_dtype", None) or "bfloat16").removeprefix("torch."))
    if state is None:
        return dtype_name(weight), bits, "not quantized yet"
    packed = getattr(state, "packing_format_for_cpu", False)
    how = (
        "weights packed for a fused CPU product"
        if packed
        else "dequantized to float for the product"
    )
    return str(state.quant_type), bits, f"bitsandbytes 4-bit: {how}"


def _bits(dtype: str) -> float:
    digits = "".join(c for c in dtype if c.isdigit())
    return float(digits) if digits else 0.0


def read_back(model: Any) -> Effective:
    """Describe a loaded model after at least one forward pass (some libraries repack weights then)."""
    layers = linear_layers(model)
    blocks = [layer for layer in layers if not layer.is_head]
    bytes_by_dtype = model_dtype_bytes(model)
    resident = sum(bytes_by_dtype.values())
    parameters = _logical_parameters(model, layers)
    weights = sum(layer.weights for layer in blocks)
    quantized = sum(layer.weights for layer in blocks if layer.quantized)
    kernels = Counter(layer.kernel for layer in blocks)
    return Effective(
        linear_layers=_classes(layers),
        dtype_bytes=bytes_by_dtype,
        bits_per_weight=8 * resident / max(parameters, 1),
        linear_bits_per_weight=8 * sum(layer.stored_bytes for layer in blocks) / max(weights, 1),
        quantized_fraction=quantized / max(weights, 1),
        left_alone=[layer.name for layer in layers if not layer.quantized] if quantized else [],
        activation_bits=_weighted_activation_bits(blocks),
        compute_dtype=dtype_name(next(p for p in model.parameters() if p.is_floating_point())),
        emulated=False,
        emulation="; ".join(kernel for kernel, _ in kernels.most_common()),
        resident_weight_bytes=resident,
        parameters=parameters,
    )


def _weighted_activation_bits(blocks: list[LinearLayer]) -> float:
    """Return the activation bits of the quantized layers (of all, when none is quantized)."""
    chosen = [layer for layer in blocks if layer.quantized] or blocks
    total = sum(layer.weights for layer in chosen)
    return sum(layer.activation_bits * layer.weights for layer in chosen) / max(total, 1)


def _classes(layers: list[LinearLayer]) -> list[LayerClass]:
    groups: dict[tuple[Any, ...], list[LinearLayer]] = defaultdict(list)
    for layer in layers:
        key = (
            layer.module_class,
            layer.weight_class,
            layer.weight_format,
            layer.kernel,
            layer.is_head,
        )
        groups[key].append(layer)
    return [
        LayerClass(
            module_class=members[0].module_class,
            weight_class=members[0].weight_class,
            weight_format=members[0].weight_format,
            count=len(members),
            weights=sum(m.weights for m in members),
            stored_bytes=sum(m.stored_bytes for m in members),
            bits_per_weight=8 * sum(m.stored_bytes for m in members)
            / max(sum(m.weights for m in members), 1),
            quantized=members[0].quantized,
            kernel=members[0].kernel,
            example=members[0].name,
        )
        for members in groups.values()
    ]  # fmt: skip


def _logical_parameters(model: Any, layers: list[LinearLayer]) -> int:
    """Count weights as the architecture has them: packed layers by their shape, tied ones once."""
    logical = {layer.name: layer.weights for layer in layers}
    seen: set[int] = set()
    total = 0
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        tensors = list(inner_tensors(parameter))
        key = tensors[0].untyped_storage().data_ptr()
        if key in seen and tensors[0].device.type != "meta":
            continue
        seen.add(key)
        total += logical[owner] if leaf == "weight" and owner in logical else parameter.numel()
    return total

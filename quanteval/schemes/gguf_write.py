"""Writes a GGUF file from a Hugging Face folder: metadata, vocabulary, and tensors one at a time.

Knows the Llama family (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM) with a byte-level
BPE vocabulary; everything else is refused by name, with the way out. Only one tensor is in memory
at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quanteval.errors import UnsupportedError
from quanteval.schemes.gguf_vocabulary import Vocabulary, read_vocabulary

FLOAT_TYPES = ("F32", "F16", "BF16")
BLOCK_TYPES = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
WIDE_ROWS = "F16"
"""Type of a matrix whose rows do not divide into the blocks of the type asked for."""

OTHERWISE = (
    "convert it with llama.cpp's convert_hf_to_gguf.py and use scheme=gguf_file with that file"
)


@dataclass(frozen=True)
class Architecture:
    """What differs between the families: GGUF's name, and whether rotary pairs are interleaved."""

    name: str
    permuted: bool


ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture("LLAMA", permuted=True),
    "MistralForCausalLM": Architecture("LLAMA", permuted=True),
    "Qwen2ForCausalLM": Architecture("QWEN2", permuted=False),
}


@dataclass(frozen=True)
class Types:
    """Which format each kind of tensor gets."""

    blocks: str
    embeddings: str


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Return the family of a model's config. UnsupportedError when it cannot be written here."""
    names = config.get("architectures") or [str(config.get("model_type", ""))]
    known = ARCHITECTURES.get(names[0])
    if known is None:
        raise UnsupportedError(
            f'"{names[0]}" is not written to GGUF here ({", ".join(ARCHITECTURES)} are): {OTHERWISE}'
        )
    window = config.get("sliding_window")
    positions = config.get("max_position_embeddings") or 0
    if window and window < positions and config.get("use_sliding_window", True):
        raise UnsupportedError(
            f'GGUF engines do not apply its sliding window of "{window}" tokens: lower max_position_embeddings to it'
        )
    kind = rope(config)["rope_type"]
    if kind not in ("default", "linear", "llama3"):
        raise UnsupportedError(f'rotary scaling "{kind}" is not written to GGUF here: {OTHERWISE}')
    return known


def rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a config, in the newer spelling."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    found.setdefault("rope_type", found.get("type", "default"))
    found.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return found


def rope_factors(config: Mapping[str, Any]) -> list[float] | None:
    """Return what each rotary frequency is divided by under 'llama3' scaling, None without it.

    Source: the scaling of Llama 3.1, as `transformers.modeling_rope_utils` computes it.
    """
    found = rope(config)
    if found["rope_type"] != "llama3":
        return None
    dim = head_dim(config)
    old = found["original_max_position_embeddings"]
    low, high, factor = found["low_freq_factor"], found["high_freq_factor"], found["factor"]
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * found["rope_theta"] ** (i / dim)
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(float(factor))
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def head_dim(config: Mapping[str, Any]) -> int:
    """Return the width of one attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def tensor_type(name: str, shape: tuple[int, ...], types: Types) -> str:
    """Return the format that a tensor of that GGUF name and shape is stored in.

    Vectors (norms, biases) stay in float32; a matrix whose rows do not divide into blocks of the
    type asked for is kept in float16.
    """
    import gguf

    if len(shape) == 1:
        return "F32"
    wanted = types.embeddings if name in ("token_embd.weight", "output.weight") else types.blocks
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[wanted]][0]
    return wanted if shape[-1] % block == 0 else WIDE_ROWS


def write_gguf(source: Path, target: Path, types: Types) -> None:
    """Write the model in the folder `source` to the file `target`. UnsupportedError as the parts say."""
    import gguf

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    architecture = architecture_of(config)
    vocabulary = read_vocabulary(source, config, OTHERWISE)
    arch = gguf.MODEL_ARCH[architecture.name]
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[arch])
    _add_metadata(writer, source, config, types)
    _add_vocabulary(writer, vocabulary)
    names = gguf.get_tensor_name_map(arch, int(config["num_hidden_layers"]))
    plan = list(_plan(source, config, names, types))
    try:
        for item in plan:
            size = math.prod(item.shape) * item.bytes_per_block // item.block
            dtype = _stored_dtype(item.type)
            stored = item.stored_shape if dtype == "uint8" else item.shape
            writer.add_tensor_info(
                item.name, stored, _numpy_dtype(dtype), size,
                raw_dtype=gguf.GGMLQuantizationType[item.type],
            )  # fmt: skip
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for item in plan:
            values = item.read()
            if architecture.permuted and item.heads:
                values = interleave(values, item.heads)
            writer.write_tensor_data(
                gguf.quants.quantize(values, gguf.GGMLQuantizationType[item.type])
            )
    finally:
        writer.close()


def interleave(values: Any, heads: int) -> Any:
    """Reorder each head's rows from (first halves, second halves) to pairs: GGUF's rotary order for Llama."""
    paired = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)


@dataclass(frozen=True)
class _Item:
    """A tensor to write: where it comes from, and in which format it goes."""

    name: str
    shape: tuple[int, ...]
    type: str
    heads: int
    file: Path | None
    key: str
    values: tuple[float, ...] = ()

    @property
    def _sizes(self) -> tuple[int, int]:
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.type]]
        return int(block), int(size)

    @property
    def block(self) -> int:
        return self._sizes[0]

    @property
    def bytes_per_block(self) -> int:
        return self._sizes[1]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-1], self.shape[-1] // self.block * self.bytes_per_block)

    def read(self) -> Any:
        """Return the tensor as a float32 array."""
        import numpy as np

        if self.file is None:
            return np.array(self.values, dtype=np.float32)
        import torch
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as file:
            tensor = file.get_tensor(self.key)
        return np.ascontiguousarray(tensor.to(torch.float32).numpy())


def _stored_dtype(kind: str) -> str:
    return {"F32": "float32", "F16": "float16"}.get(kind, "uint8")


def _numpy_dtype(name: str) -> Any:
    import numpy as np

    return np.dtype(name)


def _plan(source: Path, config: Mapping[str, Any], names: Any, types: Types) -> Iterator[_Item]:
    from safetensors import safe_open

    factors = rope_factors(config)
    if factors is not None:
        yield _Item("rope_freqs.weight", (len(factors),), "F32", 0, None, "", tuple(factors))
    seen: set[str] = set()
    tied = bool(config.get("tie_word_embeddings"))
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  (a safetensors file is no mapping)
                if key.endswith("rotary_emb.inv_freq") or (tied and key == "lm_head.weight"):
                    continue
                name = names.get_name(key, try_suffixes=(".weight", ".bias"))
                if name is None:
                    raise UnsupportedError(f'tensor "{key}" has no name in GGUF: {OTHERWISE}')
                if name in seen:
                    raise UnsupportedError(f'two weight files hold "{key}": remove one of them')
                seen.add(name)
                shape = tuple(file.get_slice(key).get_shape())
                kind = tensor_type(name, shape, types)
                yield _Item(name, shape, kind, _rotary_heads(key, config), path, key)
    if not seen:
        raise UnsupportedError(f'"{source}" has no safetensors to convert: {OTHERWISE}')


def _rotary_heads(key: str, config: Mapping[str, Any]) -> int:
    heads = int(config["num_attention_heads"])
    if ".q_proj." in key:
        return heads
    return int(config.get("num_key_value_heads") or heads) if ".k_proj." in key else 0


def _add_metadata(writer: Any, source: Path, config: Mapping[str, Any], types: Types) -> None:
    import gguf

    heads = int(config["num_attention_heads"])
    found = rope(config)
    writer.add_type("model")
    writer.add_name(source.name)
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_rope_freq_base(float(found["rope_theta"]))
    if found["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(found["factor"]))
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    writer.add_vocab_size(int(config["vocab_size"]))
    kind = "ALL_F32" if types.blocks == "F32" else f"MOSTLY_{types.blocks}"
    writer.add_file_type(int(gguf.LlamaFileType[kind]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.types))
    if vocabulary.merges:
        writer.add_token_merges(list(vocabulary.merges))
    for kind, token_id in vocabulary.special.items():
        getattr(writer, f"add_{kind}_token_id")(token_id)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_space_prefix(False)
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)

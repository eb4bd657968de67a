"""What a decoder computes and moves: floating-point operations and bytes of a prefill and of a decode step.

Formulas are those of Kaplan et al., "Scaling Laws for Neural Language Models", 2020 (2 operations a weight and
token), with attention counted for the positions that a causal mask leaves, and windows respected. Bytes are what
must cross the memory bus at least once: weights, cached keys and values; activations, which caches may hold, and
rereads are left out. Grouped key-value heads count once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quanteval.errors import ConfigError
from quanteval.records.variants import ModelShape

ELEMENT_BYTES: Mapping[str, int] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Floating-point operations and bytes of one forward pass."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.bytes


def element_bytes(dtype: str) -> int:
    """Return the bytes of one element; ConfigError for a format that is not known."""
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f'KV cache format "{dtype}" is not known; use {", ".join(ELEMENT_BYTES)}')
    return ELEMENT_BYTES[dtype]


def kv_bytes_per_token(shape: ModelShape, kv_element_bytes: float) -> float:
    """Return 2 x layers x key-value heads x head dimension x element bytes, for a token within every window."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * kv_element_bytes


def kv_bytes(shape: ModelShape, tokens: int, kv_element_bytes: float) -> float:
    """Return the cache of one sequence: layers with a window keep no more tokens than that."""
    kept = (shape.layers - shape.window_layers) * tokens + shape.window_layers * _seen(
        shape, tokens
    )
    return 2 * shape.kv_heads * shape.head_dim * kv_element_bytes * kept


def _seen(shape: ModelShape, tokens: int) -> int:
    return tokens if shape.sliding_window is None else min(tokens, shape.sliding_window)


def _pairs(tokens: int, window: int) -> float:
    """Return how many (query, key) pairs a causal mask with this window leaves among `tokens` positions."""
    reach = min(tokens, window)
    return reach * (reach + 1) / 2 + (tokens - reach) * reach


def _attention_flops(shape: ModelShape, full: float, windowed: float) -> float:
    """4 x heads x head dimension operations a pair and layer: the scores and the weighted sum."""
    layers = (shape.layers - shape.window_layers) * full + shape.window_layers * windowed
    return 4 * shape.heads * shape.head_dim * layers


def weight_bytes_read(
    shape: ModelShape, resident_bytes: float, tokens: int, embedding_element_bytes: float = 2
) -> float:
    """Return the weight bytes that one pass over `tokens` tokens reads.

    An embedding table that is not also the head is looked up, not read through. Of experts those are read
    that some token chose: with uniform routing E x (1 - (1 - active / E) ^ tokens) of E.
    """
    table = 0 if shape.tied_head else shape.embedding_parameters
    read = resident_bytes - table * embedding_element_bytes
    if shape.experts and shape.parameters > table:
        share = 1 - (1 - shape.active_experts / shape.experts) ** tokens
        experts = read * shape.expert_parameters / (shape.parameters - table)
        read -= experts * (1 - share)
    looked_up = (0 if shape.tied_head else tokens) * shape.hidden_size * embedding_element_bytes
    return max(0.0, read) + looked_up


def prefill_work(
    shape: ModelShape, tokens: int, resident_bytes: float, kv_element_bytes: float = 2
) -> Work:
    """Return the work of reading a prompt of `tokens` tokens: logits of the last one, its cache written.

    flops = 2 x active linear weights x n + 4 x heads x head dim x layers x n(n + 1)/2 + 2 x hidden x vocabulary.
    """
    head = 2 * shape.hidden_size * shape.vocab_size
    window = shape.sliding_window or tokens
    attention = _attention_flops(shape, _pairs(tokens, tokens), _pairs(tokens, window))
    return Work(
        2 * shape.active_linear_parameters * tokens + attention + head,
        weight_bytes_read(shape, resident_bytes, tokens)
        + kv_bytes_per_token(shape, kv_element_bytes) * tokens,
    )


def decode_work(
    shape: ModelShape,
    batch: float,
    context: float,
    resident_bytes: float,
    kv_element_bytes: float = 2,
) -> Work:
    """Return the work of one decode step of `batch` sequences with `context` tokens each in the cache.

    flops = batch x (2 x (active linear weights + hidden x vocabulary) + 4 x heads x head dim x layers x context);
    bytes = weights once + batch x (cache read + one token written).
    """
    tokens, held = max(1, round(batch)), round(context)
    head = shape.hidden_size * shape.vocab_size
    attention = _attention_flops(shape, context, _seen(shape, held))
    return Work(
        batch * (2 * (shape.active_linear_parameters + head) + attention),
        weight_bytes_read(shape, resident_bytes, tokens)
        + batch
        * (kv_bytes(shape, held, kv_element_bytes) + kv_bytes_per_token(shape, kv_element_bytes)),
    )

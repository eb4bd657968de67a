"""A decoder's shape, read from its config.json alone, and what a forward pass computes and moves.

Counts parameters by class for the architectures in `FAMILIES`; one that is not there is counted as a
Llama, and says so. Architectures whose cache is no plain cache of keys and values are refused.
Nothing here reads weights or imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quanteval.errors import ConfigError
from quanteval.records.variants import ModelShape

ALIASES = {
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads"),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "n_ctx"),
    "num_experts": ("num_local_experts",),
}
"""Other names under which families keep the same thing."""

OTHER_CACHES = {
    "kv_lora_rank": "multi-head latent attention: engines cache latents or whole keys and values",
    "state_size": "it keeps a recurrent state",
    "ssm_state_size": "it keeps a recurrent state",
    "mamba_d_state": "it keeps a recurrent state",
    "linear_num_key_heads": "some layers keep a recurrent state",
    "lru_width": "it keeps a recurrent state",
    "global_head_dim": "its layers have caches of different widths",
    "num_kv_shared_layers": "some layers share their cache",
}
"""Fields that show a cache of another kind, and what kind."""

KNOWN_LAYERS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Family:
    """What an architecture's classes add to its configuration: biases, norms, the MLP's form, defaults."""

    gated: bool = True
    """The MLP multiplies two projections: three matrices, not two."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    bias_field: str = ""
    """Field that switches the attention's biases: queries, keys and values, and the output where `out_follows`."""
    out_follows: bool = True
    mlp_bias_field: str = ""
    norm_bias: bool = False
    block_norms: int = 2
    qk_norm: str = ""
    """'head': a norm of head_dim on queries and on keys; 'full': over all heads together."""
    head_bias: bool = False
    tied: bool = False
    """Whether the head is tied where the configuration does not say."""
    learned_positions: bool = False
    window: str = ""
    """Which layers have the window when no layer types are listed: 'all', 'even', 'pattern', 'late', '' none."""
    expert_size_field: str = ""
    """Where the width of one expert stands; '' for an MLP without experts."""
    defaults: Mapping[str, Any] = field(default_factory=dict)


LLAMA = Family(bias_field="attention_bias", mlp_bias_field="mlp_bias")
FAMILIES: Mapping[str, Family] = {
    "llama": LLAMA,
    "granite": LLAMA,
    "smollm3": Family(bias_field="attention_bias", mlp_bias_field="mlp_bias", tied=True),
    "mistral": Family(window="all"),
    "ministral": Family(window="all"),
    "ministral3": Family(window="all"),
    "mixtral": Family(window="all", expert_size_field="intermediate_size"),
    "qwen2": Family(qkv_bias=True, window="late"),
    "qwen2_moe": Family(
        qkv_bias=True, bias_field="qkv_bias", out_follows=False, window="late",
        expert_size_field="moe_intermediate_size",
    ),
    "qwen3": Family(bias_field="attention_bias", qk_norm="head", window="late"),
    "qwen3_moe": Family(
        bias_field="attention_bias", qk_norm="head", window="late",
        expert_size_field="moe_intermediate_size",
    ),
    "gemma": Family(bias_field="attention_bias", tied=True),
    "gemma2": Family(bias_field="attention_bias", block_norms=4, tied=True, window="even"),
    "gemma3_text": Family(
        bias_field="attention_bias", block_norms=4, qk_norm="head", tied=True, window="pattern",
        # Published multimodal configurations leave these out.
        defaults={
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
            "vocab_size": 262208, "sliding_window": 4096, "max_position_embeddings": 131072,
        },
    ),
    "phi": Family(
        gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True, block_norms=1,
        head_bias=True,
    ),
    "phi3": Family(window="all"),
    "olmo2": Family(bias_field="attention_bias", qk_norm="full"),
    "starcoder2": Family(
        gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, bias_field="use_bias",
        mlp_bias_field="use_bias", norm_bias=True, tied=True, window="all",
    ),
    "gpt_neox": Family(
        gated=False, qkv_bias=True, out_bias=True, bias_field="attention_bias", mlp_bias=True,
        norm_bias=True,
    ),
    "gpt2": Family(
        gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True, tied=True,
        learned_positions=True,
    ),
}  # fmt: skip
"""By `model_type`. Checked against the parameter counts of the models that transformers builds."""


# --------------------------------------------------------------------------- reading


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a config.json describes; of a multimodal one, its language model's.

    Raises ConfigError naming the field that is missing, or why such a model cannot be planned.
    """
    return _Reader(config).shape()


class _Reader:
    """Looks fields up under all their names."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        outer = config
        inner = next(
            (config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), Mapping)),
            None,
        )  # fmt: skip
        config = outer if inner is None else inner
        self.config: Mapping[str, Any] = config
        self.outer = outer
        self.multimodal = inner is not None
        self.model_type = str(config.get("model_type") or outer.get("model_type") or "")
        self.known = self.model_type in FAMILIES
        self.family = FAMILIES.get(self.model_type, LLAMA)
        self._refuse_what_is_not_planned()

    def _refuse_what_is_not_planned(self) -> None:
        name = self.model_type or "unknown"
        if self.outer.get("is_encoder_decoder"):
            raise ConfigError(
                f'model type "{name}" is an encoder and a decoder: only decoders are planned'
            )
        for key, why in OTHER_CACHES.items():
            if self.config.get(key):
                raise ConfigError(
                    f'model type "{name}" has no plain cache of keys and values ({key}; {why}): measure it instead'
                )
        for kind in self._layer_types():
            if kind not in KNOWN_LAYERS:
                raise ConfigError(
                    f'model type "{name}" has layers of type "{kind}", whose memory is not known: measure it instead'
                )
        if not self.known and self.get("num_experts"):
            raise ConfigError(
                f'model type "{name}" has experts of a form that is not known here: measure it instead'
            )

    def get(self, name: str) -> Any:
        """Return a field under any of its names, the family's default, or None."""
        for key in (name, *ALIASES.get(name, ())):
            if self.config.get(key) is not None:
                return self.config[key]
        return self.family.defaults.get(name)

    def number(self, name: str) -> int:
        """Return a field that must be there and positive."""
        value = self.get(name)
        if value is None:
            names = ", ".join(f'"{key}"' for key in (name, *ALIASES.get(name, ())))
            also = " (looked in its text_config)" if self.multimodal else ""
            raise ConfigError(f'config.json of type "{self.model_type}" lacks {names}{also}')
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f'config.json: {name} "{value}" must be a whole number of at least 1')
        return value

    def _layer_types(self) -> Sequence[str]:
        types = self.config.get("layer_types")
        return [str(kind) for kind in types] if isinstance(types, list | tuple) else []

    @property
    def tied(self) -> bool:
        for source in (self.config, self.outer):
            if source.get("tie_word_embeddings") is not None:
                return bool(source["tie_word_embeddings"])
        return self.family.tied

    def _bias(self, field_name: str, default: bool) -> bool:
        value = self.config.get(field_name) if field_name else None
        return default if value is None else bool(value)

    # ---- windows

    def window(self, layers: int) -> tuple[int | None, int]:
        """Return the window and how many layers have one."""
        window = self.get("sliding_window")
        if not window or self.config.get("use_sliding_window") is False:
            return None, 0
        count = self._window_layers(layers)
        return (int(window), count) if count else (None, 0)

    def _window_layers(self, layers: int) -> int:
        if types := self._layer_types():
            return sum(kind == "sliding_attention" for kind in types[:layers])
        every = self._first("sliding_window_pattern", "_sliding_window_pattern", default=6)
        full = min(layers, self._first("max_window_layers", default=28))
        late = layers - full if self.config.get("use_sliding_window") else 0
        counts = {
            "all": layers,
            "even": (layers + 1) // 2,
            "pattern": layers - layers // every,
            "late": late,
        }
        return counts.get(self.family.window, 0)

    def _first(self, *names: str, default: int) -> int:
        return next((int(self.config[n]) for n in names if self.config.get(n) is not None), default)

    # ---- counting

    def shape(self) -> ModelShape:
        hidden, layers = self.number("hidden_size"), self.number("num_hidden_layers")
        heads, vocab = self.number("num_attention_heads"), self.number("vocab_size")
        kv_heads = self.number("num_key_value_heads") if self.get("num_key_value_heads") else heads
        head_dim = self.number("head_dim") if self.get("head_dim") else hidden // heads
        attention = self._attention(hidden, heads, kv_heads, head_dim)
        mlp = self._mlp(hidden, layers)
        tied, norm = self.tied, hidden * (2 if self.family.norm_bias else 1)
        window, window_layers = self.window(layers)
        positions = self.number("max_position_embeddings") if self.family.learned_positions else 0
        linear = layers * attention.weights + mlp.weights
        head = 0 if tied else vocab * (hidden + (1 if self.family.head_bias else 0))
        if tied and self.family.head_bias:
            head = vocab
        return ModelShape(
            model_type=self.model_type,
            layers=layers,
            hidden_size=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=mlp.width,
            vocab_size=vocab,
            tied_head=tied,
            max_position=self.get("max_position_embeddings"),
            sliding_window=window,
            window_layers=window_layers,
            experts=mlp.experts,
            active_experts=mlp.active,
            embedding_parameters=(vocab + positions) * hidden,
            attention_parameters=layers * (attention.weights + attention.biases),
            mlp_parameters=mlp.weights + mlp.biases + mlp.routers,
            norm_parameters=layers * (self.family.block_norms * norm + attention.norms) + norm,
            head_parameters=head,
            linear_parameters=linear,
            linear_rows=layers * attention.rows + mlp.rows,
            expert_parameters=mlp.expert_weights,
            widest_matrix=max(attention.widest, mlp.widest),
            assumed=self._assumed(),
        )

    def _assumed(self) -> str:
        notes = []
        if not self.known:
            notes.append(f'model type "{self.model_type}" is not known here and counted as a Llama')
        if self.multimodal:
            notes.append("only the language model is counted, not what reads images or sound")
        return "; ".join(notes)

    def _attention(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> _Attention:
        family = self.family
        queries, keys = heads * head_dim, kv_heads * head_dim
        qkv_bias = self._bias(family.bias_field, family.qkv_bias)
        out_bias = self._bias(family.bias_field if family.out_follows else "", family.out_bias)
        norms = {"head": 2 * head_dim, "full": queries + keys}.get(family.qk_norm, 0)
        return _Attention(
            weights=hidden * (queries + 2 * keys) + queries * hidden,
            rows=queries + 2 * keys + hidden,
            biases=(queries + 2 * keys) * qkv_bias + hidden * out_bias,
            norms=norms,
            widest=hidden * queries,
        )

    def _mlp(self, hidden: int, layers: int) -> _MLP:
        family = self.family
        bias = self._bias(family.mlp_bias_field, family.mlp_bias)
        experts = self.get("num_experts") if family.expert_size_field else None
        if not experts:
            width = self._dense_width(hidden)
            return _MLP.of(layers, hidden, width, family.gated, bias)
        width = self.number(family.expert_size_field)
        active = self.number("num_experts_per_tok")
        if active > experts:
            raise ConfigError(
                f'config.json: num_experts_per_tok "{active}" is more than its {experts} experts'
            )
        sparse = self._sparse_layers(layers)
        dense = (
            _MLP.of(layers - sparse, hidden, self._dense_width(hidden), family.gated, bias)
            if sparse < layers
            else None
        )
        shared_width = self.config.get("shared_expert_intermediate_size") or 0
        routed = _MLP.of(sparse * experts, hidden, width, family.gated, bias)
        shared = _MLP.of(sparse if shared_width else 0, hidden, shared_width, family.gated, bias)
        parts = [part for part in (routed, shared, dense) if part is not None]
        return _MLP(
            width=max(width, dense.width if dense else 0, shared_width),
            weights=sum(part.weights for part in parts),
            rows=sum(part.rows for part in parts),
            biases=sum(part.biases for part in parts),
            routers=sparse * hidden * (experts + (1 if shared_width else 0)),
            widest=max(part.widest for part in parts),
            experts=experts,
            active=active,
            expert_weights=routed.weights,
        )  # fmt: skip

    def _dense_width(self, hidden: int) -> int:
        if self.get("intermediate_size") is None and self.model_type == "gpt2":
            return 4 * hidden
        return self.number("intermediate_size")

    def _sparse_layers(self, layers: int) -> int:
        """Count the layers with experts: every `decoder_sparse_step`th that is not listed as dense."""
        step = int(self.config.get("decoder_sparse_step") or 1)
        dense = set(self.config.get("mlp_only_layers") or ())
        return sum(i not in dense and (i + 1) % step == 0 for i in range(layers))


@dataclass(frozen=True)
class _Attention:
    """One layer's attention."""

    weights: int
    rows: int
    biases: int
    norms: int
    widest: int


@dataclass(frozen=True)
class _MLP:
    """All layers' MLPs together."""

    width: int
    weights: int
    rows: int
    biases: int
    widest: int
    routers: int = 0
    experts: int = 0
    active: int = 0
    expert_weights: int = 0

    @staticmethod
    def of(count: int, hidden: int, width: int, gated: bool, bias: bool) -> _MLP:
        """`count` equal MLPs: one or two projections up, one down."""
        ups = 2 if gated else 1
        rows = ups * width + hidden
        return _MLP(
            width=width,
            weights=count * (ups + 1) * hidden * width,
            rows=count * rows,
            biases=count * rows if bias else 0,
            widest=hidden * width if count else 0,
        )

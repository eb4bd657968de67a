"""Shapes read from configurations: parameter counts equal those of the models transformers builds."""

from __future__ import annotations

import pytest

from quanteval.errors import ConfigError
from quanteval.modelshape import read_shape

SMALL = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
USUAL = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 80}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
CASES = {
    "llama": USUAL,
    "llama-biases": {"model_type": "llama", **USUAL, "attention_bias": True, "mlp_bias": True},
    "llama-tied": {"model_type": "llama", **USUAL, "tie_word_embeddings": True, "head_dim": 16},
    "granite": USUAL,
    "smollm3": {**USUAL, "pad_token_id": 0},
    "mistral": USUAL,
    "mixtral": {**USUAL, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2": USUAL,
    "qwen2_moe": {**USUAL, **EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 40},
    "qwen2_moe-mixed": {
        "model_type": "qwen2_moe", **USUAL, **EXPERTS, "num_experts": 6,
        "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2,
    },
    "qwen3": {**USUAL, "head_dim": 16},
    "qwen3_moe": {**USUAL, **EXPERTS, "num_experts": 6, "head_dim": 16},
    "qwen3_moe-mixed": {
        "model_type": "qwen3_moe", **USUAL, **EXPERTS, "num_experts": 6, "mlp_only_layers": [1],
    },
    "gemma": {**USUAL, "head_dim": 20},
    "gemma2": {**USUAL, "head_dim": 20},
    "gemma3_text": {**USUAL, "head_dim": 20},
    "phi": USUAL,
    "phi3": {**USUAL, "pad_token_id": 0},
    "olmo2": USUAL,
    "starcoder2": USUAL,
    "gpt_neox": {**SMALL, "intermediate_size": 80},
    "gpt_neox-no-bias": {
        "model_type": "gpt_neox", **SMALL, "intermediate_size": 80, "attention_bias": False,
    },
    "gpt2": {"vocab_size": 96, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "gpt2-inner": {
        "model_type": "gpt2", "vocab_size": 96, "n_embd": 48, "n_layer": 3, "n_head": 4,
        "n_positions": 64, "n_inner": 70,
    },
}  # fmt: skip


def built(fields):
    """The configuration as transformers writes it, and the model on the meta device."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[fields["model_type"]](
        **{key: value for key, value in fields.items() if key != "model_type"}
    )
    with torch.device("meta"):
        return config.to_dict(), AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", CASES)
def test_counts_are_those_of_the_built_model(name):
    fields = {"model_type": name, **CASES[name]}
    config, model = built(fields)
    for shape in (read_shape(fields), read_shape(config)):
        counts = dict.fromkeys(("embedding", "attention", "mlp", "norm", "head"), 0)
        linear = rows = 0
        for key, parameter in model.named_parameters():
            counts[kind_of(key)] += parameter.numel()
            if is_linear(key, parameter):
                linear += parameter.numel()
                rows += rows_of(key, parameter, model)
        assert shape.parameters == sum(p.numel() for p in model.parameters())
        assert {kind: getattr(shape, f"{kind}_parameters") for kind in counts} == counts
        assert shape.linear_parameters == linear
        assert shape.linear_rows == rows


def kind_of(key):
    if key.startswith(("lm_head", "embed_out")):
        return "head"
    if any(word in key for word in ("embed_tokens", "embed_in", "wte", "wpe")):
        return "embedding"
    if any(word in key for word in ("q_norm", "k_norm", "norm", "ln_")):
        return "norm"
    return "attention" if "attn" in key or "attention" in key else "mlp"


def is_linear(key, parameter):
    if kind_of(key) not in ("attention", "mlp") or parameter.ndim < 2:
        return False
    return not (key.endswith(("gate.weight", "router.weight", "shared_expert_gate.weight")))


def rows_of(key, parameter, model):
    if parameter.ndim == 3:  # experts, stacked: [experts, out, in]
        return parameter.shape[0] * parameter.shape[1]
    return parameter.shape[1 if model.config.model_type == "gpt2" else 0]


# --------------------------------------------------------------------------- windows and experts


@pytest.mark.parametrize(
    ("fields", "window", "layers"),
    [
        ({"model_type": "mistral", "sliding_window": 32}, 32, 4),
        ({"model_type": "mistral", "sliding_window": None}, None, 0),
        ({"model_type": "gemma2", "sliding_window": 32}, 32, 2),
        ({"model_type": "gemma3_text", "sliding_window": 32}, 32, 4),
        ({"model_type": "gemma3_text", "sliding_window": 32, "num_hidden_layers": 7}, 32, 6),
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False}, None, 0),
        (
            {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 3},
            32, 1,
        ),
        ({"model_type": "llama", "sliding_window": 32}, None, 0),
        (
            {"model_type": "llama", "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2},
            9, 2,
        ),
    ],
)  # fmt: skip
def test_layers_with_a_window(fields, window, layers):
    shape = read_shape({**USUAL, **fields})
    assert (shape.sliding_window, shape.window_layers) == (window, layers)


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "qwen2", "mistral"])
def test_windows_are_those_transformers_derives(name):
    extra = {"use_sliding_window": True, "max_window_layers": 2} if name == "qwen2" else {}
    fields = {"model_type": name, **USUAL, "sliding_window": 32, **extra}
    config, _ = built(fields)
    full, own = read_shape(config), read_shape(fields)
    assert (full.sliding_window, full.window_layers) == (own.sliding_window, own.window_layers)
    if "layer_types" in config:
        assert own.window_layers == config["layer_types"].count("sliding_attention")


def test_only_the_active_experts_compute_a_token():
    shape = read_shape(
        {"model_type": "mixtral", **USUAL, "num_local_experts": 8, "num_experts_per_tok": 2}
    )
    expert = 3 * 48 * 80
    assert shape.expert_parameters == 4 * 8 * expert
    assert shape.linear_parameters - shape.active_linear_parameters == 4 * 6 * expert


# --------------------------------------------------------------------------- what is refused or assumed


def test_the_text_config_of_a_multimodal_model_with_its_defaults():
    shape = read_shape(
        {
            "model_type": "gemma3",
            "vision_config": {},
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
                "num_hidden_layers": 34, "sliding_window": 1024,
            },
        }
    )  # fmt: skip
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.vocab_size) == (8, 4, 256, 262208)
    assert shape.tied_head
    assert shape.parameters == pytest.approx(3.88e9, rel=0.01)
    assert "language model" in shape.assumed


def test_an_unknown_decoder_is_counted_as_a_llama_and_says_so():
    shape = read_shape({"model_type": "newllm", **USUAL})
    assert shape.parameters == read_shape({"model_type": "llama", **USUAL}).parameters
    assert '"newllm"' in shape.assumed


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_field_is_named(missing):
    fields = {key: value for key, value in USUAL.items() if key != missing}
    with pytest.raises(ConfigError, match=f'lacks "{missing}"'):
        read_shape({"model_type": "llama", **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "latent"),
        ({"model_type": "mamba", "state_size": 16}, "recurrent"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({"model_type": "newmoe", "num_experts": 4}, "experts"),
        ({"model_type": "llama", "hidden_size": 0}, '"0"'),
        ({"model_type": "llama", "hidden_size": "big"}, '"big"'),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
            "num_experts_per_tok",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(fields, words):
    with pytest.raises(ConfigError, match=words) as caught:
        read_shape({**USUAL, **fields})
    assert "\n" not in str(caught.value)

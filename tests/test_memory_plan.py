"""Planning memory from a configuration: the parts add up, limits are limits, weights are those that are held."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quanteval.engines.transformers import TransformersEngine
from quanteval.errors import ConfigError, QuantevalError
from quanteval.interfaces import Calibration, Request, Sampling
from quanteval.memory_plan import (
    Demand,
    WeightStorage,
    parse_bytes,
    plan_memory,
    plan_memory_text,
    storage_of,
)
from quanteval.model_config import model_config
from quanteval.modelshape import read_shape
from quanteval.schemes.bitsandbytes import FourBit, Int8
from quanteval.schemes.none import Unquantized
from quanteval.schemes.torchao import Int8DynamicActivationInt8Weight, Int8WeightOnly

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072,
}  # fmt: skip
SHAPE = read_shape(LLAMA_8B)
BF16 = WeightStorage(16, 0, 0, 2)
GPU = Demand(8192, 4, "cuda", 24 * 10**9, "bfloat16", 1024)


def test_a_known_model_by_hand():
    made = plan_memory(SHAPE, BF16, GPU)
    assert SHAPE.parameters == 8_030_261_248
    assert made.parts["weights"] == 2 * 8_030_261_248
    assert made.kv_bytes_per_token == 131_072
    assert made.parts["KV cache"] == 131_072 * 4 * 8192
    assert made.total_bytes == sum(made.parts.values())
    assert made.fits == (made.spare_bytes >= 0)
    assert set(made.parts) <= set(made.how)


@given(
    users=st.integers(1, 64),
    context=st.integers(1, 131072),
    size=st.floats(17e9, 90e9),
    chunk=st.one_of(st.none(), st.integers(1, 4096)),
)
def test_the_limits_it_names_fit_and_one_more_does_not(users, context, size, chunk):
    demand = Demand(context, users, "cuda", int(size), "bfloat16", chunk)
    made = plan_memory(SHAPE, BF16, demand)
    assert made.fits == (users <= made.most_users) == (context <= made.longest_context)
    for n in (made.most_users, made.most_users + 1):
        if n:
            again = plan_memory(
                SHAPE, BF16, Demand(context, n, "cuda", int(size), "bfloat16", chunk)
            )
            assert again.fits == (n <= made.most_users)
    if made.longest_context < 131072:
        longer = Demand(made.longest_context + 1, users, "cuda", int(size), "bfloat16", chunk)
        assert not plan_memory(SHAPE, BF16, longer).fits


def test_half_the_element_is_half_the_cache():
    one = plan_memory(SHAPE, BF16, GPU).parts["KV cache"]
    for kind in ("fp8", "int8"):
        demand = Demand(8192, 4, "cuda", 24 * 10**9, kind, 1024)
        assert plan_memory(SHAPE, BF16, demand).parts["KV cache"] * 2 == one
    with pytest.raises(ConfigError, match='"int3"'):
        plan_memory(SHAPE, BF16, Demand(8192, 4, "cuda", 24 * 10**9, "int3", 1024))


def test_a_window_bounds_the_cache():
    shape = read_shape({**LLAMA_8B, "model_type": "mistral", "sliding_window": 4096})
    sizes = [
        plan_memory(shape, BF16, Demand(n, 1, "cuda", 10**11, "bfloat16", 512)).parts["KV cache"]
        for n in (4096, 100_000)
    ]
    assert sizes[0] == sizes[1] == 131_072 * 4096


def test_a_model_too_large_for_the_device_serves_nobody():
    made = plan_memory(SHAPE, BF16, Demand(8192, 1, "cuda", 10**10, "bfloat16", 1024))
    assert (made.fits, made.most_users, made.longest_context) == (False, 0, 0)


@pytest.mark.parametrize(
    "scheme",
    [
        Unquantized("float32"), Unquantized("bfloat16"), FourBit(), FourBit(double_quant=True),
        Int8(), Int8WeightOnly(), Int8DynamicActivationInt8Weight(),
    ],
    ids=lambda s: type(s).__name__,
)  # fmt: skip
def test_weights_and_cache_are_those_of_the_served_model(scheme, tiny_source, tmp_path):
    shape = read_shape(model_config(str(tiny_source.path)))
    artifact = scheme.quantize(tiny_source, tmp_path, Calibration(), "cpu")
    with TransformersEngine(kv_cache_tokens=256, max_batch_rows=2).serve(artifact) as session:
        request = Request("a", session.tokenizer.raw("hello"), Sampling(4, ignore_eos=True))
        list(session.generate([request]))
        use, effective = session.memory(), session.describe()
    # Rotary frequencies are a buffer that no configuration counts, in two copies of half a head.
    buffers = 4 * shape.head_dim
    if getattr(scheme, "double_quant", False):
        # Each matrix keeps the mean of its scales.
        buffers += 4 * sum(layer.count for layer in effective.linear_layers if layer.quantized)
    assert storage_of(scheme, "cpu").weight_bytes(shape) == use.weights_bytes - buffers
    assert shape.parameters == effective.parameters
    demand = Demand(
        64, 1, "cpu", 10**9, "float32" if scheme == Unquantized("float32") else "bfloat16"
    )
    made = plan_memory(shape, storage_of(scheme, "cpu"), demand)
    assert made.kv_bytes_per_token == use.kv_bytes_per_token_measured


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GB", 24 * 10**9), ("24GiB", 24 * 2**30), ("80e9", 80 * 10**9), ("0.5 GB", 5 * 10**8)],
)
def test_sizes(text, size):
    assert parse_bytes(text, "gpu") == size


@pytest.mark.parametrize("text", ["24", "-1GB", "24 gigs", "", "0GB", "GB"])
def test_sizes_without_sense_are_refused(text):
    if text == "24":
        assert parse_bytes(text, "gpu") == 24
        return
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text, "gpu")


# --------------------------------------------------------------------------- the verb


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return path


def test_the_verb_answers_with_a_table_and_an_exit_code(config_file):
    wanted = [f"model={config_file}", "scheme=nf4_bnb", "gpu=24GB", "context=8192", "users=4"]
    text, code = plan_memory_text(wanted)
    assert code == 0
    assert "fits: " in text
    assert "at most" in text
    text, code = plan_memory_text([*wanted[:2], "gpu=8GB", "context=131072"])
    assert code == 3
    assert "does not fit: " in text


def test_json_holds_what_the_table_says(config_file):
    text, code = plan_memory_text(
        [f"model={config_file}", "scheme=[bf16,nf4_bnb]", "gpu=12GB"], as_json=True
    )
    plans = json.loads(text)
    assert [plan["scheme"] for plan in plans] == ["bf16", "nf4_bnb"]
    assert [plan["fits"] for plan in plans] == [False, True]
    assert code == 3
    for plan in plans:
        assert plan["total_bytes"] == sum(plan["parts"].values())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["scheme=nosuch"], "nosuch"),
        (["users=0"], 'users "0"'),
        (["context=many"], 'context "many"'),
        (["gpu=big"], "is not a size"),
        (["engine.device=cuda"], "gpu=24GB"),
        (["model=no_such_model_here"], "no_such_model_here"),
        (["kv_cache=int3"], '"int3"'),
    ],
)
def test_wrong_input_is_one_line(config_file, overrides, words):
    with pytest.raises(QuantevalError, match=words) as caught:
        plan_memory_text([f"model={config_file}", "scheme=bf16", *overrides])
    assert "\n" not in str(caught.value)


def test_without_a_network_a_hub_id_is_one_line():
    with pytest.raises(QuantevalError, match="give a folder"):
        model_config("nobody/nothing-that-is-cached")


def test_a_quantized_model_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA_8B, "quantization_config": {"bits": 4}}))
    with pytest.raises(ConfigError, match="quantized already"):
        plan_memory_text([f"model={path}", "scheme=bf16"])

"""Work of a pass by hand, and shares and bounds against a machine's peaks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quanteval.metrics.utilization import decode_utilization, prefill_utilization
from quanteval.modelshape import read_shape
from quanteval.modelwork import decode_work, kv_bytes, prefill_work, weight_bytes_read
from quanteval.records import Effective, MachinePeaks

CONFIG = {
    "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 16, "vocab_size": 32, "head_dim": 2,
}  # fmt: skip
SHAPE = read_shape(CONFIG)
LINEAR = 3 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16)
PEAKS = MachinePeaks(
    device="cpu", copy_bytes_per_s=1e6, matmul_flops_per_s={"bfloat16": 1e7, "int8": 4e7}, how=""
)


def served(**fields):
    given_fields = {
        "linear_layers": [], "dtype_bytes": {}, "bits_per_weight": 16, "linear_bits_per_weight": 16,
        "quantized_fraction": 0, "left_alone": [], "activation_bits": 16, "compute_dtype": "bfloat16",
        "emulated": False, "emulation": "", "resident_weight_bytes": 2 * SHAPE.parameters,
        "parameters": SHAPE.parameters, **fields,
    }  # fmt: skip
    return Effective(**given_fields)


def test_prefill_by_hand():
    work = prefill_work(SHAPE, 5, 2 * SHAPE.parameters)
    # Each of 15 (query, key) pairs of 4 heads of 2: a product and a sum of 2 values, twice.
    attention = 3 * 15 * 4 * (2 * 2 + 2 * 2)
    assert SHAPE.linear_parameters == LINEAR
    assert work.flops == 2 * LINEAR * 5 + attention + 2 * 8 * 32
    table, token = 32 * 8 * 2, 2 * 3 * 2 * 2 * 2
    assert work.bytes == 2 * SHAPE.parameters - table + 5 * 8 * 2 + 5 * token


def test_a_decode_step_by_hand():
    work = decode_work(SHAPE, 4, 10, 2 * SHAPE.parameters)
    assert work.flops == 4 * (2 * (LINEAR + 8 * 32) + 3 * 10 * 4 * 8)
    token = 2 * 3 * 2 * 2 * 2
    assert work.bytes == 2 * SHAPE.parameters - 512 + 4 * 16 + 4 * (10 + 1) * token


@given(tokens=st.integers(1, 60))
def test_a_prompt_is_its_tokens_one_by_one(tokens):
    """Attention of a prefill is that of decode steps at growing contexts; heads differ."""
    head = 2 * 8 * 32
    steps = sum(decode_work(SHAPE, 1, n, 0).flops - head for n in range(1, tokens + 1))
    assert prefill_work(SHAPE, tokens, 0).flops == steps + head


def test_windows_bound_attention_and_cache():
    window = read_shape({**CONFIG, "model_type": "mistral", "sliding_window": 4})
    steps = sum(decode_work(window, 1, n, 0).flops - 512 for n in range(1, 21))
    assert prefill_work(window, 20, 0).flops == steps + 512
    assert kv_bytes(window, 20, 2) == kv_bytes(window, 4, 2) == kv_bytes(SHAPE, 4, 2)


def test_only_experts_that_are_chosen_are_read():
    shape = read_shape(
        {**CONFIG, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    )
    resident = 2 * shape.parameters
    one, all_of_them = (
        weight_bytes_read(shape, resident, 1),
        weight_bytes_read(shape, resident, 500),
    )
    assert all_of_them - 499 * 16 - one == pytest.approx(2 * shape.expert_parameters * 6 / 8)


# --------------------------------------------------------------------------- shares


def test_shares_and_bound():
    work = decode_work(SHAPE, 1, 10, 2 * SHAPE.parameters)
    made = decode_utilization(SHAPE, served(), PEAKS, 1, 10, 0.02)
    assert made.mfu == pytest.approx(work.flops / 0.02 / 1e7)
    assert made.mbu == pytest.approx(work.bytes / 0.02 / 1e6)
    assert (made.ridge, made.bound) == (10, "memory")
    assert made.statement.startswith("decode is memory-bound: MBU ")
    long = prefill_utilization(SHAPE, served(), PEAKS, 200, 0.1)
    assert long.intensity > 10
    assert long.bound == "compute"


def test_integer_products_are_held_against_the_integer_rate():
    made = decode_utilization(SHAPE, served(activation_bits=8), PEAKS, 1, 10, 0.02)
    assert (made.compute_format, made.ridge) == ("int8", 40)
    emulated = decode_utilization(SHAPE, served(activation_bits=8, emulated=True), PEAKS, 1, 10, 1)
    assert emulated.compute_format == "bfloat16"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, served(), PEAKS, 1, 10, 0.02), "shape"),
        ((SHAPE, None, PEAKS, 1, 10, 0.02), "served"),
        ((SHAPE, served(), None, 1, 10, 0.02), "peaks"),
        ((SHAPE, served(), PEAKS, 0, 10, 0.02), "open loop"),
        ((SHAPE, served(), PEAKS, 1, 10, 0.0), "no time"),
        ((SHAPE, served(), PEAKS, 1, 10, float("nan")), "no time"),
    ],
)
def test_what_is_not_known_is_none_with_a_reason(arguments, words):
    made = decode_utilization(*arguments)
    assert (made.mfu, made.mbu, made.bound) == (None, None, None)
    assert words in made.reason
    assert words in made.statement


def test_one_peak_without_the_other():
    made = decode_utilization(SHAPE, served(compute_dtype="float64"), PEAKS, 1, 10, 0.02)
    assert made.mfu is None
    assert made.mbu is not None
    assert "float64" in made.reason
    half = PEAKS.model_copy(update={"copy_bytes_per_s": None})
    assert decode_utilization(SHAPE, served(), half, 1, 10, 0.02).mbu is None

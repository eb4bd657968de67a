"""What a checkpoint holds is read from its headers, for each layout by numbers worked out by hand."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from quanteval.engines.checkpoint_census import quant_method, read_headers, take_census
from quanteval.errors import EngineError

ROWS, COLUMNS = 8, 64
WEIGHTS = ROWS * COLUMNS
VOCABULARY = 10


def floats(*shape, dtype=np.float16):
    return np.zeros(shape, dtype)


def checkpoint(folder, tensors, *, quantization=None, tied=False, dtype="float16"):
    tensors = {
        "model.embed_tokens.weight": floats(VOCABULARY, COLUMNS),
        "model.norm.weight": floats(COLUMNS),
        **tensors,
    }
    save_file(tensors, folder / "model.safetensors")
    config = {"tie_word_embeddings": tied, "dtype": dtype}
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def only_class(effective):
    (found,) = [c for c in effective.linear_layers if c.module_class == "linear"]
    return found


def test_plain_floats_are_counted_in_the_served_dtype(tmp_path):
    folder = checkpoint(
        tmp_path,
        {"a.q_proj.weight": floats(ROWS, COLUMNS), "a.q_proj.bias": floats(ROWS), "lm_head.weight": floats(10, 64)},
    )  # fmt: skip
    for dtype, size in ((None, 2), ("float32", 4)):
        effective = take_census(folder, dtype=dtype)
        parameters = 2 * VOCABULARY * COLUMNS + COLUMNS + WEIGHTS + ROWS
        assert effective.parameters == parameters
        assert effective.resident_weight_bytes == size * parameters
        assert effective.bits_per_weight == effective.linear_bits_per_weight == 8 * size
        assert effective.activation_bits == 8 * size
        assert effective.quantized_fraction == 0
        assert effective.left_alone == []
        assert effective.compute_dtype == (dtype or "float16")
        assert [(c.module_class, c.count) for c in effective.linear_layers] == [
            ("linear", 1), ("output head", 1),
        ]  # fmt: skip


def test_bfloat16_headers_are_read(tmp_path):
    """NumPy has no bfloat16: the file is written by hand."""
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    }
    raw = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(12))
    (tmp_path / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    effective = take_census(tmp_path)
    assert effective.dtype_bytes == {"bfloat16": 12}
    assert only_class(effective).weights == 6


def test_a_tied_head_on_disk_is_held_once(tmp_path):
    head = {"lm_head.weight": floats(VOCABULARY, COLUMNS), "a.weight": floats(ROWS, COLUMNS)}
    tied = take_census(checkpoint(tmp_path, head, tied=True))
    assert tied.parameters == VOCABULARY * COLUMNS + COLUMNS + WEIGHTS
    assert len(tied.linear_layers) == 1


@pytest.mark.parametrize(
    ("activations", "bits"), [(None, 16), ({"num_bits": 8, "dynamic": True}, 8)], ids=["w4a16", "w4a8"]
)  # fmt: skip
def test_compressed_tensors_packed(tmp_path, activations, bits):
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32},
             "input_activations": activations}  # fmt: skip
    folder = checkpoint(
        tmp_path,
        {
            "a.weight_packed": np.zeros((ROWS, COLUMNS // 8), np.int32),
            "a.weight_scale": floats(ROWS, COLUMNS // 32),
            "a.weight_shape": np.array([ROWS, COLUMNS], np.int64),
            "b.weight": floats(ROWS, COLUMNS),
        },
        quantization={"quant_method": "compressed-tensors", "config_groups": {"group_0": group}},
    )
    effective = take_census(folder, kernel="Some4BitKernel")
    quantized, plain = effective.linear_layers
    assert (quantized.weight_format, quantized.weights) == ("int4", WEIGHTS)
    assert quantized.stored_bytes == WEIGHTS // 2 + 2 * ROWS * 2 + 16
    assert (quantized.kernel, plain.kernel) == ("Some4BitKernel", "plain float16 products")
    assert effective.quantized_fraction == 0.5
    assert effective.left_alone == ["b"]
    assert effective.activation_bits == bits


def test_packed_weights_with_padding_count_by_their_shape(tmp_path):
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}
    folder = checkpoint(
        tmp_path,
        {"a.weight_packed": np.zeros((3, 2), np.int32), "a.weight_shape": np.array([3, 13], np.int64)},
        quantization={"quant_method": "compressed-tensors", "config_groups": {"group_0": group}},
    )  # fmt: skip
    assert only_class(take_census(folder)).weights == 39


def test_compressed_tensors_int8_with_a_group_for_each_kind_of_layer(tmp_path):
    eight = {
        "targets": ["re:.*q_proj"],
        "weights": {"num_bits": 8},
        "input_activations": {"num_bits": 8},
    }
    four = {"targets": ["Linear"], "weights": {"num_bits": 4}}
    folder = checkpoint(
        tmp_path,
        {
            "a.q_proj.weight": np.zeros((ROWS, COLUMNS), np.int8),
            "a.q_proj.weight_scale": floats(ROWS, 1),
            "a.o_proj.weight_packed": np.zeros((ROWS, COLUMNS // 8), np.int32),
        },
        quantization={"quant_method": "compressed-tensors", "config_groups": {"0": four, "1": eight}},
    )  # fmt: skip
    effective = take_census(folder)
    assert {c.weight_format: c.weights for c in effective.linear_layers} == {
        "int8": WEIGHTS, "int4": WEIGHTS,
    }  # fmt: skip
    assert effective.activation_bits == 12
    assert effective.quantized_fraction == 1


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_and_awq(tmp_path, method, bits):
    shape = (COLUMNS * bits // 32, ROWS) if method == "gptq" else (COLUMNS, ROWS * bits // 32)
    folder = checkpoint(
        tmp_path,
        {
            "a.qweight": np.zeros(shape, np.int32),
            "a.qzeros": np.zeros((2, ROWS * bits // 32), np.int32),
            "a.scales": floats(2, ROWS),
            "a.bias": floats(ROWS),
        },
        quantization={"quant_method": method, "bits": bits, "group_size": 32},
    )
    effective = take_census(folder, dtype="bfloat16")
    found = only_class(effective)
    assert (found.weight_format, found.weights, found.weight_class) == (
        f"int{bits}",
        WEIGHTS,
        method,
    )
    assert found.stored_bytes == WEIGHTS * bits // 8 + 2 * ROWS * bits // 8 + 2 * 2 * ROWS
    assert effective.activation_bits == 16
    assert effective.dtype_bytes["float16"] == 2 * 2 * ROWS
    assert quant_method(json.loads((folder / "config.json").read_text())) == method


def test_bitsandbytes_four_and_eight_bits(tmp_path):
    folder = checkpoint(
        tmp_path,
        {
            "a.weight": np.zeros((WEIGHTS // 2, 1), np.uint8),
            "a.weight.absmax": np.zeros(WEIGHTS // 64, np.uint8),
            "a.weight.nested_absmax": floats(1, dtype=np.float32),
            "a.weight.quant_map": floats(16, dtype=np.float32),
            "a.weight.quant_state.bitsandbytes__nf4": np.zeros(20, np.uint8),
            "b.weight": np.zeros((ROWS, COLUMNS), np.int8),
            "b.SCB": floats(ROWS, dtype=np.float32),
            "b.weight_format": np.zeros((), np.uint8),
        },
        quantization={"quant_method": "bitsandbytes"},
    )
    effective = take_census(folder, dtype="bfloat16")
    four, eight = effective.linear_layers
    assert (four.weight_format, four.weights) == ("nf4", WEIGHTS)
    assert four.stored_bytes == WEIGHTS // 2 + WEIGHTS // 64 + 4 + 64 + 20
    assert (eight.weight_format, eight.weights, eight.stored_bytes) == (
        "int8",
        WEIGHTS,
        WEIGHTS + 4 * ROWS + 1,
    )
    assert effective.activation_bits == 12


def test_float8_with_block_scales(tmp_path):
    header = {
        "a.weight": {"dtype": "F8_E4M3", "shape": [ROWS, COLUMNS], "data_offsets": [0, WEIGHTS]},
        "a.weight_scale_inv": {"dtype": "F32", "shape": [1, 1], "data_offsets": [WEIGHTS, WEIGHTS + 4]},
    }  # fmt: skip
    raw = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(
        struct.pack("<Q", len(raw)) + raw + bytes(WEIGHTS + 4)
    )
    config = {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    effective = take_census(tmp_path, kernel="k", emulation="weights are dequantized to bfloat16")
    assert only_class(effective).weight_format == "float8_e4m3fn"
    assert effective.linear_bits_per_weight == 8 * (WEIGHTS + 4) / WEIGHTS
    assert effective.activation_bits == 8
    assert effective.emulated
    assert effective.emulation == "weights are dequantized to bfloat16"


def test_only_files_of_the_index_count(tmp_path):
    checkpoint(tmp_path, {"a.weight": floats(ROWS, COLUMNS)})
    save_file({"a.weight": floats(ROWS, COLUMNS)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {"a.weight": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert only_class(take_census(tmp_path)).weights == WEIGHTS


def test_convolutions_are_no_linear_layers_and_experts_are(tmp_path):
    folder = checkpoint(
        tmp_path,
        {"a.conv1d.weight": floats(4, 1, 3), "a.experts.weight": floats(2, ROWS, COLUMNS)},
    )
    assert only_class(take_census(folder)).weights == 2 * WEIGHTS


def test_what_cannot_be_read_is_an_engine_error(tmp_path):
    with pytest.raises(EngineError, match=r"no readable config\.json"):
        take_census(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError, match="holds no safetensors files"):
        take_census(tmp_path)
    for torn in (b"", b"abc", struct.pack("<Q", 50) + b"{}", struct.pack("<Q", 2**60)):
        (tmp_path / "model.safetensors").write_bytes(torn)
        with pytest.raises(EngineError, match="is no safetensors file, or it is torn"):
            read_headers(tmp_path)


def test_an_empty_checkpoint_divides_by_nothing(tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    effective = take_census(tmp_path)
    assert (effective.parameters, effective.quantized_fraction) == (0, 0)

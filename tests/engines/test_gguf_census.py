"""What a GGUF file says about itself, and the description of what is served."""

from __future__ import annotations

import pytest

from quanteval.engines.gguf_census import effective, read_gguf
from quanteval.schemes.gguf_write import Types, write_gguf

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def census(tiny_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("census") / "model.gguf"
    write_gguf(tiny_folder, path, Types("Q4_0", "Q8_0"))
    return read_gguf(path)


def test_shapes(census):
    assert (census.layers, census.kv_heads, census.head_dim, census.context) == (2, 2, 16, 512)
    assert census.kv_values_per_token() == 2 * 2 * 2 * 16
    assert census.vocabulary == 261
    assert census.has_blocks


def test_bits_and_classes(census):
    found = effective(
        census, engine="e", kernel="int", float_kernel="float", activation_bits=8, compute="float32", notes="n"
    )  # fmt: skip
    assert found.linear_bits_per_weight == 4.5
    assert found.quantized_fraction == 1.0
    assert found.left_alone == []
    assert found.emulation == "int; n"
    kinds = {(c.weight_format, c.count): c.bits_per_weight for c in found.linear_layers}
    assert kinds == {("q4_0", 14): 4.5, ("q8_0", 1): 8.5}
    assert found.resident_weight_bytes == sum(found.dtype_bytes.values())
    assert 8 * found.resident_weight_bytes / found.parameters == found.bits_per_weight


def test_a_float_file_has_nothing_left_alone(tiny_folder, tmp_path):
    write_gguf(tiny_folder, tmp_path / "m.gguf", Types("F16", "F16"))
    found = effective(
        read_gguf(tmp_path / "m.gguf"),
        engine="e",
        kernel="int",
        float_kernel="float",
        activation_bits=16,
        compute="float32",
    )
    assert found.quantized_fraction == 0
    assert found.left_alone == []
    assert found.linear_bits_per_weight == 16
    assert found.emulation == "float"

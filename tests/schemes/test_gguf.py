"""GGUF files written from Hugging Face folders: values, names, metadata, vocabulary, refusals."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from quanteval.errors import ConfigError, UnsupportedError
from quanteval.interfaces import Calibration
from quanteval.models import resolve_model
from quanteval.schemes.gguf import GGUF, GGUFFile
from quanteval.schemes.gguf_vocabulary import pre_tokenizer, read_vocabulary
from quanteval.schemes.gguf_write import (
    Types,
    architecture_of,
    interleave,
    rope_factors,
    tensor_type,
    write_gguf,
)

gguf = pytest.importorskip("gguf")

ERRORS = {"Q8_0": 0.5 / 127, "Q4_0": 1 / 8}
"""Largest error of a weight as a share of its block's largest one, the scale taken as exact."""
SCALE = 2**-11
"""Relative error of a scale in float16."""


def dequantized(path):
    """Return tensors by name, as float32 arrays of their logical shape."""
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(
            [int(n) for n in tensor.shape[::-1]]
        )
        for tensor in gguf.GGUFReader(path).tensors
    }


def fields_of(path):
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def weights_of(folder):
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def other_family(folder, kind):
    """Write a tiny random model of another family, with the tiny Llama's tokenizer."""
    import torch
    import transformers

    shapes = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 261, "max_position_embeddings": 512,
    }  # fmt: skip
    extra = {"Mistral": {"sliding_window": None}, "Qwen2": {}, "Llama": {"attention_bias": True}}[
        kind
    ]
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**shapes, **extra, initializer_range=0.2)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tiny_folder, tmp_path_factory):
    """Folders of tiny random models by family."""
    made = {"tied": tiny_folder}
    for kind in ("Llama", "Mistral", "Qwen2"):
        folder = tmp_path_factory.mktemp(kind)
        for path in tiny_folder.iterdir():
            if path.suffix != ".safetensors" and path.is_file():
                shutil.copy(path, folder)
        made[kind] = other_family(folder, kind)
    return made


@pytest.mark.parametrize("kind", ["tied", "Llama", "Mistral", "Qwen2"])
@pytest.mark.parametrize("family_type", ["F32", "Q8_0", "Q4_0"])
def test_weights_come_back_within_the_error_of_their_format(models, tmp_path, kind, family_type):
    path = tmp_path / "model.gguf"
    write_gguf(models[kind], path, Types(family_type, family_type))
    back = dequantized(path)
    source = weights_of(models[kind])
    arch = gguf.MODEL_ARCH.QWEN2 if kind == "Qwen2" else gguf.MODEL_ARCH.LLAMA
    names = gguf.get_tensor_name_map(arch, 2)
    assert len(back) == len(source)
    for key, original in source.items():
        found = back[names.get_name(key, try_suffixes=(".weight", ".bias"))]
        heads = 4 if ".q_proj." in key else 2
        turned = kind != "Qwen2" and (".q_proj." in key or ".k_proj." in key)
        values = interleave(original, heads) if turned else original
        assert found.shape == values.shape
        if values.ndim == 1 or family_type == "F32":
            np.testing.assert_array_equal(found, values)
            continue
        blocks = values.reshape(-1, 32)
        largest = np.abs(blocks).max(axis=1, keepdims=True)
        bound = (ERRORS[family_type] + SCALE) * largest + 1e-7
        assert (np.abs(found.reshape(-1, 32) - blocks) <= bound).all(), key


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q5_0", "Q5_1", "Q4_1"])
def test_every_type_is_written_as_itself(tiny_folder, tmp_path, kind):
    path = tmp_path / "model.gguf"
    write_gguf(tiny_folder, path, Types(kind, "F16"))
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    assert types["blk.0.attn_q.weight"] == kind
    assert types["token_embd.weight"] == "F16"
    assert types["blk.0.attn_norm.weight"] == types["output_norm.weight"] == "F32"


@pytest.mark.parametrize("kind", ["tied", "Llama", "Mistral", "Qwen2"])
def test_transformers_reads_equal_logits_back(models, tmp_path, kind):
    import torch
    from transformers import AutoModelForCausalLM

    write_gguf(models[kind], tmp_path / "model.gguf", Types("F32", "F32"))
    ids = torch.arange(1, 40)[None]
    logits = []
    for folder, more in ((models[kind], {}), (tmp_path, {"gguf_file": "model.gguf"})):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more)
        with torch.no_grad():
            logits.append(model(ids).logits)
    # Its reader drops attention biases of Llama models, which GGUF keeps.
    if kind != "Llama":
        torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_metadata_and_vocabulary(tiny_folder, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(tiny_folder, path, Types("Q8_0", "Q8_0"))
    fields = fields_of(path)
    config = json.loads((tiny_folder / "config.json").read_text())
    assert fields["general.architecture"] == "llama"
    assert fields["llama.block_count"] == 2
    assert fields["llama.attention.head_count_kv"] == 2
    assert fields["llama.rope.dimension_count"] == 16
    assert fields["llama.context_length"] == config["max_position_embeddings"]
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(config["rms_norm_eps"])
    assert fields["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert len(fields["tokenizer.ggml.tokens"]) == config["vocab_size"]
    assert fields["tokenizer.ggml.tokens"][:2] == ["<s>", "<|end|>"]
    assert fields["tokenizer.ggml.token_type"][:6] == [3, 3, 3, 3, 3, 1]
    assert fields["tokenizer.ggml.bos_token_id"] == 0
    assert fields["tokenizer.ggml.eos_token_id"] == 1
    assert fields["tokenizer.ggml.add_bos_token"] is True
    assert "<|assistant|>" in fields["tokenizer.chat_template"]


def test_rows_that_do_not_divide_into_blocks_stay_in_float16():
    types = Types("Q4_0", "Q8_0")
    assert tensor_type("blk.0.ffn_up.weight", (128, 40), types) == "F16"
    assert tensor_type("blk.0.ffn_up.weight", (128, 576), types) == "Q4_0"
    assert tensor_type("token_embd.weight", (128, 64), types) == "Q8_0"
    assert tensor_type("blk.0.attn_norm.weight", (64,), types) == "F32"


def test_rotary_factors_of_llama3_are_those_of_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=rope)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / 500000.0 ** (np.arange(0, 128, 2) / 128)
    factors = rope_factors({"head_dim": 128, "rope_parameters": rope})
    np.testing.assert_allclose(plain / np.array(factors), frequencies.numpy(), rtol=1e-5)
    assert rope_factors({"head_dim": 128, "rope_theta": 1e4}) is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"model_type": "mamba"}, "mamba"),
        ({"architectures": ["LlamaForCausalLM"], "rope_scaling": {"type": "yarn"}}, "yarn"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64, "max_position_embeddings": 512}, "64"),
    ],
)  # fmt: skip
def test_other_architectures_are_refused_by_name(config, named):
    with pytest.raises(UnsupportedError, match=f'"{named}"'):
        architecture_of(config)


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT = {"type": "Split", "pattern": {"Regex": QWEN}, "behavior": "Isolated"}


def test_pre_tokenizers_are_told_by_their_rules():
    digits = {"type": "Digits", "individual_digits": True}
    plain = {**BYTES, "use_regex": False}
    sequence = lambda *steps: {"type": "Sequence", "pretokenizers": list(steps)}  # noqa: E731
    assert pre_tokenizer({"pre_tokenizer": BYTES}, "") == "gpt-2"
    assert pre_tokenizer({"pre_tokenizer": sequence(digits, BYTES)}, "") == "smollm"
    qwen = {"pre_tokenizer": sequence(SPLIT, plain), "normalizer": {"type": "NFC"}}
    assert pre_tokenizer(qwen, "") == "qwen2"
    for odd in (
        {**qwen, "normalizer": None},
        {"pre_tokenizer": sequence({**digits, "individual_digits": False}, BYTES)},
        {"pre_tokenizer": {"type": "Metaspace"}},
        {"pre_tokenizer": None},
    ):
        with pytest.raises(UnsupportedError, match="convert it"):
            pre_tokenizer(odd, "convert it")


def test_other_vocabularies_are_refused(tiny_folder, tmp_path):
    rules = json.loads((tiny_folder / "tokenizer.json").read_text())
    rules["model"] = {"type": "Unigram", "vocab": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    with pytest.raises(UnsupportedError, match='"Unigram"'):
        read_vocabulary(tmp_path, {"vocab_size": 1}, "do otherwise")
    with pytest.raises(UnsupportedError, match=r"no tokenizer\.json"):
        read_vocabulary(tmp_path / "nothing", {"vocab_size": 1}, "do otherwise")
    with pytest.raises(UnsupportedError, match="no row in an embedding of 100"):
        read_vocabulary(tiny_folder, {"vocab_size": 100}, "do otherwise")


def test_artifact_has_the_tokenizer_beside_the_file(tiny_source, tmp_path):
    from quanteval.engines.tokenizer import HFTokenizer

    scheme = GGUF("Q4_0")
    scheme.check(tiny_source, "cpu")
    artifact = scheme.quantize(tiny_source, tmp_path, Calibration(), "cpu")
    assert artifact.format == "gguf"
    assert artifact.load == {"gguf_file": "model.gguf"}
    assert artifact.bytes_on_disk == (tmp_path / "model.gguf").stat().st_size
    assert (artifact.precision.weight_bits, artifact.precision.weight_format) == (4, "q4_0")
    ours = HFTokenizer(tiny_source.path)
    assert HFTokenizer(tmp_path).fingerprint == ours.fingerprint
    assert HFTokenizer(tmp_path).eos_token_ids == ours.eos_token_ids


def test_embeddings_are_never_coarser_than_float_blocks():
    with pytest.raises(ValueError, match="Q4_0"):
        GGUF("F16", embeddings="Q4_0")


def test_a_ready_file_is_taken_with_the_models_tokenizer(tiny_source, tmp_path):
    ready = tmp_path / "ready-Q4_1.gguf"
    write_gguf(tiny_source.path, ready, Types("Q4_1", "Q8_0"))
    out = tmp_path / "out"
    out.mkdir()
    scheme = GGUFFile(str(ready))
    scheme.check(tiny_source, "cpu")
    assert scheme.precision.weight_format == "q4_1"
    artifact = scheme.quantize(tiny_source, out, Calibration(), "cpu")
    assert artifact.load == {"gguf_file": "ready-Q4_1.gguf"}
    assert (out / "ready-Q4_1.gguf").read_bytes() == ready.read_bytes()
    with pytest.raises(ConfigError, match="sha256"):
        GGUFFile(str(ready), sha256="0" * 64).quantize(tiny_source, out, Calibration(), "cpu")


def test_a_file_that_is_missing_foreign_or_no_gguf_is_refused(tiny_source, tmp_path):
    from tests.tiny import make_tiny_model

    with pytest.raises(ConfigError, match="not there"):
        GGUFFile(str(tmp_path / "none.gguf")).check(None, "cpu")
    (tmp_path / "bad.gguf").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="no GGUF file"):
        GGUFFile(str(tmp_path / "bad.gguf")).check(None, "cpu")
    wide = resolve_model(str(make_tiny_model(tmp_path / "wide", hidden=128)))
    ready = tmp_path / "wide.gguf"
    write_gguf(wide.path, ready, Types("F16", "F16"))
    with pytest.raises(UnsupportedError, match='embedding_length "128"'):
        GGUFFile(str(ready)).check(tiny_source, "cpu")

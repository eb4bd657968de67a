"""Every preset: builds, checks before loading, reloads with identical logits, says what it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from quanteval.errors import UnsupportedError
from quanteval.interfaces import Calibration, Scheme
from quanteval.models.digest import weight_files
from quanteval.resources import presets
from quanteval.schemes import _common
from quanteval.schemes._common import linear_shapes, require_package
from quanteval.targets import build
from tests.tiny import make_tiny_model


def scheme_of(name: str) -> Scheme:
    return build(yaml.safe_load(presets("scheme")[name].read_text())[name])


NAMES = sorted(presets("scheme"))
# What transformers saves and loads; tests/schemes/test_gguf.py reads GGUF files back.
SAVED = [
    name
    for name in NAMES
    if scheme_of(name).precision.quantized and not hasattr(scheme_of(name), "artifact_format")
]


def logits(path, dtype):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        return model(torch.arange(5, 37)[None]).logits


@pytest.mark.parametrize("name", NAMES)
def test_presets_state_every_field_under_their_own_name(name):
    node = yaml.safe_load(presets("scheme")[name].read_text())
    assert list(node) == [name]
    scheme = scheme_of(name)
    assert isinstance(scheme, Scheme)
    assert set(node[name]) - {"_target_"} == set(vars(scheme))


@pytest.mark.parametrize("name", SAVED)
def test_an_artifact_reloads_with_the_same_logits(name, tiny_source, tmp_path, monkeypatch):
    scheme = scheme_of(name)
    scheme.check(tiny_source, "cpu")
    built = {}
    from transformers import PreTrainedModel

    save = PreTrainedModel.save_pretrained

    def keep(self, *args, **kwargs):
        built["model"] = self
        return save(self, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", keep)
    artifact = scheme.quantize(tiny_source, tmp_path, Calibration(), "cpu")
    with torch.no_grad():
        expected = built["model"].eval()(torch.arange(5, 37)[None]).logits
    assert torch.equal(logits(artifact.path, artifact.load["dtype"]), expected)
    assert artifact.bytes_on_disk == sum(p.stat().st_size for p in weight_files(tmp_path))
    assert artifact.bytes_on_disk < sum(p.stat().st_size for p in weight_files(tiny_source.path))
    assert (Path(artifact.path) / "tokenizer.json").exists()
    assert artifact.weights_digest == tiny_source.weights_digest
    assert artifact.scheme_config["_target_"].startswith("quanteval.schemes.")
    assert set(artifact.packages) >= {"torch", "transformers"}


def test_an_unquantized_scheme_writes_nothing(tiny_source, tmp_path):
    artifact = scheme_of("bf16").quantize(tiny_source, tmp_path, Calibration(), "cpu")
    assert artifact.path == str(tiny_source.path)
    assert not any(tmp_path.iterdir())
    assert artifact.load == {"dtype": "bfloat16"}


def test_shapes_come_from_the_headers_alone(tiny_source):
    shapes = linear_shapes(tiny_source)
    assert len(shapes) == 14
    assert shapes["model.layers.0.self_attn.k_proj"] == (32, 64)
    assert not any("embed" in name for name in shapes)


def test_a_shape_that_does_not_fit_is_refused_before_loading(tmp_path):
    from quanteval.models import resolve_model

    source = resolve_model(str(make_tiny_model(tmp_path / "odd", hidden=56)))
    with pytest.raises(UnsupportedError, match=r"28 x 56 weights, .* blocks of 64"):
        scheme_of("nf4_bnb").check(source, "cpu")


def test_a_missing_or_old_package_is_named(monkeypatch):
    monkeypatch.setattr(_common, "package_version", lambda _: None)
    with pytest.raises(
        UnsupportedError, match=r'not installed: pip install "quanteval\[torchao\]"'
    ):
        require_package("torchao", "0.18", "torchao")
    monkeypatch.setattr(_common, "package_version", lambda _: "0.9.1")
    with pytest.raises(UnsupportedError, match=r"torchao >= 0\.18, found 0\.9\.1"):
        require_package("torchao", "0.18", "torchao")
    monkeypatch.setattr(_common, "package_version", lambda _: "0.18.0")
    require_package("torchao", "0.18", "torchao")


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_the_real_model_reloads_with_the_same_logits(name, embedded_model, tmp_path, monkeypatch):
    test_an_artifact_reloads_with_the_same_logits(name, embedded_model, tmp_path, monkeypatch)

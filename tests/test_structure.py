"""The structure holds: who may import whom, what stays light, and what only the command line does."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "quanteval"
FAMILIES = ("schemes", "engines", "bench", "tasks", "rules")
HEAVY = {"torch", "transformers", "vllm", "bitsandbytes", "torchao", "openvino_genai", "xllamacpp"}
HEAVY_HOMES = ("schemes", "engines", "tasks", "models")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.iter_child_nodes(tree) if top_level_only else ast.walk(tree)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def family(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_design(path):
    mine = family(path)
    for name in imports(path):
        first, _, rest = name.partition(".")
        if first == "quanteval":
            other = rest.partition(".")[0]
            if mine in FAMILIES and other in FAMILIES:
                assert other == mine, f"{mine} imports the family {other}"
            if mine not in ("cli", "__main__"):
                assert other != "cli", f"{mine} imports cli"
            if mine in FAMILIES or mine in ("gate", "report", "stats", "store", "metrics"):
                assert other not in ("pipeline", "config", "variant", "child", "runplan")
            if mine in ("errors", "records", "stats"):
                assert other in ("errors", "records", "stats", "")
        if first in HEAVY:
            assert mine in HEAVY_HOMES, f"{mine} imports {first}"
        if first in ("hydra", "omegaconf"):
            assert mine == "config", f"{mine} imports {first}"
    if mine in HEAVY_HOMES:
        assert not {n.partition(".")[0] for n in imports(path, top_level_only=True)} & HEAVY


def test_only_the_command_line_prints():
    for path in modules():
        calls = [
            node.func.id
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        ]
        if family(path) not in ("cli",):
            assert "print" not in calls, path


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["run", "--help"], ["gate", "--help"], ["gate", "nowhere"], ["report", "nowhere"]],
    ids=" ".join,
)
def test_light_verbs_load_neither_torch_nor_hydra(arguments, tmp_path):
    code = (
        "import sys\nfrom quanteval.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'hydra', 'omegaconf', 'transformers', 'datasets', 'scipy.stats'}\n"
        "loaded = heavy & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_modules_stay_readable():
    long = {str(p): n for p in modules() if (n := len(p.read_text().splitlines())) > 450}
    assert not long

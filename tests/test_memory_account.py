"""On the embedded model: the parts add up to the measured peak, and the plan made from its configuration holds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from quanteval.memory_plan import Demand, plan_memory, storage_of
from quanteval.model_config import model_config
from quanteval.modelshape import read_shape
from quanteval.records import MemoryUse
from quanteval.schemes.bitsandbytes import FourBit
from quanteval.schemes.none import Unquantized
from quanteval.schemes.torchao import Int8DynamicActivationInt8Weight

SERVE = """
import sys
from pathlib import Path
from quanteval.engines.transformers import TransformersEngine, import_libraries
from quanteval.environment import release_free_memory, reset_peak_rss
from quanteval.interfaces import Request, Sampling
from quanteval.process_memory import explain_peak, snapshot
from quanteval.records import Artifact

artifact = Artifact.model_validate_json(Path(sys.argv[1]).read_text())
import_libraries()
before = snapshot()
with TransformersEngine().serve(artifact) as session:
    release_free_memory()
    reset_peak_rss()
    for length in (60, 250):
        text = "The quick brown fox jumps over the lazy dog. " * length
        prompts = [session.tokenizer.raw(text[i : i + 4 * length]) for i in range(2)]
        sampling = Sampling(8, ignore_eos=True)
        list(session.generate([Request(f"{length}-{i}", p, sampling) for i, p in enumerate(prompts)]))
    at = snapshot()
    use = explain_peak(session.memory(), before, {"bench": at}, ["bench"])
Path(sys.argv[2]).write_text(use.model_dump_json())
"""


@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "scheme",
    [Unquantized("bfloat16"), FourBit(), Int8DynamicActivationInt8Weight()],
    ids=["bf16", "nf4", "w8a8"],
)
def test_the_parts_add_up_and_the_plan_holds(scheme, embedded_model, tmp_path):
    made, told = tmp_path / "artifact.json", tmp_path / "memory.json"
    build = (
        "import sys; from pathlib import Path; from quanteval.interfaces import Calibration\n"
        "from quanteval.models import resolve_model; from quanteval.targets import build\n"
        "import json; scheme = build(json.loads(sys.argv[1]), where='scheme')\n"
        "out = Path(sys.argv[2]); out.mkdir()\n"
        "made = scheme.quantize(resolve_model('smollm2_135m'), out, Calibration(), 'cpu')\n"
        "Path(sys.argv[3]).write_text(made.model_dump_json())"
    )
    kind = type(scheme)
    node = json.dumps({"_target_": f"{kind.__module__}.{kind.__qualname__}"})
    python(build, node, str(tmp_path / "weights"), str(made))
    python(SERVE, str(made), str(told))
    use = MemoryUse.model_validate_json(told.read_text())

    assert abs(use.unaccounted_bytes) <= 0.05 * use.process_peak_bytes
    assert all(size >= 0 for size in use.parts.values())
    # What is in use beyond weights and cache is a process's own: the same for every scheme.
    assert 30e6 < use.runtime_bytes < 160e6

    shape, storage = read_shape(model_config("smollm2_135m")), storage_of(scheme, "cpu")
    demand = Demand(use.kv_cache_tokens // 2, 2, "cpu", 10**10, "bfloat16")
    plan = plan_memory(shape, storage, demand)
    assert plan.parts["weights"] == use.weights_bytes - 4 * shape.head_dim
    assert plan.kv_bytes_per_token == use.kv_bytes_per_token_measured
    # The process without the model is an assumption: that is what the tolerance is for.
    assert plan.total_bytes == pytest.approx(use.process_peak_bytes, rel=0.15)


def python(code: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

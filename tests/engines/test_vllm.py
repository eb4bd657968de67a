"""vLLM: what is refused before anything is loaded, the command, and what is read from recorded logs and metrics."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from quanteval.engines.prometheus import delta, mean_layers, neutral, parse, prefix_hit_share
from quanteval.engines.vllm import VLLMEngine
from quanteval.engines.vllm_log import GIB, VLLMFacts, loading_began, read_log
from quanteval.engines.vllm_session import account, block_tokens, own_metrics, policy_line
from quanteval.errors import EngineError, UnsupportedError
from quanteval.interfaces import Calibration, OwnsProcesses, Request, Sampling, ScoreRequest
from quanteval.records import Artifact, Precision
from quanteval.schemes.none import Unquantized

RECORDED = Path(__file__).parent / "recorded"
CPU_LOG = (RECORDED / "vllm_0.32_cpu_eager.log").read_text(encoding="utf-8")
AFTER = (RECORDED / "vllm_0.32_after.prom").read_text(encoding="utf-8")
GPU_LINES = """
(EngineCore pid=7) INFO 01-01 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m', \
dtype=torch.float16, max_seq_len=4096, quantization=compressed-tensors, enforce_eager=False, \
enable_prefix_caching=True, enable_chunked_prefill=True, linear_backend='emulation'
(Worker pid=8) INFO 01-01 [cuda.py:1] Using FLASH_ATTN attention backend out of potential backends: [FLASH_ATTN].
(Worker pid=8) INFO 01-01 [w.py:1] Using MarlinLinearKernel for CompressedTensorsWNA16
(Worker pid=8) INFO 01-01 [w.py:1] Using MarlinLinearKernel for CompressedTensorsWNA16
(Worker pid=8) INFO 01-01 [w.py:1] Selected CutlassInt8ScaledMMLinearKernel for CompressedTensorsW8A8Int8
(Worker pid=8) INFO 01-01 [g.py:1] Model loading took 5.25 GiB memory and 2.500000 seconds
(Worker pid=8) INFO 01-01 [g.py:1] Available KV cache memory: 60.5 GiB
(EngineCore pid=7) INFO 01-01 [k.py:1] GPU KV cache size: 1,000,192 tokens, Maximum concurrency for 4,096 \
tokens per request: 244.19x
(EngineCore pid=7) INFO 01-01 [s.py:1] Chunked prefill is enabled with max_num_batched_tokens=8192.
(EngineCore pid=7) INFO 01-01 [core.py:1] init engine (profile, create kv cache, warmup model) took 41.50 s
"""


def artifact(path, *, form="transformers", **load):
    return Artifact(
        scheme="s", scheme_config={}, model_id="m", model_revision=None, model_provenance="",
        weights_digest="", path=str(path), format=form, load=load, bytes_on_disk=0, build_s=0.0,
        precision=Precision(weight_bits=16, activation_bits=16, weight_format="bfloat16",
                            compute="float", quantized=False),
    )  # fmt: skip


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return the folder of an environment whose `vllm` is a script that answers like a server."""
    monkeypatch.delenv("QUANTEVAL_VLLM", raising=False)
    command = tmp_path / "venv" / "bin" / "vllm"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\nexit 1\n")
    command.chmod(0o755)
    return tmp_path / "venv"


# --------------------------------------------------------------------------- before anything is loaded


def test_the_command_is_found_by_every_name_of_its_environment(installed, monkeypatch, tmp_path):
    command = installed / "bin" / "vllm"
    for named in (installed, installed / "bin" / "python", command):
        assert VLLMEngine(executable=str(named)).find_executable() == command
    monkeypatch.setenv("QUANTEVAL_VLLM", str(installed))
    assert VLLMEngine().find_executable() == command
    monkeypatch.delenv("QUANTEVAL_VLLM")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(command.parent))
    assert VLLMEngine().find_executable() == command
    (tmp_path / ".venv-vllm").symlink_to(installed)
    assert VLLMEngine().find_executable() == tmp_path / ".venv-vllm" / "bin" / "vllm"


def test_without_vllm_the_way_to_get_it_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("QUANTEVAL_VLLM", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnsupportedError, match=r'no vLLM in "\.venv-vllm/bin or .*make vllm-cpu'):
        VLLMEngine().check(artifact(tmp_path))
    with pytest.raises(UnsupportedError, match='no vLLM in "/nowhere": build one'):
        VLLMEngine(executable="/nowhere").check(artifact(tmp_path))


@pytest.mark.parametrize("method", ["", "gptq", "awq", "fp8", "compressed-tensors"])
def test_checkpoints_a_cpu_serves_pass(installed, tmp_path, method):
    config = {"quantization_config": {"quant_method": method}} if method else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    VLLMEngine(executable=str(installed)).check(artifact(tmp_path))


@pytest.mark.parametrize("method", ["bitsandbytes", "torchao", "hqq"])
def test_checkpoints_a_cpu_does_not_serve_are_refused(installed, tmp_path, method):
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": method}})
    )
    with pytest.raises(UnsupportedError, match=f'does not serve "{method}" checkpoints on a CPU'):
        VLLMEngine(executable=str(installed)).check(artifact(tmp_path))


def test_other_formats_and_missing_devices_are_refused(installed, tmp_path, monkeypatch):
    with pytest.raises(UnsupportedError, match='does not serve "gguf" artifacts'):
        VLLMEngine(executable=str(installed)).check(artifact(tmp_path, form="gguf"))
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    with pytest.raises(UnsupportedError, match="no NVIDIA device"):
        VLLMEngine(executable=str(installed), device="cuda").check(artifact(tmp_path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0), ("gpu_memory_utilization", 1.5), ("kv_cache_gb", 0),
        ("start_timeout_s", 0), ("extra_args", ("--port=1",)), ("extra_args", ("--model", "m")),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        VLLMEngine(**{field: value})


def test_the_command_says_everything(installed):
    engine = VLLMEngine(executable=str(installed), max_model_len=512, enforce_eager=True,
                        extra_args=("--seed=1",))  # fmt: skip
    command = engine.command(artifact("/a", dtype="bfloat16"), 1234, "name")
    assert command == [
        str(installed / "bin" / "vllm"), "serve", "/a", "--host=127.0.0.1", "--port=1234",
        "--served-model-name=name", "--dtype=bfloat16", "--max-model-len=512", "--max-num-seqs=32",
        "--tensor-parallel-size=1", "--kv-cache-memory-bytes=2000000000", "--max-logprobs=100",
        "--generation-config=vllm", "--uvicorn-log-level=warning", "--no-enable-prefix-caching",
        "--enforce-eager", "--seed=1",
    ]  # fmt: skip
    on_cuda = replace(engine, device="cuda", enable_prefix_caching=True, dtype="float16")
    command = on_cuda.command(artifact("/a", dtype="bfloat16"), 1, "n")
    assert {"--gpu-memory-utilization=0.9", "--enable-prefix-caching", "--dtype=float16"} <= {
        *command
    }
    assert not [option for option in command if "kv-cache" in option]
    assert engine.environment()["VLLM_NO_USAGE_STATS"] == "1"
    assert (
        replace(engine, env={"VLLM_NO_USAGE_STATS": 0}).environment()["VLLM_NO_USAGE_STATS"] == "0"
    )


def test_answers_tell_what_this_vllm_can_tell(installed):
    """Only the sources in the environment say so: an older vLLM would not start with an option it has not."""
    sources = installed / "lib" / "python3.11" / "site-packages" / "vllm" / "entrypoints" / "openai"
    sources.mkdir(parents=True)
    engine = VLLMEngine(executable=str(installed))
    details, metrics = "--enable-prompt-tokens-details", "--enable-per-request-metrics"

    def told(engine):
        command = engine.command(artifact("/a"), 1, "n")
        return [option for option in command if option in (details, metrics)]

    assert told(engine) == []
    (sources / "cli_args.py").write_text("    enable_prompt_tokens_details: bool = False\n")
    assert told(engine) == [details]
    with (sources / "cli_args.py").open("a") as file:
        file.write("    enable_per_request_metrics: bool = False\n")
    assert told(engine) == [details, metrics]
    assert told(replace(engine, extra_args=("--disable-log-stats",))) == [details]
    link = installed.parent / "elsewhere" / "bin" / "vllm"
    link.parent.mkdir(parents=True)
    link.symlink_to(installed / "bin" / "vllm")
    assert told(replace(engine, executable=str(link))) == [details, metrics]


def test_a_server_that_dies_leaves_a_reason_and_its_log(installed, tmp_path):
    (installed / "bin" / "vllm").write_text("#!/bin/sh\necho 'ValueError: no such model'\nexit 3\n")
    engine = VLLMEngine(executable=str(installed))
    with (
        pytest.raises(EngineError, match="exit code 3: ValueError: no such model") as caught,
        engine.serve(artifact(tmp_path)),
    ):
        pass
    log = Path(str(caught.value).rpartition("(log: ")[2].removesuffix(")"))
    assert "no such model" in log.read_text()
    log.unlink()
    log.parent.rmdir()


# --------------------------------------------------------------------------- logs and metrics


def test_the_log_of_a_cpu_server():
    assert loading_began(CPU_LOG)
    assert read_log(CPU_LOG) == VLLMFacts(
        version="0.32.0",
        dtype="bfloat16",
        load_s=1.4,
        kv_cache_bytes=GIB,
        kv_cache_tokens=46592,
        max_model_len=2048,
        max_concurrency=22.75,
        warmup_s=3.5,
        chunked_prefill=True,
        prefix_caching=False,
        enforce_eager=True,
        threads=1,
    )


def test_the_lines_of_a_gpu_server():
    assert read_log(GPU_LINES) == VLLMFacts(
        version="0.32.0",
        dtype="float16",
        quantization="compressed-tensors",
        kernels=(
            "MarlinLinearKernel for CompressedTensorsWNA16",
            "CutlassInt8ScaledMMLinearKernel for CompressedTensorsW8A8Int8",
        ),
        attention="FLASH_ATTN",
        weights_bytes=round(5.25 * GIB),
        load_s=2.5,
        kv_cache_bytes=round(60.5 * GIB),
        kv_cache_tokens=1_000_192,
        max_model_len=4096,
        max_concurrency=244.19,
        warmup_s=41.5,
        chunked_prefill=True,
        max_num_batched_tokens=8192,
        prefix_caching=True,
        enforce_eager=False,
    )
    line = "(Worker pid=8) WARNING 01-01 10:00:00 [m.py:1] Using EmulationMxfp4LinearKernel, with simulated weights"
    assert read_log(line).emulated == "Using EmulationMxfp4LinearKernel, with simulated weights"


@pytest.mark.parametrize("text", ["", "nothing of the kind", CPU_LOG[:500], "\x00\ufffd" * 9])
def test_a_log_that_says_nothing_is_no_error(text):
    assert read_log(text).kv_cache_tokens is None


def test_recorded_metrics_tell_the_layers():
    before = (RECORDED / "vllm_0.32_before.prom").read_text(encoding="utf-8")
    rise = delta(parse(before), parse(AFTER))
    known = neutral(rise)
    assert known["prompt_tokens_total"] == 104
    assert known["output_tokens_total"] == 17
    assert known["requests_total"] == known["queue_s_count"] == 2
    layers = mean_layers(rise)
    assert list(layers) == ["queue", "prefill", "decode"]
    assert sum(layers.values()) == pytest.approx(known["e2e_s_sum"] / 2, rel=0.01)
    assert prefix_hit_share(rise) is None
    assert known["preemptions_total"] == known["kv_cache_usage"] == 0
    own = own_metrics(AFTER)
    assert all(name.startswith("vllm:") for name in own)
    assert [name for name in own if "queue_time_seconds_bucket" in name]
    assert not [name for name in own if "_info" in name]
    assert "model_name=" in AFTER
    assert not [name for name in own if "model_name=" in name]
    assert block_tokens(AFTER) == 128
    assert block_tokens("") is None


def test_the_policy_is_one_line():
    line = policy_line(read_log(CPU_LOG), VLLMEngine(max_num_seqs=4), 128)
    assert (
        line
        == "vLLM 0.32.0 continuous, at most 4 rows, blocks of 128, chunked prefill, no prefix cache"
    )
    assert "8192 tokens a step" in policy_line(read_log(GPU_LINES), VLLMEngine())


def test_memory_adds_up():
    config = {"model_type": "llama", "num_hidden_layers": 30, "num_attention_heads": 9,
              "num_key_value_heads": 3, "hidden_size": 576, "intermediate_size": 1536,
              "vocab_size": 49152}  # fmt: skip
    use = account(
        device="cpu", before_load_bytes=10**9, weights_bytes=3 * 10**8, facts=read_log(CPU_LOG),
        config=config, at_rest_bytes=3 * 10**9, peak_bytes=4 * 10**9,
    )  # fmt: skip
    assert use.kv_bytes_per_token_formula == 2 * 30 * 3 * 64 * 2
    assert use.kv_bytes_per_token_measured == pytest.approx(
        use.kv_bytes_per_token_formula, rel=0.01
    )
    assert use.activation_peak_bytes == 10**9
    assert use.runtime_bytes == 3 * 10**9 - 10**9 - 3 * 10**8 - GIB
    assert sum(use.parts.values()) == use.process_peak_bytes == 4 * 10**9
    assert use.unaccounted_bytes == 0
    untouched = account(
        device="cpu", before_load_bytes=0, weights_bytes=10, facts=read_log(CPU_LOG), config={},
        at_rest_bytes=100, peak_bytes=100,
    )  # fmt: skip
    assert untouched.unaccounted_bytes == 90 - GIB
    on_cuda = account(
        device="cuda", before_load_bytes=9, weights_bytes=10, facts=read_log(GPU_LINES), config={},
        at_rest_bytes=100, peak_bytes=100,
    )  # fmt: skip
    assert on_cuda.process_peak_bytes == 10 + round(60.5 * GIB)


# --------------------------------------------------------------------------- the real server


def real_vllm() -> str:
    """Return the command of an installed vLLM, or skip."""
    folder = os.environ.get("QUANTEVAL_VLLM") or Path(__file__).parents[2] / ".venv-vllm"
    try:
        return str(VLLMEngine(executable=str(folder)).find_executable())
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.mark.model
@pytest.mark.slow
def test_the_embedded_model_is_served_on_a_cpu(embedded_model, tmp_path):
    from quanteval.engines.transformers import TransformersEngine

    engine = VLLMEngine(executable=real_vllm(), max_model_len=1024, kv_cache_gb=0.5,
                        max_num_seqs=8, enforce_eager=True)  # fmt: skip
    scheme = Unquantized(dtype="bfloat16")
    built = scheme.quantize(embedded_model, tmp_path, Calibration(), "cpu")
    text = "The quick brown fox jumps over the lazy dog. " * 6
    with engine.serve(built) as session:
        pids = session._served.process.processes()
        ids = session.tokenizer.encode(text)
        prompts = [session.tokenizer.raw("def add(a, b):\n"), session.tokenizer.raw(text)]
        sampling = Sampling(max_tokens=12, ignore_eos=True)
        answers = {
            done.request_id: done
            for done in session.generate(
                Request(str(i), prompt, sampling) for i, prompt in enumerate(prompts)
            )
        }
        chunks = list(session.stream(Request("streamed", prompts[0], sampling)))
        (served,) = session.loglikelihood([ScoreRequest("scored", ids)])
        effective, memory = session.describe(), session.memory()
        assert session.rss_bytes() > memory.weights_bytes
        assert isinstance(session, OwnsProcesses)
        loading = session.take_peak_bytes()
        assert memory.process_peak_bytes <= loading
        assert session.rss_bytes() <= session.take_peak_bytes() <= loading
        assert session.memory().process_peak_bytes == memory.process_peak_bytes
        assert session.gone() == ""
        # What vLLM tells with each answer, where this one does.
        assert chunks[-1].cached_prompt_tokens == 0
        assert chunks[-1].layers.keys() == {"queue", "prefill", "decode", "network"}
        assert not [name for name in session.server_metrics() if "model_name" in name]
        assert neutral(session.server_metrics())["prefix_cache_hits_total"] == 0
        assert session.max_context <= 1024
        assert session.batch_policy.startswith("vLLM ")
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    assert [len(answers[key].token_ids) for key in "01"] == [12, 12]
    assert sum(chunk.count for chunk in chunks) == 12
    assert tuple(i for chunk in chunks for i in chunk.token_ids) == answers["0"].token_ids
    assert (effective.compute_dtype, effective.bits_per_weight) == ("bfloat16", 16)
    assert effective.parameters == 134_515_008
    assert memory.kv_bytes_per_token_measured == pytest.approx(23040, rel=0.03)
    assert abs(memory.unaccounted_bytes) <= 0.05 * memory.process_peak_bytes
    with TransformersEngine().serve(built) as here:
        (expected,) = here.loglikelihood([ScoreRequest("scored", ids)])
    assert len(served.logprobs) == len(expected.logprobs)
    assert abs(np.mean(served.logprobs) - np.mean(expected.logprobs)) < 0.05
    assert np.mean(served.is_top1 == expected.is_top1) > 0.9


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_killed_owner_leaves_no_server(installed, tmp_path):
    """The engine's own path: its process is killed while the server starts."""
    (installed / "bin" / "vllm").write_text("#!/bin/sh\nsleep 600 &\necho $$ $! > pids\nwait\n")
    code = textwrap.dedent(f"""
        from quanteval.engines.vllm import VLLMEngine
        from tests.engines.test_vllm import artifact
        with VLLMEngine(executable={str(installed)!r}).serve(artifact({str(tmp_path)!r})):
            pass
    """)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    owner = psutil.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    pids = tmp_path / "pids"
    deadline = time.monotonic() + 60
    while not (pids.exists() and pids.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    owner.send_signal(signal.SIGKILL)
    owner.wait(60)
    for pid in map(int, pids.read_text().split()):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.02)

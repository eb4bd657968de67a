"""llama.cpp in this process (the xllamacpp wheel), on GGUF files.

Its server object listens on this machine alone; its own completion endpoint is used, since it takes
and gives token ids. The server's threads end with this process, whatever ends it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quanteval.engines.gguf_census import GGUFCensus, effective, read_gguf
from quanteval.engines.gguf_session import InProcessSession
from quanteval.engines.llama_cpp_server import ServerBackend
from quanteval.engines.tokenizer import HFTokenizer
from quanteval.environment import package_version, rss_bytes, usable_cores
from quanteval.errors import EngineError, UnsupportedError
from quanteval.process_memory import note_before_load
from quanteval.records import Artifact, Effective

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


@dataclass(frozen=True)
class LlamaCppEngine:
    """Serves GGUF artifacts. Fields are those of conf/engine/llama_cpp.yaml."""

    device: Literal["cpu"] = "cpu"
    n_parallel: int = 8
    n_ctx: int = 1024
    n_batch: int = 512
    n_threads: int | None = None
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    flash_attention: Literal["auto", "on", "off"] = "auto"

    def __post_init__(self) -> None:
        for name in ("n_parallel", "n_ctx", "n_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} "{getattr(self, name)}" must be at least 1')
        if self.cache_type_v not in ("f32", "f16", "bf16") and self.flash_attention == "off":
            raise ValueError(f'cache_type_v "{self.cache_type_v}" needs flash_attention')

    def check(self, artifact: Artifact) -> None:
        """UnsupportedError when the artifact is no GGUF file or the package is missing."""
        if artifact.format != "gguf":
            raise UnsupportedError(
                f'the llama_cpp engine does not serve "{artifact.format}" artifacts: use a gguf scheme'
            )
        if package_version("xllamacpp") is None:
            raise UnsupportedError(
                'engine=llama_cpp needs xllamacpp: pip install "quanteval[llama-cpp]"'
            )

    @contextlib.contextmanager
    def serve(self, artifact: Artifact) -> Iterator[InProcessSession]:
        """Load the file and yield its session."""
        import xllamacpp

        folder = Path(artifact.path)
        path = folder / artifact.load["gguf_file"]
        census = read_gguf(path)
        tokenizer = HFTokenizer(folder, trust_remote_code=artifact.trust_remote_code)
        before = note_before_load()
        try:
            server = xllamacpp.Server(self._params(xllamacpp, path))
        except Exception as error:
            raise EngineError(
                f'llama.cpp cannot load "{path.name}": {str(error).strip() or type(error).__name__}'
            ) from error
        backend = ServerBackend(
            server,
            server.listening_address,
            tokenizer.encode,
            tokenizer.eos_token_ids,
            self,
            census,
        )
        session = InProcessSession(
            backend,
            tokenizer,
            max_context=min(census.context, self.n_ctx),
            effective=self._effective(census),
            before_load_bytes=before,
            loaded_bytes=rss_bytes(),
        )
        try:
            yield session
        finally:
            session.close()
            # The server ends its threads when its last reference goes.
            del session, backend, server

    def _params(self, library: Any, path: Path) -> Any:
        params = library.CommonParams()
        params.model.path = str(path)
        params.hostnames = ["127.0.0.1"]
        params.port = 0
        params.n_parallel = self.n_parallel
        # The library divides its context among the rows: a row of ours holds n_ctx tokens.
        params.n_ctx = self.n_ctx * self.n_parallel
        params.n_batch = params.n_ubatch = self.n_batch
        threads = self.n_threads or usable_cores()
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_threads_http = self.n_parallel * 4 + 4
        params.cache_type_k = getattr(library.ggml_type, f"GGML_TYPE_{self.cache_type_k.upper()}")
        params.cache_type_v = getattr(library.ggml_type, f"GGML_TYPE_{self.cache_type_v.upper()}")
        kinds = library.llama_flash_attn_type
        params.flash_attn_type = {
            "auto": kinds.LLAMA_FLASH_ATTN_TYPE_AUTO,
            "on": kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED,
            "off": kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED,
        }[self.flash_attention]
        # A warm prefix would falsify latency; a request asks for it by itself where that is wanted.
        params.cache_prompt = False
        params.n_cache_reuse = 0
        params.cache_ram_mib = 0
        params.cache_idle_slots = False
        params.ctx_shift = False
        params.fit_params = False
        params.endpoint_metrics = True
        params.ui = False
        return params

    def _effective(self, census: GGUFCensus) -> Effective:
        quantizes = census.has_blocks
        return effective(
            census,
            engine="llama.cpp",
            kernel="llama.cpp: activations quantized to int8 in blocks of 32 (K-quants: 256), integer dot products",
            float_kernel="llama.cpp: float dot products, activations in the weights' format",
            activation_bits=8 if quantizes else min(t.bits for t in _linear_floats(census)),
            compute="float32",
            notes=f"KV cache in {self.cache_type_k}/{self.cache_type_v}",
        )


@dataclass(frozen=True)
class _FloatFormat:
    bits: float


def _linear_floats(census: GGUFCensus) -> list[_FloatFormat]:
    bits = {"float32": 32.0, "float16": 16.0, "bfloat16": 16.0, "float64": 64.0}
    found = [_FloatFormat(bits[t.format]) for t in census.tensors if t.is_linear]
    return found or [_FloatFormat(32.0)]

"""OpenVINO GenAI's continuous batching, in this process, on GGUF files.

One thread steps the pipeline and delivers the tokens of all requests. The library quantizes
activations to int8 for compressed weights by default, and the KV cache to 8 bits: both are fields
here, and both are reported as part of what ran.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quanteval.engines.gguf_census import GGUFCensus, effective, read_gguf
from quanteval.engines.gguf_session import InProcessSession
from quanteval.engines.openvino_runner import BLOCK_TOKENS, OpenVINOCalls, PipelineRunner
from quanteval.engines.tokenizer import HFTokenizer
from quanteval.environment import package_version, rss_bytes
from quanteval.errors import EngineError, UnsupportedError
from quanteval.process_memory import note_before_load
from quanteval.records import Artifact, Effective

EXACT = ("q8_0", "q4_0")
"""Block formats whose weights the library's reader keeps as they are in the file."""
READABLE = {"float16", "q8_0", "q4_0", "q4_1", "q4_k", "q6_k"}
"""Formats of matrices that the library's reader takes."""


@dataclass(frozen=True)
class OpenVINOEngine:
    """Serves GGUF artifacts. Fields are those of conf/engine/openvino.yaml."""

    device: Literal["cpu"] = "cpu"
    max_batch_rows: int = 32
    kv_cache_tokens: int = 8192
    step_tokens: int = 256
    split_prompts: bool = True
    inference_precision: Literal["auto", "f32", "bf16", "f16"] = "auto"
    dynamic_quantization_group_size: int | None = None
    kv_cache_precision: Literal["auto", "u8", "bf16", "f16", "f32"] = "auto"
    threads: int | None = None
    max_context: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_rows", "kv_cache_tokens", "step_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f'{name} "{getattr(self, name)}" must be at least 1')
        if (self.dynamic_quantization_group_size or 0) < 0:
            raise ValueError(
                f'dynamic_quantization_group_size "{self.dynamic_quantization_group_size}" must be 0 (off) or more'
            )

    def check(self, artifact: Artifact) -> None:
        """UnsupportedError when the artifact is no GGUF file or the package is missing."""
        if artifact.format != "gguf":
            raise UnsupportedError(
                f'the openvino engine does not serve "{artifact.format}" artifacts: use a gguf scheme'
            )
        if package_version("openvino-genai") is None:
            raise UnsupportedError(
                'engine=openvino needs openvino-genai: pip install "quanteval[openvino]"'
            )

    @property
    def properties(self) -> dict[str, Any]:
        """What the CPU plugin is told; what is left to it is absent."""
        found: dict[str, Any] = {}
        if self.inference_precision != "auto":
            found["INFERENCE_PRECISION_HINT"] = self.inference_precision
        if self.dynamic_quantization_group_size is not None:
            found["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = self.dynamic_quantization_group_size
        if self.kv_cache_precision != "auto":
            found["KV_CACHE_PRECISION"] = self.kv_cache_precision
        if self.threads is not None:
            found["INFERENCE_NUM_THREADS"] = self.threads
        return found

    @contextlib.contextmanager
    def serve(self, artifact: Artifact) -> Iterator[InProcessSession]:
        """Load the file and yield its session."""
        import openvino
        import openvino_genai

        folder = Path(artifact.path)
        path = folder / artifact.load["gguf_file"]
        census = read_gguf(path)
        _check_formats(census, path)
        tokenizer = HFTokenizer(folder, trust_remote_code=artifact.trust_remote_code)
        core = openvino.Core()
        before = note_before_load()
        blocks = -(-self.kv_cache_tokens // BLOCK_TOKENS)
        try:
            pipeline = openvino_genai.ContinuousBatchingPipeline(
                str(path), self._scheduler(openvino_genai, blocks), "CPU", self.properties
            )
        except RuntimeError as error:
            line = str(error).strip().splitlines()[-1]
            raise EngineError(f'openvino cannot load "{path.name}": {line}') from error
        runner = PipelineRunner(
            pipeline,
            OpenVINOCalls(),
            tokenizer.eos_token_ids,
            rows=self.max_batch_rows,
            policy=self._policy(blocks),
            blocks=blocks,
            values_per_token=census.kv_values_per_token(),
        )
        # The first token allocates the cache: only then is it known in which precision.
        try:
            runner.warm_up()
        except BaseException:
            runner.close()
            raise
        session = InProcessSession(
            runner,
            tokenizer,
            max_context=min(
                census.context, blocks * BLOCK_TOKENS, self.max_context or census.context
            ),
            effective=self._effective(census, core, runner.cache_bytes_per_value()),
            before_load_bytes=before,
            loaded_bytes=rss_bytes(),
        )
        try:
            yield session
        finally:
            session.close()
            del runner, pipeline

    def _scheduler(self, genai: Any, blocks: int) -> Any:
        config = genai.SchedulerConfig()
        config.num_kv_blocks = blocks
        config.max_num_seqs = self.max_batch_rows
        config.max_num_batched_tokens = self.step_tokens
        config.dynamic_split_fuse = self.split_prompts
        # A warm prefix would falsify latency.
        config.enable_prefix_caching = False
        return config

    def _policy(self, blocks: int) -> str:
        return (
            f"continuous (openvino-genai), at most {self.max_batch_rows} rows, {blocks * BLOCK_TOKENS} cache "
            f"tokens, {self.step_tokens} tokens a step, "
            f"{'prompts split' if self.split_prompts else 'prompts whole'}, no prefix caching"
        )

    def _setting(self, core: Any, name: str) -> Any:
        """What the plugin was told, else its own default."""
        told = self.properties
        return told[name] if name in told else core.get_property("CPU", name)

    def _effective(self, census: GGUFCensus, core: Any, cache_bytes: float) -> Effective:
        """Ask the plugin for what it was not told, and put it with the file's census."""
        compute = _type_name(self._setting(core, "INFERENCE_PRECISION_HINT"))
        group = int(self._setting(core, "DYNAMIC_QUANTIZATION_GROUP_SIZE"))
        quantizes = census.has_blocks and group > 0
        bits = 8 if quantizes else (32 if compute == "float32" else 16)
        kernel = (
            f"openvino: activations quantized to int8 in groups of {group}, accumulated in {compute}"
            if quantizes
            else f"openvino: weights decompressed to {compute} for the product"
        )
        return effective(
            census,
            engine="openvino",
            kernel=kernel,
            float_kernel=f"openvino: {compute} product",
            activation_bits=bits,
            compute=compute,
            notes="; ".join([f"KV cache in {8 * cache_bytes:.0f} bits", *_reader_notes(census)]),
        )


def _type_name(value: Any) -> str:
    """Return 'bfloat16' for openvino's type or for the short name it is set by."""
    text = value if isinstance(value, str) else str(value.to_string())
    names = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "u8": "uint8"}
    return names.get(text, text)


def _reader_notes(census: GGUFCensus) -> list[str]:
    kinds = {t.format for t in census.tensors if t.quantized} - set(EXACT)
    return [
        f"{', '.join(sorted(kinds))} weights are repacked by its reader (block minima become whole zero points): "
        "they are not exactly the file's"
    ] if kinds else []  # fmt: skip


def _check_formats(census: GGUFCensus, path: Path) -> None:
    odd = sorted({t.format for t in census.tensors if t.dimensions > 1} - READABLE)
    if odd:
        raise UnsupportedError(
            f'openvino does not read "{odd[0]}" matrices, which "{path.name}" has: use engine=llama_cpp'
        )

"""OpenVINO GenAI's continuous batching, in this process, on GGUF files.

One thread steps the pipeline and delivers the tokens of all requests. The library quantizes
activations to int8 for compressed weights by default, and the KV cache to 8 bits: both are fields
here, and both are reported as part of what ran.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from quanteval.engines.gguf_census import GGUFCensus, effective, read_gguf
from quanteval.engines.gguf_session import CacheUse, Deliver, InProcessSession, Piece
from quanteval.engines.tokenizer import HFTokenizer
from quanteval.environment import package_version, rss_bytes
from quanteval.errors import EngineError, UnsupportedError
from quanteval.interfaces import Request, Sampling, ScoreRequest, TokenLogprobs
from quanteval.records import Artifact, Effective

BLOCK_TOKENS = 32
"""Tokens of one block of the KV cache on a CPU."""
CACHE_BYTES = {"uint8": 1.0, "float16": 2.0, "bfloat16": 2.0, "float32": 4.0}
CLOSE_TIMEOUT_S = 60.0
LOG_HALF = math.log(0.5)
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
        before = rss_bytes()
        blocks = -(-self.kv_cache_tokens // BLOCK_TOKENS)
        try:
            pipeline = openvino_genai.ContinuousBatchingPipeline(
                str(path), self._scheduler(openvino_genai, blocks), "CPU", self.properties
            )
        except RuntimeError as error:
            line = str(error).strip().splitlines()[-1]
            raise EngineError(f'openvino cannot load "{path.name}": {line}') from error
        cache_type = _type_name(self._setting(core, "KV_CACHE_PRECISION"))
        runner = PipelineRunner(
            pipeline,
            OpenVINOCalls(),
            tokenizer.eos_token_ids,
            rows=self.max_batch_rows,
            policy=self._policy(blocks),
            blocks=blocks,
            bytes_per_token=census.kv_values_per_token() * CACHE_BYTES.get(cache_type, 2.0),
        )
        session = InProcessSession(
            runner,
            tokenizer,
            max_context=min(
                census.context, blocks * BLOCK_TOKENS, self.max_context or census.context
            ),
            effective=self._effective(census, core),
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

    def _effective(self, census: GGUFCensus, core: Any) -> Effective:
        """Ask the plugin for what it was not told, and put it with the file's census."""
        compute = _type_name(self._setting(core, "INFERENCE_PRECISION_HINT"))
        group = int(self._setting(core, "DYNAMIC_QUANTIZATION_GROUP_SIZE"))
        cache = _type_name(self._setting(core, "KV_CACHE_PRECISION"))
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
            notes="; ".join([f"KV cache in {cache}", *_reader_notes(census)]),
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


class OpenVINOCalls:
    """Makes the library's own objects: what a runner cannot do without the package."""

    def ids(self, token_ids: tuple[int, ...]) -> Any:
        """A prompt as a tensor [1, T]."""
        import openvino

        return openvino.Tensor(np.array([token_ids], dtype=np.int64))

    def config(self, sampling: Sampling, eos: frozenset[int]) -> Any:
        """Generation settings; nothing is left to the file's defaults. Stop strings are the session's."""
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = sampling.max_tokens
        config.ignore_eos = sampling.ignore_eos
        if eos and not sampling.ignore_eos:
            config.eos_token_id = min(eos)
            config.stop_token_ids = set(eos)
        config.do_sample = sampling.temperature > 0
        if config.do_sample:
            config.temperature = sampling.temperature
            config.top_p = sampling.top_p
            config.rng_seed = sampling.seed
            if sampling.top_k > 0:
                config.top_k = sampling.top_k
        return config

    def scoring(self) -> Any:
        """Settings that echo the prompt with its log-probabilities, and one greedy token."""
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = 1
        config.do_sample = False
        config.ignore_eos = True
        config.echo = True
        config.logprobs = 1
        return config


@dataclass
class _Open:
    """A request in work: its handle in the pipeline, and where its output goes."""

    handle: Any
    deliver: Deliver
    sampling: Sampling
    submitted_s: float
    added_s: float
    count: int = 0
    logprobs: list[float] = field(default_factory=list)
    finished: Callable[[_Open], None] | None = None
    token_ids: list[int] = field(default_factory=list)
    failure: str | None = None


class PipelineRunner:
    """One thread that adds requests, steps the pipeline and delivers what each request got."""

    def __init__(
        self,
        pipeline: Any,
        calls: Any,
        eos: frozenset[int],
        *,
        rows: int,
        policy: str,
        blocks: int,
        bytes_per_token: float,
    ) -> None:
        self._pipeline = pipeline
        self._calls = calls
        self._eos = eos
        self.rows = rows
        self.policy = policy
        self._blocks = blocks
        self._bytes_per_token = bytes_per_token
        self._numbers = itertools.count(1)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open: dict[str, _Open] = {}
        self._cancelled: set[str] = set()
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="openvino", daemon=True)
        self._thread.start()

    # ---- the callers' side

    def submit(self, request: Request, deliver: Deliver) -> str:
        """Queue a request."""
        submitted = time.perf_counter()
        number = next(self._numbers)
        name = str(number)

        def add() -> None:
            config = self._calls.config(request.sampling, self._eos)
            self._add(
                number, request.prompt.token_ids, config, request.sampling, deliver, submitted
            )

        self._put(add, lambda why: deliver(Piece((), time.perf_counter(), "error", why)))
        return name

    def cancel(self, handle: str) -> None:
        """Drop a request between two steps; nothing is delivered from now on."""
        with self._lock:
            if self._failure is None:
                self._cancelled.add(handle)
        self._commands.put(lambda: self._drop(handle))

    def score(self, request: ScoreRequest) -> TokenLogprobs:
        """Read the prompt's log-probabilities back through its echo.

        `is_top1` is exact up to the first token that is not the most probable, so whether all are is
        exact; after it only those above one half, which must be, are marked.
        """
        ids, first = request.token_ids, request.first_scored
        values, _ = self._one(ids, self._calls.scoring())
        if len(values) != len(ids) + 1:
            raise EngineError(
                f'"{request.request_id}": openvino gave {len(values)} log-probabilities for {len(ids)} tokens'
            )
        logprobs = np.array(values[first : len(ids)], dtype=np.float64)
        is_top1 = logprobs > LOG_HALF
        for position in np.flatnonzero(~is_top1):
            greedy = self._calls.config(Sampling(1, ignore_eos=True), self._eos)
            _, found = self._one(ids[: first + position], greedy)
            if not found or found[0] != ids[first + position]:
                break
            is_top1[position] = True
        return TokenLogprobs(request.request_id, logprobs, is_top1)

    def _one(self, ids: tuple[int, ...], config: Any) -> tuple[list[float], list[int]]:
        """Run one request to its end; return its log-probabilities and token ids."""
        done: Future[_Open] = Future()
        number = next(self._numbers)

        def failed(why: str) -> None:
            done.set_exception(EngineError(why))

        def add() -> None:
            sampling = Sampling(1, ignore_eos=True)
            self._add(number, ids, config, sampling, lambda _: None, 0.0, done.set_result)

        self._put(add, failed)
        entry = done.result()
        if entry.failure is not None:
            raise EngineError(entry.failure)
        return entry.logprobs, entry.token_ids

    def cache_use(self) -> CacheUse:
        """The block pool as the pipeline allocated it (8-bit caches hold scales too, which the formula leaves out)."""
        held = int(self._pipeline.get_metrics().kv_cache_size_in_bytes)
        tokens = self._blocks * BLOCK_TOKENS if held else 0
        return CacheUse(held, tokens, self._bytes_per_token)

    def close(self) -> None:
        """Stop after the present step."""
        self._commands.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _put(self, command: Callable[[], None], failed: Callable[[str], None]) -> None:
        def guarded() -> None:
            if self._failure is not None:
                failed(self._failure)
                return
            try:
                command()
            except Exception as error:
                failed(f"openvino refused the request: {str(error).strip().splitlines()[-1]}")

        with self._lock:
            if self._failure is None:
                self._commands.put(guarded)
                return
        failed(self._failure)

    # ---- the loop's side

    def _add(
        self,
        number: int,
        ids: tuple[int, ...],
        config: Any,
        sampling: Sampling,
        deliver: Deliver,
        submitted: float,
        finished: Callable[[_Open], None] | None = None,
    ) -> None:
        if str(number) in self._cancelled:
            self._cancelled.discard(str(number))
            return
        handle = self._pipeline.add_request(number, self._calls.ids(ids), config)
        entry = _Open(handle, deliver, sampling, submitted, time.perf_counter(), finished=finished)
        self._open[str(number)] = entry

    def _drop(self, handle: str) -> None:
        self._cancelled.discard(handle)
        entry = self._open.pop(handle, None)
        if entry is not None:
            entry.handle.cancel()

    def _run(self) -> None:
        why = "the session was closed"
        try:
            while self._take_commands():
                if self._pipeline.has_non_finished_requests():
                    self._pipeline.step()
                self._collect()
        except Exception as error:
            why = f"openvino's pipeline failed: {str(error).strip().splitlines()[-1]}"
        with self._lock:
            self._failure = why
        for name in list(self._open):
            entry = self._open.pop(name)
            with contextlib.suppress(Exception):
                entry.handle.cancel()
            self._end(entry, (), "error", why)
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if command is not None:
                command()

    def _take_commands(self) -> bool:
        """Do what callers asked; wait for them when there is nothing to compute. False to end."""
        wait = not self._open and not self._pipeline.has_non_finished_requests()
        while True:
            try:
                command = self._commands.get() if wait else self._commands.get_nowait()
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _collect(self) -> None:
        at_s = time.perf_counter()
        for name in list(self._open):
            entry = self._open[name]
            # The status first: what is read afterwards is complete when it says that all is done.
            status = entry.handle.get_status().name
            new: list[int] = []
            reason = "NONE"
            while entry.handle.can_read():
                for output in entry.handle.read().values():
                    new.extend(int(i) for i in output.generated_ids)
                    entry.logprobs.extend(output.generated_log_probs)
                    reason = output.finish_reason.name
            entry.count += len(new)
            entry.token_ids.extend(new)
            if name in self._cancelled:
                continue
            if status != "RUNNING":
                del self._open[name]
                self._finish(entry, tuple(new), status, reason)
            elif new:
                entry.deliver(Piece(tuple(new), at_s))

    def _finish(self, entry: _Open, new: tuple[int, ...], status: str, reason: str) -> None:
        if status == "IGNORED":
            self._end(
                entry,
                new,
                "error",
                "the KV cache has no room for the request: raise kv_cache_tokens",
            )
        elif status != "FINISHED":
            self._end(entry, new, "error", f'openvino ended the request as "{status.lower()}"')
        else:
            self._end(entry, new, "stop" if reason == "STOP" else "length", None)

    def _end(
        self,
        entry: _Open,
        new: tuple[int, ...],
        reason: Literal["stop", "length", "error"],
        why: str | None,
    ) -> None:
        entry.failure = why
        if entry.finished is not None:
            entry.finished(entry)
            return
        layers = self._layers(entry) if why is None else {}
        entry.deliver(
            Piece(new, time.perf_counter(), reason, why, layers, 0 if why is None else None)
        )

    def _layers(self, entry: _Open) -> dict[str, float]:
        """Seconds: `queue` until the pipeline took it, `prefill` until its first token, `decode` to its last.

        The pipeline's own waiting line is part of `prefill`: it does not tell when a prompt's turn came.
        """
        raw = entry.handle.get_perf_metrics().raw_metrics
        times = list(raw.m_new_token_times)
        first = list(raw.m_times_to_first_token)
        if not times or not first:
            return {}
        return {
            "queue": entry.added_s - entry.submitted_s,
            "prefill": first[0] / 1e6,
            "decode": (times[-1] - times[0]) / 1e3,
        }

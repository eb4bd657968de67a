"""The thread that steps an OpenVINO GenAI pipeline, adds requests to it and delivers what each got."""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from quanteval.engines.gguf_session import CacheUse, Deliver, Piece
from quanteval.errors import EngineError
from quanteval.interfaces import Request, Sampling, ScoreRequest, TokenLogprobs

BLOCK_TOKENS = 32
"""Tokens of one block of the KV cache on a CPU."""
CLOSE_TIMEOUT_S = 60.0
LOG_HALF = math.log(0.5)


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
        values_per_token: int,
    ) -> None:
        self._pipeline = pipeline
        self._calls = calls
        self._eos = eos
        self.rows = rows
        self.policy = policy
        self._blocks = blocks
        self._values_per_token = values_per_token
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
        return CacheUse(held, tokens, self._values_per_token * self.cache_bytes_per_value())

    def cache_bytes_per_value(self) -> float:
        """4, 2 or 1: told from the size of the pool, since the library chooses by the weights' format."""
        held = int(self._pipeline.get_metrics().kv_cache_size_in_bytes)
        values = self._values_per_token * self._blocks * BLOCK_TOKENS
        return 4.0 if held > 3 * values else 2.0 if held > 1.5 * values else 1.0

    def warm_up(self) -> None:
        """Compute one token. EngineError when the pipeline cannot."""
        self._one((0,), self._calls.config(Sampling(1, ignore_eos=True), self._eos))

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

"""An engine without a model: scripted answers and timings, for tests of everything around an engine.

Texts are tokenized byte by byte. `noise` stands for the damage of a scheme: it moves every
log-probability by a fixed, reproducible amount, so two fake variants can differ as real ones do.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from quanteval.errors import ConfigError, EngineError, UnsupportedError
from quanteval.interfaces import (
    Chunk,
    Completion,
    HiddenStates,
    Message,
    OutputHead,
    Prompt,
    Request,
    ScoreRequest,
    TokenLogprobs,
)
from quanteval.records import Artifact, Effective, LayerClass, MemoryUse

END = 256
BEGIN = 257


@dataclass(frozen=True)
class ByteTokenizer:
    """One token a byte; 256 ends a text, 257 begins one when `add_bos` is set."""

    add_bos: bool = False
    chat_template: bool = True

    @property
    def fingerprint(self) -> str:
        """A fixed name."""
        return f"bytes-1-{self.add_bos}-{self.chat_template}"

    @property
    def vocab_size(self) -> int:
        """256 bytes and two special ids."""
        return 258

    @property
    def bos_token_id(self) -> int | None:
        """257 when it is added."""
        return BEGIN if self.add_bos else None

    @property
    def prefix_token_id(self) -> int:
        """257."""
        return BEGIN

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """256."""
        return frozenset({END})

    @property
    def has_chat_template(self) -> bool:
        """As configured."""
        return self.chat_template

    def encode(self, text: str) -> tuple[int, ...]:
        """UTF-8 bytes."""
        return tuple(text.encode("utf-8", "surrogatepass"))

    def raw(self, text: str) -> Prompt:
        """The bytes, after the begin id where it is added."""
        begin = (BEGIN,) if self.add_bos else ()
        return Prompt(text, begin + self.encode(text))

    def chat(self, messages: Sequence[Message]) -> Prompt:
        """'<role>content' lines, then '<assistant>'."""
        if not self.chat_template:
            raise ConfigError("this model has no chat template: use the raw prompt form")
        text = "".join(f"<{m['role']}>{m['content']}\n" for m in messages) + "<assistant>"
        return self.raw(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Bytes back to text."""
        return bytes(i for i in token_ids if i < 256).decode("utf-8", "replace")


@dataclass(frozen=True)
class FakeEngine:
    """Answers from a script; see the fields of conf/engine/fake.yaml.

    `answers` maps a piece of the prompt to the answer; the longest piece that occurs decides, and
    `default_answer` is for the rest. `failing` lists request ids that end in an error.
    """

    answers: Mapping[str, str] = field(default_factory=dict)
    default_answer: str = "ok"
    ttft_s: float = 0.0
    itl_s: float = 0.0
    tokens_per_chunk: int = 1
    failing: tuple[str, ...] = ()
    noise: float = 0.0
    noise_of: Mapping[str, float] = field(default_factory=dict)
    max_context: int = 1 << 20
    weights_bytes: int = 1_000_000
    add_bos: bool = False
    device: str = "cpu"

    def check(self, artifact: Artifact) -> None:
        """Takes every artifact."""

    @contextlib.contextmanager
    def serve(self, artifact: Artifact) -> Iterator[FakeSession]:
        """Yield a session; `noise_of` sets the noise by scheme name."""
        yield FakeSession(self, artifact, self.noise_of.get(artifact.scheme, self.noise))


class FakeSession:
    """A scripted session; safe to use from several threads."""

    batch_policy = "scripted"

    def __init__(self, engine: FakeEngine, artifact: Artifact, noise: float) -> None:
        self._engine = engine
        self._artifact = artifact
        self._noise = noise
        self._lock = threading.Lock()
        self.tokenizer = ByteTokenizer(add_bos=engine.add_bos)
        self.in_flight = 0
        self.most_in_flight = 0

    @property
    def max_context(self) -> int:
        """As configured."""
        return self._engine.max_context

    def _answer(self, request: Request) -> tuple[tuple[int, ...], bool]:
        """Return the answer's tokens and whether it was cut by max_tokens."""
        pieces = [piece for piece in self._engine.answers if piece in request.prompt.text]
        answer = (
            self._engine.answers[max(pieces, key=len)] if pieces else self._engine.default_answer
        )
        ids = self.tokenizer.encode(answer)
        limit = request.sampling.max_tokens
        if request.sampling.ignore_eos:
            repeated = (ids or (32,)) * (limit // max(len(ids), 1) + 1)
            return repeated[:limit], True
        return (ids[:limit], True) if len(ids) >= limit else ((*ids, END), False)

    def stream(self, request: Request) -> Iterator[Chunk]:
        """Sleep and yield as the script says."""
        with self._lock:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            yield from self._chunks(request)
        finally:
            with self._lock:
                self.in_flight -= 1

    def _chunks(self, request: Request) -> Iterator[Chunk]:
        time.sleep(self._engine.ttft_s)
        if request.request_id in self._engine.failing:
            yield Chunk((), time.perf_counter(), "error", "scripted failure")
            return
        if len(request.prompt.token_ids) + request.sampling.max_tokens > self.max_context:
            yield Chunk((), time.perf_counter(), "error", "longer than the context")
            return
        ids, cut = self._answer(request)
        step = self._engine.tokens_per_chunk
        for start in range(0, len(ids), step):
            if start:
                time.sleep(self._engine.itl_s)
            last = start + step >= len(ids)
            reason = ("length" if cut else "stop") if last else None
            yield Chunk(ids[start : start + step], time.perf_counter(), reason)  # type: ignore[arg-type]

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """One after the other."""
        for request in requests:
            started = time.perf_counter()
            ids: tuple[int, ...] = ()
            for chunk in self.stream(request):
                ids += chunk.token_ids
                if chunk.finish_reason is not None:
                    text = self.tokenizer.decode(ids) if chunk.error is None else ""
                    for stop in request.sampling.stop:
                        text = text.split(stop)[0]
                    elapsed = time.perf_counter() - started
                    yield Completion(
                        request.request_id, text, ids, chunk.finish_reason, chunk.error, elapsed
                    )

    def loglikelihood(self, requests: Iterable[ScoreRequest]) -> Iterator[TokenLogprobs]:
        """A number between -4 and 0 from a hash of each token and the one before, less the noise."""
        for request in requests:
            if request.request_id in self._engine.failing:
                raise EngineError(f'"{request.request_id}": scripted failure')
            ids = request.token_ids
            values = [
                -4 * _fraction(ids[i - 1], ids[i]) - self._noise * _fraction(ids[i], i)
                for i in range(request.first_scored, len(ids))
            ]
            logprobs = np.array(values, dtype=np.float64)
            yield TokenLogprobs(request.request_id, logprobs, logprobs > -1)

    def hidden_states(self, requests: Iterable[ScoreRequest]) -> Iterator[HiddenStates]:
        """There are none."""
        raise UnsupportedError("the fake engine has no hidden states")

    def output_head(self) -> OutputHead:
        """There is none."""
        raise UnsupportedError("the fake engine has no output head")

    def memory(self) -> MemoryUse:
        """Fixed numbers that add up."""
        return MemoryUse(
            device="fake",
            before_load_bytes=10_000,
            weights_bytes=self._engine.weights_bytes,
            kv_cache_bytes=2_000,
            kv_cache_tokens=100,
            kv_bytes_per_token_formula=20.0,
            kv_bytes_per_token_measured=20.0,
            activation_peak_bytes=3_000,
            activation_peak_how="scripted",
            process_peak_bytes=self._engine.weights_bytes + 16_000,
            unaccounted_bytes=1_000,
        )

    def describe(self) -> Effective:
        """Say that what was asked for is what runs."""
        precision = self._artifact.precision
        bits = precision.weight_bits
        weights = int(8 * self._engine.weights_bytes / bits)
        layer = LayerClass(
            module_class="fake.Linear",
            weight_class="fake.Tensor",
            weight_format=precision.weight_format,
            count=1,
            weights=weights,
            stored_bytes=self._engine.weights_bytes,
            bits_per_weight=bits,
            quantized=precision.quantized,
            kernel="scripted",
            example="fake",
        )
        return Effective(
            linear_layers=[layer],
            dtype_bytes={precision.weight_format: self._engine.weights_bytes},
            bits_per_weight=bits,
            linear_bits_per_weight=bits,
            quantized_fraction=1.0 if precision.quantized else 0.0,
            left_alone=[],
            activation_bits=precision.activation_bits,
            compute_dtype="float32",
            emulated=False,
            emulation="scripted",
            resident_weight_bytes=self._engine.weights_bytes,
            parameters=weights,
        )


def _fraction(first: int, second: int) -> float:
    digest = hashlib.sha256(f"{first},{second}".encode()).digest()
    return int.from_bytes(digest[:4], "little") / 2**32

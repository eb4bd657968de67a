"""The seams: what crosses from one part of the pipeline to another, in memory.

Schemes, engines, benches, tasks and rules are written against this module and against `records`
alone, never against each other. Nothing here touches torch, files or the network.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quanteval.records import (
    Artifact,
    Effective,
    FinishReason,
    LoadPointRecord,
    MemoryUse,
    Precision,
    RequestTrace,
    Score,
)

# --------------------------------------------------------------------------- models and schemes


@dataclass(frozen=True)
class ModelSource:
    """An unquantized model on this machine, ready to be read by any scheme.

    `path` is a folder that `transformers` loads (config, tokenizer, safetensors).
    `weights_digest` is the sha256 over the weight files' contents and names.
    """

    id: str
    path: Path
    weights_digest: str
    revision: str | None = None
    provenance: str = ""
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Calibration:
    """Texts a scheme may look at while quantizing; empty for schemes that need none."""

    texts: tuple[str, ...] = ()
    digest: str = ""


@runtime_checkable
class Scheme(Protocol):
    """How weights and activations are stored and computed; a frozen dataclass that is its own config."""

    @property
    def precision(self) -> Precision:
        """What this scheme asks for; compared with what the served model reports."""
        ...

    def check(self, source: ModelSource | None, device: str) -> None:
        """Raise UnsupportedError (one line: why, what would help) before any weights are loaded.

        Without a source (a model that is not on this machine yet) shapes are not checked.
        """
        ...

    def quantize(
        self, source: ModelSource, out: Path, calibration: Calibration, device: str
    ) -> Artifact:
        """Write the artifact under the empty folder `out` (or point at the source) and describe it."""
        ...


# --------------------------------------------------------------------------- prompts and requests


class Message(TypedDict):
    """One chat turn."""

    role: Literal["system", "user", "assistant"]
    content: str


def hash_token_ids(token_ids: Sequence[int]) -> str:
    """Return the sha256 of token ids as little-endian int32: the identity of a prompt."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i4").tobytes()).hexdigest()


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt and its token ids, made by the session's tokenizer and by nothing else."""

    text: str
    token_ids: tuple[int, ...]

    @property
    def sha256(self) -> str:
        """Hash of the token ids."""
        return hash_token_ids(self.token_ids)


class Tokenizer(Protocol):
    """The one place where text becomes token ids, shared by every engine.

    The chat template is applied exactly once and the BOS token is there exactly once, as the
    tokenizer itself says; the prompt's bytes are kept (a trailing newline survives).
    """

    @property
    def fingerprint(self) -> str:
        """sha256 over the tokenizer's files and chat template."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def bos_token_id(self) -> int | None:
        """The id this tokenizer puts before a text, None when it puts none."""
        ...

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it: the begin id, else the end id.

        Unlike `bos_token_id` it is there also when the tokenizer does not put it by itself.
        """
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a generation."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can be used."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text` alone: no BOS, no other special token added."""
        ...

    def raw(self, text: str) -> Prompt:
        """A raw prompt: `text` with whatever special tokens the tokenizer adds by itself."""
        ...

    def chat(self, messages: Sequence[Message]) -> Prompt:
        """A chat prompt that ends where the assistant's answer begins; ConfigError without a template."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens removed by id, spaces untouched."""
        ...


@dataclass(frozen=True)
class Sampling:
    """Every sampling parameter, always sent explicitly; temperature 0 is greedy."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Request:
    """One generation to do; `request_id` is unique within a session's lifetime."""

    request_id: str
    prompt: Prompt
    sampling: Sampling


@dataclass(frozen=True)
class Completion:
    """What a generation returned; an error is carried here, never in `text`.

    `token_ids` holds every generated id, the end-of-sequence id included.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: str | None = None
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class Chunk:
    """One arrival on a stream: its tokens (at least one unless it only ends the stream) and when.

    `at_s` is `time.perf_counter()` of the moment the chunk reached the caller's side of the engine.
    """

    token_ids: tuple[int, ...]
    at_s: float
    finish_reason: FinishReason | None = None
    error: str | None = None
    tokens: int | None = None
    """Number of tokens where a server tells it without their ids; None: that of `token_ids`."""
    text: str = ""
    """The piece of text, where the engine has it at hand (servers send text)."""
    cached_prompt_tokens: int | None = None
    """On the last chunk: prompt tokens taken from a prefix cache, where the engine tells."""
    layers: Mapping[str, float] = field(default_factory=dict)
    """On the last chunk: seconds by layer, see `RequestTrace.layers`."""

    @property
    def count(self) -> int:
        """Number of output tokens in this chunk."""
        return len(self.token_ids) if self.tokens is None else self.tokens


@dataclass(frozen=True)
class ScoreRequest:
    """A token sequence to score; positions `first_scored`.. are scored given all before them.

    `first_scored` >= 1: the first token has nothing before it.
    """

    request_id: str
    token_ids: tuple[int, ...]
    first_scored: int = 1


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities (float64) of the scored tokens, and whether each was the argmax."""

    request_id: str
    logprobs: NDArray[np.float64]
    is_top1: NDArray[np.bool_]


@dataclass(frozen=True)
class HiddenStates:
    """Final hidden states (after the last norm) before each scored token; a torch tensor [T, d].

    Together with the session's `output_head` they rebuild the exact logits, at a hundredth of
    their size.
    """

    request_id: str
    values: Any


@dataclass(frozen=True)
class OutputHead:
    """What turns final hidden states into logits: torch tensors on the CPU, in the served dtype."""

    weight: Any
    bias: Any | None = None
    softcap: float | None = None


class Session(Protocol):
    """One live served model. Methods may be called from several threads unless said otherwise."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the served model."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens (prompt and output together) one request may hold.

        A scored sequence may have one more: its last token is only ever predicted.
        """
        ...

    @property
    def batch_policy(self) -> str:
        """One line: how requests are batched here, e.g. 'continuous, paged|sdpa, at most 8 rows'."""
        ...

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yield one completion a request, as they finish, in any order; errors are completions too."""
        ...

    def stream(self, request: Request) -> Iterator[Chunk]:
        """Yield chunks as they arrive; the last one has a finish_reason. Closing it cancels."""
        ...

    def loglikelihood(self, requests: Iterable[ScoreRequest]) -> Iterator[TokenLogprobs]:
        """Yield log-probabilities one sequence at a time, in the order asked. EngineError on failure."""
        ...

    def hidden_states(self, requests: Iterable[ScoreRequest]) -> Iterator[HiddenStates]:
        """Yield final hidden states, in the order asked; UnsupportedError where an engine has none."""
        ...

    def output_head(self) -> OutputHead:
        """The output head as served; UnsupportedError where an engine has none."""
        ...

    def memory(self) -> MemoryUse:
        """Memory by part, as measured now; callable any time, after at least one forward pass."""
        ...

    def describe(self) -> Effective:
        """What really runs, read back from the loaded model."""
        ...


@runtime_checkable
class StreamsAsync(Protocol):
    """A session that streams on an event loop by itself; for others a thread a request does it."""

    def astream(self, request: Request) -> AsyncIterator[Chunk]:
        """As `Session.stream`; closing the iterator, or cancelling its task, cancels the request."""
        ...


@runtime_checkable
class TellsMetrics(Protocol):
    """A session whose server counts things itself."""

    def server_metrics(self) -> dict[str, float]:
        """Counters and gauges by name, as they stand now; {} when they cannot be read."""
        ...


@dataclass(frozen=True)
class TopLogprobs:
    """The `k` most probable ids at each scored position [T, k] and their natural log-probabilities [T, k]."""

    request_id: str
    ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]


@runtime_checkable
class GivesTopLogprobs(Protocol):
    """A session without hidden states that tells the head of each position's distribution."""

    def top_logprobs(self, requests: Iterable[ScoreRequest], k: int) -> Iterator[TopLogprobs]:
        """Yield the top `k` of each scored position, in the order asked."""
        ...


class Engine(Protocol):
    """What serves an artifact; a frozen dataclass that is its own config."""

    @property
    def device(self) -> str:
        """'cpu' or 'cuda'."""
        ...

    def check(self, artifact: Artifact) -> None:
        """Raise UnsupportedError when this engine cannot serve that artifact."""
        ...

    def serve(self, artifact: Artifact) -> AbstractContextManager[Session]:
        """Load the artifact and yield a session; everything is released on exit."""
        ...


# --------------------------------------------------------------------------- bench and tasks


class Bench(Protocol):
    """A measuring plan; a frozen dataclass that is its own config."""

    def fingerprint(self) -> dict[str, Any]:
        """Everything, as plain JSON, that the traces depend on besides the served model."""
        ...

    def run(self, session: Session) -> Iterator[RequestTrace | LoadPointRecord]:
        """Yield one trace a request as each ends, warm-up first (marked as such), and a record a load point."""
        ...


@dataclass(frozen=True)
class Sample:
    """One item of a suite: an id that is stable between runs, and its fields as loaded."""

    sample_id: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class TaskContext:
    """What a task may use besides the session.

    `variant_dir` is the variant's own folder, `baseline_dir` the baseline's (the same folder when
    the variant is the baseline); a task keeps its own files under `<variant_dir>/<kind>/<task>/`.
    """

    variant_dir: Path
    baseline_dir: Path
    is_baseline: bool
    seed: int = 0


class Task(Protocol):
    """A suite with a kind; a frozen dataclass that is its own config, built from tasks/<name>/task.yaml."""

    @property
    def name(self) -> str:
        """Folder name under tasks/."""
        ...

    @property
    def kind(self) -> str:
        """'code', 'perplexity', 'divergence', ...: decides which metrics and rules apply."""
        ...

    @property
    def uses_baseline(self) -> bool:
        """Whether a candidate's scores also depend on what the baseline's run stored."""
        ...

    def samples(self) -> list[Sample]:
        """Load the samples (after `limit`), ids unique; ConfigError when there are none."""
        ...

    def fingerprint(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Everything, as plain JSON, that the scores depend on besides the served model."""
        ...

    def evaluate(
        self, session: Session, samples: Sequence[Sample], context: TaskContext
    ) -> Iterator[Score]:
        """Yield exactly one score a sample, as each is known, in any order."""
        ...

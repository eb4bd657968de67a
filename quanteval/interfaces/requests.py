"""Prompts, the tokenizer that makes them, and what is asked of a session and comes back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from quanteval.records import FinishReason


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


@dataclass(frozen=True)
class TopLogprobs:
    """The `k` most probable ids at each scored position [T, k] and their natural log-probabilities [T, k]."""

    request_id: str
    ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]

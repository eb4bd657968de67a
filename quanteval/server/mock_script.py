"""What the mock server does, as plain values: its settings, and what follows from them for one request."""

from __future__ import annotations

import codecs
import hashlib
import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from quanteval.engines.fake import END, ByteTokenizer
from quanteval.errors import ConfigError

TOKENIZER = ByteTokenizer()


@dataclass(frozen=True)
class MockSettings:
    """Timings, faults and answers of the mock server; all times in seconds, all shares from 0 to 1.

    Tokens are bytes, and 256 ends a text. Which requests a share hits depends on `seed` and the
    request's number alone (numbers count from 0 since the start or the last reset).
    """

    model_name: str = "mock"
    max_context: int = 1 << 20
    seed: int = 0

    ttft_s: float = 0.0
    """From having a slot to the first chunk with tokens."""
    itl_s: float = 0.0
    """From one chunk to the next: the gap between tokens when a chunk holds one."""
    spread: Literal["constant", "lognormal"] = "constant"
    sigma: float = 0.5
    """Of the logarithm, when lognormal; `ttft_s` and `itl_s` stay the means."""
    prefill_s_per_token: float = 0.0
    """Added to `ttft_s` for each prompt token."""
    exclusive_prefill: bool = False
    """Whether one prompt is read at a time, so that a long one holds up those behind it."""

    slots: int = 0
    """Most requests served at a time, others wait in the order they came; 0: no limit."""
    max_waiting: int = 0
    """Most requests that wait, more are answered 503; 0: no limit."""
    full_speed_streams: int = 0
    """With more streams than this, gaps grow in proportion, so tokens/s stay as they are; 0: never."""

    tokens_per_chunk: int = 1
    role_only_first_chunk: bool = False
    """Chat: a chunk with a role and no text goes out as soon as the request has a slot."""
    usage_only_last_chunk: bool = True
    """When usage is asked for: in a chunk of its own without choices, else on the chunk that ends the text."""
    reasoning_tokens: int = 0
    """Chat: so many first tokens go out as reasoning."""
    reasoning_field: Literal["reasoning_content", "reasoning"] = "reasoning_content"
    cached_prompt_tokens: int = 0
    """Told in usage and in the metrics as taken from a prefix cache, at most the prompt's length."""

    stall_at_s: float | None = None
    """When everything stands still, after the first request since the start or reset."""
    stall_s: float = 0.0

    http_error_status: int = 500
    http_error_share: float = 0.0
    http_error_requests: tuple[int, ...] = ()
    stream_error_after: int | None = None
    """An error object in the stream, under HTTP 200, after so many tokens."""
    stream_error_share: float = 1.0
    stream_error_text: str = "scripted failure in the middle of the stream"
    drop_connection_after: int | None = None
    """The connection is cut after so many tokens."""
    drop_connection_share: float = 1.0
    die_after_requests: int | None = None
    """The process exits when one more request than this arrives since the start or the last reset; in a process of
    its own only."""

    answers: Mapping[str, str] = field(default_factory=dict)
    """Piece of a prompt: answer; the longest piece that occurs decides."""
    default_answer: str = "ok"
    prompt_logprobs: Literal["given", "refused", "ignored", "shifted"] = "given"
    """shifted: those of each position stand one place too late."""

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s", "sigma", "prefill_s_per_token", "stall_s", "slots",
                     "max_waiting", "full_speed_streams", "reasoning_tokens", "cached_prompt_tokens"):  # fmt: skip
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f'{name} "{value}" must be 0 or more')
        for name in ("tokens_per_chunk", "max_context"):
            if getattr(self, name) < 1:
                raise ConfigError(f'{name} "{getattr(self, name)}" must be at least 1')
        for name in ("http_error_share", "stream_error_share", "drop_connection_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f'{name} "{getattr(self, name)}" must be from 0 to 1')
        if not 400 <= self.http_error_status <= 599:
            raise ConfigError(
                f'http_error_status "{self.http_error_status}" must be from 400 to 599'
            )


class Script:
    """What happens to request number `number`; every draw is reproducible."""

    def __init__(self, settings: MockSettings, number: int) -> None:
        self.settings = settings
        self.number = number
        self._random = random.Random(f"{settings.seed}:{number}:time")

    def _hit(self, what: str, share: float) -> bool:
        if share in (0.0, 1.0):
            return share == 1.0
        return random.Random(f"{self.settings.seed}:{self.number}:{what}").random() < share

    @property
    def http_error(self) -> bool:
        """Whether it is answered with an HTTP error."""
        return self.number in self.settings.http_error_requests or self._hit(
            "http", self.settings.http_error_share
        )

    @property
    def error_after(self) -> int | None:
        """Tokens after which an error comes in the stream."""
        hit = self._hit("stream", self.settings.stream_error_share)
        return self.settings.stream_error_after if hit else None

    @property
    def drop_after(self) -> int | None:
        """Tokens after which the connection is cut."""
        hit = self._hit("drop", self.settings.drop_connection_share)
        return self.settings.drop_connection_after if hit else None

    def _draw(self, mean_s: float) -> float:
        if self.settings.spread == "constant" or mean_s == 0:
            return mean_s
        sigma = self.settings.sigma
        return self._random.lognormvariate(math.log(mean_s) - sigma * sigma / 2, sigma)

    def prefill_s(self, prompt_tokens: int) -> float:
        """Draw the time to the first token."""
        return self._draw(self.settings.ttft_s) + prompt_tokens * self.settings.prefill_s_per_token

    def gap_s(self, active: int) -> float:
        """Draw a gap while `active` streams are served."""
        full = self.settings.full_speed_streams
        return self._draw(self.settings.itl_s) * (max(active / full, 1.0) if full else 1.0)


def answer_of(
    settings: MockSettings, prompt: str, max_tokens: int | None, ignore_eos: bool
) -> tuple[tuple[int, ...], str]:
    """Return the answer's token ids and its finish reason; with `ignore_eos` it is repeated to the length."""
    pieces = [piece for piece in settings.answers if piece in prompt]
    text = settings.answers[max(pieces, key=len)] if pieces else settings.default_answer
    ids = TOKENIZER.encode(text)
    if ignore_eos and max_tokens is not None:
        repeated = (ids or (32,)) * (max_tokens // max(len(ids), 1) + 1)
        return repeated[:max_tokens], "length"
    if max_tokens is not None and len(ids) >= max_tokens:
        return ids[:max_tokens], "length"
    return (*ids, END), "stop"


def logprob(before: int, token: int) -> float:
    """Return the natural log-probability of a token after another: between -4 and 0, by their hash."""
    digest = hashlib.sha256(f"{before},{token}".encode()).digest()
    return -4 * int.from_bytes(digest[:4], "little") / 2**32


def prompt_logprobs(settings: MockSettings, ids: Sequence[int]) -> list[float | None]:
    """Return the log-probability of each prompt token given the one before; None for the first."""
    values: list[float | None] = [None]
    values += [logprob(before, token) for before, token in itertools.pairwise(ids)]
    if settings.prompt_logprobs == "shifted" and len(values) > 1:
        # The second stands twice, so that the list looks as it should.
        values = [None, values[1], *values[1:-1]]
    return values[: len(ids)]


def pieces_of(ids: Sequence[int], step: int) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield chunks of ids and their text; a character's bytes are held back until it is whole."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for start in range(0, len(ids), step):
        some = tuple(ids[start : start + step])
        last = start + step >= len(ids)
        yield some, decoder.decode(bytes(i for i in some if i < 256), last)


def token_texts(ids: Sequence[int]) -> list[str]:
    """Return a text for each id alone, as completions name tokens."""
    return [chr(i) if i < 128 else f"<{i}>" for i in ids]

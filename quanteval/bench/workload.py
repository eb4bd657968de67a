"""Requests of exact token lengths made of real text, the same ones for every variant.

What is sent is planned before a tokenizer exists (`PlannedRequest`: lengths, order, place in the text), so that a plan
can be hashed; `PromptMaker` then cuts the prompts out of the Python language reference (`pydoc_data.topics`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import platform
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quanteval.interfaces import Prompt, Request, Sampling, Tokenizer

PREFIX_TOKENS = 8
"""No two prompts begin with the same so many tokens of text; prefix caches share pages of 16 and more."""
HASH_MULTIPLIER = np.uint64(6364136223846793005)


@dataclass(frozen=True)
class Bucket:
    """A range of prompt lengths in tokens (both ends included), its share of the traffic, and its output length.

    `output_tokens` None means the plan's.
    """

    low: int
    high: int
    weight: float = 1.0
    output_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f'bucket "{self.name}" must be 1 <= low <= high')
        if not 0 < self.weight < math.inf:
            raise ValueError(f'weight "{self.weight}" of bucket "{self.name}" must be positive')
        if self.output_tokens is not None and self.output_tokens < 1:
            raise ValueError(
                f'output_tokens "{self.output_tokens}" of bucket "{self.name}" must be at least 1'
            )

    @property
    def name(self) -> str:
        """'low-high'."""
        return f"{self.low}-{self.high}"


@dataclass(frozen=True)
class PlannedRequest:
    """A request before it has a text.

    `place` picks where in the text its prompt begins: no two requests of a plan have the same.
    Steady-state figures rest on `measured` requests alone: `ramp` ones fill the slots before them,
    `filler` ones keep the slots full until the last of them has ended.
    """

    request_id: str
    bucket: str
    prompt_tokens: int
    output_tokens: int
    place: int
    role: Literal["ramp", "measured", "filler"] = "measured"


def requests_digest(requests: Iterable[PlannedRequest]) -> str:
    """Return the sha256 of planned requests in their order."""
    plain = [dataclasses.astuple(request) for request in requests]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def draw_buckets(buckets: Sequence[Bucket], count: int, rng: random.Random) -> list[Bucket]:
    """Return `count` buckets in random order, in shares as near to the weights as `count` allows.

    Largest remainders, so that two draws of one size differ in their order alone.
    """
    total = sum(bucket.weight for bucket in buckets)
    exact = [count * bucket.weight / total for bucket in buckets]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(buckets)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: count - sum(shares)]:
        shares[i] += 1
    chosen = [bucket for bucket, share in zip(buckets, shares, strict=True) for _ in range(share)]
    rng.shuffle(chosen)
    return chosen


@cache
def corpus() -> str:
    """Return the text prompts are cut from."""
    from pydoc_data.topics import topics

    return "\n".join(text for _, text in sorted(topics.items()))


def corpus_fingerprint() -> dict[str, str]:
    """Return what identifies the text; it differs between Python versions."""
    digest = hashlib.sha256(corpus().encode()).hexdigest()
    return {"text": "pydoc_data.topics", "sha256": digest, "python": platform.python_version()}


def _distinct_starts(ids: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the positions whose window of PREFIX_TOKENS ids occurs nowhere before, by a 64-bit hash.

    Equal windows have equal hashes, so a collision costs a position and never keeps a repetition.
    """
    count = len(ids) - PREFIX_TOKENS + 1
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(PREFIX_TOKENS):
        hashes = hashes * HASH_MULTIPLIER + ids[offset : offset + count] + np.uint64(1)
    _, firsts = np.unique(hashes, return_index=True)
    return np.sort(firsts)


class PromptMaker:
    """Turns planned requests into requests; safe to use from several threads once built.

    A prompt starts where the next PREFIX_TOKENS tokens occur for the first time in the text, so
    prompts from different places share no longer beginning (the text repeats whole sections), and
    wraps around at the text's end, so that it always has the length asked for.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.encode(corpus())
        begin = tokenizer.bos_token_id
        self._begin = () if begin is None else (begin,)
        self._starts = _distinct_starts(np.asarray(self._ids, dtype=np.uint64))
        np.random.default_rng(seed).shuffle(self._starts)

    def request(self, planned: PlannedRequest) -> Request:
        """Return the request with a prompt of exactly the planned length, BOS included where there is one."""
        body = planned.prompt_tokens - len(self._begin)
        start = int(self._starts[planned.place % len(self._starts)])
        around = (start + body) // len(self._ids) + 1
        ids = self._begin + (self._ids * around)[start : start + body]
        return Request(
            planned.request_id,
            Prompt(self._tokenizer.decode(ids), ids),
            Sampling(planned.output_tokens, ignore_eos=True),
        )

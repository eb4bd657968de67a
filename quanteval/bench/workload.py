"""Requests of exact token lengths made of real text, the same ones for every variant.

The text is the Python language reference (`pydoc_data.topics`); each prompt starts elsewhere in it, so
that no two share a prefix that a cache could serve.
"""

from __future__ import annotations

import hashlib
import platform
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from quanteval.interfaces import Prompt, Request, Sampling, Tokenizer


@dataclass(frozen=True)
class Bucket:
    """A range of prompt lengths in tokens (both ends included) and its share of the traffic."""

    low: int
    high: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f'bucket "{self.low}-{self.high}" must be 1 <= low <= high')
        if self.weight <= 0:
            raise ValueError(f'weight "{self.weight}" must be positive')

    @property
    def name(self) -> str:
        """'low-high'."""
        return f"{self.low}-{self.high}"


@cache
def corpus() -> str:
    """Return the text prompts are cut from."""
    from pydoc_data.topics import topics

    return "\n".join(text for _, text in sorted(topics.items()))


def corpus_fingerprint() -> dict[str, str]:
    """Return what identifies the text."""
    digest = hashlib.sha256(corpus().encode()).hexdigest()
    return {"text": "pydoc_data.topics", "sha256": digest, "python": platform.python_version()}


class PromptMaker:
    """Cuts prompts of exact lengths out of the corpus, each from a place of its own."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        self._ids = tokenizer.encode(corpus())
        begin = tokenizer.bos_token_id
        self._begin = () if begin is None else (begin,)
        self._starts: set[int] = set()

    def prompt(self, tokens: int) -> Prompt:
        """Return a prompt of exactly `tokens` ids, the begin token included where there is one."""
        body = max(tokens - len(self._begin), 0)
        latest = max(len(self._ids) - body, 1)
        start = self._random.randrange(latest)
        while start in self._starts and len(self._starts) < latest:
            start = self._random.randrange(latest)
        self._starts.add(start)
        ids = (self._begin + self._ids[start : start + body])[:tokens]
        return Prompt(self._tokenizer.decode(ids), ids)


def make_requests(
    maker: PromptMaker,
    buckets: Sequence[Bucket],
    count: int,
    *,
    output_tokens: int,
    seed: int,
    prefix: str,
) -> list[tuple[Request, Bucket]]:
    """Return `count` requests over the buckets by weight, lengths uniform within each.

    Shares are kept as closely as `count` allows (largest remainders), then the order is shuffled.
    """
    rng = random.Random(seed)
    total = sum(bucket.weight for bucket in buckets)
    exact = [count * bucket.weight / total for bucket in buckets]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(buckets)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: count - sum(shares)]:
        shares[i] += 1
    chosen = [bucket for bucket, share in zip(buckets, shares, strict=True) for _ in range(share)]
    rng.shuffle(chosen)
    sampling = Sampling(output_tokens, ignore_eos=True)
    return [
        (
            Request(f"{prefix}-{i}", maker.prompt(rng.randint(bucket.low, bucket.high)), sampling),
            bucket,
        )
        for i, bucket in enumerate(chosen)
    ]


def describe_buckets(buckets: Sequence[Bucket]) -> list[dict[str, Any]]:
    """Return buckets as plain JSON."""
    return [{"low": b.low, "high": b.high, "weight": b.weight} for b in buckets]

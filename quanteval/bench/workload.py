"""What is sent under load: how long prompts and outputs are, when requests arrive, and the text they are made of.

A workload is planned without a tokenizer and is the same for every variant; `prompts` makes the text.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quanteval.bench.arrivals import Arrivals
from quanteval.bench.lengths import EDGES, Lengths, Lognormal, Mixture, bucket_name, draw
from quanteval.bench.prompts import (
    PREFIX_TOKENS,
    PlannedRequest,
    PromptMaker,
    corpus,
    corpus_fingerprint,
    requests_digest,
)
from quanteval.errors import ConfigError
from quanteval.interfaces import Tokenizer

__all__ = [
    "PREFIX_TOKENS",
    "Bucket",
    "PlannedRequest",
    "PromptMaker",
    "Workload",
    "corpus",
    "corpus_fingerprint",
    "draw_buckets",
    "requests_digest",
]

LOOKED_AT = 1000
"""Requests drawn to say what a context would clip, and to fingerprint what is drawn."""


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


@dataclass(frozen=True)
class Workload:
    """A distribution of requests; fields are those of conf/workload/*.yaml.

    `buckets` are the upper ends of the reported prompt-length buckets. `shared_prefix` is the share of
    each prompt that all prompts have in common (0: all are unique, no prefix cache can be warm).
    `exact_text` makes prompts whose text tokenizes back to their ids. `corpus_file` replaces the
    Python language reference as the text.
    """

    prompts: Lengths = field(default_factory=Mixture)
    outputs: Lengths = field(default_factory=lambda: Lognormal(64, 0.6, 8, 256))
    arrivals: Arrivals = field(default_factory=Arrivals)
    buckets: tuple[int, ...] = EDGES
    shared_prefix: float = 0.0
    exact_text: bool = True
    corpus_file: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if Lengths in (type(self.prompts), type(self.outputs)):
            raise ValueError("prompts and outputs must name a kind of lengths by its _target_")
        if list(self.buckets) != sorted(set(self.buckets)) or any(b < 1 for b in self.buckets):
            raise ValueError(f'buckets "{list(self.buckets)}" must be rising lengths of at least 1')
        if not 0 <= self.shared_prefix < 1:
            raise ValueError(f'shared_prefix "{self.shared_prefix}" must be at least 0 and below 1')
        if self.seed < 0:
            raise ValueError(f'seed "{self.seed}" must not be negative')

    @property
    def loop(self) -> str:
        """'closed' or 'open'."""
        return "closed" if self.arrivals.process == "closed" else "open"

    def bucket_names(self) -> list[str]:
        """Return the names of the buckets, shortest first."""
        return (
            [bucket_name(n, self.buckets) for n in (*self.buckets, self.buckets[-1] + 1)]
            if self.buckets
            else ["1+"]
        )

    def maker(self, tokenizer: Tokenizer, salt: str = "") -> PromptMaker:
        """Return what makes this workload's prompts; ConfigError for a text that cannot be read or is too short."""
        return PromptMaker(
            tokenizer,
            self.seed,
            exact_text=self.exact_text,
            corpus_file=self.corpus_file,
            salt=salt,
        )

    def requests(
        self, name: str, repetition: int = 0, *, max_context: int | None = None, lengths: str = ""
    ) -> Iterator[PlannedRequest]:
        """Yield the requests of a load point without end, all with the role 'measured'.

        They depend on the seed, the name and the repetition alone, not on what was sent before. The
        lengths are the same in every repetition, and in all load points that name the same `lengths`
        (default: the point's own name); the texts differ always. Requests longer than `max_context`
        are clipped to it, see `clipped`.
        """
        # Places far apart: each load point has its own part of the text's starts and laps.
        digest = hashlib.sha256(f"{self.seed}/{name}/{repetition}".encode()).digest()
        base = int.from_bytes(digest[:6], "little")
        drawn = draw(self.prompts, self.outputs, f"{self.seed}/{lengths or name}")
        for i, pair in enumerate(drawn):
            prompt, output = pair if max_context is None else clip(*pair, max_context)
            yield PlannedRequest(
                request_id=f"{name}-{repetition}-{i}",
                bucket=bucket_name(prompt, self.buckets),
                prompt_tokens=prompt,
                output_tokens=output,
                place=base + i,
                shared_tokens=int(prompt * self.shared_prefix),
            )

    def times(self, name: str, rate: float, repetition: int = 0) -> Iterator[float]:
        """Yield arrival times at `rate` requests/s, in seconds since the load point began, without end.

        Two rates of one name and repetition have the same bursts on another scale.
        """
        return self.arrivals.times(rate, f"{self.seed}/{name}/{repetition}")

    def arriving(
        self,
        name: str,
        rate: float,
        repetition: int = 0,
        *,
        measured_from_s: float = 0.0,
        measured_to_s: float = math.inf,
        max_context: int | None = None,
        trace: str = "",
    ) -> Iterator[tuple[PlannedRequest, float]]:
        """Yield the requests of an open load point with their times, without end.

        Their role is 'ramp' before the steady window, 'measured' in it and 'filler' from its end on.
        `trace` names whose lengths and bursts are taken (default: the point's own name), so that loads
        found by a search differ in their rate alone.
        """
        of = trace or name
        requests = self.requests(name, repetition, max_context=max_context, lengths=of)
        for request, at_s in zip(requests, self.times(of, rate, repetition), strict=False):
            role = (
                "ramp"
                if at_s < measured_from_s
                else "measured"
                if at_s < measured_to_s
                else "filler"
            )
            yield replace(request, role=role), at_s  # type: ignore[arg-type]

    def clipped(self, max_context: int) -> str:
        """Return what a context of so many tokens would clip, '' when nothing: one line for the report."""
        drawn = list(itertools.islice(draw(self.prompts, self.outputs, self.seed), LOOKED_AT))
        cut = [pair for pair in drawn if clip(*pair, max_context) != pair]
        if not cut:
            return ""
        longest = max(prompt + output for prompt, output in cut)
        return (
            f"{len(cut) / len(drawn):.1%} of the requests, up to {longest} tokens long, "
            f"are clipped to the {max_context} tokens that a request may hold"
        )

    def fingerprint(self) -> dict[str, Any]:
        """Everything the requests depend on besides the served model, what is drawn by its hash."""
        requests = itertools.islice(self.requests("fingerprint"), LOOKED_AT)
        plain: dict[str, Any] = {
            **asdict(self),
            "prompts": {"kind": type(self.prompts).__name__, **_fields(self.prompts)},
            "outputs": {"kind": type(self.outputs).__name__, **_fields(self.outputs)},
            "buckets": list(self.buckets),
            "requests_sha256": requests_digest(requests),
            "corpus": corpus_fingerprint(self.corpus_file),
        }
        if self.loop == "open":
            times = [
                f"{t:.9g}" for t in itertools.islice(self.times("fingerprint", 1.0), LOOKED_AT)
            ]
            plain["times_sha256"] = hashlib.sha256("\n".join(times).encode()).hexdigest()
        return plain


def clip(prompt: int, output: int, max_context: int) -> tuple[int, int]:
    """Return lengths that a context holds: the output keeps its length up to half of it, the prompt gives way.

    A prompt shorter than half of the context is kept whole, and the output gives way. ConfigError
    for a context of less than two tokens.
    """
    if max_context < 2:
        raise ConfigError(f'a context of "{max_context}" tokens holds no prompt with an output')
    if prompt + output <= max_context:
        return prompt, output
    output = min(output, max_context - min(prompt, max_context // 2))
    return min(prompt, max_context - output), output


def _fields(lengths: Any) -> dict[str, Any]:
    plain = asdict(lengths)
    return {
        key: [dict(p) for p in value] if isinstance(value, tuple) else value
        for key, value in plain.items()
    }

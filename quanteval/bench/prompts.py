"""Prompts of exact token lengths cut out of real text, no two of them with the same beginning.

What is sent is planned before a tokenizer exists (`PlannedRequest`), so that a plan can be hashed;
`PromptMaker` then cuts the prompts out of the Python language reference (`pydoc_data.topics`) or a
text file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quanteval.errors import ConfigError
from quanteval.interfaces import Prompt, Request, Sampling, Tokenizer

PREFIX_TOKENS = 8
"""No two prompts begin with the same so many tokens of text; prefix caches share pages of 16 and more."""
HASH_MULTIPLIER = np.uint64(6364136223846793005)
MIN_CORPUS_TOKENS = 1000
WINDOW = 24
"""Tokens on either side of a cut that are tokenized again to see whether it holds."""
TRIES = 2000
"""Cuts that are tried for a text that tokenizes back to its ids; about one in ten holds."""


@dataclass(frozen=True)
class PlannedRequest:
    """A request before it has a text.

    `place` picks where in the text its prompt begins: no two requests of a plan have the same.
    Steady-state figures rest on `measured` requests alone: `ramp` ones fill the slots before them,
    `filler` ones keep the slots full until the last of them has ended. The first `shared_tokens`
    of the prompt are the same in every prompt, to measure a warm prefix cache on purpose.
    """

    request_id: str
    bucket: str
    prompt_tokens: int
    output_tokens: int
    place: int
    role: Literal["ramp", "measured", "filler"] = "measured"
    shared_tokens: int = 0


def requests_digest(requests: Iterable[PlannedRequest]) -> str:
    """Return the sha256 of planned requests in their order."""
    plain = [dataclasses.astuple(request) for request in requests]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


@cache
def corpus(path: str | None = None) -> str:
    """Return the text prompts are cut from: that of a file, or the Python language reference."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(text for _, text in sorted(topics.items()))
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'corpus "{path}" cannot be read as UTF-8 text: {error}') from None


def corpus_fingerprint(path: str | None = None) -> dict[str, str]:
    """Return what identifies the text; the language reference differs between Python versions."""
    digest = hashlib.sha256(corpus(path).encode()).hexdigest()
    if path is not None:
        return {"text": "file", "sha256": digest}
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
    wraps around at the text's end, so that it always has the length asked for. Places beyond the
    number of such starts begin like an earlier prompt, and go on elsewhere after PREFIX_TOKENS.

    With `exact_text` a prompt's text tokenizes back to exactly its ids, so that a server that takes
    text alone computes the same tokens: the text is put together from pieces whose ends are such
    that encode(decode(ids)) == ids. `salt` moves every prompt elsewhere, for a server whose prefix
    cache knows those of an earlier run.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        *,
        exact_text: bool = False,
        corpus_file: str | None = None,
        salt: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._exact = exact_text
        self._ids = tokenizer.encode(corpus(corpus_file))
        if len(self._ids) < MIN_CORPUS_TOKENS:
            raise ConfigError(
                f'corpus "{corpus_file}" has {len(self._ids)} tokens: at least {MIN_CORPUS_TOKENS} are needed'
            )
        begin = tokenizer.bos_token_id
        self._begin = () if begin is None else (begin,)
        self._starts = _distinct_starts(np.asarray(self._ids, dtype=np.uint64))
        key = (
            seed
            if not salt
            else int(hashlib.sha256(f"{seed}/{salt}".encode()).hexdigest()[:15], 16)
        )
        np.random.default_rng(key).shuffle(self._starts)

    def request(self, planned: PlannedRequest) -> Request:
        """Return the request with a prompt of exactly the planned length, BOS included where there is one.

        With `exact_text`, ConfigError when no such text is found: the tokenizer then does not give
        back what it decodes.
        """
        body = planned.prompt_tokens - len(self._begin)
        shared = min(planned.shared_tokens, max(body - 1, 0))
        if self._exact:
            text, ids = self._exact_prompt(planned, body, shared)
        else:
            ids = self._begin + next(self._candidates(planned, body, shared))[0]
            text = self._tokenizer.decode(ids)
        return Request(
            planned.request_id,
            Prompt(text, ids),
            Sampling(planned.output_tokens, ignore_eos=True),
        )

    def _candidates(
        self, planned: PlannedRequest, body: int, shared: int
    ) -> Iterator[tuple[tuple[int, ...], list[int]]]:
        """Yield ids of the length asked for, and where in them two pieces meet; the first are the plain ones."""
        place, count = planned.place, len(self._starts)
        lap = place // count if place >= 0 else (-1 - place) // count
        rng = random.Random(f"{place}/{planned.prompt_tokens}")
        head = self._at(0, shared) if shared else ()
        cuts = [shared] if shared else []
        start = int(self._starts[place % count])
        if lap == 0:
            yield head + self._at(start, body - shared), cuts
        while True:
            # A beginning of its own, then text from anywhere else. How long the beginning is varies a little, so
            # that its end comes to lie where a word does; with a begin token it stays below a page of 16.
            own = min(PREFIX_TOKENS + rng.randrange(PREFIX_TOKENS - 1), body - shared)
            rest = body - shared - own
            yield (
                head + self._at(start, own) + self._at(rng.randrange(len(self._ids)), rest),
                [*cuts, *([shared + own] if rest else [])],
            )
            if rng.random() < 0.2:
                start = int(self._starts[rng.randrange(count)])

    def _at(self, start: int, length: int) -> tuple[int, ...]:
        around = (start + length) // len(self._ids) + 1
        return (self._ids if around == 1 else self._ids * around)[start : start + length]

    def _exact_prompt(
        self, planned: PlannedRequest, body: int, shared: int
    ) -> tuple[str, tuple[int, ...]]:
        """Return a text and the ids it tokenizes to; the ends are tried on short pieces before the whole is."""
        if body <= 0:
            return "", self._begin[: planned.prompt_tokens]
        tries = self._candidates(planned, body, shared)
        for (ids, cuts), _ in zip(tries, range(TRIES), strict=False):
            if not all(self._holds(ids, cut) for cut in (0, *cuts, len(ids))):
                continue
            text = self._tokenizer.decode(ids)
            if self._tokenizer.encode(text) == ids:
                return text, self._begin + ids
        raise ConfigError(
            f'no text of exactly "{body}" tokens was found for request "{planned.request_id}": this tokenizer does '
            "not give back the ids it decodes (exact_text: false sends ids)"
        )

    def _holds(self, ids: Sequence[int], cut: int) -> bool:
        """Whether the tokens around a cut stay as they are when their text alone is tokenized."""
        low, high = max(0, cut - WINDOW), min(len(ids), cut + WINDOW)
        piece = tuple(ids[low:high])
        again = self._tokenizer.encode(self._tokenizer.decode(piece))
        # The window's own ends may fall within a word: only those at an end of the prompt must hold.
        half = WINDOW // 2
        before, after = min(half, cut - low), min(half, high - cut)
        if low == 0 and high == len(ids):
            return again == piece
        if low == 0:
            return again[: cut + after] == piece[: cut + after]
        if high == len(ids):
            kept = before + len(ids) - cut
            return again[-kept:] == piece[-kept:]
        wanted = piece[cut - low - before : cut - low + after]
        return any(
            again[i : i + len(wanted)] == wanted for i in range(len(again) - len(wanted) + 1)
        )

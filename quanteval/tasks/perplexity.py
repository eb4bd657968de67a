"""Perplexity: the rolling log-likelihood of documents, each token scored exactly once."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quanteval.interfaces import (
    Sample,
    ScoreRequest,
    Session,
    TaskContext,
    TokenLogprobs,
    hash_token_ids,
)
from quanteval.records import Score
from quanteval.tasks.grouped import score_grouped
from quanteval.tasks.loading import (
    Source,
    check_limit,
    check_name,
    data_digest,
    load_rows,
    make_samples,
    require_text,
)

Mode = Literal["rolling", "harness", "llama.cpp"]
Window = tuple[int, int, int]
"""Start, end and first scored position in a document's ids."""


def rolling_windows(length: int, window: int, stride: int) -> list[Window]:
    """Return the windows that score tokens 1..length-1 once, each moved on by `stride`.

    A window holds at most `window` tokens; every token after the first window is scored with at least
    `window - stride` tokens before it (transformers' recipe for fixed-length models). The last window
    may be shorter.
    """
    windows = []
    scored_to = 1
    start = 0
    while scored_to < length:
        end = min(start + window, length)
        windows.append((start, end, scored_to))
        scored_to = end
        start += stride
    return windows


def harness_windows(length: int, window: int) -> list[Window]:
    """Return the windows of lm-evaluation-harness's rolling log-likelihood, tokens 1..length-1 once.

    Windows follow each other with one token in common; the last one reaches back until it is full.
    `window` counts the last target too, so it is the harness's `max_length` + 1.
    """
    windows = []
    scored_to = 1
    while scored_to < length:
        end = min(scored_to - 1 + window, length)
        windows.append((max(0, end - window), end, scored_to))
        scored_to = end
    return windows


def llama_cpp_windows(length: int, window: int) -> list[Window]:
    """Return llama.cpp's chunks: side by side, each scored in its second half, an incomplete last one left out.

    Of a chunk of n tokens those from n/2 + 1 on are scored (its `perplexity` tool without --ppl-stride).
    """
    return [
        (start, start + window, start + window // 2 + 1)
        for start in range(0, length - window + 1, window)
    ]


@dataclass(frozen=True)
class PerplexityTask:
    """Documents scored token by token; the fields of a task.yaml of this kind.

    `mode` chooses the windows (see the functions above); `window` and `stride` count tokens, the begin
    token included, and only 'rolling' has a stride. `bos`: 'tokenizer' puts the begin token where the
    tokenizer itself puts one, and the first token of the document is then scored too; 'always' puts
    it, or the end token where there is none, as lm-evaluation-harness does; 'never' leaves it out, and
    the first token is not scored. llama.cpp's chunks each begin with it, in place of their first token.
    Words and bytes are counted in `counted_field` where that is not the text scored.
    """

    name: str
    version: str
    source: Source
    folder: str = ""
    id_field: str = "id"
    text_field: str = "text"
    counted_field: str | None = None
    mode: Mode = "rolling"
    window: int = 1024
    stride: int = 512
    bos: Literal["tokenizer", "always", "never"] = "tokenizer"
    max_tokens_per_document: int | None = None
    keep_logprobs: bool = False
    limit: int | None = None
    description: str = ""
    licence: str = ""

    kind = "perplexity"
    uses_baseline = False

    def __post_init__(self) -> None:
        check_name(self.name)
        check_limit(self.limit)
        if self.window < 2:
            raise ValueError(f'window "{self.window}" must be at least 2')
        if self.mode == "rolling" and not 1 <= self.stride < self.window:
            raise ValueError(f'stride "{self.stride}" must be at least 1 and less than the window')
        if self.mode == "llama.cpp" and self.window < 4:
            raise ValueError(f'window "{self.window}" must be at least 4 in the mode llama.cpp')
        if self.max_tokens_per_document is not None and self.max_tokens_per_document < 2:
            raise ValueError(
                f'max_tokens_per_document "{self.max_tokens_per_document}" must be at least 2'
            )

    def samples(self) -> list[Sample]:
        """Load the documents; ConfigError when there are none, or one has no text."""
        samples = make_samples(load_rows(self.source, self.folder), self.id_field, self.limit)
        require_text(samples, self.text_field)
        if self.counted_field is not None:
            require_text(samples, self.counted_field)
        return samples

    def fingerprint(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """What the scores depend on besides the model."""
        return {
            "kind": self.kind,
            "version": self.version,
            "data": data_digest(samples),
            "text_field": self.text_field,
            "counted_field": self.counted_field,
            "mode": self.mode,
            "window": self.window,
            "stride": self.stride if self.mode == "rolling" else None,
            "bos": self.bos,
            "max_tokens_per_document": self.max_tokens_per_document,
            "keep_logprobs": self.keep_logprobs,
        }

    def evaluate(
        self, session: Session, samples: Sequence[Sample], context: TaskContext
    ) -> Iterator[Score]:
        """Yield a score a document, in order."""
        documents = ((d, d.requests) for d in (self._document(session, s) for s in samples))
        last = time.perf_counter()
        for document, parts in score_grouped(session, documents):
            ended = time.perf_counter()
            yield self._score(session, document, parts, ended - last)
            last = ended

    def token_ids(self, session: Session, text: str) -> tuple[int, ...]:
        """Return a document's ids, after the begin token where there is one."""
        ids = session.tokenizer.encode(text)
        if self.max_tokens_per_document is not None:
            ids = ids[: self.max_tokens_per_document]
        begin = self._begin(session)
        return ids if begin is None else (begin, *ids)

    def _begin(self, session: Session) -> int | None:
        if self.bos == "always":
            return session.tokenizer.prefix_token_id
        return session.tokenizer.bos_token_id if self.bos == "tokenizer" else None

    def _windows(self, session: Session, length: int) -> list[Window]:
        window = min(self.window, session.max_context + 1)
        if self.mode == "harness":
            return harness_windows(length, window)
        if self.mode == "llama.cpp":
            # A shorter window would be another measurement: the request is refused instead.
            return llama_cpp_windows(length, self.window)
        return rolling_windows(length, window, min(self.stride, window - 1))

    def _document(self, session: Session, sample: Sample) -> _Document:
        ids = self.token_ids(session, str(sample.data[self.text_field]))
        windows = self._windows(session, len(ids))
        begin = self._begin(session) if self.mode == "llama.cpp" else None
        requests = tuple(
            ScoreRequest(
                f"{sample.sample_id}@{start}",
                ids[start:end] if begin is None else (begin, *ids[start + 1 : end]),
                first - start,
            )
            for start, end, first in windows
        )
        return _Document(sample, ids, requests)

    def _score(
        self,
        session: Session,
        document: _Document,
        parts: Sequence[TokenLogprobs],
        elapsed_s: float,
    ) -> Score:
        ids, sums = document.ids, [float(-part.logprobs.sum()) for part in parts]
        logprobs = [float(value) for part in parts for value in part.logprobs]
        bad = next((i for i, value in enumerate(logprobs) if not math.isfinite(value)), None)
        if not logprobs:
            least = self.window if self.mode == "llama.cpp" else 2
            status, detail = "error", f"{len(ids)} tokens: nothing to score below {least}"
        elif bad is not None:
            status, detail = "error", f"log-likelihood {logprobs[bad]} at scored token {bad}"
        else:
            status, detail = "ok", ""
        series = {"window_nll": sums, "window_tokens": [float(len(p.logprobs)) for p in parts]}
        if self.keep_logprobs:
            series["logprobs"] = logprobs
        return Score(
            sample_id=document.sample.sample_id,
            prompt_sha256=hash_token_ids(ids),
            value=-math.fsum(logprobs) if bad is None and logprobs else math.nan,
            weight=len(logprobs),
            status=status,
            finish_reason="none",
            output_tokens=0,
            detail=detail,
            numbers=self._counts(session, document),
            series=series,
            elapsed_s=elapsed_s,
        )

    def _counts(self, session: Session, document: _Document) -> dict[str, float]:
        """Return the words and bytes that the scored tokens stand for."""
        data = document.sample.data
        if self.mode == "llama.cpp":
            scored = [i for r in document.requests for i in r.token_ids[r.first_scored :]]
            return {"bytes": _bytes(session.tokenizer.decode(scored))}
        if self.max_tokens_per_document is not None:
            text = session.tokenizer.decode(document.ids)
        else:
            text = str(data[self.counted_field or self.text_field])
        return {"words": float(count_words(text)), "bytes": _bytes(text)}


@dataclass(frozen=True)
class _Document:
    """A document's ids and the windows to score."""

    sample: Sample
    ids: tuple[int, ...]
    requests: tuple[ScoreRequest, ...]


def _bytes(text: str) -> float:
    return float(len(text.encode("utf-8", "surrogatepass")))


def count_words(text: str) -> int:
    """Count words as lm-evaluation-harness does: pieces of a split at runs of white space."""
    return len(re.split(r"\s+", text))

"""Perplexity: the rolling log-likelihood of documents, each token scored exactly once."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quanteval.interfaces import Sample, ScoreRequest, Session, TaskContext, hash_token_ids
from quanteval.records import Score
from quanteval.tasks.loading import (
    Source,
    check_limit,
    check_name,
    data_digest,
    load_rows,
    make_samples,
    require_text,
)


def rolling_windows(length: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """Return (start, end, first scored position) of the windows that score tokens 1..length-1 once.

    A window holds at most `window` tokens and moves on by `stride`; every token after the first
    window is scored with at least `window - stride` tokens before it (transformers' recipe for
    fixed-length models; with stride = window - 1 it is the rolling likelihood of
    lm-evaluation-harness, which keeps one token of context between windows).
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


@dataclass(frozen=True)
class PerplexityTask:
    """Documents scored token by token; the fields of a task.yaml of this kind.

    `bos`: 'tokenizer' puts the begin token where the tokenizer itself puts one, and the first token
    of the document is then scored too; 'never' leaves it out, and the first token is not scored.
    `window` and `stride` count tokens, the begin token included.
    """

    name: str
    version: str
    source: Source
    folder: str = ""
    id_field: str = "id"
    text_field: str = "text"
    window: int = 1024
    stride: int = 512
    bos: Literal["tokenizer", "never"] = "tokenizer"
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
        if not 1 <= self.stride < self.window:
            raise ValueError(f'stride "{self.stride}" must be at least 1 and less than the window')
        if self.max_tokens_per_document is not None and self.max_tokens_per_document < 2:
            raise ValueError(
                f'max_tokens_per_document "{self.max_tokens_per_document}" must be at least 2'
            )

    def samples(self) -> list[Sample]:
        """Load the documents; ConfigError when there are none, or one has no text."""
        samples = make_samples(load_rows(self.source, self.folder), self.id_field, self.limit)
        require_text(samples, self.text_field)
        return samples

    def fingerprint(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """What the scores depend on besides the model."""
        return {
            "kind": self.kind,
            "version": self.version,
            "data": data_digest(samples),
            "text_field": self.text_field,
            "window": self.window,
            "stride": self.stride,
            "bos": self.bos,
            "max_tokens_per_document": self.max_tokens_per_document,
            "keep_logprobs": self.keep_logprobs,
        }

    def evaluate(
        self, session: Session, samples: Sequence[Sample], context: TaskContext
    ) -> Iterator[Score]:
        """Yield a score a document, in order."""
        for sample in samples:
            yield self._score(session, sample)

    def token_ids(self, session: Session, text: str) -> tuple[int, ...]:
        """Return a document's ids, after the begin token where there is one."""
        ids = session.tokenizer.encode(text)
        if self.max_tokens_per_document is not None:
            ids = ids[: self.max_tokens_per_document]
        begin = session.tokenizer.bos_token_id if self.bos == "tokenizer" else None
        return ids if begin is None else (begin, *ids)

    def _score(self, session: Session, sample: Sample) -> Score:
        started = time.perf_counter()
        text = str(sample.data[self.text_field])
        ids = self.token_ids(session, text)
        window = min(self.window, session.max_context)
        requests = [
            ScoreRequest(f"{sample.sample_id}@{start}", ids[start:end], first - start)
            for start, end, first in rolling_windows(len(ids), window, min(self.stride, window - 1))
        ]
        logprobs = [
            float(value) for part in session.loglikelihood(requests) for value in part.logprobs
        ]
        if self.max_tokens_per_document is not None:
            text = session.tokenizer.decode(ids)
        bad = next((i for i, value in enumerate(logprobs) if not math.isfinite(value)), None)
        if not logprobs:
            status, detail = "error", f"the document has {len(ids)} tokens: nothing to score"
        elif bad is not None:
            status, detail = "error", f"log-likelihood {logprobs[bad]} at scored token {bad}"
        else:
            status, detail = "ok", ""
        return Score(
            sample_id=sample.sample_id,
            prompt_sha256=hash_token_ids(ids),
            value=-math.fsum(logprobs) if bad is None and logprobs else math.nan,
            weight=len(logprobs),
            status=status,
            finish_reason="none",
            output_tokens=0,
            detail=detail,
            numbers={
                "words": float(count_words(text)),
                "bytes": float(len(text.encode("utf-8", "surrogatepass"))),
            },
            series={"logprobs": logprobs} if self.keep_logprobs else {},
            elapsed_s=time.perf_counter() - started,
        )


def count_words(text: str) -> int:
    """Count words as lm-evaluation-harness does: pieces of a split at runs of white space."""
    return len(re.split(r"\s+", text))

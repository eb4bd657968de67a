"""Divergence from the baseline: KL and top-1 agreement on the same teacher-forced tokens, and how long
both write the same by themselves.

The baseline's run stores its distributions as compactly as the engine allows (see `distributions`) and its
greedy continuations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quanteval.interfaces import (
    Completion,
    Prompt,
    Request,
    Sample,
    Sampling,
    ScoreRequest,
    Session,
    TaskContext,
    hash_token_ids,
)
from quanteval.records import Score
from quanteval.tasks.distributions import Form, Store, Tensors, open_form
from quanteval.tasks.loading import (
    Source,
    check_limit,
    check_name,
    data_digest,
    load_rows,
    make_samples,
    require_text,
)

DOCUMENTS_A_TURN = 16
"""Documents worked on between two times that scores are handed on."""


@dataclass(frozen=True)
class DivergenceTask:
    """Documents on which distributions are compared; the fields of a task.yaml of this kind.

    Each document is cut after `max_tokens` tokens; with a tokenizer that begins texts with a token
    of its own, that token is context for the first. `greedy_tokens` are generated after the document's
    first `greedy_prompt_tokens` and compared token by token; 0 leaves that out.
    """

    name: str
    version: str
    source: Source
    folder: str = ""
    id_field: str = "id"
    text_field: str = "text"
    max_tokens: int = 256
    greedy_tokens: int = 32
    greedy_prompt_tokens: int = 64
    limit: int | None = None
    description: str = ""
    licence: str = ""

    kind = "divergence"
    uses_baseline = True

    def __post_init__(self) -> None:
        check_name(self.name)
        check_limit(self.limit)
        if self.max_tokens < 2:
            raise ValueError(f'max_tokens "{self.max_tokens}" must be at least 2')
        if self.greedy_tokens < 0:
            raise ValueError(f'greedy_tokens "{self.greedy_tokens}" must be at least 0')
        if self.greedy_prompt_tokens < 1:
            raise ValueError(
                f'greedy_prompt_tokens "{self.greedy_prompt_tokens}" must be at least 1'
            )

    def samples(self) -> list[Sample]:
        """Load the documents; ConfigError when there are none, or one has no text."""
        samples = make_samples(load_rows(self.source, self.folder), self.id_field, self.limit)
        require_text(samples, self.text_field)
        return samples

    def fingerprint(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """What the scores depend on besides the models."""
        return {
            "kind": self.kind,
            "version": self.version,
            "data": data_digest(samples),
            "text_field": self.text_field,
            "max_tokens": self.max_tokens,
            "greedy_tokens": self.greedy_tokens,
            "greedy_prompt_tokens": self.greedy_prompt_tokens if self.greedy_tokens else None,
            "stored": "final hidden states and output head, or most probable tokens",
        }

    def evaluate(
        self, session: Session, samples: Sequence[Sample], context: TaskContext
    ) -> Iterator[Score]:
        """Yield a score a document; the baseline's own divergence is 0 by definition."""
        store = Store(context.baseline_dir / self.kind / self.name)
        form = open_form(session, store, context.is_baseline)
        comparison = _Comparison(self, session, store, form, context.is_baseline)
        for start in range(0, len(samples), DOCUMENTS_A_TURN):
            yield from comparison.scores(samples[start : start + DOCUMENTS_A_TURN])

    def request(self, session: Session, sample: Sample) -> ScoreRequest | None:
        """Return what is scored of a document, None where it has fewer than two tokens."""
        ids = session.tokenizer.encode(str(sample.data[self.text_field]))[: self.max_tokens]
        begin = session.tokenizer.bos_token_id
        ids = ids if begin is None else (begin, *ids)
        return ScoreRequest(sample.sample_id, ids) if len(ids) > 1 else None

    def greedy_request(self, session: Session, scored: ScoreRequest) -> Request:
        """Return the generation that begins with a document's first tokens."""
        begins = session.tokenizer.bos_token_id is not None
        ids = scored.token_ids[: self.greedy_prompt_tokens + begins]
        prompt = Prompt(session.tokenizer.decode(ids), ids)
        return Request(f"{scored.request_id} greedy", prompt, Sampling(self.greedy_tokens))


@dataclass(frozen=True)
class _Comparison:
    """One variant's documents against the stored baseline, or stored as the baseline."""

    task: DivergenceTask
    session: Session
    store: Store
    form: Form
    is_baseline: bool

    def scores(self, samples: Sequence[Sample]) -> Iterator[Score]:
        asked = {s.sample_id: self.task.request(self.session, s) for s in samples}
        usable = [request for request in asked.values() if request is not None]
        written = self._generate(usable)
        observed = self.form.observe(usable)
        last = time.perf_counter()
        for sample in samples:
            request = asked[sample.sample_id]
            if request is None:
                yield _failed(sample, (), "the document has fewer than 2 tokens")
                continue
            score = self._score(sample, request, next(observed), written.get(sample.sample_id))
            ended = time.perf_counter()
            yield score.model_copy(update={"elapsed_s": ended - last})
            last = ended

    def _generate(self, requests: Sequence[ScoreRequest]) -> dict[str, Completion]:
        """Return the greedy continuation of each document; none where they are left out."""
        if not self.task.greedy_tokens:
            return {}
        of = {}
        for request in requests:
            greedy = self.task.greedy_request(self.session, request)
            of[greedy.request_id] = (request.request_id, greedy)
        completions = self.session.generate(greedy for _, greedy in of.values())
        return {of[done.request_id][0]: done for done in completions}

    def _score(
        self,
        sample: Sample,
        request: ScoreRequest,
        observed: Tensors,
        written: Completion | None,
    ) -> Score:
        ids = request.token_ids
        if written is not None and written.finish_reason not in ("stop", "length"):
            return _failed(sample, ids, written.error or written.finish_reason)
        tokens = written.token_ids if written is not None else ()
        if self.is_baseline:
            self.store.save(sample.sample_id, ids, observed, tokens)
            expected, wanted = observed, tokens
        else:
            expected, wanted = self.store.load(sample.sample_id, ids)
        divergence = self.form.compare(expected, observed)
        kl = divergence.kl
        bad = next((i for i, value in enumerate(kl) if not math.isfinite(value)), None)
        if bad is not None:
            return _failed(sample, ids, f"KL {kl[bad]} at token {bad}")
        numbers = {"top1_agree": float(divergence.agree)}
        if written is not None:
            numbers |= _agreement(wanted, tokens)
        return Score(
            sample_id=sample.sample_id,
            prompt_sha256=hash_token_ids(ids),
            value=math.fsum(kl),
            weight=len(kl),
            status="ok",
            finish_reason="none",
            output_tokens=len(tokens),
            output=None if written is None else written.text,
            detail=self.form.caveat,
            numbers=numbers,
            series={"kl": kl},
        )


def _agreement(baseline: Sequence[int], candidate: Sequence[int]) -> dict[str, float]:
    """Return the position of the first differing token, and whether there is none.

    Two continuations of which one ends where the other goes on differ at that place.
    """
    same = 0
    for first, second in zip(baseline, candidate, strict=False):
        if first != second:
            break
        same += 1
    whole = same == len(baseline) == len(candidate)
    return {"greedy_same": float(whole), "first_divergence": float(same)}


def _failed(sample: Sample, ids: Sequence[int], detail: str) -> Score:
    return Score(
        sample_id=sample.sample_id,
        prompt_sha256=hash_token_ids(ids),
        value=math.nan,
        weight=0,
        status="error",
        finish_reason="none",
        output_tokens=0,
        detail=detail,
    )

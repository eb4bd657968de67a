"""Cloze: whether the one continuation given is what the model itself would write, token by token."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from quanteval.errors import ConfigError
from quanteval.interfaces import Sample, Session, TaskContext, TokenLogprobs
from quanteval.records import Score
from quanteval.tasks.loading import (
    Row,
    Source,
    check_limit,
    check_name,
    data_digest,
    load_rows,
    make_samples,
)
from quanteval.tasks.pairing import (
    Asked,
    Context,
    Form,
    Pairer,
    Solved,
    ask,
    ask_all,
    grouped,
    total,
)
from quanteval.tasks.prompting import FewShot, check_template, describe_shots, load_examples, render


@dataclass(frozen=True)
class ClozeTask:
    """Contexts with the words that end them; the fields of a task.yaml of this kind.

    `prompt` and `target` are templates over the row's fields. In the chat form the space before the target
    is dropped: it begins the assistant's turn.
    """

    name: str
    version: str
    source: Source
    folder: str = ""
    id_field: str = "id"
    prompt: str = "{{ context }}"
    target: str = " {{ target }}"
    form: Form = "raw"
    shots: FewShot = field(default_factory=FewShot)
    on_overlong: Literal["error", "truncate"] = "error"
    limit: int | None = None
    description: str = ""
    licence: str = ""

    kind = "cloze"
    uses_baseline = False

    def __post_init__(self) -> None:
        check_name(self.name)
        check_limit(self.limit)
        for name in ("prompt", "target"):
            check_template(name, getattr(self, name))

    def samples(self) -> list[Sample]:
        """Load the rows; ConfigError when one lacks a field that a template names."""
        samples = make_samples(load_rows(self.source, self.folder), self.id_field, self.limit)
        rows = [(sample.sample_id, sample.data) for sample in samples]
        rows += [(f"example {number}", row) for number, row in enumerate(self._pool)]
        for sample_id, row in rows:
            try:
                render(self.prompt, row)
                render(self.target, row)
            except ConfigError as error:
                raise ConfigError(f'sample "{sample_id}": {error}') from None
        return samples

    @cached_property
    def _pool(self) -> list[Row]:
        return load_examples(self.shots, self.source, self.folder)

    def fingerprint(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """What the scores depend on besides the model."""
        return {
            "kind": self.kind,
            "version": self.version,
            "data": data_digest(samples),
            "prompt": self.prompt,
            "target": self.target,
            "form": self.form,
            "shots": describe_shots(self.shots, self._pool),
            "on_overlong": self.on_overlong,
        }

    def _context(self, sample: Sample) -> Context:
        examples = self.shots.choose(sample.data, sample.sample_id, self._pool)
        return Context(
            question=render(self.prompt, sample.data),
            opening=render(self.shots.description, sample.data),
            solved=tuple(
                Solved(render(self.prompt, row), render(self.target, row)) for row in examples
            ),
            separator=self.shots.separator,
        )

    def render(self, session: Session, sample: Sample) -> tuple[str, str]:
        """Return the text that precedes the target, and the target, as both are scored."""
        text = Pairer(session.tokenizer).text(self._context(sample), self.form)
        target = render(self.target, sample.data)
        return text, target if self.form == "raw" else target.lstrip()

    def _ask(self, pairer: Pairer, most: int, sample: Sample) -> Asked:
        target = render(self.target, sample.data)
        pair = pairer.pair(self._context(sample), self.form, target)
        return ask(sample, [pair], most, truncate=self.on_overlong == "truncate")

    def evaluate(
        self, session: Session, samples: Sequence[Sample], context: TaskContext
    ) -> Iterator[Score]:
        """Yield a score a row, rows that share examples side by side."""
        pairer, most = Pairer(session.tokenizer), session.max_context
        ordered = grouped(samples, self.shots.group_field if self.shots.count else None)
        questions = (self._ask(pairer, most, sample) for sample in ordered)
        started = time.perf_counter()
        for asked, results in ask_all(session, questions):
            now = time.perf_counter()
            yield _score(asked, results, now - started)
            started = now


def _score(asked: Asked, results: Sequence[TokenLogprobs], elapsed_s: float) -> Score:
    failure, value = asked.failure, 0.0
    numbers: dict[str, float] = {}
    for result in results:
        logprob = total(result)
        value = float(result.is_top1.all())
        numbers = {"logprob": logprob, "tokens": float(asked.pairs[0].scored)}
        if asked.cut:
            numbers["cut_tokens"] = float(asked.cut)
        if not math.isfinite(logprob):
            failure, value, numbers = f"log-likelihood {logprob} of the target", 0.0, {}
    return Score(
        sample_id=asked.sample.sample_id,
        prompt_sha256=asked.sha256,
        value=value,
        weight=1.0,
        status="error" if failure else "ok",
        finish_reason="none",
        output_tokens=0,
        outcome="error" if failure else "right" if value else "wrong",
        detail=failure,
        numbers=numbers,
        elapsed_s=elapsed_s,
    )

"""Multiple choice: which of the given answers the model finds likeliest after the question.

Answers are compared by log-likelihood, as it is or divided by their length in characters, UTF-8 bytes or
tokens. How much a log-likelihood moves with what is computed beside it is measured, and answers decided by
no more than that are marked.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal
from weakref import WeakKeyDictionary

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
    ask_alone,
    grouped,
    total,
)
from quanteval.tasks.prompting import FewShot, check_template, describe_shots, load_examples, render

SCORES = ("acc", "acc_norm", "acc_norm_bytes", "acc_norm_tokens")


@dataclass(frozen=True)
class MultipleChoiceTask:
    """Questions with given answers; the fields of a task.yaml of this kind.

    `prompt` and `choice` are templates over the row's fields and {{ choice }}, the answer in question: a
    prompt that uses it gives each answer a context of its own. `choices` is the field that lists the answers,
    or a list of templates. `answer` is the field with the right one's index (from 0), or a template that
    gives it. In the chat form the space before an answer is dropped: it begins the assistant's turn.
    `score` decides the score: the likeliest answer (acc), or the likeliest per character (acc_norm), byte
    or token. `noise_probe` questions are scored alone as well, to measure the noise of batches; 0 leaves
    that out.
    """

    name: str
    version: str
    source: Source
    folder: str = ""
    id_field: str = "id"
    prompt: str = "{{ question }}"
    choices: str | tuple[str, ...] = "choices"
    choice: str = " {{ choice }}"
    answer: str = "answer"
    form: Form = "raw"
    shots: FewShot = field(default_factory=FewShot)
    score: Literal["acc", "acc_norm", "acc_norm_bytes", "acc_norm_tokens"] = "acc"
    on_overlong: Literal["error", "truncate"] = "error"
    noise_probe: int = 8
    limit: int | None = None
    description: str = ""
    licence: str = ""

    kind = "multiple_choice"
    uses_baseline = False

    def __post_init__(self) -> None:
        check_name(self.name)
        check_limit(self.limit)
        for name in ("prompt", "choice", "answer"):
            check_template(name, getattr(self, name))
        if not isinstance(self.choices, str):
            for template in self.choices:
                check_template("choices", template)
        if self.noise_probe < 0:
            raise ValueError(f'noise_probe "{self.noise_probe}" must be at least 0')

    def samples(self) -> list[Sample]:
        """Load the questions; ConfigError when one has no answers, or none of them is the right one."""
        samples = make_samples(load_rows(self.source, self.folder), self.id_field, self.limit)
        for sample in samples:
            self._check(sample.data, sample.sample_id)
        for number, row in enumerate(self._pool):
            self._check(row, f"example {number}")
        return samples

    def _check(self, row: Mapping[str, Any], sample_id: str) -> None:
        choices = self._choices(row, sample_id)
        self._gold(row, choices, sample_id)
        try:
            render(self.prompt, row, choice=choices[0])
            render(self.choice, row, choice=choices[0])
        except ConfigError as error:
            raise ConfigError(f'sample "{sample_id}": {error}') from None

    @cached_property
    def _pool(self) -> list[Row]:
        return load_examples(self.shots, self.source, self.folder)

    @cached_property
    def _noises(self) -> WeakKeyDictionary[Session, float]:
        """What was measured on each session: a suite that may stop early is asked in parts."""
        return WeakKeyDictionary()

    def fingerprint(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """What the scores depend on besides the model."""
        return {
            "kind": self.kind,
            "version": self.version,
            "data": data_digest(samples),
            "prompt": self.prompt,
            "choices": self.choices if isinstance(self.choices, str) else list(self.choices),
            "choice": self.choice,
            "answer": self.answer,
            "form": self.form,
            "shots": describe_shots(self.shots, self._pool),
            "score": self.score,
            "on_overlong": self.on_overlong,
            "noise_probe": self.noise_probe,
        }

    # ---- prompts

    def _choices(self, row: Mapping[str, Any], sample_id: str) -> list[str]:
        if not isinstance(self.choices, str):
            return [render(template, row) for template in self.choices]
        found = row.get(self.choices)
        if not isinstance(found, list | tuple) or not found:
            raise ConfigError(f'sample "{sample_id}" has no list of answers under "{self.choices}"')
        return [str(choice) for choice in found]

    def _gold(self, row: Mapping[str, Any], choices: Sequence[str], sample_id: str) -> int:
        found = row[self.answer] if self.answer in row else render(self.answer, row)
        try:
            index = int(str(found))
        except ValueError:
            index = -1
        if not 0 <= index < len(choices):
            raise ConfigError(
                f'sample "{sample_id}": "{found}" under "{self.answer}" is no index of {len(choices)} '
                "answers (from 0); a split without published answers cannot be scored"
            )
        return index

    def _context(self, sample: Sample, choice: str) -> Context:
        row = sample.data
        return Context(
            question=render(self.prompt, row, choice=choice),
            opening=render(self.shots.description, row),
            solved=self._solved(sample),
            separator=self.shots.separator,
        )

    def _solved(self, sample: Sample) -> tuple[Solved, ...]:
        solved = []
        for row in self.shots.choose(sample.data, sample.sample_id, self._pool):
            choices = self._choices(row, f"{sample.sample_id}: example")
            right = choices[self._gold(row, choices, f"{sample.sample_id}: example")]
            solved.append(
                Solved(
                    render(self.prompt, row, choice=right), render(self.choice, row, choice=right)
                )
            )
        return tuple(solved)

    def render(self, session: Session, sample: Sample, number: int = 0) -> tuple[str, str]:
        """Return the text that precedes an answer, and that of the answer, as both are scored."""
        choice = self._choices(sample.data, sample.sample_id)[number]
        text = Pairer(session.tokenizer).text(self._context(sample, choice), self.form)
        answer = render(self.choice, sample.data, choice=choice)
        return text, answer if self.form == "raw" else answer.lstrip()

    def _ask(self, pairer: Pairer, most: int, sample: Sample) -> Asked:
        pairs, row = [], sample.data
        choices = self._choices(row, sample.sample_id)
        context = self._context(sample, choices[0])
        for choice in choices:
            context = replace(context, question=render(self.prompt, row, choice=choice))
            pairs.append(pairer.pair(context, self.form, render(self.choice, row, choice=choice)))
        return ask(sample, pairs, most, truncate=self.on_overlong == "truncate")

    # ---- scores

    def evaluate(
        self, session: Session, samples: Sequence[Sample], context: TaskContext
    ) -> Iterator[Score]:
        """Yield a score a question, questions that share examples side by side."""
        pairer, most = Pairer(session.tokenizer), session.max_context
        ordered = grouped(samples, self.shots.group_field if self.shots.count else None)
        known = self._noises.get(session)
        probed = self.noise_probe if known is None else 0
        first = [self._ask(pairer, most, sample) for sample in ordered[:probed]]
        alone = ask_alone(session, first)
        rest = (self._ask(pairer, most, sample) for sample in ordered[probed:])
        results = ask_all(session, itertools.chain(first, rest))
        started = time.perf_counter()
        # Those of the probe wait for each other: the noise is part of their scores.
        held = list(itertools.islice(results, len(first)))
        together = [[total(one) for one in values] for _, values in held]
        noise = batch_noise(alone, together) if known is None else known
        if noise is not None:
            self._noises[session] = noise
        for asked, values in itertools.chain(held, results):
            now = time.perf_counter()
            yield self._score(asked, values, noise, now - started)
            started = now

    def _score(
        self, asked: Asked, results: Sequence[TokenLogprobs], noise: float | None, elapsed_s: float
    ) -> Score:
        values = [total(result) for result in results]
        failure = asked.failure
        if bad := [value for value in values if not math.isfinite(value)]:
            failure = f"log-likelihood {bad[0]} of answer {values.index(bad[0])}"
        base = Score(
            sample_id=asked.sample.sample_id,
            prompt_sha256=asked.sha256,
            value=0.0,
            weight=1.0,
            status="error",
            finish_reason="none",
            output_tokens=0,
            outcome="error",
            detail=failure,
            elapsed_s=elapsed_s,
        )
        return base if failure else base.model_copy(update=self._answered(asked, values, noise))

    def _answered(
        self, asked: Asked, values: Sequence[float], noise: float | None
    ) -> dict[str, Any]:
        """Return a score's fields that hold what was answered."""
        row, key = asked.sample.data, asked.sample.sample_id
        choices = self._choices(row, key)
        gold = self._gold(row, choices, key)
        tokens = [pair.scored for pair in asked.pairs]
        decided = {
            name: decide(values, lengths_of(name, choices, tokens), noise or 0.0) for name in SCORES
        }
        pick, near = decided[self.score]
        numbers = {name: float(found == gold) for name, (found, _) in decided.items()}
        numbers |= {
            "margin": near.margin,
            "near_tie": float(near.near_tie),
            "gold_logprob": values[gold],
            "tokens": float(tokens[gold]),
        }
        if noise is not None:
            numbers["batch_noise"] = noise
        if asked.cut:
            numbers["cut_tokens"] = float(asked.cut)
        return {
            "value": float(pick == gold),
            "status": "ok",
            "outcome": "right" if pick == gold else "wrong",
            "output": choices[pick],
            "numbers": numbers,
            "series": {"loglikelihoods": list(values), "tokens": [float(n) for n in tokens]},
        }


@dataclass(frozen=True)
class Nearest:
    """How far the best answer is ahead of the second, and whether noise could have turned that."""

    margin: float
    near_tie: bool


def lengths_of(score: str, choices: Sequence[str], tokens: Sequence[int]) -> list[int]:
    """Return what each log-likelihood is divided by; acc_norm counts characters of the answer as listed.

    These are lm-evaluation-harness's acc, acc_norm and acc_bytes; acc_norm_tokens has no counterpart there.
    """
    if score == "acc":
        return [1] * len(choices)
    if score == "acc_norm":
        return [len(choice) for choice in choices]
    if score == "acc_norm_bytes":
        return [len(choice.encode("utf-8", "surrogatepass")) for choice in choices]
    return list(tokens)


def decide(values: Sequence[float], lengths: Sequence[int], noise: float) -> tuple[int, Nearest]:
    """Return the answer with the greatest value per length, the first of equals, and its lead.

    An answer without length cannot be chosen. The lead is a near tie when errors of `noise` nats in both
    log-likelihoods could cancel it; a lone answer leads by infinity.
    """
    scaled = [
        value / length if length else -math.inf
        for value, length in zip(values, lengths, strict=True)
    ]
    best = max(range(len(scaled)), key=scaled.__getitem__)
    others = [i for i in range(len(scaled)) if i != best and lengths[i]]
    if not others or not lengths[best]:
        return best, Nearest(math.inf, near_tie=False)
    second = max(others, key=scaled.__getitem__)
    margin = scaled[best] - scaled[second]
    return best, Nearest(margin, margin <= noise * (1 / lengths[best] + 1 / lengths[second]))


def batch_noise(
    alone: Sequence[Sequence[float]], together: Sequence[Sequence[float]]
) -> float | None:
    """Return the largest difference between two passes over the same questions, None without one."""
    pairs = [
        abs(one - other)
        for ones, others in zip(alone, together, strict=True)
        for one, other in zip(ones, others, strict=True)
        if math.isfinite(one - other)
    ]
    return max(pairs, default=None)

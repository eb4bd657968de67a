"""A context and its continuation as token ids, split where lm-evaluation-harness splits them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from quanteval.errors import ConfigError
from quanteval.interfaces import (
    Message,
    Prompt,
    Sample,
    ScoreRequest,
    Session,
    Tokenizer,
    TokenLogprobs,
    hash_token_ids,
)
from quanteval.tasks.grouped import score_grouped

Form = Literal["raw", "chat"]


@dataclass(frozen=True)
class Solved:
    """A solved example: the question, and the answer with what separates the two."""

    question: str
    answer: str


@dataclass(frozen=True)
class Context:
    """What precedes an answer: an opening, solved examples, the question."""

    question: str
    opening: str = ""
    solved: tuple[Solved, ...] = ()
    separator: str = ""

    def text(self) -> str:
        """All of it as one text; the separator follows each example."""
        examples = "".join(each.question + each.answer + self.separator for each in self.solved)
        return self.opening + examples + self.question

    def messages(self) -> list[Message]:
        """The same as turns of a chat; the opening heads the first, answers lose the space before them."""
        turns: list[Message] = []
        for each in self.solved:
            turns.append({"role": "user", "content": each.question})
            turns.append({"role": "assistant", "content": each.answer.lstrip()})
        turns.append({"role": "user", "content": self.question})
        turns[0] = {"role": "user", "content": self.opening + turns[0]["content"]}
        return turns


@dataclass(frozen=True)
class Pair:
    """Token ids of a context and its continuation; the continuation begins at `first_scored`."""

    token_ids: tuple[int, ...]
    first_scored: int

    @property
    def scored(self) -> int:
        """Tokens of the continuation."""
        return len(self.token_ids) - self.first_scored

    def fitted(self, most: int) -> Pair:
        """Return the pair's last `most` tokens; the continuation may lose its context, not its own tokens."""
        cut = max(len(self.token_ids) - most, 0)
        return Pair(self.token_ids[cut:], self.first_scored - cut)


class Pairer:
    """Makes pairs with one tokenizer.

    White space that ends the context belongs to the continuation; the continuation's ids are those of the
    whole text from where the context's own end (lm-evaluation-harness, TemplateLM._encode_pair). The ids
    that the tokenizer puts before a text, such as BOS, are there once. A continuation without a context
    follows those ids, or the tokenizer's prefix token where it puts none.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._opening = _opening(tokenizer.raw("a").token_ids, tokenizer.encode("a")) or ()
        # The answers of a question mostly share their context.
        self._known: tuple[str, tuple[int, ...]] = ("", ())
        self._chatted: tuple[Context, Prompt] = (Context(""), Prompt("", ()))

    def pair(self, context: Context, form: Form, continuation: str) -> Pair:
        """Pair an answer with what precedes it.

        In the chat form the answer begins the assistant's turn, so that the space before it is dropped.
        ConfigError when there is no context and no id that could stand for one.
        """
        if form == "chat":
            return self._chat(context, continuation.lstrip())
        return self._raw(context.text(), continuation)

    def text(self, context: Context, form: Form) -> str:
        """Return what precedes an answer, as text."""
        if form == "chat":
            return self._tokenizer.chat(context.messages()).text
        return context.text()

    def _raw(self, context: str, continuation: str) -> Pair:
        context, continuation = _move_space(context, continuation)
        if not context:
            return self._without_context(continuation)
        before = self._context_ids(context)
        whole = self._ids(context + continuation)
        return Pair(before + whole[len(before) :], len(before))

    def _chat(self, context: Context, continuation: str) -> Pair:
        """A rendered template has its special tokens already, as text or as ids before it."""
        encode = self._tokenizer.encode
        if self._chatted[0] != context:
            self._chatted = (context, self._tokenizer.chat(context.messages()))
        prompt = self._chatted[1]
        opening = _opening(prompt.token_ids, encode(prompt.text))
        text, continuation = _move_space(prompt.text, continuation)
        if opening is None or not text:
            return Pair(prompt.token_ids + encode(continuation), len(prompt.token_ids))
        before = opening + encode(text)
        whole = opening + encode(text + continuation)
        return Pair(before + whole[len(before) :], len(before))

    def _ids(self, text: str) -> tuple[int, ...]:
        ids = self._tokenizer.encode(text)
        # A text that spells the begin token out, as rendered templates do, has it already.
        return ids if ids[: len(self._opening)] == self._opening else self._opening + ids

    def _context_ids(self, context: str) -> tuple[int, ...]:
        if self._known[0] != context:
            self._known = (context, self._ids(context))
        return self._known[1]

    def _without_context(self, continuation: str) -> Pair:
        try:
            before = self._opening or (self._tokenizer.prefix_token_id,)
        except ConfigError:
            raise ConfigError(
                f'"{continuation[:40]}" has no context, and this tokenizer has neither a begin nor an end '
                "token to stand for one: write a prompt"
            ) from None
        ids = self._tokenizer.encode(continuation)
        return Pair(ids if ids[: len(before)] == before else before + ids, len(before))


def _move_space(context: str, continuation: str) -> tuple[str, str]:
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _opening(ids: tuple[int, ...], own: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return what stands before a text's own ids, None where they are not found."""
    for start in range(len(ids) - len(own) + 1):
        if ids[start : start + len(own)] == own:
            return ids[:start]
    return None


# --------------------------------------------------------------------------- examples


def grouped(samples: Sequence[Sample], group_field: str | None) -> list[Sample]:
    """Return the samples with those of one group side by side, otherwise in order."""
    if group_field is None:
        return list(samples)
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(str(sample.data.get(group_field)), []).append(sample)
    return [sample for group in groups.values() for sample in group]


# --------------------------------------------------------------------------- scoring


@dataclass(frozen=True)
class Asked:
    """A sample with the sequences that decide it, or why they cannot be scored.

    `cut` is how many tokens the longest sequence lost at its beginning.
    """

    sample: Sample
    pairs: tuple[Pair, ...]
    failure: str = ""
    cut: int = 0

    @property
    def requests(self) -> list[ScoreRequest]:
        """One request a pair; none after a failure."""
        if self.failure:
            return []
        return [
            ScoreRequest(f"{self.sample.sample_id}#{number}", pair.token_ids, pair.first_scored)
            for number, pair in enumerate(self.pairs)
        ]

    @property
    def sha256(self) -> str:
        """Hash of all sequences' token ids, with -1 before each further one."""
        ids = [i for pair in self.pairs for i in (-1, *pair.token_ids)]
        return hash_token_ids(ids[1:])


def ask(sample: Sample, pairs: Sequence[Pair], most: int, *, truncate: bool) -> Asked:
    """Return what to score of a sample in sequences of at most `most` tokens; failures are one line.

    `truncate` cuts contexts at their beginning, as lm-evaluation-harness does.
    """
    pairs = tuple(pairs)
    if any(pair.scored < 1 for pair in pairs):
        return Asked(sample, pairs, "a continuation adds no token of its own to its context")
    longest = max(len(pair.token_ids) for pair in pairs)
    if longest <= most:
        return Asked(sample, pairs)
    if not truncate:
        return Asked(
            sample,
            pairs,
            f"{longest} tokens are more than the {most} a sequence may hold: serve with a longer context, "
            "or set on_overlong: truncate",
        )
    if (widest := max(pair.scored for pair in pairs)) >= most:
        return Asked(sample, pairs, f"{widest} tokens to score leave no context within {most}")
    return Asked(sample, tuple(pair.fitted(most) for pair in pairs), cut=longest - most)


def ask_all(
    session: Session, questions: Iterable[Asked]
) -> Iterator[tuple[Asked, list[TokenLogprobs]]]:
    """Yield each question with its results when its last one has come; all are asked in one call, lazily.

    A question that failed beforehand comes without results. EngineError when one is missing or out of turn.
    """
    return score_grouped(session, ((each, each.requests) for each in questions))


def total(result: TokenLogprobs) -> float:
    """Return the log-likelihood of a continuation in nats."""
    return math.fsum(float(value) for value in result.logprobs)


def ask_alone(session: Session, questions: Iterable[Asked]) -> list[list[float]]:
    """Return the log-likelihoods of each question's continuations, asked one sequence at a time."""
    found = []
    for question in questions:
        values = []
        for request in question.requests:
            (result,) = session.loglikelihood([request])
            values.append(total(result))
        found.append(values)
    return found

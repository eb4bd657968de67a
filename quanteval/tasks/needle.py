"""Needle: a fact hidden at a known depth in filler of a known length, and a question about it.

The length is that of the whole prompt in the model's own tokens, chat template and begin token
included. What is asked for cannot be known but from the text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from quanteval.errors import ConfigError, UnsupportedError
from quanteval.interfaces import (
    Completion,
    Prompt,
    Request,
    Sample,
    Sampling,
    ScoreRequest,
    Session,
    TaskContext,
)
from quanteval.records import Score
from quanteval.store import fingerprint as digest
from quanteval.tasks.answers import Judged, Match
from quanteval.tasks.generate import answers_of, failure_of, score_of
from quanteval.tasks.loading import (
    Source,
    check_limit,
    check_name,
    data_digest,
    load_rows,
    make_samples,
)
from quanteval.tasks.prompting import check_template, render
from quanteval.tasks.synthetic import shuffled

_KEYS = (
    "Amsterdam Ankara Athens Bangkok Barcelona Berlin Bogota Boston Brussels Budapest Cairo Chicago "
    "Copenhagen Dallas Delhi Denver Dublin Geneva Hamburg Hanoi Havana Helsinki Houston Istanbul Jakarta "
    "Kyoto Lagos Lima Lisbon London Madrid Manila Melbourne Miami Milan Montreal Moscow Mumbai Munich "
    "Nairobi Naples Oslo Ottawa Paris Prague Quito Riga Rome Santiago Seattle Seoul Sofia Stockholm Sydney "
    "Taipei Tallinn Tokyo Toronto Tunis Vancouver Venice Vienna Warsaw Zurich"
)
KEYS = tuple(_KEYS.split())
CONTAINS = Match(mode="contains", ignore=(r"(?<=[0-9]),(?=[0-9]{3})", "[*_]"))
"""A value may be written with separators or set in bold; longer numbers do not contain it."""
SENTENCE_CHARACTERS = range(20, 241)
CHUNK = 16


@dataclass(frozen=True)
class NeedleTask:
    """A grid of lengths and depths; the fields of a task.yaml of this kind.

    `lengths` are prompt tokens; a prompt holds as many whole sentences of the filler as fit. `depths` go
    from 0 (the fact comes first) to 1 (last). Each cell has `per_cell` samples. `needle` is a
    template over key and value, `prompt` one over text and key. `distractors` facts about other keys
    are strewn in. With `score_value` the log-probability of the right value is recorded too, after
    `answer_lead` (a template over key: how the answer begins). It moves long before the answer does, and
    costs another pass over the prompt.
    """

    name: str
    version: str
    folder: str = ""
    filler: Source = field(
        default_factory=lambda: Source(loader="quanteval.tasks.loaders.pydoc_topics")
    )
    text_field: str = "text"
    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    per_cell: int = 5
    distractors: int = 0
    digits: int = 5
    seed: int = 0
    needle: str = "The magic number of {{ key }} is {{ value }}."
    prompt: str = "{{ text }}\n\nWhat is the magic number of {{ key }}?"
    form: Literal["chat", "raw"] = "chat"
    answer_lead: str = ""
    score_value: bool = True
    max_tokens: int = 24
    stop: tuple[str, ...] = ()
    limit: int | None = None
    description: str = ""
    licence: str = ""

    kind = "needle"
    uses_baseline = False

    def __post_init__(self) -> None:
        check_name(self.name)
        check_limit(self.limit)
        _check_uses("needle", self.needle, ("key", "value"))
        _check_uses("prompt", self.prompt, ("text", "key"))
        check_template("answer_lead", self.answer_lead)
        for name, least in (("per_cell", 1), ("distractors", 0), ("digits", 1), ("max_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f'{name} "{getattr(self, name)}" must be at least {least}')
        if self.distractors >= len(KEYS):
            raise ValueError(f'distractors "{self.distractors}" must be less than {len(KEYS)}')
        for name in ("lengths", "depths"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f'{name} "{list(values)}" must be distinct, and at least one')
        if any(not 0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f'depths "{list(self.depths)}" must be from 0 to 1')
        if "" in self.stop:
            raise ValueError('stop "" would end every answer at once')

    # ---- samples

    def samples(self) -> list[Sample]:
        """Draw the facts and where they go: all cells once, then all again, up to `per_cell`."""
        filler = " ".join(self.sentences())
        rows = [
            self._row(filler, length, depth, number)
            for number in range(self.per_cell)
            for length in self.lengths
            for depth in self.depths
        ]
        return make_samples(rows, "id", self.limit)

    def _row(self, filler: str, length: int, depth: float, number: int) -> dict[str, Any]:
        name = f"{length}-{depth:g}-{number}"
        facts: list[dict[str, Any]] = []
        for order, key in enumerate(shuffled(len(KEYS), f"{self.seed} {name} keys")):
            if order > self.distractors:
                break
            place = depth if not order else _draw(f"{self.seed} {name} {order} place", 1001) / 1000
            value = self._value(f"{self.seed} {name} {order}", filler, [f["value"] for f in facts])
            facts.append({"key": KEYS[key], "value": value, "depth": place})
        return {
            "id": name,
            "category": str(length),
            "length": length,
            **facts[0],
            "offset": _draw(f"{self.seed} {name} offset", 2**32),
            "distractors": facts[1:],
        }

    def _value(self, key: str, filler: str, taken: Sequence[str]) -> str:
        """Return a number that is neither in the filler nor another fact's."""
        low = 10 ** (self.digits - 1)
        for attempt in range(1000):
            value = str(low + _draw(f"{key} value {attempt}", 9 * low))
            if value not in filler and value not in taken:
                return value
        raise ConfigError(f'digits "{self.digits}": too few numbers are left for values; take more')

    def sentences(self) -> list[str]:
        """Return the filler's sentences of moderate length. ConfigError when there is none."""
        texts = [row.get(self.text_field) for row in load_rows(self.filler, self.folder)]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError(f'a row of the filler has no text under "{self.text_field}"')
        found = [s for text in texts for s in split_sentences(str(text))]
        if not found:
            raise ConfigError(
                f"the filler has no sentence of {SENTENCE_CHARACTERS.start} to "
                f"{SENTENCE_CHARACTERS.stop - 1} characters"
            )
        return found

    def fingerprint(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """What the scores depend on besides the model."""
        fields = ("needle", "prompt", "form", "answer_lead", "score_value")
        return {
            "kind": self.kind,
            "version": self.version,
            "data": data_digest(samples),
            "filler": digest({"sentences": self.sentences()}),
            **{name: getattr(self, name) for name in fields},
            "sampling": asdict(self.sampling()),
        }

    def sampling(self) -> Sampling:
        """Greedy."""
        return Sampling(self.max_tokens, stop=self.stop)

    # ---- prompts

    def render(self, session: Session, row: Mapping[str, Any], filler: Filler) -> Prompt:
        """Return the longest prompt of whole sentences within the row's length, the fact in its place.

        ConfigError when the question alone is longer.
        """
        length, start = int(row["length"]), int(row["offset"]) % len(filler.sentences)
        facts = [(float(f["depth"]), render(self.needle, f)) for f in [row, *row["distractors"]]]

        def prompt(count: int) -> Prompt:
            text = filler.with_facts(start, count, facts)
            content = render(self.prompt, {"text": text, "key": row["key"]})
            if self.form == "raw":
                return session.tokenizer.raw(content)
            return session.tokenizer.chat([{"role": "user", "content": content}])

        best = prompt(0)
        room = length - len(best.token_ids)
        if room < 0:
            raise ConfigError(
                f'lengths "{length}": the question alone has {len(best.token_ids)} tokens; leave it out'
            )
        # Sentences tokenized one by one need not add up to the text, so the count is only close.
        count = filler.count(start, room)
        best = prompt(count)
        while len(best.token_ids) > length:
            count -= 1
            best = prompt(count)
        while len((longer := prompt(count + 1)).token_ids) <= length:
            count, best = count + 1, longer
        return best

    def _refuse_long(self, session: Session, samples: Sequence[Sample]) -> None:
        """Raise ConfigError for lengths that cannot be served: zeros for all would hide a real loss."""
        lengths = sorted({int(sample.data["length"]) for sample in samples})
        most = session.max_context - self.max_tokens
        if lengths and lengths[-1] > most:
            fitting = ",".join(str(length) for length in lengths if length <= most)
            raise ConfigError(
                f'lengths "{lengths[-1]}": with {self.max_tokens} output tokens more than the '
                f"{session.max_context} one request may hold; set task.{self.name}.lengths=[{fitting}]"
            )

    # ---- scores

    def evaluate(
        self, session: Session, samples: Sequence[Sample], context: TaskContext
    ) -> Iterator[Score]:
        """Yield a score a sample, a few prompts at a time. ConfigError for a length that is not served."""
        self._refuse_long(session, samples)
        filler = Filler(session, self.sentences())
        for start in range(0, len(samples), CHUNK):
            chunk = {sample.sample_id: sample.data for sample in samples[start : start + CHUNK]}
            prompts = {i: self.render(session, row, filler) for i, row in chunk.items()}
            values = self._value_logprobs(session, chunk, prompts)
            requests = [Request(i, prompt, self.sampling()) for i, prompt in prompts.items()]
            for completion in answers_of(session, requests):
                row = chunk[completion.request_id]
                prompt = prompts[completion.request_id]
                numbers = {
                    "length": float(row["length"]),
                    "depth": float(row["depth"]),
                    "prompt_tokens": float(len(prompt.token_ids)),
                    **values.get(completion.request_id, {}),
                }
                yield score_of(completion, prompt.sha256, _judge(completion, row), numbers)

    def _value_logprobs(
        self,
        session: Session,
        rows: Mapping[str, Mapping[str, Any]],
        prompts: Mapping[str, Prompt],
    ) -> dict[str, dict[str, float]]:
        """Return the log-probability of each right value, in nats; nothing where an engine has none."""
        if not self.score_value:
            return {}
        requests = []
        for sample_id, prompt in prompts.items():
            row, ids = rows[sample_id], prompt.token_ids
            begins = render(self.answer_lead, {"key": row["key"]})
            lead = session.tokenizer.encode(begins)
            value = session.tokenizer.encode(begins + str(row["value"]))
            # The value's first token may take the end of the lead: what both readings share is given.
            common = 0
            while common < min(len(lead), len(value) - 1) and lead[common] == value[common]:
                common += 1
            requests.append(ScoreRequest(sample_id, ids + value, len(ids) + common))
        try:
            found = list(session.loglikelihood(requests))
        except UnsupportedError:
            return {}
        return {f.request_id: {"value_logprob": float(np.sum(f.logprobs))} for f in found}


class Filler:
    """Sentences, read round and round from any one of them, with their lengths in tokens."""

    def __init__(self, session: Session, sentences: Sequence[str]) -> None:
        self.sentences = sentences
        self.tokens = [len(session.tokenizer.encode(f" {sentence}")) for sentence in sentences]

    def count(self, start: int, room: int) -> int:
        """Return about how many sentences from `start` on have `room` tokens together."""
        count = 0
        while (room := room - self.tokens[(start + count) % len(self.tokens)]) >= 0:
            count += 1
        return count

    def with_facts(self, start: int, count: int, facts: Sequence[tuple[float, str]]) -> str:
        """Return `count` sentences with each fact at the sentence's end nearest to its depth."""
        picked = [(start + i) % len(self.sentences) for i in range(count)]
        ends = list(accumulate((self.tokens[i] for i in picked), initial=0))
        texts = [[self.sentences[i]] for i in picked]
        after: list[list[str]] = [[], *texts]
        for depth, fact in facts:
            place = min(range(len(ends)), key=lambda end: abs(ends[end] - depth * ends[-1]))
            after[place].append(fact)
        return " ".join(part for parts in after for part in parts)


def split_sentences(text: str) -> Iterator[str]:
    """Yield a text's sentences of moderate length, each on one line.

    Paragraphs end at empty lines. What does not end in a full stop, a question or an exclamation mark,
    such as headings, grammars and programs, is left out.
    """
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[.!?])\s+|(?<=[。！？])", paragraph):
            line = " ".join(sentence.split())
            if len(line) in SENTENCE_CHARACTERS and line[-1] in ".!?。！？":
                yield line


def _check_uses(name: str, template: str, fields: Sequence[str]) -> None:
    """Raise ValueError unless a template's text depends on each field, and on no other."""
    check_template(name, template)
    plain = dict.fromkeys(fields, "0")
    for key in fields:
        try:
            unused = render(template, plain) == render(template, {**plain, key: "1"})
        except ConfigError as error:
            raise ValueError(f"{name}: {error}") from None
        if unused:
            raise ValueError(f'{name} "{template[:60]}" must use {{{{ {key} }}}}')


def _judge(completion: Completion, row: Mapping[str, Any]) -> Judged:
    """Right is an answer with the value, and with no distractor's."""
    failure = failure_of(completion)
    if failure is not None:
        return failure
    others = [fact for fact in row["distractors"] if _holds(completion.text, fact["value"])]
    right = _holds(completion.text, row["value"]) and not others
    detail = f'gave the value of "{others[0]["key"]}"' if others else ""
    return Judged(float(right), "right" if right else "wrong", completion.text.strip(), detail)


def _holds(text: str, value: str) -> bool:
    return CONTAINS.judge(text, {}, [value]).value == 1.0


def _draw(key: str, bound: int) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest(), "big") % bound

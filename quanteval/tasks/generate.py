"""Generated answers: a prompt from a template, a greedy answer, and a judge that gives it a value from 0 to 1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from pydantic import InstanceOf

from quanteval.errors import ConfigError, EngineError
from quanteval.interfaces import (
    Completion,
    Message,
    Prompt,
    Request,
    Sample,
    Sampling,
    Session,
    TaskContext,
)
from quanteval.records import SampleStatus, Score
from quanteval.tasks.answers import RIGHT_FROM, Answer, Judged, Match
from quanteval.tasks.loading import (
    Row,
    Source,
    check_limit,
    check_name,
    data_digest,
    load_rows,
    make_samples,
)
from quanteval.tasks.prompting import (
    FewShot,
    check_template,
    describe_shots,
    load_examples,
    render,
)


@dataclass(frozen=True)
class GenerateTask:
    """Questions with short answers; the fields of a task.yaml of this kind.

    `prompt` and `target` are Jinja templates over a row; `targets_field` names a field with a list of
    targets instead, any of which counts. `strip` takes white space off a prompt's end. Solved examples
    (`shots`) are a prompt, `target_separator` and `example_target` (the target, when empty): turns of the
    conversation in the chat form, where the separator is left out, and text in the raw form. Their
    `description` opens the first user turn, or the text. `system` is a template too.
    """

    name: str
    version: str
    source: Source
    prompt: str
    folder: str = ""
    id_field: str = "id"
    target: str = ""
    targets_field: str | None = None
    form: Literal["chat", "raw"] = "chat"
    system: str = ""
    strip: bool = True
    shots: FewShot = field(default_factory=FewShot)
    target_separator: str = " "
    example_target: str = ""
    answer: InstanceOf[Answer] = field(default_factory=Match)
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    limit: int | None = None
    description: str = ""
    licence: str = ""

    kind = "generate"
    uses_baseline = False

    def __post_init__(self) -> None:
        check_name(self.name)
        check_limit(self.limit)
        for name in ("prompt", "target", "system", "example_target"):
            check_template(name, getattr(self, name))
        if self.max_tokens < 1:
            raise ValueError(f'max_tokens "{self.max_tokens}" must be at least 1')
        if "" in self.stop:
            raise ValueError('stop "" would end every answer at once')
        if self.target and self.targets_field:
            raise ValueError(f'targets_field "{self.targets_field}": give it or target, not both')
        if self.system and self.form == "raw":
            raise ValueError(f'system "{self.system[:40]}" is for the chat form only')
        has_target = bool(self.target or self.targets_field)
        if getattr(self.answer, "needs_target", False) and not has_target:
            raise ValueError(f'answer "{type(self.answer).__name__}" needs target or targets_field')
        if self.shots.count and not (has_target or self.example_target):
            raise ValueError(f'shots.count "{self.shots.count}" needs example_target')

    def samples(self) -> list[Sample]:
        """Load the questions; ConfigError when one has no prompt or no target."""
        samples = make_samples(load_rows(self.source, self.folder), self.id_field, self.limit)
        for sample in samples:
            try:
                self._prompt(sample.data)
                self.targets(sample.data)
            except ConfigError as error:
                raise ConfigError(f'sample "{sample.sample_id}": {error}') from None
        # Examples that are missing are told before anything is served.
        for example in self._pool:
            self._example_target(example)
        return samples

    def sampling(self) -> Sampling:
        """Greedy."""
        return Sampling(self.max_tokens, stop=self.stop)

    def fingerprint(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """What the scores depend on besides the model."""
        fields = ("prompt", "target", "targets_field", "form", "system", "strip")
        return {
            "kind": self.kind,
            "version": self.version,
            "data": data_digest(samples),
            **{name: getattr(self, name) for name in fields},
            "shots": self._shots_fingerprint(),
            "sampling": asdict(self.sampling()),
            "answer": self._judge().fingerprint(),
        }

    @cached_property
    def _pool(self) -> list[Row]:
        return load_examples(self.shots, self.source, self.folder)

    def _shots_fingerprint(self) -> dict[str, Any]:
        return {
            **describe_shots(self.shots, self._pool),
            "target_separator": self.target_separator,
            "example_target": self.example_target,
        }

    def targets(self, row: Mapping[str, Any]) -> list[str]:
        """Return a row's targets; none where the task has none. ConfigError when its own are missing."""
        if self.targets_field is None:
            return [render(self.target, row)] if self.target else []
        value = row.get(self.targets_field)
        values = [value] if isinstance(value, str | int | float) else value
        if not isinstance(values, list | tuple) or not values:
            raise ConfigError(f'"{self.targets_field}" has no list of targets')
        return [str(target) for target in values]

    def _prompt(self, row: Mapping[str, Any]) -> str:
        text = render(self.prompt, row)
        return text.rstrip() if self.strip else text

    def _example_target(self, row: Mapping[str, Any]) -> str:
        return render(self.example_target, row) if self.example_target else self.targets(row)[0]

    def render(self, session: Session, sample: Sample) -> Prompt:
        """Return the prompt of one question, after its examples."""
        row = sample.data
        shots = [
            (self._prompt(example), self._example_target(example))
            for example in self.shots.choose(row, sample.sample_id, self._pool)
        ]
        opening = render(self.shots.description, row)
        question = self._prompt(row)
        if self.form == "raw":
            parts = [asked + self.target_separator + told for asked, told in shots]
            return session.tokenizer.raw(opening + self.shots.separator.join([*parts, question]))
        asked = [*(text for text, _ in shots), question]
        asked[0] = opening + asked[0]
        messages: list[Message] = []
        if self.system:
            messages.append({"role": "system", "content": render(self.system, row)})
        for text, (_, told) in zip(asked, shots, strict=False):
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": told})
        messages.append({"role": "user", "content": asked[-1]})
        return session.tokenizer.chat(messages)

    def _judge(self) -> Answer:
        """Return the judge, with its files looked up in the suite's folder."""
        bind = getattr(self.answer, "relative_to", None)
        answer: Answer = bind(self.folder) if bind else self.answer
        return answer

    def evaluate(
        self, session: Session, samples: Sequence[Sample], context: TaskContext
    ) -> Iterator[Score]:
        """Yield a score a question, as the answers come."""
        judge = self._judge()
        asked: dict[str, tuple[Sample, str]] = {}

        def requests() -> Iterator[Request]:
            for sample in samples:
                prompt = self.render(session, sample)
                asked[sample.sample_id] = (sample, prompt.sha256)
                yield Request(sample.sample_id, prompt, self.sampling())

        for completion in answers_of(session, requests()):
            sample, prompt_sha256 = asked.pop(completion.request_id)
            row = sample.data
            yield score_of(
                completion,
                prompt_sha256,
                failure_of(completion) or judge.judge(completion.text, row, self.targets(row)),
            )


def answers_of(session: Session, requests: Iterable[Request]) -> Iterator[Completion]:
    """Yield the completion of each request, once. EngineError for one twice, unasked for or missing."""
    open_ids: set[str] = set()

    def noted() -> Iterator[Request]:
        for request in requests:
            open_ids.add(request.request_id)
            yield request

    for completion in session.generate(noted()):
        if completion.request_id not in open_ids:
            raise EngineError(f'"{completion.request_id}" was answered twice or never asked')
        open_ids.remove(completion.request_id)
        yield completion
    if open_ids:
        raise EngineError(f"{len(open_ids)} requests got no answer, the first: {min(open_ids)}")


def failure_of(completion: Completion) -> Judged | None:
    """Return the judgement of a generation that failed, None for one that ended in an answer."""
    if completion.error is None and completion.finish_reason in ("stop", "length"):
        return None
    return Judged(0.0, "error", detail=completion.error or completion.finish_reason)


def score_of(
    completion: Completion,
    prompt_sha256: str,
    judged: Judged,
    numbers: Mapping[str, float] | None = None,
) -> Score:
    """Return the score of a judged answer; one with nothing in it that is not right is 'empty'."""
    outcome = judged.outcome
    if outcome in ("wrong", "no_answer") and not completion.text.strip():
        outcome = "empty"
    detail = judged.detail
    if outcome == "wrong" and not detail and judged.extracted != completion.text.strip():
        detail = f'extracted "{judged.extracted[:100]}"'
    return Score(
        sample_id=completion.request_id,
        prompt_sha256=prompt_sha256,
        value=judged.value,
        weight=1.0,
        status=_status(completion, judged),
        finish_reason=completion.finish_reason,
        output_tokens=len(completion.token_ids),
        output=completion.text,
        outcome=outcome,
        detail=detail,
        numbers={**judged.numbers, **(numbers or {})},
        elapsed_s=completion.elapsed_s,
    )


def _status(completion: Completion, judged: Judged) -> SampleStatus:
    """An answer that was cut and is not right is 'truncated', so that it is not taken for a wrong one."""
    if judged.outcome == "error":
        return "error"
    cut = completion.finish_reason == "length" and judged.value < RIGHT_FROM
    return "truncated" if cut else "ok"

"""Code: functions written by the model, run against their tests in the sandbox; greedy pass@1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from quanteval.errors import ConfigError, EngineError
from quanteval.interfaces import Completion, Prompt, Request, Sample, Sampling, Session, TaskContext
from quanteval.records import SampleStatus, Score
from quanteval.sandbox import Limits, Outcome, Problem, Sandbox, probe
from quanteval.tasks.extract import Extraction, extract_chat, extract_raw
from quanteval.tasks.loading import (
    Source,
    check_limit,
    check_name,
    data_digest,
    load_rows,
    make_samples,
)

FIELDS = ("prompt", "entry_point", "test")
INSTRUCTION = (
    "Complete the following Python function. Reply with the whole function in a code block.\n\n"
    "```python\n{prompt}\n```"
)
RAW_STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert ")


@dataclass(frozen=True)
class PromptForm:
    """How a problem is put to the model.

    `chat` sends `instruction`, with {prompt} filled in, as one user message; `raw` sends the prompt
    itself for completion. `strip` takes white space off the prompt's end: many models continue a
    raw prompt that ends in a line break with nothing at all.
    """

    form: Literal["chat", "raw"] = "chat"
    instruction: str = INSTRUCTION
    strip: bool = True

    def __post_init__(self) -> None:
        if "{prompt}" not in self.instruction:
            raise ValueError(f'instruction "{self.instruction[:40]}" must contain {{prompt}}')


@dataclass(frozen=True)
class CodeTask:
    """Functions to write; the fields of a task.yaml of this kind.

    Rows need `prompt`, `entry_point` and `test` (HumanEval's format: `test` defines check(candidate)).
    `stop` is used with the raw form only: a stop string could cut a fenced block short.
    """

    name: str
    version: str
    source: Source
    folder: str = ""
    id_field: str = "task_id"
    prompt: PromptForm = field(default_factory=PromptForm)
    max_tokens: int = 512
    stop: tuple[str, ...] = RAW_STOPS
    sandbox: Limits = field(default_factory=Limits)
    limit: int | None = None
    description: str = ""
    licence: str = ""

    kind = "code"
    uses_baseline = False

    def __post_init__(self) -> None:
        check_name(self.name)
        check_limit(self.limit)
        if self.max_tokens < 1:
            raise ValueError(f'max_tokens "{self.max_tokens}" must be at least 1')

    def samples(self) -> list[Sample]:
        """Load the problems; ConfigError when one lacks a field."""
        samples = make_samples(load_rows(self.source, self.folder), self.id_field, self.limit)
        for sample in samples:
            missing = [key for key in FIELDS if not sample.data.get(key)]
            if missing:
                raise ConfigError(f'problem "{sample.sample_id}" has no "{missing[0]}"')
        return samples

    def sampling(self) -> Sampling:
        """Greedy, with stop strings in the raw form only."""
        return Sampling(self.max_tokens, stop=self.stop if self.prompt.form == "raw" else ())

    def fingerprint(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """What the scores depend on besides the model; the sandbox's real level is part of it."""
        return {
            "kind": self.kind,
            "version": self.version,
            "data": data_digest(samples),
            "prompt": asdict(self.prompt),
            "sampling": asdict(self.sampling()),
            "sandbox": {**asdict(self.sandbox), "level": probe().name},
        }

    def render(self, session: Session, sample: Sample) -> Prompt:
        """Return the prompt of one problem."""
        text = str(sample.data["prompt"])
        if self.prompt.strip:
            text = text.rstrip()
        if self.prompt.form == "raw":
            return session.tokenizer.raw(text)
        content = self.prompt.instruction.replace("{prompt}", text)
        return session.tokenizer.chat([{"role": "user", "content": content}])

    def extract(self, sample: Sample, text: str) -> Extraction:
        """Return the program in an answer."""
        prompt, entry = str(sample.data["prompt"]), str(sample.data["entry_point"])
        if self.prompt.form == "raw":
            return extract_raw(text, prompt.rstrip() if self.prompt.strip else prompt, entry)
        return extract_chat(text, prompt, entry)

    def evaluate(
        self, session: Session, samples: Sequence[Sample], context: TaskContext
    ) -> Iterator[Score]:
        """Generate, and check each answer while the others are still being written."""
        by_id = {sample.sample_id: sample for sample in samples}
        prompts = {sample.sample_id: self.render(session, sample) for sample in samples}
        requests = (Request(i, prompt, self.sampling()) for i, prompt in prompts.items())
        checks: dict[Future[Outcome], Completion] = {}

        def finished(*, wait: bool) -> Iterator[Score]:
            for future in [f for f in checks if wait or f.done()]:
                completion = checks.pop(future)
                outcome = future.result()
                prompt = prompts[completion.request_id]
                yield _score(prompt, completion, outcome.status, outcome.detail)

        with Sandbox(self.sandbox) as sandbox, ThreadPoolExecutor(1) as pool:
            try:
                for completion in session.generate(requests):
                    sample = by_id.pop(completion.request_id, None)
                    if sample is None:
                        raise EngineError(
                            f'"{completion.request_id}" was answered twice or never asked'
                        )
                    answer = _answer(self, sample, completion)
                    if isinstance(answer, Score):
                        yield answer.model_copy(
                            update={"prompt_sha256": prompts[sample.sample_id].sha256}
                        )
                    else:
                        checks[pool.submit(sandbox.check, answer)] = completion
                    yield from finished(wait=False)
                yield from finished(wait=True)
            finally:
                # Interrupted or failed: what still waits for a check is scored in the next run.
                pool.shutdown(wait=False, cancel_futures=True)
        if by_id:
            raise EngineError(f"{len(by_id)} problems got no answer, the first: {min(by_id)}")


def _answer(task: CodeTask, sample: Sample, completion: Completion) -> Problem | Score:
    """Return what the sandbox is to check, or the score of an answer that holds no program."""
    if completion.error is not None or completion.finish_reason not in ("stop", "length"):
        return _score(None, completion, "error", completion.error or completion.finish_reason)
    found = task.extract(sample, completion.text)
    if found.status != "ok":
        return _score(None, completion, found.status, "")
    return Problem(
        problem_id=sample.sample_id,
        code=found.code,
        entry_point=str(sample.data["entry_point"]),
        test=str(sample.data["test"]),
        context=str(sample.data["prompt"]),
    )


def _score(prompt: Prompt | None, completion: Completion, outcome: str, detail: str) -> Score:
    return Score(
        sample_id=completion.request_id,
        prompt_sha256=prompt.sha256 if prompt else "",
        value=1.0 if outcome == "passed" else 0.0,
        weight=1.0,
        status=_status(completion, outcome),
        finish_reason=completion.finish_reason,
        output_tokens=len(completion.token_ids),
        output=completion.text,
        outcome=outcome,
        detail=detail,
        elapsed_s=completion.elapsed_s,
    )


def _status(completion: Completion, outcome: str) -> SampleStatus:
    """An answer that was cut and failed is 'truncated', so that it is not taken for a wrong one."""
    if outcome in ("error", "timeout"):
        return "error" if outcome == "error" else "timeout"
    if completion.finish_reason == "length" and outcome != "passed":
        return "truncated"
    return "ok"

"""Code: functions written by the model, run against their tests in the sandbox; samples for pass@k."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import InstanceOf

from quanteval.errors import EngineError
from quanteval.interfaces import Completion, Prompt, Request, Sample, Sampling, Session, TaskContext
from quanteval.records import SampleStatus, Score
from quanteval.sandbox import Limits, Outcome, Problem
from quanteval.tasks.extract import Extraction
from quanteval.tasks.loading import (
    Source,
    check_limit,
    check_name,
    data_digest,
    load_rows,
    make_samples,
)
from quanteval.tasks.programs import (
    INSTRUCTIONS,
    STOPS,
    Draws,
    Exercise,
    Format,
    Language,
    PromptForm,
    Python,
    inside_fence,
    read_exercise,
)

__all__ = ["CodeTask", "PromptForm"]

# What a second request for an answer has at the end of its id.
WHOLE = " whole"


@dataclass(frozen=True)
class CodeTask:
    """Functions to write; the fields of a task.yaml of this kind.

    Rows are in `format`: HumanEval's (`prompt`, `entry_point`, `test`, which defines check(candidate)) or
    MBPP's (`text` or `prompt`, `code`, `test_list`, `test_setup_code` or `test_imports`). Each problem is
    answered `samples_per_problem` times, at `temperature`; `limit` counts problems. `stop` (null: the
    format's own) is used with the raw form only, and not inside code fences.
    """

    name: str
    version: str
    source: Source
    folder: str = ""
    id_field: str = "task_id"
    format: Format = "humaneval"
    prompt: PromptForm = field(default_factory=PromptForm)
    language: InstanceOf[Language] = field(default_factory=Python)
    samples_per_problem: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 512
    stop: tuple[str, ...] | None = None
    sandbox: Limits = field(default_factory=Limits)
    limit: int | None = None
    description: str = ""
    licence: str = ""

    kind = "code"
    uses_baseline = False

    def __post_init__(self) -> None:
        check_name(self.name)
        check_limit(self.limit)
        Draws(self.samples_per_problem, self.temperature, self.top_p, self.top_k)
        if self.max_tokens < 1:
            raise ValueError(f'max_tokens "{self.max_tokens}" must be at least 1')

    def samples(self) -> list[Sample]:
        """Load the problems, each as many times as it is answered; ConfigError when one lacks a field."""
        problems = make_samples(load_rows(self.source, self.folder), self.id_field, self.limit)
        for problem in problems:
            read_exercise(self.format, problem.data, problem.sample_id)
        if self.samples_per_problem == 1:
            return problems
        return [
            Sample(f"{problem.sample_id}#{k}", problem.data)
            for problem in problems
            for k in range(self.samples_per_problem)
        ]

    def sampling(self, seed: int = 0) -> Sampling:
        """As configured, with stop strings in the raw form only."""
        stop = STOPS[self.format] if self.stop is None else self.stop
        return Sampling(
            self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=seed,
            stop=stop if self.prompt.form == "raw" else (),
        )

    def fingerprint(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """What the scores depend on besides the model; what the sandbox really holds is part of it.

        By how much a slow machine's limits are stretched is not: it is measured anew each time.
        """
        language = self.language.fingerprint()
        return {
            "kind": self.kind,
            "version": self.version,
            "data": data_digest(samples),
            "format": self.format,
            "prompt": {**asdict(self.prompt), "instruction": self._instruction()},
            "sampling": asdict(self.sampling()),
            "samples_per_problem": self.samples_per_problem,
            "language": language,
            "sandbox": asdict(self.sandbox),
        }

    def exercise(self, sample: Sample) -> Exercise:
        """Return what a sample asks for."""
        return read_exercise(self.format, sample.data, sample.sample_id)

    def _instruction(self) -> str:
        return self.prompt.instruction or INSTRUCTIONS[self.format]

    def _shown(self, exercise: Exercise) -> str:
        text = exercise.completed if self.prompt.form == "raw" else exercise.prompt
        return text.rstrip() if self.prompt.strip else text

    def render(self, session: Session, sample: Sample) -> Prompt:
        """Return the prompt of one problem."""
        text = self._shown(self.exercise(sample))
        if self.prompt.form == "raw":
            return session.tokenizer.raw(text)
        content = self._instruction().replace("{prompt}", text)
        return session.tokenizer.chat([{"role": "user", "content": content}])

    def extract(self, sample: Sample, text: str) -> Extraction:
        """Return the program in an answer."""
        exercise = self.exercise(sample)
        return self.language.extract(text, self._shown(exercise), exercise, self.prompt.form)

    def problem_of(self, sample: Sample) -> tuple[str, int]:
        """Return the problem's id and which of its samples this is."""
        if self.samples_per_problem == 1:
            return sample.sample_id, 0
        problem, _, number = sample.sample_id.rpartition("#")
        return problem, int(number)

    def evaluate(
        self, session: Session, samples: Sequence[Sample], context: TaskContext
    ) -> Iterator[Score]:
        """Generate, and check each answer while the others are still being written."""
        run = _Run(self, session, samples, context)
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        with (
            self.language.checker(self.sandbox, workers) as checker,
            ThreadPoolExecutor(workers) as pool,
        ):
            try:
                for completion in run.completions():
                    sample = run.take(completion)
                    answer = _answer(self, sample, completion)
                    if isinstance(answer, Score):
                        yield run.finish(answer, sample)
                    else:
                        run.checks[pool.submit(checker.check, answer)] = (sample, completion)
                    yield from run.checked(checker.factor, wait=False)
                yield from run.checked(checker.factor, wait=True)
            finally:
                # Interrupted or failed: what still waits for a check is scored in the next run.
                pool.shutdown(wait=False, cancel_futures=True)
        run.require_all()


class _Run:
    """The samples of one evaluation that are not scored yet."""

    def __init__(
        self, task: CodeTask, session: Session, samples: Sequence[Sample], context: TaskContext
    ) -> None:
        self._task = task
        self._session = session
        self._waiting = {sample.sample_id: sample for sample in samples}
        self._requests = [self._request(sample, context.seed) for sample in samples]
        self._prompts = {request.request_id: request.prompt for request in self._requests}
        self.checks: dict[Future[Outcome], tuple[Sample, Completion]] = {}

    def _request(self, sample: Sample, seed: int) -> Request:
        own = _seed(seed, *self._task.problem_of(sample)) if self._task.temperature else 0
        prompt = self._task.render(self._session, sample)
        return Request(sample.sample_id, prompt, self._task.sampling(own))

    def completions(self) -> Iterator[Completion]:
        """Yield what the session answers; an answer that a stop string cut in a code fence is asked for anew."""
        cut: list[Request] = []
        by_id = {request.request_id: request for request in self._requests}
        for completion in self._session.generate(iter(self._requests)):
            request = by_id.get(completion.request_id)
            stopped = completion.finish_reason == "stop" and completion.error is None
            if request and request.sampling.stop and stopped and inside_fence(completion.text):
                sampling = replace(request.sampling, stop=())
                cut.append(Request(request.request_id + WHOLE, request.prompt, sampling))
            else:
                yield completion
        if cut:
            for completion in self._session.generate(iter(cut)):
                yield replace(completion, request_id=completion.request_id.removesuffix(WHOLE))

    def take(self, completion: Completion) -> Sample:
        """Return the sample that a completion is for; EngineError when there is none, or no more."""
        sample = self._waiting.pop(completion.request_id, None)
        if sample is None:
            raise EngineError(f'"{completion.request_id}" was answered twice or never asked')
        return sample

    def finish(self, score: Score, sample: Sample) -> Score:
        """Fill in what all scores have."""
        problem, _ = self._task.problem_of(sample)
        return score.model_copy(
            update={
                "prompt_sha256": self._prompts[sample.sample_id].sha256,
                "problem_id": problem if self._task.samples_per_problem > 1 else "",
            }
        )

    def checked(self, factor: float, *, wait: bool) -> Iterator[Score]:
        """Yield the scores of finished checks."""
        for future in [f for f in self.checks if wait or f.done()]:
            sample, completion = self.checks.pop(future)
            outcome = future.result()
            score = _score(completion, outcome.status, outcome.detail)
            numbers = {"check_cpu_s": outcome.cpu_s, "limits_factor": factor}
            yield self.finish(score.model_copy(update={"numbers": numbers}), sample)

    def require_all(self) -> None:
        """Raise EngineError unless all samples were answered."""
        if self._waiting:
            first = min(self._waiting)
            raise EngineError(f"{len(self._waiting)} problems got no answer, the first: {first}")


def _seed(seed: int, problem: str, number: int) -> int:
    """Return a sample's own seed, below 2**31: the same in each run and for every variant."""
    digest = hashlib.sha256(f"{seed}\0{problem}\0{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _answer(task: CodeTask, sample: Sample, completion: Completion) -> Problem | Score:
    """Return what is to be checked, or the score of an answer that holds no program."""
    if completion.error is not None or completion.finish_reason not in ("stop", "length"):
        return _score(completion, "error", completion.error or completion.finish_reason)
    found = task.extract(sample, completion.text)
    if found.status != "ok":
        return _score(completion, found.status, "")
    exercise = task.exercise(sample)
    return Problem(
        problem_id=sample.sample_id,
        code=found.code,
        entry_point=exercise.entry_point,
        test=exercise.test,
        context=exercise.context,
    )


def _score(completion: Completion, outcome: str, detail: str) -> Score:
    return Score(
        sample_id=completion.request_id,
        prompt_sha256="",
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

"""What becomes of the documents of an lm_eval task: their requests, the session's results, one score each."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from quanteval.errors import EngineError, QuantevalError, UnsupportedError
from quanteval.interfaces import (
    Completion,
    Request,
    Sample,
    Session,
    TokenLogprobs,
    hash_token_ids,
)
from quanteval.records import SampleStatus, Score
from quanteval.tasks.lm_eval_loading import quiet, seeded
from quanteval.tasks.pairing import Asked, Pair, ask, ask_all
from quanteval.tasks.perplexity import count_words

if TYPE_CHECKING:
    from quanteval.tasks.lm_eval_model import SessionLM

REQUEST_TYPES = {"perplexity": "loglikelihood_rolling", "generate": "generate_until"}
"""What lm_eval calls the requests of a kind; 'loglikelihood' for the rest."""
PER_WORD, PER_BYTE = ("word_perplexity",), ("byte_perplexity", "bits_per_byte")


@dataclass(frozen=True)
class Part:
    """One lm_eval task of a suite, with the metric and the filter that make its score."""

    name: str
    task: Any
    kind: str
    metric: str | None
    pipeline: Any
    shots: int

    @property
    def repeats(self) -> int:
        """How often each request is asked: more than once only where the filter looks at all answers."""
        steps = self.pipeline.filters
        first = type(steps[0]()).__name__ if steps else ""
        return 1 if first == "TakeFirstFilter" else int(self.task.get_config("repeats") or 1)


@dataclass(frozen=True)
class Document:
    """One document: its sample, the lm_eval task it belongs to, and its place in that task's data."""

    sample: Sample
    part: Part
    number: int
    doc: Any


@dataclass(frozen=True)
class PromptForm:
    """How contexts are made; the arguments of `lm_eval.simple_evaluate`."""

    apply_chat_template: bool
    fewshot_as_multiturn: bool
    system_instruction: str | None
    fewshot_seed: int


@dataclass
class Prepared:
    """A document with its lm_eval requests, or one line on why there are none."""

    document: Document
    instances: list[Any] = field(default_factory=list)
    failure: str = ""
    counts: list[int] = field(default_factory=list)
    """Token sequences of each request: several for the windows of a long text."""
    requests: dict[str, tuple[int, Request]] = field(default_factory=dict)
    """Generations by request id, with the number of the lm_eval request each belongs to."""
    completions: dict[str, Completion] = field(default_factory=dict)
    cut: int = 0
    """Tokens that a context lost at its beginning, to leave room for the answer."""

    @property
    def sample(self) -> Sample:
        """The document's sample."""
        return self.document.sample


# --------------------------------------------------------------------------- requests


def prepare(
    lm: SessionLM, documents: Sequence[Document], wanted: Sequence[Document], form: PromptForm
) -> Iterator[Prepared]:
    """Yield the wanted documents with their requests, in order.

    Where examples are drawn at random, each draw depends on those before it: then the requests of a
    subtask are made for all its documents up to the last one wanted, as lm_eval makes them.
    """
    ids = {document.sample.sample_id for document in wanted}
    last: dict[str, int] = {}
    for document in wanted:
        last[document.part.name] = max(document.number, last.get(document.part.name, 0))
    made: dict[str, dict[str, Prepared]] = {}
    for document in wanted:
        part = document.part
        if not part.shots:
            yield _request(lm, document, form)
            continue
        if part.name not in made:
            part.task.set_fewshot_seed(form.fewshot_seed)
            made[part.name] = {
                each.sample.sample_id: prepared
                for each in documents
                if each.part.name == part.name and each.number <= last[part.name]
                # All of them are made, to draw their examples, and only those wanted are kept.
                if (prepared := _request(lm, each, form)) and each.sample.sample_id in ids
            }
        yield made[part.name].pop(document.sample.sample_id)


def _request(lm: SessionLM, document: Document, form: PromptForm) -> Prepared:
    """Make one document's requests as `Task.build_all_requests` does."""
    part, task, doc = document.part, document.part.task, document.doc
    template = lm.apply_chat_template if form.apply_chat_template else None
    try:
        # Seeded, so that what a task draws itself does not depend on which documents came before.
        with quiet(), seeded():
            opening = task.fewshot_context(
                doc,
                num_fewshot=part.shots,
                system_instruction=form.system_instruction,
                apply_chat_template=form.apply_chat_template,
                fewshot_as_multiturn=form.fewshot_as_multiturn,
                chat_template=template,
                gen_prefix=task.doc_to_prefix(doc),
            )
            made = task.construct_requests(
                doc=doc,
                ctx=opening,
                metadata=(part.name, document.number, part.repeats),
                apply_chat_template=form.apply_chat_template,
                chat_template=template,
            )
    except QuantevalError:
        raise
    except Exception as error:
        return Prepared(document, failure=_line(error))
    instances = made if isinstance(made, list) else [made]
    expected = REQUEST_TYPES.get(part.kind, "loglikelihood")
    if other := {each.request_type for each in instances} - {expected}:
        raise UnsupportedError(
            f'lm_eval task "{part.name}" asks for "{other.pop()}" besides {expected}: such a mixture is not served'
        )
    return Prepared(document, instances)


# --------------------------------------------------------------------------- likelihoods


def likelihoods(session: Session, lm: SessionLM, prepared: Iterator[Prepared]) -> Iterator[Score]:
    """Yield a score a document, in order; all are asked in one lazy call."""
    waiting: dict[str, Prepared] = {}

    def questions() -> Iterator[Asked]:
        for each in prepared:
            waiting[each.sample.sample_id] = each
            yield _ask(lm, each)

    began = time.perf_counter()
    for asked, results in ask_all(session, questions()):
        now = time.perf_counter()
        each = waiting.pop(asked.sample.sample_id)
        yield _likelihood_score(each, asked, results, now - began)
        began = now


def _ask(lm: SessionLM, prepared: Prepared) -> Asked:
    """Return the token sequences of a document's requests, those of one request side by side."""
    sample = prepared.sample
    if prepared.failure:
        return Asked(sample, (), prepared.failure)
    try:
        groups = [_sequences(lm, each) for each in prepared.instances]
    except (TypeError, AttributeError) as error:
        return Asked(sample, (), _line(error))
    prepared.counts = [len(group) for group in groups]
    if not all(prepared.counts):
        return Asked(sample, (), "the text has no tokens: nothing to score")
    pairs = [pair for group in groups for pair in group]
    return ask(sample, pairs, lm.max_length + 1, truncate=True)


def _sequences(lm: SessionLM, instance: Any) -> list[Pair]:
    if instance.request_type == "loglikelihood_rolling":
        return lm.windows(instance.args[0])
    return [lm.pair(*instance.args[:2])]


def _likelihood_score(
    prepared: Prepared, asked: Asked, results: Sequence[TokenLogprobs], elapsed_s: float
) -> Score:
    from quanteval.tasks.lm_eval_model import answer

    base: dict[str, Any] = {
        "sample_id": asked.sample.sample_id,
        "prompt_sha256": asked.sha256,
        "finish_reason": "none",
        "output_tokens": 0,
        "elapsed_s": elapsed_s,
    }
    if asked.failure:
        return _error(prepared, base, asked.failure)
    rest = iter(results)
    answers = [answer(list(islice(rest, count))) for count in prepared.counts]
    values = [value for value, _ in answers]
    if bad := [value for value in values if not math.isfinite(value)]:
        return _error(prepared, base, f"log-likelihood {bad[0]}")
    if prepared.document.part.kind == "perplexity":
        return _summed(prepared, base, values, sum(len(each.logprobs) for each in results))
    for instance, found in zip(prepared.instances, answers, strict=True):
        instance.resps = [found] * (instance.repeats or 1)
    base["series"] = {
        "loglikelihoods": values,
        "tokens": [float(pair.scored) for pair in asked.pairs],
    }
    if not asked.cut:
        return _judged(prepared, base, "ok", "")
    base["numbers"] = {"cut_tokens": float(asked.cut)}
    return _judged(prepared, base, "ok", f"the context lost {asked.cut} tokens at its beginning")


def _summed(prepared: Prepared, base: dict[str, Any], values: list[float], tokens: int) -> Score:
    """Return the summed negative log-likelihood, with the words and bytes that the task counts."""
    document = prepared.document
    try:
        with quiet():
            told = document.part.task.process_results(document.doc, values)
    except Exception as error:
        return _error(prepared, base, _line(error))
    text = str(prepared.instances[0].args[0])
    counts = {
        "words": _count(told, PER_WORD, count_words(text)),
        "bytes": _count(told, PER_BYTE, len(text.encode("utf-8", "surrogatepass"))),
    }
    return Score(**base, value=-math.fsum(values), weight=tokens, status="ok", numbers=counts)


def _count(told: Mapping[str, Any], names: Sequence[str], otherwise: int) -> float:
    """Return the count in the pair (log-likelihood, count) under one of the names."""
    pairs = [told[name] for name in names if isinstance(told.get(name), tuple | list)]
    return float(pairs[0][1] if pairs else otherwise)


# --------------------------------------------------------------------------- generation


def generations(
    session: Session, lm: SessionLM, prepared: Iterator[Prepared], seed: int
) -> Iterator[Score]:
    """Yield a score a document as its answers end; all are asked in one lazy call.

    EngineError when an answer is missing or was never asked for.
    """
    waiting: dict[str, Prepared] = {}
    failed: list[Prepared] = []

    def requests() -> Iterator[Request]:
        for each in prepared:
            each.requests = _generation_requests(lm, each, seed)
            if not each.requests:
                failed.append(each)
            waiting.update(dict.fromkeys(each.requests, each))
            yield from [request for _, request in each.requests.values()]

    for completion in session.generate(requests()):
        each = waiting.pop(completion.request_id, None)
        if each is None:
            raise EngineError(f'"{completion.request_id}" was answered twice or never asked')
        each.completions[completion.request_id] = completion
        if len(each.completions) == len(each.requests):
            yield _generation_score(each)
    yield from map(_generation_score, failed)
    if waiting:
        raise EngineError(f"{len(waiting)} requests got no answer, the first: {min(waiting)}")


def _generation_requests(
    lm: SessionLM, prepared: Prepared, seed: int
) -> dict[str, tuple[int, Request]]:
    """Return a request for each answer; sampled answers have a seed of their own each."""
    found: dict[str, tuple[int, Request]] = {}
    for number, instance in enumerate(prepared.instances):
        for repeat in range(instance.repeats or 1):
            name = f"{prepared.sample.sample_id}#{number}.{repeat}"
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            context, arguments = instance.args[:2]
            draw = int.from_bytes(digest[:4], "little")
            made = lm.request(name, context, arguments, draw)
            found[name] = (number, made)
            kept = len(made.prompt.token_ids)
            if kept == lm.max_length - made.sampling.max_tokens:
                prepared.cut = max(prepared.cut, len(lm.tok_encode(context)) - kept)
    return found


def _generation_score(prepared: Prepared) -> Score:
    done = [prepared.completions[name] for name in prepared.requests]
    unfinished = [each for each in done if each.finish_reason != "stop"]
    failed = [each for each in done if each.error or each.finish_reason not in ("stop", "length")]
    worst = next(iter(failed or unfinished or done), None)
    ids = [i for _, request in prepared.requests.values() for i in request.prompt.token_ids]
    base: dict[str, Any] = {
        "sample_id": prepared.sample.sample_id,
        "prompt_sha256": hash_token_ids(ids),
        "finish_reason": worst.finish_reason if worst else "none",
        "output_tokens": sum(len(each.token_ids) for each in done),
        "output": done[0].text if done else None,
        "elapsed_s": max((each.elapsed_s for each in done), default=0.0),
    }
    if prepared.cut:
        base["numbers"] = {"cut_tokens": float(prepared.cut)}
    if worst is None:
        return _error(prepared, base, prepared.failure or "the task asks nothing")
    if failed:
        return _error(prepared, base, worst.error or worst.finish_reason)
    for instance in prepared.instances:
        instance.resps = []
    for each, (number, _) in zip(done, prepared.requests.values(), strict=True):
        prepared.instances[number].resps.append(each.text)
    return _judged(prepared, base, "truncated" if unfinished else "ok", "")


# --------------------------------------------------------------------------- scores


def _error(prepared: Prepared, base: Mapping[str, Any], detail: str) -> Score:
    """Return the score of what cannot be scored: a sum over tokens has no value then, a mean counts 0."""
    summed = prepared.document.part.kind == "perplexity"
    return Score(
        **base,
        value=math.nan if summed else 0.0,
        weight=0.0 if summed else 1.0,
        status="error",
        outcome="error",
        detail=detail,
    )


def _judged(prepared: Prepared, base: dict[str, Any], status: SampleStatus, detail: str) -> Score:
    """Filter the responses and return the score that the task's own metric gives."""
    part, doc = prepared.document.part, prepared.document.doc
    try:
        with quiet(), seeded():
            part.pipeline.apply(prepared.instances)
            ordered = sorted(prepared.instances, key=lambda instance: int(instance.idx))
            filtered = [instance.filtered_resps[part.pipeline.name] for instance in ordered]
            told = part.task.process_results(doc, filtered)
    except Exception as error:
        return _error(prepared, base, _line(error))
    numbers = {str(name): float(value) for name, value in told.items() if _is_number(value)}
    value = numbers.get(str(part.metric), math.nan)
    base["numbers"] = {**base.get("numbers", {}), **numbers}
    if not math.isfinite(value):
        got = "missing" if part.metric not in told else f"{told[part.metric]!r:.80}"
        return _error(prepared, base, f'metric "{part.metric}" is {got}')
    if part.kind == "generate" and filtered[0] != base["output"]:
        detail = f"filtered: {filtered[0]}"[:300]
    outcome = {1.0: "right", 0.0: "empty" if base.get("output") == "" else "wrong"}.get(value, "")
    # An answer that was cut and is right all the same is an answer.
    status = "ok" if value == 1.0 else status
    return Score(**base, value=value, weight=1.0, status=status, outcome=outcome, detail=detail)


def _is_number(value: Any) -> bool:
    import numpy as np

    return isinstance(value, bool | int | float | np.bool_ | np.number)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]

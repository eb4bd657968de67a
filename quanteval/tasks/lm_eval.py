"""Any task of lm-evaluation-harness, by name or from a folder of its YAML files, through our sessions.

Prompts, few-shot examples, filters and metrics are that library's own; what it computes for each document
becomes one score. Corpus metrics have no value of a single document, so they cannot be compared in pairs and
are refused, as are metrics that are better when lower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from quanteval.errors import ConfigError, UnsupportedError
from quanteval.interfaces import Sample, Session, TaskContext
from quanteval.records import Score
from quanteval.targets import near
from quanteval.tasks.lm_eval_loading import (
    describe_config,
    library_version,
    load_tasks,
    merged,
    plain,
)
from quanteval.tasks.lm_eval_scoring import (
    Document,
    Part,
    PromptForm,
    generations,
    likelihoods,
    prepare,
)
from quanteval.tasks.loading import check_limit, check_name, data_digest

KINDS = {
    "multiple_choice": "multiple_choice",
    "generate_until": "generate",
    "loglikelihood": "cloze",
    "loglikelihood_rolling": "perplexity",
}


@dataclass(frozen=True)
class LmEvalTask:
    """A task of lm-evaluation-harness; the fields of a task.yaml of this kind.

    `task` is a name that lm_eval knows (a task, group or tag), or one defined in `include_path`, a folder of
    its YAML files (relative to the suite's own folder). `metric` and `filter` choose which of the task's own
    becomes the score; the first that can be used, otherwise. `overrides` is merged into the task's
    configuration. `limit` counts documents of each subtask, and `id_field` names the field of a document
    that is its id; its number, otherwise. The other fields are arguments of `lm_eval.simple_evaluate` with
    its defaults, and of SessionLM.
    """

    name: str
    task: str
    version: str | None = None
    folder: str = ""
    include_path: str = ""
    num_fewshot: int | None = None
    fewshot_seed: int = 1234
    fewshot_as_multiturn: bool = True
    apply_chat_template: bool = False
    system_instruction: str | None = None
    metric: str | None = None
    filter: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    id_field: str | None = None
    max_length: int | None = None
    prefix_token_id: int | None = None
    limit: int | None = None
    description: str = ""
    licence: str = ""

    uses_baseline = False

    def __post_init__(self) -> None:
        check_name(self.name)
        check_limit(self.limit)
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ValueError(f'num_fewshot "{self.num_fewshot}" must be at least 0')
        if (self.overrides.get("dataset_kwargs") or {}).get("trust_remote_code"):
            raise ValueError('"trust_remote_code" is not allowed: data sets run no code here')

    # ---- what is asked

    @cached_property
    def _tasks(self) -> dict[str, Any]:
        include = str(Path(self.folder) / self.include_path) if self.include_path else ""
        return load_tasks(self.task, include, self._located_overrides())

    def _located_overrides(self) -> dict[str, Any]:
        """Look up data files of the overrides in the suite's own folder first."""
        files = (self.overrides.get("dataset_kwargs") or {}).get("data_files")
        if not files or not self.folder:
            return self.overrides

        def located(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: located(each) for key, each in value.items()}
            if isinstance(value, list | tuple):
                return [located(each) for each in value]
            own = Path(self.folder) / str(value)
            return str(own) if own.exists() else value

        return merged(self.overrides, {"dataset_kwargs": {"data_files": located(files)}})

    @cached_property
    def kind(self) -> str:
        """The kind of the task's output type; the tasks of a group must agree. Loads the task."""
        types = {str(task.OUTPUT_TYPE): name for name, task in self._tasks.items()}
        if len(types) > 1:
            raise ConfigError(
                f'lm_eval group "{self.task}" mixes kinds ({", ".join(types)}): choose its tasks one by one'
            )
        (output_type,) = types
        if output_type not in KINDS:
            raise UnsupportedError(
                f'lm_eval task "{self.task}" has the output type "{output_type}"'
            )
        return KINDS[output_type]

    @cached_property
    def _parts(self) -> dict[str, Part]:
        return {
            name: Part(
                name=name,
                task=task,
                kind=self.kind,
                metric=self._metric(name, task),
                pipeline=self._pipeline(name, task),
                shots=self._shots(name, task),
            )
            for name, task in self._tasks.items()
        }

    @cached_property
    def _documents(self) -> dict[str, Document]:
        found: dict[str, Document] = {}
        for part in self._parts.values():
            docs = getattr(part.task, "task_docs", None)
            rows = islice(part.task.eval_docs if docs is None else docs, self.limit)
            for number, doc in enumerate(rows):
                sample = self._sample(part.name, number, doc)
                if sample.sample_id in found:
                    raise ConfigError(f'two documents have the id "{sample.sample_id}"')
                found[sample.sample_id] = Document(sample, part, number, doc)
        if not found:
            raise ConfigError(f'lm_eval task "{self.task}" has no documents')
        return found

    def _sample(self, part: str, number: int, doc: Any) -> Sample:
        data = plain(doc)
        data = data if isinstance(data, dict) else {"document": data}
        own: Any = number
        if self.id_field is not None and (own := data.get(self.id_field)) is None:
            raise ConfigError(f'document {number} of "{part}" has no "{self.id_field}"')
        if len(self._tasks) > 1:
            data = {**data, "category": part}
        return Sample(f"{part}/{own}", data)

    def samples(self) -> list[Sample]:
        """Load the documents. ConfigError, UnsupportedError or QuantevalError: one line on what is wrong."""
        return [document.sample for document in self._documents.values()]

    def fingerprint(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """What the scores depend on besides the model; functions by the digest of their source."""
        versions = {str(getattr(task, "VERSION", None)) for task in self._tasks.values()}
        default = f"{'+'.join(sorted(versions))} of lm_eval {library_version()}"
        return {
            "kind": self.kind,
            "version": self.version or default,
            "lm_eval": library_version(),
            "data": data_digest(samples),
            "tasks": {name: _describe(part) for name, part in self._parts.items()},
            "fewshot_seed": self.fewshot_seed,
            "fewshot_as_multiturn": self.fewshot_as_multiturn,
            "apply_chat_template": self.apply_chat_template,
            "system_instruction": self.system_instruction,
            "max_length": self.max_length,
            "prefix_token_id": self.prefix_token_id,
        }

    # ---- metric, filter, examples

    def _metric(self, name: str, task: Any) -> str | None:
        """Return which metric is the score; None for perplexity, whose score is the summed likelihood."""
        if self.kind == "perplexity":
            if self.metric is not None:
                raise ConfigError(
                    f'metric "{self.metric}": the score of "{name}" is its log-likelihood; leave it out'
                )
            return None
        known = {str(metric): _why_not_paired(task, metric) for metric in task.aggregation()}
        if self.metric is None:
            usable = [metric for metric, reason in known.items() if not reason]
            if not usable:
                reasons = "; ".join(f'"{metric}" {reason}' for metric, reason in known.items())
                raise ConfigError(f'lm_eval task "{name}" has no metric to compare: {reasons}')
            return usable[0]
        if self.metric not in known:
            raise ConfigError(
                f'lm_eval task "{name}" has no metric "{self.metric}"; {near(self.metric, known)}'
            )
        if known[self.metric]:
            raise ConfigError(f'metric "{self.metric}" of "{name}" {known[self.metric]}')
        return self.metric

    def _pipeline(self, name: str, task: Any) -> Any:
        pipelines = {pipeline.name: pipeline for pipeline in task._filters}
        asked = next(iter(pipelines)) if self.filter is None else self.filter
        if asked not in pipelines:
            raise ConfigError(
                f'lm_eval task "{name}" has no filter "{asked}"; {near(asked, pipelines)}'
            )
        return pipelines[asked]

    def _shots(self, name: str, task: Any) -> int:
        own = task.get_config("num_fewshot")
        if self.num_fewshot and own == 0:
            raise ConfigError(
                f'num_fewshot "{self.num_fewshot}": lm_eval task "{name}" fixes it at 0, which lm_eval keeps; '
                "to change it, set overrides.num_fewshot"
            )
        shots = int((own or 0) if self.num_fewshot is None else self.num_fewshot)
        have = len(getattr(getattr(task, "sampler", None), "df", ()) or ()) if shots else 0
        if shots > have:
            raise ConfigError(
                f'num_fewshot "{shots}": lm_eval task "{name}" has {have} examples to choose from'
            )
        return shots

    # ---- evaluation

    def evaluate(
        self, session: Session, samples: Sequence[Sample], context: TaskContext
    ) -> Iterator[Score]:
        """Yield a score a document as it is known; documents that cannot be asked are errors."""
        from quanteval.tasks.lm_eval_model import SessionLM

        lm = SessionLM(session, max_length=self.max_length, prefix_token_id=self.prefix_token_id)
        form = PromptForm(
            self.apply_chat_template,
            self.fewshot_as_multiturn,
            self.system_instruction,
            self.fewshot_seed,
        )
        wanted = [self._documents[sample.sample_id] for sample in samples]
        prepared = prepare(lm, list(self._documents.values()), wanted, form)
        if self.kind == "generate":
            for part in self._parts.values():
                lm.sampling(part.task.config.generation_kwargs or {})
            yield from generations(session, lm, prepared, context.seed)
        else:
            yield from likelihoods(session, lm, prepared)


def _describe(part: Part) -> dict[str, Any]:
    pool = list(part.task.sampler.df) if part.shots else []
    return {
        "config": describe_config(part.task),
        "metric": part.metric,
        "filter": part.pipeline.name,
        "num_fewshot": part.shots,
        "examples": data_digest([Sample("", {"pool": plain(pool)})]) if pool else "",
    }


def _why_not_paired(task: Any, metric: str) -> str:
    """Return why a metric cannot be compared sample by sample, '' when it can."""
    import numpy as np
    from lm_eval.api.metrics import mean

    aggregation = task.aggregation()[metric]
    if aggregation not in (mean, np.mean):
        name = getattr(aggregation, "__name__", "another function")
        return (
            f'is computed over all samples together ("{name}"), so a sample has no value of its own'
        )
    if not task.higher_is_better().get(metric, True):
        return "is better when lower, and a gain would be taken for a loss"
    return ""

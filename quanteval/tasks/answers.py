"""Ways to judge a generated answer: by text, by what a pattern finds, by number, by a metric of the
`evaluate` library, or by any function. None of them asks a model."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from quanteval.errors import ConfigError, QuantevalError
from quanteval.targets import locate
from quanteval.tasks.numerals import Number, numbers_in

RIGHT_FROM = 1 - 1e-9
"""A value from here on counts as right: metrics of a perfect answer may miss 1 by rounding."""


@dataclass(frozen=True)
class Judged:
    """What an answer is worth, from 0 to 1; `outcome` is right, wrong, no_answer or error."""

    value: float
    outcome: str
    extracted: str = ""
    detail: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


@runtime_checkable
class Answer(Protocol):
    """Judges answers; a frozen dataclass that is its own config.

    Two more members are optional: `relative_to(folder)` returns the same judge with its files looked up
    in the suite's folder, and `needs_target` says that a task without targets makes no sense.
    """

    def fingerprint(self) -> dict[str, Any]:
        """Everything, as plain JSON, that judgements depend on; no paths."""
        ...

    def judge(self, output: str, row: Mapping[str, Any], targets: Sequence[str]) -> Judged:
        """Judge one answer against the targets, any of which counts. Only ConfigError is raised."""
        ...


def _fields(answer: Any) -> dict[str, Any]:
    return {"answer": type(answer).__name__, **dataclasses.asdict(answer)}


def _failed(detail: str, extracted: str = "") -> Judged:
    return Judged(0.0, "error", extracted, " ".join(detail.split())[:300])


def _compile(name: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f'{name} "{pattern}" is no regular expression: {error}') from None


# --------------------------------------------------------------------------- text


@dataclass(frozen=True)
class Match:
    """Compares texts after taking away what does not matter.

    In this order: `ignore` (regular expressions whose matches are removed), `ignore_case` (Unicode
    case folding), `ignore_punctuation`, `ignore_articles` (a, an, the; runs of white space become one
    space), `strip` (white space at both ends). With `starts_with` and `contains` the target must end, and
    for `contains` begin, at the edge of a word; `whole_words: false` lifts that, for scripts without spaces.
    """

    mode: Literal["equal", "starts_with", "contains"] = "equal"
    strip: bool = True
    ignore_case: bool = False
    ignore_punctuation: bool = False
    ignore_articles: bool = False
    ignore: tuple[str, ...] = ()
    whole_words: bool = True

    needs_target = True

    def __post_init__(self) -> None:
        for pattern in self.ignore:
            _compile("ignore", pattern)

    def fingerprint(self) -> dict[str, Any]:
        """All fields."""
        return _fields(self)

    def normalize(self, text: str) -> str:
        """Return what of a text is compared, canonically composed (NFC)."""
        text = unicodedata.normalize("NFC", text)
        for pattern in self.ignore:
            text = re.sub(pattern, "", text)
        if self.ignore_case:
            text = unicodedata.normalize("NFC", text.casefold())
        if self.ignore_punctuation:
            text = "".join(c for c in text if not _is_punctuation(c))
        if self.ignore_articles:
            text = " ".join(re.sub(r"\b(a|an|the)\b", " ", text, flags=re.IGNORECASE).split())
        return text.strip() if self.strip else text

    def judge(self, output: str, row: Mapping[str, Any], targets: Sequence[str]) -> Judged:
        """Compare with each target."""
        said = self.normalize(output)
        wanted = [self.normalize(target) for target in targets]
        if not wanted:
            return _failed("the sample has no target")
        for target, normal in zip(targets, wanted, strict=True):
            # Nothing is left of it: it would be found in every answer, or equal any empty one.
            if not normal and (target or self.mode != "equal"):
                return _failed(f'target "{target}" holds nothing to compare', said)
        right = any(self._agrees(said, target) for target in wanted)
        return Judged(float(right), "right" if right else "wrong", said)

    def _agrees(self, said: str, target: str) -> bool:
        if self.mode == "equal":
            return said == target
        pattern = re.escape(target)
        if self.whole_words:
            pattern = (r"(?<!\w)" if _is_word(target[0]) else "") + pattern
            pattern += r"(?!\w)" if _is_word(target[-1]) else ""
        found = re.match if self.mode == "starts_with" else re.search
        return found(pattern, said) is not None


def _is_punctuation(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character).startswith("P")


def _is_word(character: str) -> bool:
    return re.match(r"\w", character) is not None


@dataclass(frozen=True)
class RegexMatch:
    r"""Takes the answer out with a regular expression, then compares it as `match` says.

    Without `group` the whole match counts, or its first group that is not empty where the pattern has
    groups. What was found is stripped of white space before it is compared. This is what
    lm-evaluation-harness does with a `regex` filter and `exact_match`; its GSM8K is
    `pattern: '#### (\-?[0-9\.\,]+)'` (strict) or `'(-?[$0-9.,]{2,})|(-?[0-9]+)'` with `which: last`
    (flexible), and `match: {ignore: [',', '\$', '(?s).*#### ', '\.$'], ignore_case: true, strip: false}`.
    """

    pattern: str
    which: Literal["first", "last"] = "first"
    group: int | str | None = None
    match: Match = field(default_factory=Match)

    needs_target = True

    def __post_init__(self) -> None:
        regex = _compile("pattern", self.pattern)
        known = range(regex.groups + 1) if isinstance(self.group, int) else regex.groupindex
        if self.group is not None and self.group not in known:
            raise ValueError(
                f'group "{self.group}": the pattern "{self.pattern}" has no such group'
            )

    def fingerprint(self) -> dict[str, Any]:
        """All fields."""
        return _fields(self)

    def extract(self, output: str) -> str:
        """Return what the pattern finds, '' when it finds nothing."""
        matches = list(re.finditer(self.pattern, output))
        if not matches:
            return ""
        found = matches[0 if self.which == "first" else -1]
        if self.group is not None:
            return (found.group(self.group) or "").strip()
        groups = found.groups()
        return next((text for text in groups if text), "" if groups else found.group()).strip()

    def judge(self, output: str, row: Mapping[str, Any], targets: Sequence[str]) -> Judged:
        """Extract, and compare with each target."""
        found = self.extract(output)
        return self.match.judge(found, row, targets) if found else Judged(0.0, "no_answer")


# --------------------------------------------------------------------------- numbers


@dataclass(frozen=True)
class NumericMatch:
    """Takes a number out of the answer and compares it with the target's by value, exactly.

    The number is the last or first one (`which`), after the last occurrence of `marker` (any case) where
    one is given: without the marker there is no answer. A number is right when it differs from the target's
    by at most max(`rel_tol` x |target|, `abs_tol`). A percentage equals another by its figure, and a plain
    number as 50 or as 0.5: texts do not say which is meant. A target is read in the same way; one without
    the marker is read whole.
    """

    which: Literal["last", "first"] = "last"
    marker: str = ""
    rel_tol: float = 0.0
    abs_tol: float = 0.0

    needs_target = True

    def __post_init__(self) -> None:
        for name in ("rel_tol", "abs_tol"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f'{name} "{getattr(self, name)}" must be finite and at least 0')

    def fingerprint(self) -> dict[str, Any]:
        """All fields."""
        return _fields(self)

    def extract(self, text: str) -> Number | None:
        """Return the number that counts as a text's answer."""
        if self.marker:
            _, *after = re.split(re.escape(self.marker), text, flags=re.IGNORECASE)
            if not after:
                return None
            text = after[-1]
        found = list(numbers_in(text))
        return found[0 if self.which == "first" else -1] if found else None

    def judge(self, output: str, row: Mapping[str, Any], targets: Sequence[str]) -> Judged:
        """Extract a number, and compare it with each target's."""
        whole = dataclasses.replace(self, marker="")
        wanted = [self.extract(target) or whole.extract(target) for target in targets]
        for target, number in zip(targets, wanted, strict=True):
            if number is None:
                return _failed(f'target "{target}" holds no number')
        if not wanted:
            return _failed("the sample has no target")
        said = self.extract(output)
        if said is None:
            return Judged(0.0, "no_answer")
        right = any(number is not None and self._equal(said, number) for number in wanted)
        return Judged(float(right), "right" if right else "wrong", said.text)

    def _equal(self, said: Number, wanted: Number) -> bool:
        pairs = [(said.value, wanted.value)]
        if said.percent and not wanted.percent:
            pairs.append((said.value / 100, wanted.value))
        elif wanted.percent and not said.percent:
            pairs.append((said.value, wanted.value / 100))
        rel, absolute = Fraction(str(self.rel_tol)), Fraction(str(self.abs_tol))
        return any(abs(a - b) <= max(rel * abs(b), absolute) for a, b in pairs)


# --------------------------------------------------------------------------- metrics and functions


@dataclass(frozen=True)
class EvaluateMetric:
    """Any metric of the library `evaluate`, computed for each answer alone; its module's code is run.

    `path` is an id of the hub, or a module's file or folder, looked up in the suite's folder first; an id
    of a namespace ("org/name") needs `trust_remote_code`. `key` names the figure in the metric's result (the
    only number there, when empty); `arguments` go to compute(). `reference_form: list` hands over all
    targets together, `string` each alone, of which the best counts. The value is the figure over `scale`,
    or 1 minus that where lower is better; below 0 it is 0, and a figure above `scale` is an error, unless
    lower is better: then it is 0 (an error rate may exceed 1).
    """

    path: str
    name: str | None = None
    key: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    reference_form: Literal["string", "list"] = "string"
    higher_is_better: bool = True
    scale: float = 1.0
    revision: str | None = None
    trust_remote_code: bool = False
    folder: str = ""

    needs_target = True

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError('path "" must be the id or the path of a metric')
        if not 0 < self.scale < math.inf:
            raise ValueError(f'scale "{self.scale}" must be positive')

    def relative_to(self, folder: str) -> EvaluateMetric:
        """Return the same metric, looked up in `folder` first."""
        return dataclasses.replace(self, folder=folder)

    def fingerprint(self) -> dict[str, Any]:
        """The fields, with the hash of the module's code. ConfigError when it cannot be loaded."""
        fields = {**_fields(self), "path": Path(self.path).stem, "hash": self._load()._hash}
        return {key: value for key, value in fields.items() if key != "folder"}

    def judge(self, output: str, row: Mapping[str, Any], targets: Sequence[str]) -> Judged:
        """Compute the metric of one answer; an empty answer is worth 0 without asking."""
        metric = self._load()
        if not targets:
            return _failed("the sample has no target")
        if not output.strip():
            return Judged(0.0, "wrong")
        together = self.reference_form == "list"
        references: list[Any] = [list(targets)] if together else list(targets)
        try:
            values = [self._scaled(self._figure(metric, output, r)) for r in references]
        except Exception as error:  # A module's own: whatever it raises concerns this answer.
            return _failed(f'metric "{self.path}": {type(error).__name__}: {error}', output)
        value = max(values)
        return Judged(value, "right" if value >= RIGHT_FROM else "wrong", output)

    def _figure(self, metric: Any, output: str, reference: Any) -> float:
        result = metric.compute(predictions=[output], references=[reference], **self.arguments)
        numbers = {k: v for k, v in (result or {}).items() if not self.key or k == self.key}
        numbers = {k: _one_number(v) for k, v in numbers.items()}
        found = [v for v in numbers.values() if v is not None]
        if len(found) != 1:
            raise ValueError(
                f'result has {len(found)} numbers under "{self.key or "any key"}" '
                f"({', '.join(result or {})}): set key"
            )
        return float(found[0])

    def _scaled(self, figure: float) -> float:
        share = figure / self.scale
        if not math.isfinite(share):
            raise ValueError(f"the result is {figure}")
        if not self.higher_is_better:
            return min(max(0.0, 1 - share), 1.0)
        if share > 1 + 1e-6:
            raise ValueError(f'{figure:g} is more than the scale "{self.scale:g}": set scale')
        return min(max(0.0, share), 1.0)

    def _load(self) -> Any:
        local = Path(self.folder) / self.path
        is_local = local.exists()
        if not is_local and "/" in self.path and not self.trust_remote_code:
            raise ConfigError(
                f'metric "{self.path}" is no file here, and the code of a hub id is run only with '
                "trust_remote_code: true"
            )
        return _load_metric(
            str(local.resolve()) if is_local else self.path, self.name, self.revision
        )


def _one_number(value: Any) -> float | None:
    """Return a number, or the only one of a list (some metrics give a figure a sample), else None."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1:
        value = value[0]
    try:
        return float(value) if not isinstance(value, str) else None
    except (TypeError, ValueError):
        return None


@lru_cache(maxsize=8)
def _load_metric(path: str, name: str | None, revision: str | None) -> Any:
    try:
        import evaluate
    except ImportError:
        raise ConfigError(
            f'metric "{path}" needs the package "evaluate": pip install "quanteval[evaluate]"'
        ) from None
    # The library copies a module to a folder of its own, which the import system may have listed before.
    importlib.invalidate_caches()
    try:
        return evaluate.load(path, name, revision=revision, keep_in_memory=True)
    except (FileNotFoundError, ConnectionError):
        raise QuantevalError(
            f'metric "{path}" is no metric module here, and the hub does not have it or cannot be reached'
        ) from None
    except ImportError as error:
        line = " ".join(str(error).split())
        raise ConfigError(f'metric "{path}" cannot be loaded: {line}') from None
    except Exception as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise QuantevalError(f'metric "{path}" cannot be loaded: {line}') from None


@dataclass(frozen=True)
class Callable:
    """Any function of (output, row) that returns a value from 0 to 1, or a mapping with `value`.

    `function` is its dotted path. The mapping may have an `outcome` and a `detail`; its other numbers are
    kept with the score. `arguments` are passed by keyword. `version` stands for the function's code
    in the fingerprint: raise it when the function changes.
    """

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    version: str = "1"

    def fingerprint(self) -> dict[str, Any]:
        """All fields. ConfigError when there is no such function."""
        self._located()
        return _fields(self)

    def _located(self) -> Any:
        function = locate(self.function)
        if not callable(function):
            raise ConfigError(f'function "{self.function}" is no function')
        return function

    def judge(self, output: str, row: Mapping[str, Any], targets: Sequence[str]) -> Judged:
        """Ask the function; what it raises is this answer's error."""
        function = self._located()
        try:
            result = function(output, row, **self.arguments)
            told = dict(result) if isinstance(result, Mapping) else {"value": result}
            value = float(told.pop("value"))
            outcome = str(told.pop("outcome", "right" if value >= RIGHT_FROM else "wrong"))
            detail = str(told.pop("detail", ""))
            numbers = {str(k): float(v) for k, v in told.items() if isinstance(v, int | float)}
        except Exception as error:
            return _failed(f"{self.function}: {type(error).__name__}: {error}", output)
        if not 0 <= value <= 1:
            return _failed(f"{self.function} returned {value}, which is not from 0 to 1", output)
        return Judged(value, outcome, output, detail, numbers)

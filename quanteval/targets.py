"""Builds objects from plain nodes: {"_target_": "dotted.path", **fields}.

The dotted path is the only registry. A target is imported only when its path starts with an
allowed prefix; its fields are checked by type before the object exists, and an unknown field is
answered with its nearest match. Hydra composes nodes, this module builds them, so that reading a
policy needs no Hydra.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from quanteval.errors import ConfigError

DEFAULT_PREFIXES = ("quanteval.",)
_allowed: ContextVar[tuple[str, ...]] = ContextVar("allowed", default=DEFAULT_PREFIXES)


def allow(prefixes: Sequence[str]) -> None:
    """Set which prefixes `locate` accepts from here on, for objects that look something up after they are built."""
    _allowed.set(tuple(prefixes))


def near(word: str, known: Iterable[str]) -> str:
    """Return ', did you mean "x"?' for the nearest known word, or the list of what is known."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f'did you mean "{close[0]}"?'
    return f"known: {', '.join(known)}" if known else "none is known"


def locate(path: str, prefixes: Sequence[str] | None = None) -> Any:
    """Import and return what a dotted path names. ConfigError when not allowed or not there.

    Without `prefixes` those given to `allow` count, quanteval's own to begin with.
    """
    prefixes = _allowed.get() if prefixes is None else prefixes
    if not isinstance(path, str) or "." not in path:
        raise ConfigError(
            f'target "{path}" is not a dotted path such as quanteval.schemes.none.Unquantized'
        )
    if not any(path.startswith(prefix) for prefix in prefixes):
        raise ConfigError(
            f'target "{path}" is not allowed; allowed prefixes: {", ".join(prefixes)} '
            "(add one with trust.targets=[...])"
        )
    module_name, _, attribute = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not module_name.startswith(error.name):
            raise ConfigError(
                f'target "{path}" needs the package "{error.name}": install it'
            ) from None
        raise ConfigError(f'target "{path}": there is no module "{module_name}"') from None
    if not hasattr(module, attribute):
        public = [name for name in vars(module) if not name.startswith("_")]
        raise ConfigError(f'target "{path}" does not exist; {near(attribute, public)}')
    return getattr(module, attribute)


def build(
    node: Mapping[str, Any], *, where: str = "", prefixes: Sequence[str] = DEFAULT_PREFIXES
) -> Any:
    """Build the dataclass that `node` describes; nested nodes with a target are built first.

    `where` names the node in error messages, e.g. 'scheme.nf4_bnb'. Raises ConfigError.
    """
    label = where or "node"
    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigError(f'{label}: "_target_" is missing, so there is nothing to build')
    cls = locate(node["_target_"], prefixes)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ConfigError(f'{label}: target "{node["_target_"]}" is not a dataclass')
    _refuse_unknown_keys(cls, node, label)
    fields = {
        key: _build_nested(value, f"{label}.{key}", prefixes)
        for key, value in node.items()
        if key != "_target_"
    }
    try:
        return TypeAdapter(cls).validate_python(fields)
    except ValidationError as error:
        raise ConfigError(_one_line(error, label)) from None


def _refuse_unknown_keys(cls: type, node: Mapping[str, Any], label: str) -> None:
    """Raise ConfigError for a key that is no field, also of the dataclasses that fields hold."""
    known = {f.name for f in dataclasses.fields(cls) if f.init}
    hints = get_type_hints(cls)
    for key, value in node.items():
        if key == "_target_":
            continue
        if key not in known:
            raise ConfigError(f'{label}: unknown key "{key}"; {near(str(key), known)}')
        for part, place in _parts(value, f"{label}.{key}"):
            for inner in _dataclasses_of(hints[key]):
                _refuse_unknown_keys(inner, part, place)


def _parts(value: Any, label: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the nodes without a target of their own in a field's value: itself, or those of a list."""
    if isinstance(value, Mapping) and "_target_" not in value:
        yield value, label
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _parts(item, f"{label}[{i}]")


def _dataclasses_of(hint: Any) -> list[type]:
    """Return the one dataclass that a field's type names, alone or in a list or tuple, if any."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return [hint]
    found = [inner for argument in get_args(hint) for inner in _dataclasses_of(argument)]
    return found if len(found) == 1 else []


def _build_nested(value: Any, where: str, prefixes: Sequence[str]) -> Any:
    if isinstance(value, Mapping):
        if "_target_" in value:
            return build(value, where=where, prefixes=prefixes)
        return {k: _build_nested(v, f"{where}.{k}", prefixes) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_build_nested(v, f"{where}[{i}]", prefixes) for i, v in enumerate(value)]
    return value


def _one_line(error: ValidationError, label: str) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join([label, *(str(part) for part in first["loc"])])
    if first["type"] == "missing":
        return f"{place}: this key is required"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and not first["loc"]:
        return f"{place}: {message}"
    return f'{place}: "{first["input"]}" is not valid: {message}'

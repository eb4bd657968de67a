"""Which conditions, beyond the scheme itself, keep two variants from being compared, and what each means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quanteval.evidence import VariantEvidence
from quanteval.store import canonical_json

ENGINE = "engine._target_"
# Beginnings of the names of conditions, and what a difference in them means; the first that fits is said.
MEANINGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("model_",), "not the same model"),
    ((ENGINE,), "served by different engines"),
    (("batch_policy", "engine.max_batch_rows", "engine.batching"), "batched differently"),
    (("engine.",), "served with different settings"),
    (("packages.",), "a stale baseline, measured with other versions: measure it again"),
    (("cpu", "device", "threads"), "measured on different hardware or threads"),
    (("bench.",), "measured under different loads"),
    (("seed",), "different seeds"),
)


def incomparable(baseline: VariantEvidence, candidate: VariantEvidence) -> str:
    """Say what keeps two variants from being compared, naming every condition that differs; '' for nothing."""
    for evidence in (baseline, candidate):
        if not evidence.result.comparable:
            return f"the conditions of {evidence.name} were not recorded"
    differing = differences(baseline.result.comparable, candidate.result.comparable)
    if any(name == ENGINE for name, _ in differing):
        # Another engine has other settings and its own way of batching: they say nothing more.
        differing = [d for d in differing if d[0] == ENGINE or not _of_engine(d[0])]
    grouped: dict[str, list[str]] = {}
    for name, text in differing:
        grouped.setdefault(_meaning(name), []).append(text)
    for task in sorted(set(baseline.scores) & set(candidate.scores)):
        first, second = baseline.scores[task].record, candidate.scores[task].record
        label = f"task {task}, not the same suite or prompts"
        if first.kind != second.kind:
            grouped.setdefault(label, []).append(f"kind ({first.kind} and {second.kind})")
        if first.fingerprint != second.fingerprint:
            names = [text for _, text in differences(first.inputs, second.inputs)]
            grouped.setdefault(label, []).extend(names or ["fingerprint"])
    return "; ".join(f"{what}: {', '.join(texts)}" for what, texts in grouped.items())


def _of_engine(name: str) -> bool:
    return name.startswith("engine.") or name == "batch_policy"


def _meaning(name: str) -> str:
    found = (what for starts, what in MEANINGS if name.startswith(starts))
    return next(found, "different conditions")


def differences(
    first: Mapping[str, Any], second: Mapping[str, Any], path: str = ""
) -> list[tuple[str, str]]:
    """Return the name of every value that differs, and the name with both values."""
    out: list[tuple[str, str]] = []
    for key in sorted({*first, *second}):
        a, b = first.get(key), second.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            out += differences(a, b, f"{path}{key}.")
        elif canonical_json(a) != canonical_json(b):
            out.append((f"{path}{key}", f"{path}{key} ({_short(a)} and {_short(b)})"))
    return out


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else canonical_json(value)
    return text if len(text) <= 60 else text[:57] + "..."

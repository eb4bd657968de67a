"""Reads a byte-level BPE vocabulary from tokenizer.json, in the terms of a GGUF file.

GGUF names a vocabulary's way of splitting text ("pre-tokenizer") by an id that each engine knows;
here it is told from the rules in tokenizer.json, and rules that are not known are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quanteval.errors import UnsupportedError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Token types, as GGUF numbers them."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: Mapping[str, str] = {
    _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _WORDS + r"\p{N}" + _REST: "qwen2",
}
"""Regular expressions of published tokenizers, and GGUF's ids for them."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens in the order of their ids, and what a GGUF file says about them."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    pre: str
    special: Mapping[str, int]
    """Ids by GGUF's names: bos, eos, unk, pad."""
    adds_bos: bool
    chat_template: str


def pre_tokenizer(rules: Mapping[str, Any], otherwise: str) -> str:
    """Return GGUF's id for the pre-tokenizer of a tokenizer.json. UnsupportedError when it is not known."""
    found = rules.get("pre_tokenizer") or {}
    steps = found.get("pretokenizers", [found])
    kinds = [step.get("type") for step in steps]
    last = steps[-1]
    whole = kinds[-1] == "ByteLevel" and not last.get("add_prefix_space")
    if whole and kinds == ["ByteLevel"] and last.get("use_regex", True):
        return "gpt-2"
    by_digit = kinds == ["Digits", "ByteLevel"] and bool(steps[0].get("individual_digits"))
    if whole and by_digit and last.get("use_regex", True):
        return "smollm"
    if whole and kinds == ["Split", "ByteLevel"] and not last.get("use_regex", True):
        known = SPLITS.get(steps[0].get("pattern", {}).get("Regex", ""))
        # Qwen's ids stand for a vocabulary that also composes its text (NFC); the others leave it alone.
        normal = (rules.get("normalizer") or {}).get("type")
        if known and normal == ("NFC" if known == "qwen2" else None):
            return known
    raise UnsupportedError(
        f'pre-tokenizer "{"+".join(map(str, kinds))}" of tokenizer.json has no known GGUF id: {otherwise}'
    )


def read_vocabulary(folder: Path, config: Mapping[str, Any], otherwise: str) -> Vocabulary:
    """Read the tokenizer of a model folder. UnsupportedError when it is no byte-level BPE."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedError(f'"{folder}" has no tokenizer.json: {otherwise}')
    rules = json.loads(path.read_text(encoding="utf-8"))
    model = rules["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = f"{model.get('type')}{' with byte fallback' if model.get('byte_fallback') else ''}"
        raise UnsupportedError(
            f'vocabulary "{kind}" is not written to GGUF here (byte-level BPE is): {otherwise}'
        )
    pre = pre_tokenizer(rules, otherwise)
    tokens, types = _tokens(
        model["vocab"], rules.get("added_tokens", []), int(config["vocab_size"])
    )
    return Vocabulary(
        tokens=tokens,
        types=types,
        merges=tuple(
            merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]
        ),
        pre=pre,
        special=_special(folder, {token: i for i, token in enumerate(tokens)}),
        adds_bos=_adds_bos(folder),
        chat_template=_chat_template(folder),
    )


def _tokens(
    vocab: Mapping[str, int], added: list[Mapping[str, Any]], rows: int
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return tokens and types; rows of the embedding that no token uses are filled with unused ones."""
    names = {i: token for token, i in vocab.items()}
    kinds = dict.fromkeys(names, NORMAL)
    for entry in added:
        names[entry["id"]] = entry["content"]
        kinds[entry["id"]] = CONTROL if entry["special"] else USER_DEFINED
    if names and max(names) >= rows:
        raise UnsupportedError(
            f'token id "{max(names)}" has no row in an embedding of {rows}: the tokenizer is not this model\'s'
        )
    return (
        tuple(names.get(i, f"[PAD{i}]") for i in range(rows)),
        tuple(kinds.get(i, UNUSED) for i in range(rows)),
    )


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _special(folder: Path, ids: Mapping[str, int]) -> dict[str, int]:
    settings = _settings(folder)
    found = {}
    for kind in ("bos", "eos", "unk", "pad"):
        token = settings.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token in ids:
            found[kind] = ids[token]
    return found


def _adds_bos(folder: Path) -> bool:
    """Whether the tokenizer puts its begin token before a text, asked of the tokenizer itself."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    first = tokenizer("a")["input_ids"][:1]
    return tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]


def _chat_template(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _settings(folder).get("chat_template")
    return template if isinstance(template, str) else ""

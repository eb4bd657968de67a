"""The one place where text becomes token ids, for every engine that serves a Hugging Face model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quanteval.errors import ConfigError
from quanteval.interfaces import Message, Prompt

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja",
         "special_tokens_map.json", "vocab.json", "merges.txt", "generation_config.json")  # fmt: skip


class HFTokenizer:
    """A tokenizer loaded by transformers from a model's folder; implements `interfaces.Tokenizer`."""

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
        self._special = frozenset(self._tokenizer.all_special_ids)
        self._eos = self._find_eos(folder)
        self._bos = self._find_bos()
        digest = hashlib.sha256()
        for name in FILES:
            path = folder / name
            if path.is_file():
                digest.update(name.encode() + b"\0" + path.read_bytes())
        digest.update((self._tokenizer.chat_template or "").encode())
        self._fingerprint = digest.hexdigest()

    def _find_eos(self, folder: Path) -> frozenset[int]:
        """Return the tokenizer's end id and those that the model's generation config adds."""
        from transformers import GenerationConfig

        ids = {self._tokenizer.eos_token_id}
        if (folder / "generation_config.json").is_file():
            more = GenerationConfig.from_pretrained(folder).eos_token_id
            ids.update(more if isinstance(more, list | tuple) else [more])
        return frozenset(int(i) for i in ids if i is not None)

    def _find_bos(self) -> int | None:
        """Return the id that the tokenizer itself puts before a text, None when it puts none."""
        bos = self._tokenizer.bos_token_id
        ids = self._tokenizer("a")["input_ids"]
        return int(bos) if bos is not None and ids[:1] == [bos] else None

    @property
    def fingerprint(self) -> str:
        """sha256 over the tokenizer's files and chat template."""
        return self._fingerprint

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self._tokenizer)

    @property
    def bos_token_id(self) -> int | None:
        """The id this tokenizer puts before a text, None when it puts none."""
        return self._bos

    @property
    def prefix_token_id(self) -> int:
        """The begin id where the tokenizer has one, else its end id. ConfigError when it has neither."""
        for found in (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id):
            if found is not None:
                return int(found)
        raise ConfigError(
            "this tokenizer has neither a begin nor an end token to put before a text"
        )

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a generation."""
        return self._eos

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can be used."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text` alone."""
        return tuple(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def raw(self, text: str) -> Prompt:
        """`text` with whatever special tokens the tokenizer adds by itself."""
        return Prompt(text, tuple(self._tokenizer(text, verbose=False)["input_ids"]))

    def chat(self, messages: Sequence[Message]) -> Prompt:
        """Render the template once; the rendered text already holds its special tokens."""
        if not self.has_chat_template:
            raise ConfigError("this model has no chat template: use the raw prompt form")
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        return Prompt(text, self.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens removed by id, spaces untouched."""
        kept = [i for i in token_ids if i not in self._special and i not in self._eos]
        text = self._tokenizer.decode(
            kept, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

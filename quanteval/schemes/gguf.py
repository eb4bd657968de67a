"""GGUF files: weights in llama.cpp's block formats, written here or given as a file.

A GGUF file says how weights are stored. Which precision the activations have is the engine's doing:
it is read back from what is served, and reported.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quanteval.errors import ConfigError, UnsupportedError
from quanteval.interfaces import Calibration, ModelSource
from quanteval.records import Artifact, Precision
from quanteval.schemes._common import describe_artifact, require_package
from quanteval.schemes.gguf_vocabulary import read_vocabulary
from quanteval.schemes.gguf_write import (
    FLOAT_TYPES,
    OTHERWISE,
    Types,
    architecture_of,
    write_gguf,
)
from quanteval.store import file_sha256

MINIMUM = "0.17"
FORMATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
KEPT = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
        "special_tokens_map.json", "vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja")  # fmt: skip
"""Files of the source's folder that go beside the GGUF file: tokenizer and configuration."""

FileType = Literal["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"]


@dataclass(frozen=True)
class GGUF:
    """Writes the source as a GGUF file of one block format, in blocks of 32 weights with a scale.

    `embeddings` is the format of the token embeddings and of an output head of its own; None takes
    Q8_0 for a quantized `type`, else `type` itself. Matrices whose rows do not divide into blocks stay
    in float16. Without an importance matrix: plain rounding, as llama.cpp's quantizer without one.
    """

    type: FileType = "Q8_0"
    embeddings: FileType | None = None

    artifact_format = "gguf"

    def __post_init__(self) -> None:
        if self.type in FLOAT_TYPES and self.embeddings not in (None, *FLOAT_TYPES):
            raise ValueError(f'embeddings "{self.embeddings}" are coarser than type "{self.type}"')

    @property
    def _types(self) -> Types:
        default = self.type if self.type in FLOAT_TYPES else "Q8_0"
        return Types(self.type, self.embeddings or default)

    @property
    def precision(self) -> Precision:
        """Weights in `type`; activations in float, unless the engine quantizes them by itself."""
        return _precision(self.type)

    def check(self, source: ModelSource | None, device: str) -> None:
        """Needs the package, a known architecture and a known vocabulary."""
        require_package("gguf", MINIMUM, "gguf")
        if source is not None:
            config = json.loads((source.path / "config.json").read_text(encoding="utf-8"))
            architecture_of(config)
            read_vocabulary(source.path, config, OTHERWISE)

    def quantize(
        self, source: ModelSource, out: Path, calibration: Calibration, device: str
    ) -> Artifact:
        """Write `model.gguf` and the tokenizer's files."""
        started = time.perf_counter()
        write_gguf(source.path, out / "model.gguf", self._types)
        _keep_files(source.path, out)
        return _describe(self, source, out, "model.gguf", time.perf_counter() - started)


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file of any type, made elsewhere from the same model, with the model's own tokenizer.

    `sha256`, where given, is checked. Shapes that differ from the model's configuration are refused.
    """

    file: str
    sha256: str = ""

    artifact_format = "gguf"

    @property
    def precision(self) -> Precision:
        """What the file's most common matrix format says, once the file is there."""
        path = Path(self.file).expanduser()
        return _precision(_main_type(path) if path.is_file() else "Q8_0")

    def check(self, source: ModelSource | None, device: str) -> None:
        """Needs the package and the file; with a source, the file must be of that model's shape."""
        require_package("gguf", MINIMUM, "gguf")
        path = Path(self.file).expanduser()
        if not path.is_file():
            raise ConfigError(f'file "{self.file}" is not there: give the path of a GGUF file')
        with path.open("rb") as opened:
            if opened.read(4) != b"GGUF":
                raise ConfigError(f'file "{self.file}" is no GGUF file')
        if source is not None:
            _check_shapes(path, source.path)

    def quantize(
        self, source: ModelSource, out: Path, calibration: Calibration, device: str
    ) -> Artifact:
        """Put the file (a hard link where the file system allows) beside the tokenizer's files."""
        started = time.perf_counter()
        path = Path(self.file).expanduser().resolve()
        if self.sha256 and file_sha256(path) != self.sha256.lower():
            raise ConfigError(f'file "{self.file}" does not have sha256 "{self.sha256}"')
        try:
            os.link(path, out / path.name)
        except OSError:
            shutil.copyfile(path, out / path.name)
        _keep_files(source.path, out)
        return _describe(self, source, out, path.name, time.perf_counter() - started)


def _precision(kind: str) -> Precision:
    """Return what a GGUF type asks for; K-quants and others by the digit in their name."""
    if kind in FORMATS:
        bits: float = 32 if kind == "F32" else 16
        return Precision(
            weight_bits=bits,
            activation_bits=bits,
            weight_format=FORMATS[kind],
            compute="float",
            quantized=False,
        )
    digits = [c for c in kind if c.isdigit()]
    return Precision(
        weight_bits=float(digits[0]) if digits else 8,
        activation_bits=16,
        weight_format=kind.lower(),
        compute="float",
        quantized=True,
    )


def _main_type(path: Path) -> str:
    """Return the type that holds most weights of the blocks' matrices."""
    import gguf

    counts: dict[str, int] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            name = tensor.tensor_type.name
            counts[name] = counts.get(name, 0) + int(tensor.n_elements)
    return max(counts, key=lambda name: counts[name]) if counts else "F32"


def _check_shapes(path: Path, source: Path) -> None:
    import gguf

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    fields = gguf.GGUFReader(path).fields
    arch = str(fields["general.architecture"].contents())
    wanted = {
        f"{arch}.block_count": config.get("num_hidden_layers"),
        f"{arch}.embedding_length": config.get("hidden_size"),
        f"{arch}.attention.head_count": config.get("num_attention_heads"),
    }
    for name, value in wanted.items():
        found = fields[name].contents() if name in fields else None
        if value is not None and found is not None and found != value:
            raise UnsupportedError(
                f'file "{path}" has {name} "{found}", the model has "{value}": it was made from another model'
            )


def _keep_files(source: Path, out: Path) -> None:
    for name in KEPT:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def _describe(
    scheme: GGUF | GGUFFile, source: ModelSource, out: Path, name: str, build_s: float
) -> Artifact:
    made = describe_artifact(
        scheme, source, path=out, load={"gguf_file": name}, build_s=build_s, packages=("gguf",)
    )
    return made.model_copy(update={"format": "gguf"})

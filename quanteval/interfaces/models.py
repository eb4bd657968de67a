"""Models, and the schemes that quantize them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from quanteval.records import Artifact, Precision


@dataclass(frozen=True)
class ModelSource:
    """An unquantized model on this machine, ready to be read by any scheme.

    `path` is a folder that `transformers` loads (config, tokenizer, safetensors).
    `weights_digest` is the sha256 over the weight files' contents and names.
    """

    id: str
    path: Path
    weights_digest: str
    revision: str | None = None
    provenance: str = ""
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Calibration:
    """Texts a scheme may look at while quantizing; empty for schemes that need none.

    The texts are joined and cut into `samples` blocks of `length` tokens, in an order drawn with `seed`.
    """

    texts: tuple[str, ...] = ()
    digest: str = ""
    name: str = ""
    samples: int = 0
    length: int = 0
    seed: int = 0


@runtime_checkable
class Scheme(Protocol):
    """How weights and activations are stored and computed; a frozen dataclass that is its own config.

    Optional class attributes: `artifact_format` (the format of its artifacts where it is not 'transformers'),
    `calibrated` (True: it looks at texts while quantizing), `lasting` (False: its results are never reused). An
    optional method `content() -> dict` returns what its node does not say and its artifact depends on.
    """

    @property
    def precision(self) -> Precision:
        """What this scheme asks for; compared with what the served model reports."""
        ...

    def check(self, source: ModelSource | None, device: str) -> None:
        """Raise UnsupportedError (one line: why, what would help) before any weights are loaded.

        Without a source (a model that is not on this machine yet) shapes are not checked.
        """
        ...

    def quantize(
        self, source: ModelSource, out: Path, calibration: Calibration, device: str
    ) -> Artifact:
        """Write the artifact under the empty folder `out` (or point at the source) and describe it."""
        ...

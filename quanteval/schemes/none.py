"""No quantization: the model in one of the formats it is trained or published in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quanteval.errors import UnsupportedError
from quanteval.interfaces import Calibration, ModelSource
from quanteval.records import Artifact, Precision
from quanteval.schemes._common import describe_artifact

BITS = {"float32": 32, "float16": 16, "bfloat16": 16}


@dataclass(frozen=True)
class Unquantized:
    """The source model as it is, cast to `dtype` when it is loaded; nothing is written.

    `bytes_on_disk` of its artifact is the size of the source's own weight files, whatever their
    format.
    """

    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"

    @property
    def precision(self) -> Precision:
        """Weights and activations in `dtype`."""
        bits = BITS[self.dtype]
        return Precision(
            weight_bits=bits,
            activation_bits=bits,
            weight_format=self.dtype,
            compute="float",
            quantized=False,
        )

    def check(self, source: ModelSource | None, device: str) -> None:
        """Every device computes in these formats."""
        if device not in ("cpu", "cuda"):
            raise UnsupportedError(f'device "{device}" is not known; use cpu or cuda')

    def quantize(
        self, source: ModelSource, out: Path, calibration: Calibration, device: str
    ) -> Artifact:
        """Point at the source."""
        return describe_artifact(
            self, source, path=source.path, load={"dtype": self.dtype}, build_s=0.0,
            packages=("torch", "transformers"),
        )  # fmt: skip

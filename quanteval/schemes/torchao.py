"""torchao: INT8 weight-only, and INT8 weights with dynamic INT8 activations. Embeddings and head stay in BF16."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quanteval.interfaces import Calibration, ModelSource
from quanteval.records import Artifact, Precision
from quanteval.schemes._common import quantize_with_transformers, require_package

MINIMUM = "0.18"


@dataclass(frozen=True)
class Int8WeightOnly:
    """INT8 weights, one scale a row, dequantized inside the product; activations untouched."""

    skip_modules: tuple[str, ...] = ("lm_head",)
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"

    @property
    def precision(self) -> Precision:
        """8-bit weights, activations as they are."""
        return Precision(
            weight_bits=8,
            activation_bits=32 if self.dtype == "float32" else 16,
            weight_format="int8",
            compute="float",
            quantized=True,
        )

    def check(self, source: ModelSource | None, device: str) -> None:
        """Needs the package; any shape and device will do."""
        require_package("torchao", MINIMUM, "torchao")

    def quantize(
        self, source: ModelSource, out: Path, calibration: Calibration, device: str
    ) -> Artifact:
        """Quantize while loading, then save."""

        def config() -> Any:
            from torchao.quantization import Int8WeightOnlyConfig
            from transformers import TorchAoConfig

            return TorchAoConfig(
                Int8WeightOnlyConfig(version=2), modules_to_not_convert=list(self.skip_modules)
            )

        return quantize_with_transformers(
            self,
            source,
            out,
            device=device,
            make_config=config,
            dtype=self.dtype,
            packages=("torchao",),
        )


@dataclass(frozen=True)
class Int8DynamicActivationInt8Weight:
    """INT8 weights, one scale a row, and activations quantized to INT8 per token as they come (W8A8)."""

    skip_modules: tuple[str, ...] = ("lm_head",)
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"

    @property
    def precision(self) -> Precision:
        """INT8 by INT8 products."""
        return Precision(
            weight_bits=8, activation_bits=8, weight_format="int8", compute="int8", quantized=True
        )

    def check(self, source: ModelSource | None, device: str) -> None:
        """Needs the package; any shape and device will do."""
        require_package("torchao", MINIMUM, "torchao")

    def quantize(
        self, source: ModelSource, out: Path, calibration: Calibration, device: str
    ) -> Artifact:
        """Quantize while loading, then save."""

        def config() -> Any:
            from torchao.quantization import Int8DynamicActivationInt8WeightConfig
            from transformers import TorchAoConfig

            return TorchAoConfig(
                Int8DynamicActivationInt8WeightConfig(version=2),
                modules_to_not_convert=list(self.skip_modules),
            )

        return quantize_with_transformers(
            self,
            source,
            out,
            device=device,
            make_config=config,
            dtype=self.dtype,
            packages=("torchao",),
        )

"""bitsandbytes: LLM.int8() and the 4-bit formats NF4 and FP4. Embeddings and output head stay in BF16."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quanteval.errors import UnsupportedError
from quanteval.interfaces import Calibration, ModelSource
from quanteval.records import Artifact, Precision
from quanteval.schemes._common import (
    linear_shapes,
    quantize_with_transformers,
    require_package,
    torch_dtype,
)

MINIMUM = "0.50"
BLOCK = 64


@dataclass(frozen=True)
class Int8:
    """LLM.int8(): INT8 weights by row and activations by token, outlier features in floating point.

    Source: Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale", 2022.
    """

    threshold: float = 6.0
    skip_modules: tuple[str, ...] = ("lm_head",)
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"

    @property
    def precision(self) -> Precision:
        """INT8 by INT8 products, apart from outliers."""
        return Precision(
            weight_bits=8, activation_bits=8, weight_format="int8", compute="int8", quantized=True
        )

    def check(self, source: ModelSource | None, device: str) -> None:
        """Needs the package; runs on a CPU and on CUDA."""
        require_package("bitsandbytes", MINIMUM, "bitsandbytes")

    def quantize(
        self, source: ModelSource, out: Path, calibration: Calibration, device: str
    ) -> Artifact:
        """Quantize while loading, then save."""

        def config() -> Any:
            from transformers import BitsAndBytesConfig

            return BitsAndBytesConfig(
                load_in_8bit=True,
                llm_int8_threshold=self.threshold,
                llm_int8_skip_modules=list(self.skip_modules),
            )

        return quantize_with_transformers(
            self,
            source,
            out,
            device=device,
            make_config=config,
            dtype=self.dtype,
            packages=("bitsandbytes",),
        )


@dataclass(frozen=True)
class FourBit:
    """4-bit weights in blocks of 64, computed in `compute_dtype` (weight-only).

    `double_quant` stores the blocks' scales in 8 bits; on a CPU that saves disk only, since the
    scales are expanded when the weights are packed for its kernel. Source: Dettmers et al., "QLoRA:
    Efficient Finetuning of Quantized LLMs", 2023.
    """

    quant_type: Literal["nf4", "fp4"] = "nf4"
    double_quant: bool = False
    compute_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    skip_modules: tuple[str, ...] = ("lm_head",)

    @property
    def precision(self) -> Precision:
        """4-bit weights, activations as they are."""
        return Precision(
            weight_bits=4,
            activation_bits=32 if self.compute_dtype == "float32" else 16,
            weight_format=self.quant_type,
            compute="float",
            quantized=True,
        )

    def check(self, source: ModelSource | None, device: str) -> None:
        """Needs the package, and matrices that divide into blocks."""
        require_package("bitsandbytes", MINIMUM, "bitsandbytes")
        for name, (rows, columns) in (linear_shapes(source) if source else {}).items():
            if rows * columns % BLOCK:
                raise UnsupportedError(
                    f'"{name}" has {rows} x {columns} weights, which do not divide into blocks of {BLOCK}'
                )

    def quantize(
        self, source: ModelSource, out: Path, calibration: Calibration, device: str
    ) -> Artifact:
        """Quantize while loading, then save."""

        def config() -> Any:
            from transformers import BitsAndBytesConfig

            return BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type=self.quant_type,
                bnb_4bit_use_double_quant=self.double_quant,
                bnb_4bit_compute_dtype=torch_dtype(self.compute_dtype),
                llm_int8_skip_modules=list(self.skip_modules),
            )

        return quantize_with_transformers(
            self,
            source,
            out,
            device=device,
            make_config=config,
            dtype=self.compute_dtype,
            packages=("bitsandbytes",),
        )

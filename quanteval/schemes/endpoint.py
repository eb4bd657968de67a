"""A model that is served already, somewhere: nothing is written, and what it runs is declared, not read back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from quanteval.interfaces import Calibration, ModelSource
from quanteval.records import Artifact, Precision
from quanteval.schemes._common import describe_artifact

FULL_BITS = 16


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible endpoint, attached to as it is.

    The source gives the tokenizer, which must be that of the served model. The fields on precision are what its
    operator says; an endpoint is never asked.
    """

    base_url: str
    model: str = ""
    api: Literal["completions", "chat"] = "completions"
    weight_bits: float = 16
    weight_format: str = "bfloat16"
    activation_bits: float = 16
    compute: str = "float"

    artifact_format = "endpoint"
    lasting = False
    """What answers at an address may be another model tomorrow: nothing measured there is used again."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f'base_url "{self.base_url}" must be an address such as http://127.0.0.1:8000/v1'
            )
        if parts.username is not None or parts.password is not None or parts.query:
            # The address is recorded, so nothing secret may be in it.
            raise ValueError(
                "base_url must hold no name, password or query: name a variable in engine.api_key_env"
            )
        for name in ("weight_bits", "activation_bits"):
            if not 0 < getattr(self, name) <= 64:
                raise ValueError(f'{name} "{getattr(self, name)}" must be above 0 and at most 64')

    @property
    def precision(self) -> Precision:
        """As declared."""
        return Precision(
            weight_bits=self.weight_bits,
            activation_bits=self.activation_bits,
            weight_format=self.weight_format,
            compute=self.compute,
            quantized=self.weight_bits < FULL_BITS,
        )

    def check(self, source: ModelSource | None, device: str) -> None:
        """Nothing to check before the endpoint is asked, which its engine does."""

    def quantize(
        self, source: ModelSource, out: Path, calibration: Calibration, device: str
    ) -> Artifact:
        """Point at the endpoint, and at the source for its tokenizer."""
        artifact = describe_artifact(
            self, source, path=source.path,
            load={"base_url": self.base_url, "model": self.model, "api": self.api},
            build_s=0.0, packages=("transformers",),
        )  # fmt: skip
        return artifact.model_copy(update={"format": "endpoint", "bytes_on_disk": 0})

"""transformers, in this process: what is configured, and how an artifact is loaded and served."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quanteval.engines.tokenizer import HFTokenizer
from quanteval.engines.transformers_session import Batchers, TransformersSession
from quanteval.environment import package_version
from quanteval.errors import UnsupportedError
from quanteval.process_memory import note_before_load
from quanteval.records import Artifact
from quanteval.targets import locate

FORMATS = ("transformers", "torch")
MODULES = {
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed_tensors",
    "gptqmodel": "gptqmodel",
    "hqq": "hqq.core.quantize",
    "optimum-quanto": "optimum.quanto",
    "torchao": "torchao",
}
"""What to import of a package that an artifact was made with, before memory is counted."""


@dataclass(frozen=True)
class TransformersEngine:
    """Serves a folder that transformers loads. Fields are those of conf/engine/transformers.yaml."""

    device: Literal["cpu", "cuda"] = "cpu"
    batching: Literal["auto", "continuous", "padded"] = "auto"
    max_batch_rows: int = 32
    kv_cache_tokens: int = 8192
    page_tokens: int = 64
    step_tokens: int = 1024
    score_batch_tokens: int = 512
    max_context: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_batch_rows", "kv_cache_tokens", "page_tokens", "step_tokens", "score_batch_tokens",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f'{name} "{getattr(self, name)}" must be at least 1')

    def check(self, artifact: Artifact) -> None:
        """UnsupportedError when the artifact is of another format or the device is not there."""
        if artifact.format not in FORMATS:
            raise UnsupportedError(
                f'the transformers engine does not serve "{artifact.format}" artifacts'
            )
        if self.device == "cuda":
            import torch

            if not torch.cuda.is_available():
                raise UnsupportedError(
                    "engine.device=cuda, but torch finds no CUDA device: use engine.device=cpu"
                )

    @contextlib.contextmanager
    def serve(self, artifact: Artifact) -> Iterator[TransformersSession]:
        """Load the artifact and yield its session."""
        # The libraries' own pages are not the model's: they are counted before it is loaded.
        import_libraries(artifact.packages)
        before = note_before_load()
        model = _load(artifact, self.device)
        folder = Path(artifact.path)
        tokenizer = HFTokenizer(folder, trust_remote_code=artifact.trust_remote_code)
        batchers = Batchers(self, model, tokenizer.eos_token_ids)
        session = TransformersSession(self, model, tokenizer, batchers, before)
        try:
            yield session
        finally:
            session.close()


def import_libraries(packages: Iterable[str] = ()) -> None:
    """Import what loading a model imports, so that it can be told from the model's own memory.

    `packages` are those that its artifact was made with.
    """
    import torch

    for name in ("generation.continuous_batching", "models.auto.modeling_auto"):
        importlib.import_module(f"transformers.{name}")
    for package in ("bitsandbytes", "torchao", *packages):
        if package in MODULES and package_version(package):
            importlib.import_module(MODULES[package])
    torch.ones(8, 8) @ torch.ones(8, 8)


def _load(artifact: Artifact, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if loader := artifact.load.get("loader"):
        return locate(loader)(artifact, device)
    dtype = getattr(torch, artifact.load["dtype"])
    # The library's own choice of attention: SDPA, or eager for the few architectures that SDPA does not do.
    model = AutoModelForCausalLM.from_pretrained(
        artifact.path,
        dtype=dtype,
        device_map=device,
        trust_remote_code=artifact.trust_remote_code,
    )
    return model.eval()

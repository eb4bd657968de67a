"""What families share: loading and saving through transformers, package checks, the model's shapes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import struct
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from packaging.version import Version

from quanteval.environment import package_version
from quanteval.errors import ConfigError, UnsupportedError
from quanteval.interfaces import Calibration, ModelSource
from quanteval.models.digest import weight_files
from quanteval.records import Artifact, Precision

ARTIFACT_FORMAT = "transformers"


def require_package(name: str, minimum: str, extra: str) -> None:
    """Raise UnsupportedError when a package is missing or too old, naming the extra that brings it."""
    found = package_version(name)
    if found is None:
        raise UnsupportedError(
            f'needs {name} >= {minimum}, which is not installed: pip install "quanteval[{extra}]"'
        )
    if Version(found) < Version(minimum):
        raise UnsupportedError(
            f'needs {name} >= {minimum}, found {found}: pip install --upgrade "quanteval[{extra}]"'
        )


def linear_shapes(source: ModelSource) -> dict[str, tuple[int, int]]:
    """Return the shapes of the blocks' weight matrices, read from the safetensors headers alone.

    Embeddings and the output head, which schemes leave alone by default, are not among them.
    """
    shapes: dict[str, tuple[int, int]] = {}
    for path in weight_files(source.path):
        if path.suffix != ".safetensors":
            continue
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            shape = entry.get("shape", []) if name != "__metadata__" else []
            if len(shape) == 2 and not any(
                word in name for word in ("embed", "lm_head", "wte", "wpe")
            ):
                shapes[name.removesuffix(".weight")] = (shape[0], shape[1])
    return shapes


def torch_dtype(name: str) -> Any:
    """Return torch's dtype of that name. ConfigError when there is none."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f'"{name}" is not a torch dtype such as bfloat16')
    return dtype


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence progress bars, warnings and chatty loggers of the libraries, for this block only."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    loggers = [logging.getLogger(name) for name in ("bitsandbytes", "torchao")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
        for logger, old in zip(loggers, levels, strict=True):
            logger.setLevel(old)


def quantize_with_transformers(
    scheme: Any,
    source: ModelSource,
    out: Path,
    *,
    device: str,
    make_config: Callable[[], Any],
    dtype: str,
    packages: tuple[str, ...],
) -> Artifact:
    """Load the source under a quantization config, and save what comes out.

    The model is saved before its first forward pass: some libraries repack the weights for the
    device at that moment, and the repacked form does not reload.
    """
    started = time.perf_counter()
    with quiet_libraries():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(
            source.path,
            dtype=torch_dtype(dtype),
            quantization_config=make_config(),
            device_map=device,
            trust_remote_code=source.trust_remote_code,
        )
        model.save_pretrained(out)
        tokenizer = AutoTokenizer.from_pretrained(
            source.path, trust_remote_code=source.trust_remote_code
        )
        tokenizer.save_pretrained(out)
    return describe_artifact(
        scheme,
        source,
        path=out,
        load={"dtype": dtype},
        build_s=time.perf_counter() - started,
        packages=("torch", "transformers", *packages),
    )


def token_blocks(source: ModelSource, calibration: Calibration) -> list[list[int]]:
    """Return a calibration's texts as blocks of token ids: at most `samples` blocks of exactly `length` tokens.

    The texts are taken in an order drawn with the calibration's seed, joined by the end-of-sequence token, and cut.
    ConfigError when they are too short for a single block.
    """
    import random

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        source.path, trust_remote_code=source.trust_remote_code
    )
    order = list(calibration.texts)
    random.Random(calibration.seed).shuffle(order)
    stream: list[int] = []
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    wanted = calibration.samples * calibration.length
    for text in order:
        if len(stream) >= wanted:
            break
        stream += tokenizer(text, add_special_tokens=False)["input_ids"] + separator
    starts = range(0, min(wanted, len(stream)), calibration.length)
    blocks = [stream[start : start + calibration.length] for start in starts]
    whole = [block for block in blocks if len(block) == calibration.length]
    if not whole:
        raise ConfigError(
            f'calibration "{calibration.name}" has {len(stream)} tokens, fewer than one sample of '
            f"{calibration.length}: use more text or a smaller calibration.length"
        )
    return whole


def describe_artifact(
    scheme: Any,
    source: ModelSource,
    *,
    path: Path,
    load: dict[str, Any],
    build_s: float,
    packages: tuple[str, ...],
) -> Artifact:
    """Return the record of a built artifact; its name and fingerprint are the pipeline's to fill in."""
    precision: Precision = scheme.precision
    kind = type(scheme)
    return Artifact(
        scheme="",
        scheme_config={
            "_target_": f"{kind.__module__}.{kind.__qualname__}",
            **dataclasses.asdict(scheme),
        },
        precision=precision,
        model_id=source.id,
        model_revision=source.revision,
        model_provenance=source.provenance,
        weights_digest=source.weights_digest,
        path=str(path),
        format=ARTIFACT_FORMAT,
        load=load,
        trust_remote_code=source.trust_remote_code,
        bytes_on_disk=sum(file.stat().st_size for file in weight_files(path)),
        build_s=build_s,
        packages={name: version for name in packages if (version := package_version(name))},
    )

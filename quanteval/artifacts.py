"""Artifacts in the cache: what identifies one, where it lies, and how it gets there."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quanteval import __version__
from quanteval.environment import package_versions
from quanteval.interfaces import Calibration, ModelSource
from quanteval.models.cache import cache_dir
from quanteval.runplan import RunPlan
from quanteval.store import file_lock, fingerprint, write_record
from quanteval.targets import build

RESULT_PACKAGES = (
    "torch", "transformers", "tokenizers", "accelerate", "bitsandbytes", "torchao", "gguf",
    "openvino-genai", "xllamacpp",
)  # fmt: skip
"""Packages whose versions a result depends on."""


def result_packages() -> dict[str, str]:
    """Return the installed versions of RESULT_PACKAGES."""
    return {k: v for k, v in package_versions().items() if k in RESULT_PACKAGES}


def artifact_inputs(plan: RunPlan, source: ModelSource, scheme: str) -> dict[str, Any]:
    """Return everything an artifact depends on, as plain JSON."""
    return {
        "quanteval": __version__,
        "model": source.weights_digest,
        "revision": source.revision,
        "scheme": plan.variants[scheme].node,
        "device": plan.engine.object.device,
        "packages": result_packages(),
    }


def artifact_place(plan: RunPlan, source: ModelSource, scheme: str) -> Path:
    """Return the artifact's folder in the cache, whether or not it is there yet."""
    return cache_dir() / "artifacts" / fingerprint(artifact_inputs(plan, source, scheme))


def quantize_spec(plan: RunPlan, source: ModelSource, scheme: str) -> dict[str, Any]:
    """Return what a child process needs to know to build an artifact."""
    return {
        "source": {**vars(source), "path": str(source.path)},
        "scheme": plan.variants[scheme].node,
        "scheme_name": scheme,
        "engine": plan.engine.node,
        "artifact_dir": str(artifact_place(plan, source, scheme)),
        "artifact_fingerprint": fingerprint(artifact_inputs(plan, source, scheme)),
        "prefixes": plan.prefixes,
    }


def quantize(spec: Mapping[str, Any]) -> None:
    """Build the artifact that a child's spec asks for in the cache, whole or not at all."""
    source = _source_of(spec)
    scheme = build(spec["scheme"], where=f"scheme.{spec['scheme_name']}", prefixes=spec["prefixes"])
    engine = build(spec["engine"], where="engine", prefixes=spec["prefixes"])
    scheme.check(source, engine.device)
    place = Path(spec["artifact_dir"])
    with file_lock(place.parent / f"{place.name}.lock", wait=True, busy=""):
        if (place / "artifact.json").exists():
            return
        shutil.rmtree(place, ignore_errors=True)
        for stale in place.parent.glob(f".{place.name}.*"):
            shutil.rmtree(stale, ignore_errors=True)
        building = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
        try:
            artifact = scheme.quantize(source, building, Calibration(), engine.device)
            moved = str(artifact.path).replace(str(building), str(place), 1)
            record = artifact.model_copy(
                update={
                    "scheme": spec["scheme_name"],
                    "path": moved,
                    "fingerprint": spec["artifact_fingerprint"],
                }
            )
            write_record(building / "artifact.json", record)
            building.rename(place)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise


def _source_of(spec: Mapping[str, Any]) -> ModelSource:
    fields = spec["source"]
    return ModelSource(**{**fields, "path": Path(fields["path"])})

"""`quanteval serve`: build one scheme's artifact and put an OpenAI-compatible server on it."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quanteval.artifacts import artifact_place, quantize_spec
from quanteval.children import run_child
from quanteval.config import compose, make_plan
from quanteval.environment import set_thread_variables
from quanteval.errors import ConfigError
from quanteval.models import resolve_model
from quanteval.runplan import RunPlan
from quanteval.store import VariantDirectory, write_atomic

Notify = Callable[[str], None]


@dataclass(frozen=True)
class ServeOptions:
    """Where to listen, and the name under which the model is offered ('' for the scheme's)."""

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str = ""


@contextlib.contextmanager
def server_spec(overrides: Sequence[str], options: ServeOptions, notify: Notify) -> Iterator[Path]:
    """Compose the overrides of a run, build the artifact where it is missing, and yield what a server is started with.

    The file is a spec of `python -m quanteval.server`. Raises ConfigError for anything but one scheme.
    """
    plan = make_plan(compose(_one_scheme(overrides)))
    if len(plan.variants) != 1:
        raise ConfigError(
            f'scheme "{", ".join(plan.variants)}": a server serves one; write scheme=[NAME]'
        )
    scheme = next(iter(plan.variants))
    notify(f"model: {plan.model.name}")
    source = resolve_model(
        plan.model.name,
        revision=plan.model.revision,
        gguf_file=plan.model.gguf_file,
        trust_remote_code=plan.model.trust_remote_code,
    )
    place = artifact_place(plan, source, scheme)
    with tempfile.TemporaryDirectory(prefix="quanteval-serve-") as name:
        folder = Path(name)
        if not (place / "artifact.json").exists():
            notify(f"quantize: {scheme}")
            order = {
                **quantize_spec(plan, source, scheme),
                "mode": "quantize",
                "variant_dir": name,
                "parent_pid": os.getpid(),
            }
            run_child(order, VariantDirectory(folder), plan.runtime.thread_count)
        set_thread_variables(plan.runtime.thread_count, os.environ)  # type: ignore[arg-type]
        path = folder / "server.json"
        write_atomic(path, json.dumps(_spec(plan, scheme, place, options), indent=1))
        yield path


def _one_scheme(overrides: Sequence[str]) -> list[str]:
    """Serve the unquantized model where no scheme is chosen; suites and bench play no part."""
    chosen = any(text.lstrip("+").startswith("scheme=") for text in overrides)
    return [*([] if chosen else ["scheme=[bf16]"]), "bench=none", *overrides]


def _spec(plan: RunPlan, scheme: str, place: Path, options: ServeOptions) -> dict[str, object]:
    return {
        "artifact": str(place / "artifact.json"),
        "engine": plan.engine.node,
        "prefixes": list(plan.prefixes),
        "host": options.host,
        "port": options.port,
        "model_name": options.model_name or scheme,
        "threads": plan.runtime.thread_count,
        "parent_pid": None,
        "ready_file": None,
    }

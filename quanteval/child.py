"""The child's side of a variant: quantize in one process, serve and evaluate in another.

Started as `python -m quanteval.child SPEC`. What libraries print goes to child.log; progress bars go
to the terminal when there is one. The outcome is in the exit code and, when it is not 0, in
child.json as a status and one line.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import IO, Any

from quanteval.errors import QuantevalError
from quanteval.evaluation import Evaluation
from quanteval.failures import explain
from quanteval.interfaces import Calibration, ModelSource
from quanteval.store import VariantDirectory, file_lock, write_atomic, write_record
from quanteval.targets import allow, build


def main() -> int:
    """Do what the spec named on the command line asks for; return the exit code."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    folder = VariantDirectory(Path(spec["variant_dir"]))
    allow(spec["prefixes"])
    _die_with_parent(spec["parent_pid"])
    terminal = _divert_output(folder.log)
    try:
        if spec["mode"] == "quantize":
            _quantize(spec, folder)
        else:
            Evaluation(spec, folder, terminal).run()
    except BaseException as error:
        status, reason = explain(error)
        if status == "failed":
            traceback.print_exc()
        with contextlib.suppress(QuantevalError):
            outcome = json.dumps({"status": status, "reason": reason})
            write_atomic(folder.path / "child.json", outcome)
        return 130 if status == "interrupted" else 1
    return 0


def _die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to end this process when its parent dies, so that nothing is left running."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() != parent_pid:
            raise SystemExit("the parent is gone")


def _divert_output(log: Path) -> IO[str]:
    """Send file descriptors 1 and 2 to the log; return the old standard error for progress."""
    log.parent.mkdir(parents=True, exist_ok=True)
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    return terminal


# --------------------------------------------------------------------------- quantize


def _quantize(spec: dict[str, Any], folder: VariantDirectory) -> None:
    """Build the artifact in the cache, whole or not at all."""
    source = _source(spec)
    scheme = build(spec["scheme"], where=f"scheme.{spec['variant']}", prefixes=spec["prefixes"])
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
                    "scheme": spec["variant"],
                    "path": moved,
                    "fingerprint": spec["artifact_fingerprint"],
                }
            )
            write_record(building / "artifact.json", record)
            building.rename(place)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise


def _source(spec: dict[str, Any]) -> ModelSource:
    fields = spec["source"]
    return ModelSource(**{**fields, "path": Path(fields["path"])})


if __name__ == "__main__":
    sys.exit(main())

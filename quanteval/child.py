"""The child's side of a variant: quantize in one process, serve and evaluate in another.

Started as `python -m quanteval.child SPEC`. What libraries print goes to child.log; progress bars go
to the terminal when there is one. The outcome is in the exit code and, when it is not 0, in
child.json as a status and one line.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import IO

from quanteval.artifacts import quantize
from quanteval.environment import die_with_parent
from quanteval.errors import QuantevalError
from quanteval.evaluation import Evaluation
from quanteval.failures import explain
from quanteval.store import VariantDirectory, write_atomic
from quanteval.targets import allow


def main() -> int:
    """Do what the spec named on the command line asks for; return the exit code."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    folder = VariantDirectory(Path(spec["variant_dir"]))
    allow(spec["prefixes"])
    die_with_parent(spec["parent_pid"])
    terminal = _divert_output(folder.log)
    try:
        if spec["mode"] == "quantize":
            quantize(spec)
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


def _divert_output(log: Path) -> IO[str]:
    """Send file descriptors 1 and 2 to the log; return the old standard error for progress."""
    log.parent.mkdir(parents=True, exist_ok=True)
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    return terminal


if __name__ == "__main__":
    sys.exit(main())

"""A small warm process that forks a referee for each job: python -I -S _zygote.py ROOT.

Jobs come as JSON lines on standard input, results leave as JSON lines on standard output. It ends when
its input does, that is, when the process that started it is gone.
"""

from __future__ import annotations

import json
import os
import sys

# What short programs import: loaded once here, so that a candidate finds it in memory.
WARM = (
    "abc", "array", "base64", "bisect", "calendar", "cmath", "collections", "collections.abc",
    "copy", "csv", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools",
    "hashlib", "heapq", "inspect", "io", "itertools", "json", "math", "numbers", "operator",
    "os", "pprint", "queue", "random", "re", "statistics", "string", "struct", "sys",
    "textwrap", "time", "typing", "unicodedata", "uuid", "warnings",
)  # fmt: skip


def main() -> None:
    """Fork and wait, one job after the other."""
    sys.path.insert(0, sys.argv[1])
    for name in WARM:
        __import__(name)
    from quanteval.sandbox import _candidate, _codec, _isolate, _referee  # noqa: F401

    sys.path.remove(sys.argv[1])
    sys.modules["candidate"] = type(sys)("candidate")
    out = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                _referee.serve(job, out)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            detail = f"the referee ended with status {status}"
            os.write(out, json.dumps({"status": "error", "detail": detail}).encode() + b"\n")


if __name__ == "__main__":
    main()

"""Serves one artifact over HTTP: `python -m quanteval.server SPEC.json`.

The spec's keys: "artifact" (path of an artifact.json), "engine" (a node), "prefixes" (of allowed
targets), "host", "port" (0 picks a free one), "model_name", "threads", "parent_pid" (the server ends
with that process; null: it stands alone) and "ready_file" (gets {"port", "pid"} once the server answers;
null: none).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quanteval.environment import die_with_parent, set_thread_variables
from quanteval.errors import QuantevalError
from quanteval.failures import explain
from quanteval.records import Artifact
from quanteval.server.app import Front
from quanteval.server.running import bind, port_of, uvicorn_server, write_ready
from quanteval.store import read_record
from quanteval.targets import allow, build


def serve(spec: dict[str, Any], on_ready: Callable[[int], None] | None = None) -> None:
    """Serve by a spec until SIGINT or SIGTERM; requests still running then get an end.

    `on_ready(port)` is called once the server answers. Raises what building, checking or loading raises.
    """
    allow(spec["prefixes"])
    if spec.get("threads"):
        set_thread_variables(spec["threads"], os.environ)  # type: ignore[arg-type]
    artifact = read_record(Path(spec["artifact"]), Artifact)
    engine = build(spec["engine"], where="engine", prefixes=spec["prefixes"])
    engine.check(artifact)
    # Bound before the model is loaded: a port that is taken costs no waiting.
    with bind(spec["host"], spec["port"]) as sock:
        port = port_of(sock)

        def ready() -> None:
            write_ready(spec.get("ready_file") and Path(spec["ready_file"]), port)
            if on_ready is not None:
                on_ready(port)

        with engine.serve(artifact) as session:
            front = Front(session, spec["model_name"])
            server = uvicorn_server(front, ready, front.close)
            with contextlib.suppress(KeyboardInterrupt):
                server.run(sockets=[sock])


def main() -> int:
    """Serve by the spec named on the command line; return the exit code."""
    # A stop while the model is still loading unwinds like Ctrl-C, so that engines end their own children.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if spec.get("parent_pid") is not None:
        die_with_parent(spec["parent_pid"])
    try:
        serve(spec)
    except KeyboardInterrupt:
        return 130
    except QuantevalError as error:
        _, reason = explain(error)
        sys.stderr.write(f"error: {reason}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

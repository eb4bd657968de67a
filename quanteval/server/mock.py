"""A server with set timings, faults and answers, against which every latency formula is tested.

`MockServer` runs it for a test, on a thread or as a process; `run_mock` for the command line;
`python -m quanteval.server.mock SPEC.json` is that process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quanteval.environment import die_with_parent
from quanteval.errors import ConfigError, EngineError
from quanteval.server.mock_app import MockApp
from quanteval.server.mock_script import MockSettings
from quanteval.server.running import bind, port_of, uvicorn_server, write_ready
from quanteval.targets import build

__all__ = ["MockServer", "MockSettings", "run_mock"]

START_S = 60.0


def run_mock(
    settings: MockSettings,
    host: str = "127.0.0.1",
    port: int = 0,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Serve until interrupted; `on_ready(port)` is called once it answers. ConfigError when it cannot listen."""
    with bind(host, port) as sock:
        chosen = port_of(sock)
        ready = None if on_ready is None else lambda: on_ready(chosen)
        server = uvicorn_server(MockApp(settings, may_die=True), ready)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[sock])


class MockServer:
    """A mock server on a free port of 127.0.0.1 while a `with` block runs.

    On a thread it shares the interpreter with whoever measures it; with `subprocess` it does not,
    and can be killed.
    """

    def __init__(self, settings: MockSettings | None = None, *, subprocess: bool = False) -> None:
        self.settings = settings or MockSettings()
        self.port = 0
        self._as_process = subprocess
        self._process: Any = None
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self._sock: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if self.settings.die_after_requests is not None and not subprocess:
            raise ConfigError("die_after_requests needs a process of its own: set subprocess=True")

    @property
    def url(self) -> str:
        """The server's root."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        """What OpenAI clients take as their base."""
        return f"{self.url}/v1"

    @property
    def pid(self) -> int | None:
        """The process id, None on a thread."""
        return None if self._process is None else int(self._process.pid)

    def __enter__(self) -> MockServer:
        """Start and wait until it answers."""
        if self._as_process:
            self._start_process()
        else:
            self._start_thread()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop; connections still open are cut."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(30)
            self._sock.close()
        if self._folder is not None:
            self._folder.cleanup()

    def kill(self) -> None:
        """End the process at once (`subprocess` only)."""
        if self._process is None:
            raise ConfigError("only a mock server with subprocess=True can be killed")
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def truth(self) -> list[dict[str, Any]]:
        """Return what the server recorded of each request, in the order they came (see mock_app.Truth)."""
        return json.loads(self._call("/truth"))  # type: ignore[no-any-return]

    def metrics(self) -> str:
        """Return the metrics' text."""
        return self._call("/metrics").decode()

    def reset(self) -> None:
        """Forget the truth so far, count requests from 0 and start the stall's clock anew."""
        self._call("/reset", b"")

    def stall(self, seconds: float) -> None:
        """Let everything stand still from now on, for so long."""
        self._call(f"/stall?seconds={seconds}", b"")

    def _call(self, path: str, data: bytes | None = None) -> bytes:
        # Never through a proxy that the environment names.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url + path, data, timeout=30) as response:
            return bytes(response.read())

    def _start_thread(self) -> None:
        self._sock = bind("127.0.0.1", 0)
        self.port = port_of(self._sock)
        answering = threading.Event()
        self._server = uvicorn_server(MockApp(self.settings), answering.set)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._sock]}, name="mock", daemon=True
        )
        self._thread.start()
        if not answering.wait(START_S):
            raise EngineError("the mock server did not start")

    def _start_process(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="quanteval-mock-")
        folder = Path(self._folder.name)
        spec = {
            "settings": asdict(self.settings),
            "parent_pid": os.getpid(),
            "ready_file": str(folder / "ready.json"),
        }
        (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "quanteval.server.mock", str(folder / "spec.json")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_S
        while not (folder / "ready.json").exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                text = (folder / "log").read_text(encoding="utf-8", errors="replace")
                self.__exit__()
                raise EngineError(f"the mock server did not start: {' '.join(text.split())[-300:]}")
            time.sleep(0.01)
        self.port = json.loads((folder / "ready.json").read_text())["port"]


def main() -> int:
    """Serve by the spec named on the command line.

    Its keys: "settings" (fields of MockSettings), "host", "port" (0 picks a free one), "ready_file"
    (gets {"port", "pid"} once the server answers) and "parent_pid" (the server ends with it).
    """
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if spec.get("parent_pid") is not None:
        die_with_parent(spec["parent_pid"])
    target = f"{MockSettings.__module__}.{MockSettings.__name__}"
    settings = build({"_target_": target, **spec.get("settings", {})}, where="mock")
    ready = spec.get("ready_file")
    run_mock(
        settings,
        spec.get("host", "127.0.0.1"),
        spec.get("port", 0),
        lambda port: write_ready(ready and Path(ready), port),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Any other engine behind HTTP: its session runs in a server process of ours and is measured through the network.

So a model that only loads in process (bitsandbytes, torchao) meets the same client and the same
framing as one on a real server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quanteval.engines.process import ServerProcess
from quanteval.engines.transformers import TransformersEngine
from quanteval.records import Artifact
from quanteval.targets import DEFAULT_PREFIXES

if TYPE_CHECKING:
    from quanteval.engines.served_session import ServedSession

MODEL_NAME = "served"


@dataclass(frozen=True)
class ServedEngine:
    """Serves what the engine `inner` serves, in a process of its own over HTTP; see conf/engine/served.yaml."""

    inner: Any = field(default_factory=TransformersEngine)
    max_in_flight: int = 64
    start_timeout_s: float = 900.0
    silence_timeout_s: float = 900.0

    def __post_init__(self) -> None:
        if not callable(getattr(self.inner, "serve", None)) or isinstance(self.inner, ServedEngine):
            raise ValueError(f'inner "{self.inner}" must be another engine, with its "_target_"')
        if self.max_in_flight < 1:
            raise ValueError(f'max_in_flight "{self.max_in_flight}" must be at least 1')
        for name in ("start_timeout_s", "silence_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f'{name} "{getattr(self, name)}" must be above 0')

    @property
    def device(self) -> str:
        """The inner engine's."""
        return str(self.inner.device)

    def check(self, artifact: Artifact) -> None:
        """Whatever the inner engine has against the artifact."""
        self.inner.check(artifact)

    def spec(self, folder: Path) -> dict[str, Any]:
        """Return what the server process is told; its files are in `folder`."""
        kind = type(self.inner)
        return {
            "artifact": str(folder / "artifact.json"),
            "engine": {
                "_target_": f"{kind.__module__}.{kind.__qualname__}",
                **dataclasses.asdict(self.inner),
            },
            # The inner engine was built here, so that its own module is allowed.
            "prefixes": [*DEFAULT_PREFIXES, f"{kind.__module__}."],
            "host": "127.0.0.1",
            "port": 0,
            "model_name": MODEL_NAME,
            "threads": None,
            # A supervisor stands between, which ends the server when this process is gone.
            "parent_pid": None,
            "ready_file": str(folder / "ready.json"),
        }

    @contextlib.contextmanager
    def serve(self, artifact: Artifact) -> Iterator[ServedSession]:
        """Start the server, wait until it answers and yield a session on it; end it and all it started on exit."""
        from quanteval.engines.served_session import ServedSession, tokenizer_of

        folder = Path(tempfile.mkdtemp(prefix="quanteval-served-"))
        spec, ready = self.spec(folder), folder / "ready.json"
        (folder / "artifact.json").write_text(artifact.model_dump_json(), encoding="utf-8")
        (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
        command = [sys.executable, "-m", "quanteval.server", str(folder / "spec.json")]
        with ServerProcess(command, folder / "server.log") as process:
            # The log stays when the server does not come up: the error names it.
            process.wait_until(ready.exists, self.start_timeout_s, interval_s=0.05)
            port = json.loads(ready.read_text(encoding="utf-8"))["port"]
            process.reset_peak_rss()  # loading has a peak of its own
            try:
                with ServedSession(
                    f"http://127.0.0.1:{port}/v1",
                    process,
                    tokenizer_of(self.inner, artifact),
                    max_in_flight=self.max_in_flight,
                    silence_timeout_s=self.silence_timeout_s,
                ) as session:
                    yield session
            finally:
                shutil.rmtree(folder, ignore_errors=True)

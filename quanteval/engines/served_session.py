"""A session on a server of ours: what the session in there says of itself comes over HTTP as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quanteval.engines.fake import ByteTokenizer, FakeEngine
from quanteval.engines.http_session import HTTPSession
from quanteval.engines.http_wire import Remote
from quanteval.engines.process import ServerProcess
from quanteval.engines.tokenizer import HFTokenizer
from quanteval.interfaces import Tokenizer
from quanteval.records import Artifact, Effective, MemoryUse


def tokenizer_of(inner: Any, artifact: Artifact) -> Tokenizer:
    """Return the tokenizer that the inner engine's session has."""
    if isinstance(inner, FakeEngine):
        return ByteTokenizer(add_bos=inner.add_bos)
    return HFTokenizer(Path(artifact.path), trust_remote_code=artifact.trust_remote_code)


class ServedSession(HTTPSession):
    """A session on one server process, which implements OwnsProcesses; what is only known in there is asked for."""

    def __init__(
        self,
        base_url: str,
        process: ServerProcess,
        tokenizer: Tokenizer,
        *,
        max_in_flight: int,
        silence_timeout_s: float,
    ) -> None:
        remote = Remote(base_url, silence_timeout_s=silence_timeout_s, alive=process.alive)
        super().__init__(
            remote,
            tokenizer,
            max_in_flight=max_in_flight,
            describe=self._described,
            memory=self._measured,
            scores_one_more=True,
        )
        self._process = process

    def open(self) -> None:
        """Probe the server and ask how it batches."""
        super().open()
        policy = json.loads(self._told("batch_policy"))["batch_policy"]
        self._batch_policy = f"{policy}; over HTTP"

    def rss_bytes(self) -> int:
        """Return the resident memory of the server's process and those it started."""
        return self._process.rss_bytes()

    def take_peak_bytes(self) -> int:
        """Return their highest resident memory since the last call, and begin anew."""
        peak = self._process.peak_rss_bytes()
        self._process.reset_peak_rss()
        return peak

    def gone(self) -> str:
        """Return why the server ended, '' while it is there."""
        return self._process.alive() or ""

    def _told(self, what: str) -> bytes:
        return self._call(self._wire.get(f"{self.remote.root}/quanteval/{what}", timeout_s=600.0))

    def _described(self) -> Effective:
        return Effective.model_validate_json(self._told("describe"))

    def _measured(self) -> MemoryUse:
        return MemoryUse.model_validate_json(self._told("memory"))

"""Attaches to any OpenAI-compatible endpoint: it is served already, and nothing is started or stopped."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quanteval.errors import UnsupportedError
from quanteval.records import Artifact

if TYPE_CHECKING:
    from quanteval.engines.http_session import HTTPSession

OWN_FIELDS = frozenset(
    {"model", "prompt", "messages", "stream", "stream_options", "n", "echo", "max_tokens",
     "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos", "return_token_ids",
     "logprobs", "prompt_logprobs"}
)  # fmt: skip
"""What a session sends by itself."""


@dataclass(frozen=True)
class OpenAIEngine:
    """Serves artifacts of format 'endpoint'. Fields are those of conf/engine/openai.yaml."""

    device: str = "remote"
    api_key_env: str = ""
    max_context: int | None = None
    max_in_flight: int = 32
    connect_timeout_s: float = 10.0
    silence_timeout_s: float = 900.0
    text_prompts: bool = False
    raw_as_user: bool = False
    reasoning_in_text: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_in_flight < 1:
            raise ValueError(f'max_in_flight "{self.max_in_flight}" must be at least 1')
        if self.max_context is not None and self.max_context < 2:
            raise ValueError(f'max_context "{self.max_context}" must be at least 2, or null')
        for name in ("connect_timeout_s", "silence_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f'{name} "{getattr(self, name)}" must be above 0')
        if own := sorted(OWN_FIELDS & set(self.extra_body)):
            raise ValueError(f'extra_body "{own[0]}" is set by the session itself: leave it out')

    def check(self, artifact: Artifact) -> None:
        """UnsupportedError for artifacts that are no endpoint."""
        if artifact.format != "endpoint":
            raise UnsupportedError(
                f'the openai engine attaches to endpoints and does not serve "{artifact.format}" artifacts: '
                "use scheme=endpoint, or the served engine"
            )

    @contextlib.contextmanager
    def serve(self, artifact: Artifact) -> Iterator[HTTPSession]:
        """Probe the endpoint and yield a session on it; ConfigError when its key is not set."""
        from quanteval.engines.http_session import HTTPSession
        from quanteval.engines.http_wire import Remote, base_url_of, key_from
        from quanteval.engines.tokenizer import HFTokenizer

        folder = Path(artifact.path)
        tokenizer = HFTokenizer(folder, trust_remote_code=artifact.trust_remote_code)
        remote = Remote(
            base_url=base_url_of(artifact.load["base_url"]),
            model=artifact.load.get("model", ""),
            api=artifact.load.get("api", "completions"),
            key=key_from(self.api_key_env),
            connect_timeout_s=self.connect_timeout_s,
            silence_timeout_s=self.silence_timeout_s,
            extra_body=self.extra_body,
        )
        asked = artifact.precision
        with HTTPSession(
            remote,
            tokenizer,
            max_context=self.max_context,
            fallback_context=positions_of(folder),
            max_in_flight=self.max_in_flight,
            reasoning_in_text=self.reasoning_in_text,
            raw_as_user=self.raw_as_user,
            text_prompts=self.text_prompts,
            declared=f"{asked.weight_format}, {asked.weight_bits:g} bits a weight, "
            f"activations {asked.activation_bits:g} bits",
        ) as session:
            yield session


def positions_of(folder: Path) -> int | None:
    """Return the longest sequence that a model's config.json names, None where it names none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = config.get("text_config", config).get("max_position_embeddings")
    return found if isinstance(found, int) else None

"""The fields of completion requests that both servers understand, checked; unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quanteval.interfaces import Message
from quanteval.server.http import HTTPError

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
DEFAULT_COMPLETION_TOKENS = 16
MOST_LOGPROBS = 100
LARGEST_SEED = 2**63 - 1
"""What random generators take."""


@dataclass(frozen=True)
class Ask:
    """One HTTP request for text; `prompts` are texts or token ids, for chat there are `messages`."""

    chat: bool
    model: str | None
    prompts: tuple[str | tuple[int, ...], ...]
    messages: tuple[Message, ...]
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    logprobs: int | None
    token_ids: bool
    tokens_as_ids: bool
    special_tokens: bool
    """Whether the tokenizer adds its own to a prompt that is text."""


def read_ask(body: Mapping[str, Any], chat: bool) -> Ask:
    """Check a body's fields; HTTPError 400 names the field, the value and what is allowed."""
    fields = _Fields(body)
    stream = fields.flag("stream")
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise HTTPError(400, f'stream_options "{options}" must be an object', "stream_options")
    if fields.whole("n", 1, low=1) != 1:
        raise HTTPError(400, f'n "{body["n"]}" is not supported: use 1', "n")
    prompts = () if chat else _prompts(body.get("prompt"))
    if stream and len(prompts) > 1:
        raise HTTPError(400, "a stream takes one prompt: send several without streaming", "prompt")
    logprobs = None if chat else fields.whole("logprobs", None, low=0, high=MOST_LOGPROBS)
    max_tokens = fields.whole("max_tokens", None, low=0)
    if chat:
        max_tokens = fields.whole("max_completion_tokens", max_tokens, low=0)
    elif max_tokens is None:
        max_tokens = DEFAULT_COMPLETION_TOKENS
    echo = not chat and fields.flag("echo")
    if max_tokens == 0 and not echo:
        raise HTTPError(400, 'max_tokens "0" must be at least 1, unless echo is set', "max_tokens")
    if stream and echo:
        raise HTTPError(400, "echo is not supported in a stream: leave stream out", "echo")
    return Ask(
        chat=chat,
        model=fields.text("model"),
        prompts=prompts,
        messages=_messages(body.get("messages")) if chat else (),
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 1.0, low=0.0),
        top_p=fields.number("top_p", 1.0, low=0.0, high=1.0),
        top_k=max(fields.whole("top_k", 0, low=-1) or 0, 0),
        seed=fields.whole("seed", None, low=-LARGEST_SEED - 1, high=LARGEST_SEED),
        stop=_stop(body.get("stop")),
        ignore_eos=fields.flag("ignore_eos"),
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        echo=echo,
        logprobs=logprobs,
        token_ids=fields.flag("return_token_ids"),
        tokens_as_ids=fields.flag("return_tokens_as_token_ids"),
        special_tokens=body.get("add_special_tokens") is not False,
    )


class _Fields:
    """Reads fields by type; null stands for the default."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def flag(self, name: str) -> bool:
        value = self._body.get(name)
        if value is not None and not isinstance(value, bool):
            raise HTTPError(400, f'{name} "{value}" must be true or false', name)
        return bool(value)

    def text(self, name: str) -> str | None:
        value = self._body.get(name)
        if value is not None and not isinstance(value, str):
            raise HTTPError(400, f'{name} "{value}" must be a text', name)
        return value

    def whole(
        self, name: str, default: int | None, low: int | None = None, high: int | None = None
    ) -> int | None:
        value = self._body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise HTTPError(400, f'{name} "{value}" must be a whole number', name)
        _between(name, value, low, high)
        return value

    def number(
        self, name: str, default: float, low: float | None = None, high: float | None = None
    ) -> float:
        value = self._body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise HTTPError(400, f'{name} "{value}" must be a number', name)
        _between(name, value, low, high)
        return float(value)


def _between(name: str, value: float, low: float | None, high: float | None) -> None:
    # Written so that NaN fails too.
    if not (low is None or value >= low) or not (high is None or value <= high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise HTTPError(400, f'{name} "{value}" must be {limits}', name)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int for i in value)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _is_ids(value):
            return (tuple(value),)
        if all(isinstance(item, str) or _is_ids(item) for item in value):
            return tuple(item if isinstance(item, str) else tuple(item) for item in value)
    raise HTTPError(
        400, "prompt must be a text, a list of token ids, or a list of either", "prompt"
    )


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise HTTPError(400, "messages must be a list with at least one message", "messages")
    return tuple(_message(item) for item in value)


def _message(item: Any) -> Message:
    role = item.get("role") if isinstance(item, Mapping) else None
    content = item.get("content") if isinstance(item, Mapping) else None
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise HTTPError(
            400, "each message needs a role (system, user, assistant) and a text", "messages"
        )
    return Message(role=role, content=content)


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else ([] if value is None else value)
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise HTTPError(400, f'stop "{value}" must be a text or a list of texts', "stop")
    return tuple(stops)


def echo_logprobs(
    texts: Sequence[str], logprobs: Sequence[float | None], tops: Sequence[dict[str, float] | None]
) -> dict[str, Any]:
    """Return the `logprobs` object of a completion; one entry a token, None where nothing is before it."""
    offsets, at = [], 0
    for text in texts:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": list(texts),
        "token_logprobs": list(logprobs),
        "top_logprobs": list(tops),
        "text_offset": offsets,
    }


def usage_of(prompt_tokens: int, output_tokens: int, cached: int | None = None) -> dict[str, Any]:
    """Return a usage object."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage

"""From the events of a streamed answer to chunks: whose tokens are how many, and how the answer ended.

Tokens are counted by their ids where the server sends them, else by its log-probabilities, else by
the running count it tells, else by tokenizing the text anew; the sum is held against the server's
final count, and a difference that cannot be explained is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from quanteval.engines.retokenize import Retokenizer
from quanteval.engines.sse import Event
from quanteval.interfaces import Chunk
from quanteval.records import FinishReason

DONE = b"[DONE]"
_decode = json.JSONDecoder().decode
FINISH: dict[str, FinishReason] = {
    "stop": "stop", "eos": "stop", "tool_calls": "stop", "function_call": "stop",
    "length": "length", "abort": "cancelled", "cancelled": "cancelled",
}  # fmt: skip
SLACK = 0.1
"""Share of a server's token count that tokenizing the text anew may miss: marks that no text shows."""
MESSAGE_LIMIT = 300


def error_text(body: Any) -> str:
    """Return the message of an error answer, on one line; '' when the body is none."""
    if not isinstance(body, dict):
        return ""
    error = body.get("error")
    if error is None and body.get("object") == "error":
        error = body
    if error is None and isinstance(body.get("detail"), str | list):
        error = body["detail"]
    if not error:
        return ""
    if isinstance(error, dict):
        error = error.get("message") or error.get("type") or error.get("code") or error
    return one_line(error if isinstance(error, str) else json.dumps(error))


def one_line(text: str) -> str:
    """Return printable text on one line, shortened."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= MESSAGE_LIMIT else line[: MESSAGE_LIMIT - 3] + "..."


def finish_of(name: Any) -> tuple[FinishReason, str | None]:
    """Return the finish reason a server names, and the error it amounts to, if any."""
    if name is None:
        return "error", "the answer ended without a finish reason"
    known = FINISH.get(name) if isinstance(name, str) else None
    if known is None:
        return "error", one_line(f'the answer ended with the finish reason "{name}"')
    return known, None


def cached_tokens(usage: Mapping[str, Any]) -> int | None:
    """Return how many prompt tokens came from a prefix cache, None where the server does not tell."""
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else None


def layers_of(usage: Mapping[str, Any] | None, metrics: Any) -> dict[str, float]:
    """Return seconds by layer (see `RequestTrace.layers`): as our own server tells them in usage, or as vLLM does."""
    told = (usage or {}).get("layers")
    if isinstance(told, dict):
        return {str(name): float(seconds) for name, seconds in told.items()}
    names = {
        "queue": "queue_time_ms",
        "prefill": "time_to_first_token_ms",  # there from being scheduled on
        "decode": "generation_time_ms",
    }
    found = {layer: (metrics or {}).get(name) for layer, name in names.items()}
    return {layer: ms / 1000 for layer, ms in found.items() if isinstance(ms, int | float)}


class ChunkMaker:
    """Follows the events of one answer.

    `prompt_tokens` is how many tokens the prompt must have on the server, None when that is known
    without asking; `sent_s` when it was sent, by the clock of the events' times. Reasoning counts as
    tokens; its text is left out unless `reasoning_in_text`.
    """

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        *,
        api: Literal["completions", "chat"],
        prompt_tokens: int | None = None,
        reasoning_in_text: bool = False,
        sent_s: float | None = None,
    ) -> None:
        self._encode = encode
        self._sent_s = sent_s
        self._first_s = 0.0
        self._is_chat = api == "chat"
        self._prompt_tokens = prompt_tokens
        self._reasoning_in_text = reasoning_in_text
        self._retokenizers: dict[bool, Retokenizer] = {}
        self._usage: Mapping[str, Any] = {}
        self._layers: Mapping[str, float] = {}
        self._running_count = True
        self._exact = True
        self._finish: str | None = None
        self._finish_s = 0.0
        self.counted = 0
        self.done = False
        self.error: str | None = None

    def take(self, event: Event, at_s: float) -> Chunk | None:
        """Take one event; return the chunk it brings, None when it brings neither tokens nor text."""
        if self.done or self.error is not None:
            return None
        if event.data == DONE:
            self.done = True
            return None
        try:
            body = _decode(event.data.decode())
        except ValueError:
            shown = event.data[:MESSAGE_LIMIT].decode("utf-8", "replace")
            self.error = one_line(f'the server sent an event that is not JSON: "{shown}"')
            return None
        if not isinstance(body, dict):
            self.error = one_line(f'the server sent an event that is no object: "{body}"')
            return None
        if "error" in body or body.get("object") == "error" or event.name == b"error":
            failure = error_text(body)
            if failure or event.name == b"error":
                self.error = failure or "the server reports an error without a message"
                return None
        usage = body.get("usage")
        if usage:
            self._usage = usage
        if "metrics" in body or (usage and "layers" in usage):
            self._layers = layers_of(usage, body.get("metrics"))
        choices = body.get("choices")
        return self._choice(choices[0], usage, at_s) if choices else None

    def _choice(
        self, choice: Mapping[str, Any], usage: Mapping[str, Any] | None, at_s: float
    ) -> Chunk | None:
        if choice.get("finish_reason") is not None:
            self._finish, self._finish_s = choice["finish_reason"], at_s
        if self._is_chat:
            delta = choice.get("delta") or {}
            text = delta.get("content") or ""
            hidden = delta.get("reasoning_content") or delta.get("reasoning") or ""
            if delta.get("tool_calls"):
                hidden += _arguments(delta["tool_calls"])
        else:
            text, hidden = choice.get("text") or "", ""
        ids = choice.get("token_ids")
        told = choice.get("logprobs")
        count = self._count(told, usage, text, hidden) if ids is None else len(ids)
        if not self.counted:
            self._first_s = at_s
        self.counted += count
        if not count and not text:
            return None
        shown = hidden + text if self._reasoning_in_text else text
        if ids is not None:
            return Chunk(tuple(ids), at_s, text=shown)
        return Chunk((), at_s, tokens=count, text=shown)

    def _count(self, logprobs: Any, usage: Mapping[str, Any] | None, text: str, hidden: str) -> int:
        """Return the number of new tokens where their ids are not told."""
        if logprobs:
            tokens = logprobs.get("content" if self._is_chat else "tokens")
            if tokens:
                return len(tokens)
        if usage and self._running_count:
            used = usage.get("completion_tokens")
            # A count that stands still at 0, or falls behind, is no running count.
            if isinstance(used, int) and used >= self.counted and (used or not (text or hidden)):
                return used - self.counted
            self._running_count = False
        if not (text or hidden):
            return 0
        self._exact = False
        seen = self._retokenized(False, text) + self._retokenized(True, hidden)
        return max(seen - self.counted, 1)

    def _retokenized(self, hidden: bool, text: str) -> int:
        counter = self._retokenizers.get(hidden)
        if counter is None:
            if not text:
                return 0
            counter = self._retokenizers[hidden] = Retokenizer(self._encode)
        return counter.add(text)

    def end(self, at_s: float, failure: str | None = None) -> Chunk:
        """Return the last chunk: how the answer ended, and tokens that only the final count shows."""
        failure = failure or self.error
        reason: FinishReason = "error"
        if failure is None and self._finish is None:
            missing = "a finish reason" if self.done else "a finish reason or [DONE]"
            failure = f"the stream ended without {missing}"
        if failure is None:
            reason, failure = finish_of(self._finish)
        unseen = 0
        if failure is None:
            unseen, failure = self._reconcile(reason)
        if failure is not None:
            return Chunk((), at_s, "error", failure)
        return Chunk(
            (),
            self._finish_s,
            reason,
            tokens=unseen or None,
            cached_prompt_tokens=cached_tokens(self._usage),
            layers=self._with_network(),
        )

    def _with_network(self) -> Mapping[str, float]:
        """Return the layers, and as network what the server cannot account for before the first token."""
        layers = self._layers
        if self._sent_s is None or not self.counted or not layers.keys() >= {"queue", "prefill"}:
            return layers
        before = sum(layers.get(name, 0.0) for name in ("queue", "tokenize", "prefill"))
        return {**layers, "network": max(self._first_s - self._sent_s - before, 0.0)}

    def _reconcile(self, reason: FinishReason) -> tuple[int, str | None]:
        """Hold the counts against the server's; return the tokens no event showed, and an error."""
        told = self._usage.get("prompt_tokens")
        if self._prompt_tokens is not None and told != self._prompt_tokens:
            return 0, prompt_mismatch(told, self._prompt_tokens)
        total = self._usage.get("completion_tokens")
        if not isinstance(total, int) or total == self.counted:
            return 0, None
        unseen = total - self.counted
        # The end token is counted, and by some servers never sent.
        most = max(2, round(SLACK * total)) if not self._exact else int(reason == "stop")
        if 0 < unseen <= most:
            return unseen, None
        how = "" if self._exact else ", by tokenizing its text anew,"
        return 0, (
            f'the server counted "{total}" output tokens, but its stream{how} held "{self.counted}": '
            "their times cannot be told"
        )


def prompt_mismatch(told: Any, expected: int) -> str:
    """Return the error for a prompt that did not arrive as it was made."""
    if told is None:
        return (
            "the server did not tell how many prompt tokens it saw, so the prompt is not confirmed"
        )
    return (
        f'the server counted "{told}" prompt tokens where the tokenizer here makes "{expected}": '
        "the prompt did not arrive as it was made"
    )


def _arguments(calls: Any) -> str:
    """Return the text of tool calls: tokens of the answer that are no part of what it says."""
    pieces = []
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            pieces += [function.get("name") or "", function.get("arguments") or ""]
    return "".join(pieces)

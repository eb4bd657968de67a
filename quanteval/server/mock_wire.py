"""What the mock server writes: chunks made from pieces rendered beforehand, whole answers, metrics."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from typing import Any

from quanteval.server.http import dump, event
from quanteval.server.mock_script import (
    TOKENIZER,
    MockSettings,
    logprob,
    prompt_logprobs,
    token_texts,
)
from quanteval.server.protocol import Ask, echo_logprobs, usage_of

BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class Wire:
    """Renders the answer to one request."""

    def __init__(self, settings: MockSettings, ask: Ask, request_id: str, created: int) -> None:
        self.settings = settings
        self.ask = ask
        name = ("chat.completion" if ask.chat else "text_completion") + (
            ".chunk" if ask.chat and ask.stream else ""
        )
        prefix = "chatcmpl" if ask.chat else "cmpl"
        self.head = {
            "id": f"{prefix}-{request_id}",
            "object": name,
            "created": created,
            "model": settings.model_name,
        }
        self._open = b"data: " + dump(self.head)[:-1] + b',"choices":[{"index":0,'
        self._close = b',"finish_reason":null}]'

    def role(self) -> bytes:
        """Return a first chunk that has a role and no text."""
        return self._open + b'"delta":{"role":"assistant","content":""}' + self._close + b"}\n\n"

    def chunk(
        self,
        prompt: Sequence[int],
        ids: Sequence[int],
        text: str,
        sent: int,
        reason: str | None,
    ) -> bytes:
        """Return the chunk after which `sent` tokens are out; reasoning goes by its last token."""
        ask = self.ask
        if ask.chat:
            reasoning = sent <= self.settings.reasoning_tokens
            name = self.settings.reasoning_field if reasoning else "content"
            body = b'"delta":{"' + name.encode() + b'":' + dump(text) + b"}"
        else:
            body = b'"text":' + dump(text)
        first = sent == len(ids)
        more = b""
        if ask.token_ids:
            body += b',"token_ids":' + dump(list(ids))
            if first and ask.chat:
                more += b',"prompt_token_ids":' + dump(list(prompt))
            elif first:
                body += b',"prompt_token_ids":' + dump(list(prompt))
        if ask.logprobs is not None:
            body += b',"logprobs":' + dump(self._output_logprobs(ids))
        close = self._close if reason is None else b',"finish_reason":' + dump(reason) + b"}]"
        last = reason is not None and not self.settings.usage_only_last_chunk
        if ask.continuous_usage or (last and ask.include_usage):
            more += b',"usage":' + dump(self._usage(len(prompt), sent))
        return self._open + body + close + more + b"}\n\n"

    def _output_logprobs(self, ids: Sequence[int]) -> dict[str, Any]:
        # Chunks know nothing of what came before them, so in streams each token is certain.
        texts = self._names(ids)
        return echo_logprobs(texts, [0.0] * len(ids), [{name: 0.0} for name in texts])

    def _names(self, ids: Sequence[int]) -> list[str]:
        return [f"token_id:{i}" for i in ids] if self.ask.tokens_as_ids else token_texts(ids)

    def _usage(self, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
        cached = self.settings.cached_prompt_tokens
        return usage_of(prompt_tokens, output_tokens, min(cached, prompt_tokens))

    def end(self, prompt_tokens: int, output_tokens: int) -> bytes:
        """Return the chunk that holds only usage, where it was asked for."""
        asked = self.ask.include_usage and self.settings.usage_only_last_chunk
        if not asked:
            return b""
        usage = self._usage(prompt_tokens, output_tokens)
        return event({**self.head, "choices": [], "usage": usage})

    def whole(
        self, prompts: Sequence[tuple[int, ...]], outputs: Sequence[tuple[tuple[int, ...], str]]
    ) -> dict[str, Any]:
        """Return an answer that is not streamed."""
        choices = [
            self._choice(i, ids, output, reason)
            for i, (ids, (output, reason)) in enumerate(zip(prompts, outputs, strict=True))
        ]
        usage = self._usage(sum(map(len, prompts)), sum(len(output) for output, _ in outputs))
        body = {**self.head, "choices": choices, "usage": usage}
        if self.ask.token_ids and self.ask.chat:
            body["prompt_token_ids"] = list(prompts[0])
        return body

    def _choice(
        self, index: int, prompt: tuple[int, ...], output: tuple[int, ...], reason: str
    ) -> dict[str, Any]:
        ask = self.ask
        choice: dict[str, Any] = {"index": index, "finish_reason": reason}
        if ask.token_ids:
            choice["token_ids"] = list(output)
        if ask.chat:
            cut = self.settings.reasoning_tokens
            message = {"role": "assistant", "content": TOKENIZER.decode(output[cut:])}
            if cut:
                message[self.settings.reasoning_field] = TOKENIZER.decode(output[:cut])
            return {**choice, "message": message}
        if ask.token_ids:
            choice["prompt_token_ids"] = list(prompt)
        echo = ask.echo and not (
            ask.logprobs is not None and self.settings.prompt_logprobs == "ignored"
        )
        shown = (*prompt, *output) if echo else output
        choice["text"] = TOKENIZER.decode(shown)
        choice["logprobs"] = None
        if ask.logprobs is not None:
            texts = self._names(shown)
            joined = (*prompt, *output)
            values: list[float | None] = [
                logprob(joined[i - 1], joined[i]) for i in range(len(prompt), len(joined))
            ]
            if echo:
                values = [*prompt_logprobs(self.settings, prompt), *values]
            tops = [None if v is None else {t: v} for t, v in zip(texts, values, strict=True)]
            choice["logprobs"] = echo_logprobs(texts, values, tops)
        return choice


def models(settings: MockSettings) -> dict[str, Any]:
    """Return the list of models: one."""
    model = {
        "id": settings.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "quanteval",
        "max_model_len": settings.max_context,
    }
    return {"object": "list", "data": [model]}


def observe(counts: Counter[str], name: str, seconds: float) -> None:
    """Add a duration to a histogram."""
    counts[f"{name}_seconds_sum"] += seconds  # type: ignore[assignment]
    counts[f"{name}_seconds_count"] += 1
    counts[f"{name}_seconds_bucket_{bisect.bisect_left(BOUNDS, seconds)}"] += 1


def metrics(settings: MockSettings, counts: Counter[str], active: int, waiting: int) -> str:
    """Return counters, gauges and histograms as Prometheus text, under the names that vLLM gives them."""
    label = f'model_name="{settings.model_name}"'
    lines = []
    for name in ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits",
                 "request_success", "num_preemptions"):  # fmt: skip
        more = ',finished_reason="length"' if name == "request_success" else ""
        lines.append(f"# TYPE vllm:{name}_total counter")
        lines.append(f"vllm:{name}_total{{{label}{more}}} {float(counts[name])}")
    for name, value in (("num_requests_running", active), ("num_requests_waiting", waiting)):
        lines.append(f"# TYPE vllm:{name} gauge")
        lines.append(f"vllm:{name}{{{label}}} {float(value)}")
    for name in ("request_queue_time", "request_prefill_time", "request_decode_time",
                 "time_to_first_token", "e2e_request_latency"):  # fmt: skip
        lines += _histogram(counts, name, label)
    return "\n".join(lines) + "\n"


def _histogram(counts: Counter[str], name: str, label: str) -> list[str]:
    lines = [f"# TYPE vllm:{name}_seconds histogram"]
    below = 0
    for i, bound in enumerate((*BOUNDS, "+Inf")):
        below += counts[f"{name}_seconds_bucket_{i}"]
        lines.append(f'vllm:{name}_seconds_bucket{{le="{bound}",{label}}} {float(below)}')
    for part in ("sum", "count"):
        value = float(counts[f"{name}_seconds_{part}"])
        lines.append(f"vllm:{name}_seconds_{part}{{{label}}} {value}")
    return lines

"""What is sent to an endpoint and what its whole answers mean: bodies, completions, log-probabilities of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from quanteval.engines.http_chunks import finish_of, prompt_mismatch
from quanteval.engines.http_wire import API
from quanteval.errors import EngineError, UnsupportedError
from quanteval.interfaces import (
    Completion,
    Message,
    Prompt,
    Request,
    Sampling,
    ScoreRequest,
    Tokenizer,
    TokenLogprobs,
    TopLogprobs,
)

FLOOR = -9999.0
"""What servers write for minus infinity, which JSON cannot hold."""
ID_PREFIX = "token_id:"
PromptLogprobs = Literal["", "prompt_logprobs", "echo"]


@dataclass(frozen=True)
class ChatPrompt(Prompt):
    """A chat prompt that still knows its messages, for endpoints that apply the template themselves."""

    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Capabilities:
    """What an endpoint can do, as probed; each without a value is missing."""

    token_id_prompts: bool = False
    return_token_ids: bool = False
    usage: bool = False
    stream_usage: bool = False
    continuous_usage: bool = False
    ignore_eos: bool = False
    """The field is taken; whether it is heeded shows in the number of tokens."""
    neutral: Mapping[str, float] = field(default_factory=dict)
    """Sampling fields that must be sent to switch off what the server's own defaults would do."""
    length_field: str = "max_tokens"
    prompt_logprobs: PromptLogprobs = ""
    prompt_logprobs_missing: str = ""
    """Why there are no log-probabilities of prompts."""
    ranks: bool = False
    """They come with the rank of the token, or with whether it was the most probable one."""
    score_tokens: int = 1
    """Tokens that must be generated for a prompt to be scored."""

    def __str__(self) -> str:
        has = {
            "token-id prompts": self.token_id_prompts,
            "token ids": self.return_token_ids,
            "usage in streams": self.stream_usage,
            "running usage": self.continuous_usage,
            "ignore_eos": self.ignore_eos,
            "prompt log-probabilities": bool(self.prompt_logprobs),
        }
        yes = ", ".join(name for name, there in has.items() if there)
        no = ", ".join(name for name, there in has.items() if not there)
        return f"has {yes or 'none'}" + (f"; lacks {no}" if no else "")


class Bodies:
    """Builds the bodies of requests for one endpoint and model."""

    def __init__(
        self,
        model: str,
        api: API,
        can: Capabilities,
        tokenizer: Tokenizer,
        extra: Mapping[str, Any],
        *,
        raw_as_user: bool = False,
    ) -> None:
        self._base = {"model": model} if model else {}
        self._api = api
        self._can = can
        self._tokenizer = tokenizer
        self._extra = extra
        self._raw_as_user = raw_as_user

    def generation(self, request: Request, *, stream: bool = False) -> dict[str, Any]:
        """Return the body of a generation. UnsupportedError for what the endpoint cannot be asked."""
        can = self._can
        body = {
            **self._base,
            **self._prompt(request.prompt),
            **self._sampling(request.sampling),
        }
        if can.return_token_ids:
            body["return_token_ids"] = True
        if stream:
            body["stream"] = True
            if can.stream_usage:
                body["stream_options"] = {"include_usage": True}
                if can.continuous_usage and not can.return_token_ids:
                    body["stream_options"]["continuous_usage_stats"] = True
        return {**body, **self._extra}

    def expected_prompt_tokens(self, request: Request) -> int | None:
        """Return how many tokens the server must count in the prompt; None when it gets the ids."""
        prompt = request.prompt
        if self._api == "completions":
            return None if self._can.token_id_prompts else len(prompt.token_ids)
        if isinstance(prompt, ChatPrompt):
            return len(prompt.token_ids)
        return len(self._tokenizer.chat(_as_user(prompt)).token_ids)

    def _prompt(self, prompt: Prompt) -> dict[str, Any]:
        if self._api == "chat":
            if isinstance(prompt, ChatPrompt):
                return {"messages": list(prompt.messages)}
            if self._raw_as_user:
                return {"messages": _as_user(prompt)}
            raise UnsupportedError(
                "a raw prompt cannot be sent to a chat endpoint, which adds its template: use "
                "api=completions (or raw_as_user=true, for load only)"
            )
        if self._can.token_id_prompts:
            return {"prompt": prompt.token_ids}
        return {"prompt": prompt.text, **self._special_tokens(prompt)}

    def _special_tokens(self, prompt: Prompt) -> dict[str, Any]:
        """Return what keeps a server from putting a second begin token before a rendered chat."""
        begin = self._tokenizer.bos_token_id
        if begin is None or prompt.token_ids[:1] != (begin,):
            return {}
        rendered = self._tokenizer.encode(prompt.text)[:1] == (begin,)
        return {"add_special_tokens": False} if rendered else {}

    def _sampling(self, sampling: Sampling) -> dict[str, Any]:
        can = self._can
        body: dict[str, Any] = {
            can.length_field: sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            **can.neutral,
        }
        if sampling.top_k > 0:
            body["top_k"] = sampling.top_k
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.ignore_eos:
            if not can.ignore_eos:
                raise UnsupportedError(
                    "the server does not take ignore_eos, so that outputs have no set length"
                )
            body["ignore_eos"] = True
        return body

    def top(self, k: int | None) -> int:
        """Return how many of the most probable ids are asked for: none where ranks make them unnecessary."""
        return (0 if self._can.ranks else 1) if k is None else k

    def scoring(self, token_ids: Sequence[int], k: int | None = None) -> dict[str, Any]:
        """Return the body that asks for log-probabilities of a prompt, with the `k` most probable ids."""
        can = self._can
        if not can.prompt_logprobs:
            raise UnsupportedError(
                f"this endpoint gives no log-probabilities of prompts: {can.prompt_logprobs_missing}"
            )
        sampling = self._sampling(Sampling(max_tokens=can.score_tokens))
        body = {**self._base, "prompt": list(token_ids), **sampling}
        top = self.top(k)
        if can.prompt_logprobs == "prompt_logprobs":
            return {**body, "prompt_logprobs": top, **self._extra}
        return {
            **body, "echo": True, "logprobs": top, "return_tokens_as_token_ids": True, **self._extra
        }  # fmt: skip


def _as_user(prompt: Prompt) -> list[Message]:
    return [{"role": "user", "content": prompt.text}]


def completion_of(
    request: Request,
    answer: Mapping[str, Any],
    *,
    api: API,
    tokenizer: Tokenizer,
    prompt_tokens: int | None,
    elapsed_s: float,
) -> Completion:
    """Return what a whole answer says; whatever is wrong with it makes an error of it, without text."""

    def failed(error: str) -> Completion:
        return Completion(request.request_id, "", (), "error", error, elapsed_s)

    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        return failed("the server's answer holds no choice")
    choice = choices[0]
    usage = answer.get("usage") or {}
    if prompt_tokens is not None and usage.get("prompt_tokens") != prompt_tokens:
        return failed(prompt_mismatch(usage.get("prompt_tokens"), prompt_tokens))
    reason, error = finish_of(choice.get("finish_reason"))
    if error is not None or reason == "cancelled":
        return failed(error or "the server cancelled the request")
    text = (
        choice.get("text") if api == "completions" else (choice.get("message") or {}).get("content")
    )
    text = text or ""
    ids = choice.get("token_ids")
    if ids is None:
        ids = list(tokenizer.encode(text))
        ended = reason == "stop" and usage.get("completion_tokens") == len(ids) + 1
        ids += [min(tokenizer.eos_token_ids)] if ended and tokenizer.eos_token_ids else []
    ends = [at for stop in request.sampling.stop if (at := text.find(stop)) >= 0]
    return Completion(
        request.request_id, text[: min(ends, default=None)], tuple(ids), reason, None, elapsed_s
    )


# ---- log-probabilities of prompts


@dataclass(frozen=True)
class PromptScores:
    """What a server says of a prompt's tokens, one entry each; the first token has None."""

    logprobs: list[float | None]
    ranks: list[int | None]
    tops: list[dict[int, float]]
    """The most probable ids; {} where they come without ids."""
    best: list[float]
    """The highest log-probability told at each position; infinity where only the token's own is."""


def prompt_scores(
    answer: Mapping[str, Any], token_ids: Sequence[int], how: PromptLogprobs, k: int
) -> PromptScores:
    """Read an answer's log-probabilities of its prompt, asked for with the top `k`.

    EngineError when they are missing or not of these ids.
    """
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    if how == "echo":
        return _echoed(choice.get("logprobs"), token_ids, k)
    entries = choice.get("prompt_logprobs")
    if entries is None:
        entries = answer.get("prompt_logprobs")
    if not isinstance(entries, list):
        raise EngineError("the answer holds no prompt_logprobs")
    _check_shape(len(entries), entries[0] if entries else 0, token_ids)
    scores = PromptScores([None], [None], [{}], [0.0])
    for position in range(1, len(token_ids)):
        entry, key = entries[position], str(token_ids[position])
        if not isinstance(entry, dict) or key not in entry:
            raise EngineError(
                f'prompt_logprobs do not hold token "{key}" at position {position}: they are misaligned'
            )
        own = entry[key]
        scores.logprobs.append(_logprob(own["logprob"]))
        scores.ranks.append(own.get("rank"))
        scores.tops.append({int(i): _logprob(e["logprob"]) for i, e in entry.items()})
        others = scores.tops[-1].values() if k else ()
        scores.best.append(max(others, default=float("inf")))
    return scores


def _echoed(told: Any, token_ids: Sequence[int], k: int) -> PromptScores:
    if not isinstance(told, dict) or not isinstance(told.get("token_logprobs"), list):
        raise EngineError("the answer holds no logprobs of the echoed prompt")
    values, tokens = told["token_logprobs"], told.get("tokens") or []
    if len(values) < len(token_ids):
        _check_shape(len(values), None, token_ids)
    _check_shape(len(token_ids), values[0], token_ids)
    tops = told.get("top_logprobs") or [None] * len(values)
    top1 = told.get("is_top1") or [None] * len(values)
    scores = PromptScores([None], [None], [{}], [0.0])
    for position in range(1, len(token_ids)):
        token = tokens[position] if position < len(tokens) else ""
        wrong = token.startswith(ID_PREFIX) and token != f"{ID_PREFIX}{token_ids[position]}"
        if wrong or values[position] is None:
            raise EngineError(
                f'the echoed prompt does not hold token "{token_ids[position]}" at position {position}: '
                "its log-probabilities are misaligned"
            )
        top = tops[position] or {}
        own = _logprob(values[position])
        scores.logprobs.append(own)
        scores.ranks.append(None if top1[position] is None else 2 - bool(top1[position]))
        by_id = {
            int(k.removeprefix(ID_PREFIX)): _logprob(v)
            for k, v in top.items()
            if k.startswith(ID_PREFIX)
        }
        scores.tops.append(by_id)
        others = map(_logprob, top.values()) if k else ()
        scores.best.append(max(others, default=float("inf")))
    return scores


def _check_shape(entries: int, first: Any, token_ids: Sequence[int]) -> None:
    if entries != len(token_ids):
        raise EngineError(
            f'"{entries}" log-probabilities for a prompt of "{len(token_ids)}" tokens: they are misaligned'
        )
    if first is not None:
        raise EngineError(
            "the first token of a prompt has a log-probability, though nothing is before it: they are misaligned"
        )


def _logprob(value: float) -> float:
    return float("-inf") if value <= FLOOR else float(value)


def token_logprobs(request: ScoreRequest, scores: PromptScores) -> TokenLogprobs:
    """Return the scored positions; whether a token was the argmax comes from its rank, else from the top."""
    span = range(request.first_scored, len(request.token_ids))
    logprobs = np.array([scores.logprobs[i] for i in span], dtype=np.float64)
    top1 = np.array(
        [
            rank == 1
            if (rank := scores.ranks[i]) is not None
            else scores.logprobs[i] == scores.best[i]
            for i in span
        ],
        dtype=np.bool_,
    )
    return TokenLogprobs(request.request_id, logprobs, top1)


def top_of(request: ScoreRequest, scores: PromptScores, k: int) -> TopLogprobs:
    """Return the `k` most probable ids of the scored positions. UnsupportedError when fewer were told."""
    ids, logprobs = [], []
    for i in range(request.first_scored, len(request.token_ids)):
        best = sorted(scores.tops[i].items(), key=lambda item: (-item[1], item[0]))[:k]
        if len(best) < k:
            raise UnsupportedError(
                f'the server tells "{len(best)}" of the "{k}" most probable tokens asked for, with their ids'
            )
        ids.append([token for token, _ in best])
        logprobs.append([value for _, value in best])
    return TopLogprobs(
        request.request_id,
        np.array(ids, dtype=np.int64).reshape(-1, k),
        np.array(logprobs, dtype=np.float64).reshape(-1, k),
    )

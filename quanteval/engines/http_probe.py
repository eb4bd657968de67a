"""Finds out at the start, with a few small requests, what an endpoint can do and whether its scores are right.

A field that a server refuses is left out from then on; one that it silently ignores shows in the
answer. Log-probabilities of prompts are used only when a known text proves them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from quanteval.engines.http_bodies import (
    ID_PREFIX,
    Bodies,
    Capabilities,
    PromptLogprobs,
    PromptScores,
    prompt_scores,
)
from quanteval.engines.http_chunks import DONE, error_text
from quanteval.engines.http_wire import API, GoneError, RefusedError, Wire
from quanteval.engines.sse import EventParser
from quanteval.errors import ConfigError, EngineError
from quanteval.interfaces import Tokenizer

TEXT = "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday,"
MORE = " Saturday and Sunday."
NEW_TOKENS = 4
NEUTRAL: tuple[dict[str, float], ...] = (
    {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
)
TOLERANCE = 0.5
"""Nats by which one token's log-probability may differ between two forwards in low precision."""
MEDIAN_TOLERANCE = 0.1


@dataclass(frozen=True)
class Probed:
    """What the start of a session found out."""

    model: str
    max_model_len: int | None
    can: Capabilities = field(default_factory=Capabilities)


async def probe(wire: Wire, tokenizer: Tokenizer, *, text_only: bool = False) -> Probed:
    """Ask the endpoint what it can do. EngineError when it does not answer, ConfigError for a wrong model."""
    remote = wire.remote
    model, limit = await _model(wire)
    asker = _Asker(wire, tokenizer, {"model": model} if model else {})
    can = await asker.generation(remote.api, text_only=text_only)
    can = await asker.streaming(remote.api, can)
    can = await asker.prompt_logprobs(can)
    return Probed(model, limit, can)


async def _model(wire: Wire) -> tuple[str, int | None]:
    """Return the name to ask for and its longest context, as far as the endpoint lists its models."""
    remote = wire.remote
    try:
        listed = json.loads(await wire.get(f"{remote.base_url}/models")).get("data")
    except (RefusedError, ValueError, AttributeError):
        return remote.model, None
    entries = {
        entry["id"]: entry
        for entry in listed or []
        if isinstance(entry, dict) and isinstance(entry.get("id"), str)
    }
    if remote.model and entries and remote.model not in entries:
        known = ", ".join(sorted(entries)[:5])
        raise ConfigError(
            f'model "{remote.model}" is not served at {remote.base_url}; it serves: {known}'
        )
    if not remote.model and len(entries) > 1:
        known = ", ".join(sorted(entries)[:5])
        raise ConfigError(f'model "" is not enough at {remote.base_url}: name one of {known}')
    name = remote.model or next(iter(entries), "")
    limit = entries.get(name, {}).get("max_model_len")
    return name, limit if isinstance(limit, int) and limit > 0 else None


class _Asker:
    """Puts the questions for one model."""

    def __init__(self, wire: Wire, tokenizer: Tokenizer, base: Mapping[str, Any]) -> None:
        self._wire = wire
        self._tokenizer = tokenizer
        self._base = {**base, "temperature": 0.0}
        self._extra = wire.remote.extra_body
        self._prompt = tokenizer.raw(TEXT)
        self._refusal: RefusedError | None = None

    async def _ask(self, body: Mapping[str, Any], api: API) -> dict[str, Any] | None:
        """Return the answer, None when the request is refused for its fields."""
        try:
            return await self._wire.ask({**self._base, **body, **self._extra}, api)
        except RefusedError as refusal:
            if refusal.status in (400, 404, 405, 415, 422, 500, 501):
                self._refusal = refusal
                return None
            raise

    # ---- generation

    async def generation(self, api: API, *, text_only: bool) -> Capabilities:
        """Find the prompt's form and which fields are taken."""
        plain = self._plain(api)
        can = Capabilities(token_id_prompts=api == "completions" and not text_only)
        everything = {"ignore_eos": True, "return_token_ids": True, **NEUTRAL[0]}
        body = {**self._form(api, can, plain), "max_tokens": NEW_TOKENS, **everything}
        answer = await self._ask(body, api)
        if answer is not None and (not can.token_id_prompts or self._counts_ids(answer)):
            return self._seen(replace(can, ignore_eos=True, neutral=NEUTRAL[0]), answer)
        return await self._one_by_one(api, can, plain)

    async def _one_by_one(
        self, api: API, can: Capabilities, plain: Mapping[str, Any]
    ) -> Capabilities:
        if can.token_id_prompts:
            answer = await self._ask({**self._form(api, can, plain), "max_tokens": 1}, api)
            can = replace(can, token_id_prompts=answer is not None and self._counts_ids(answer))
        form = self._form(api, can, plain)
        if await self._ask({**form, "max_tokens": 1}, api) is None:
            refusal = self._refusal
            can = replace(can, length_field="max_completion_tokens")
            if await self._ask({**form, can.length_field: 1}, api) is None and refusal is not None:
                raise refusal
        body = {**form, can.length_field: NEW_TOKENS}
        if await self._ask({**body, "ignore_eos": True}, api) is not None:
            can = replace(can, ignore_eos=True)
        for neutral in NEUTRAL:
            if await self._ask({**body, **neutral}, api) is not None:
                can = replace(can, neutral=neutral)
                break
        answer = await self._ask({**body, "return_token_ids": True}, api)
        if answer is None:
            answer = await self._ask(body, api)
        return self._seen(can, answer or {})

    def _plain(self, api: API) -> dict[str, Any]:
        if api == "chat":
            return {"messages": [{"role": "user", "content": TEXT}]}
        return {"prompt": TEXT}

    def _form(self, api: API, can: Capabilities, plain: Mapping[str, Any]) -> dict[str, Any]:
        if api == "completions" and can.token_id_prompts:
            return {"prompt": list(self._prompt.token_ids)}
        return dict(plain)

    def _counts_ids(self, answer: Mapping[str, Any]) -> bool:
        """Whether the server saw the token ids as such: it counts as many as were sent."""
        usage = answer.get("usage") or {}
        return bool(usage.get("prompt_tokens") == len(self._prompt.token_ids))

    def _seen(self, can: Capabilities, answer: Mapping[str, Any]) -> Capabilities:
        choice = _first(answer)
        usage = answer.get("usage") or {}
        return replace(
            can,
            return_token_ids=isinstance(choice.get("token_ids"), list),
            usage=isinstance(usage.get("completion_tokens"), int),
        )

    # ---- streaming

    async def streaming(self, api: API, can: Capabilities) -> Capabilities:
        """Find out how a stream tells its numbers of tokens."""
        body = {**self._form(api, can, self._plain(api)), can.length_field: NEW_TOKENS}
        body["stream"] = True
        if can.return_token_ids:
            body["return_token_ids"] = True
        options = (
            {"include_usage": True, "continuous_usage_stats": True},
            {"include_usage": True},
            None,
        )
        for option in options:
            asked = {**body, "stream_options": option} if option else body
            events = await self._events(asked, api)
            if events is not None:
                break
        else:
            raise EngineError(f"the server at {self._wire.remote.base_url} does not stream answers")
        told = [event for event in events if event.get("usage")]
        running = [event for event in told if event.get("choices")]
        ids = [_first(event).get("token_ids") is not None for event in events]
        return replace(
            can,
            stream_usage=bool(option and told),
            continuous_usage=len(running) > 1,
            return_token_ids=can.return_token_ids and any(ids),
        )

    async def _events(self, body: Mapping[str, Any], api: API) -> list[dict[str, Any]] | None:
        parser, found = EventParser(), []
        try:
            async with self._wire.posted({**self._base, **body, **self._extra}, api) as response:
                async for piece in response.content.iter_any():
                    found += [e.data for e in parser.feed(piece) if e.data != DONE]
        except RefusedError as refusal:
            if refusal.status in (400, 422, 500, 501):
                return None
            raise
        except (OSError, TimeoutError) as error:
            raise await self._wire.remote.explain(error) from error
        try:
            events = [json.loads(data) for data in found]
        except ValueError:
            return None
        usable = all(isinstance(event, dict) and not error_text(event) for event in events)
        return events if usable else None

    # ---- log-probabilities of prompts

    async def prompt_logprobs(self, can: Capabilities) -> Capabilities:
        """Choose how log-probabilities of prompts are asked for, if a known text proves them right."""
        if self._wire.remote.api == "completions" and not can.token_id_prompts:
            return replace(can, prompt_logprobs_missing="it takes no token ids as prompts")
        reasons = []
        for how, least in (("prompt_logprobs", 1), ("echo", 0), ("echo", 1)):
            tried = replace(
                can, prompt_logprobs=cast(PromptLogprobs, how), ranks=True, score_tokens=least
            )
            try:
                first = await self._score(tried, self._prompt.token_ids)
                if first.ranks[-1] is None:
                    tried = replace(tried, ranks=False)
                    first = await self._score(tried, self._prompt.token_ids)
                await self._prove(tried, first)
            except GoneError:
                raise
            except EngineError as error:
                reasons.append(f"by {how}: {error}")
                continue
            return tried
        return replace(can, prompt_logprobs_missing="; ".join(dict.fromkeys(reasons)))

    async def _score(
        self, can: Capabilities, token_ids: Sequence[int], k: int | None = None
    ) -> PromptScores:
        bodies = Bodies(
            self._base.get("model", ""), "completions", can, self._tokenizer, self._extra
        )
        answer = await self._wire.ask(bodies.scoring(token_ids, k), "completions")
        scores = prompt_scores(answer, token_ids, can.prompt_logprobs, bodies.top(k))
        if can.prompt_logprobs == "echo":
            _check_echo(_first(answer)["logprobs"], self._tokenizer, token_ids)
        return scores

    async def _prove(self, can: Capabilities, first: PromptScores) -> None:
        """EngineError unless what comes later changes nothing and a greedy answer scores as the most probable."""
        ids = self._prompt.token_ids
        longer = ids + self._tokenizer.encode(MORE)
        again = await self._score(can, longer)
        _agree(first.logprobs[1:], again.logprobs[1 : len(ids)], "in a longer text")
        body = {"prompt": list(ids), "max_tokens": NEW_TOKENS, "logprobs": 1, **can.neutral}
        if can.return_token_ids:
            body["return_token_ids"] = True
        if can.ignore_eos:
            body["ignore_eos"] = True
        answer = await self._wire.ask({**self._base, **body, **self._extra}, "completions")
        choice = _first(answer)
        said = choice.get("token_ids")
        if said is None:
            said = self._tokenizer.encode(choice.get("text") or "")
        if not said:
            raise EngineError(
                "the endpoint's greedy answer to a known text is empty: nothing to prove by"
            )
        scored = await self._score(can, (*ids, *said), k=1)
        span = range(len(ids), len(ids) + len(said))
        gaps = [
            0.0 if scored.ranks[i] == 1 else scored.best[i] - (scored.logprobs[i] or 0.0)
            for i in span
        ]
        # Without the size of a gap, one tie of low precision is let pass.
        if any(TOLERANCE < gap < np.inf for gap in gaps) or gaps.count(np.inf) > 1:
            raise EngineError(
                "the tokens of a greedy answer are not the most probable ones by the log-probabilities of the "
                "same text as a prompt: these are misaligned"
            )
        told = (choice.get("logprobs") or {}).get("token_logprobs")
        if isinstance(told, list) and len(told) == len(said) and None not in told:
            _agree(told, [scored.logprobs[i] for i in span], "of the same tokens when generated")


def _agree(first: Sequence[float | None], second: Sequence[float | None], where: str) -> None:
    """EngineError when two lists of log-probabilities differ by more than low precision explains."""
    apart = np.abs(np.array(first, dtype=float) - np.array(second, dtype=float))
    if len(apart) and not (apart.max() <= TOLERANCE and np.median(apart) <= MEDIAN_TOLERANCE):
        raise EngineError(
            f'the log-probabilities of a known text and those {where} differ by up to "{apart.max():.3g}" nats: '
            "they are misaligned"
        )


def _check_echo(told: Mapping[str, Any], tokenizer: Tokenizer, token_ids: Sequence[int]) -> None:
    """EngineError when echoed tokens, told as text, are not those of the prompt."""
    tokens = (told.get("tokens") or [])[: len(token_ids)]
    if all(str(token).startswith(ID_PREFIX) for token in tokens):
        return
    joined = "".join(map(str, tokens))
    if not joined.endswith(tokenizer.decode(token_ids)):
        raise EngineError(f'the echoed prompt reads "{joined[:80]}", which is not what was sent')


def _first(answer: Mapping[str, Any]) -> dict[str, Any]:
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    return choice if isinstance(choice, dict) else {}

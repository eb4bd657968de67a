"""The exchanges themselves, as coroutines: one answer whole, one streamed, one sequence scored."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import aiohttp

from quanteval.engines.http_bodies import (
    Bodies,
    Capabilities,
    PromptScores,
    completion_of,
    prompt_scores,
)
from quanteval.engines.http_chunks import ChunkMaker
from quanteval.engines.http_wire import GoneError, Wire, arrival_clock
from quanteval.engines.sse import EventParser
from quanteval.errors import EngineError, QuantevalError, UnsupportedError
from quanteval.interfaces import Chunk, Completion, Request, ScoreRequest, Tokenizer

DRAIN_S = 0.05


class Calls:
    """What can be asked of one endpoint; `limit` is the most tokens one request may hold."""

    def __init__(
        self,
        wire: Wire,
        tokenizer: Tokenizer,
        bodies: Bodies,
        can: Capabilities,
        limit: int,
        *,
        reasoning_in_text: bool = False,
    ) -> None:
        self._wire = wire
        self._api = wire.remote.api
        self._tokenizer = tokenizer
        self._bodies = bodies
        self._can = can
        self._limit = limit
        self._reasoning_in_text = reasoning_in_text

    def _refusal(self, request: Request) -> str | None:
        length, wanted = len(request.prompt.token_ids), request.sampling.max_tokens
        if length == 0:
            return "the prompt is empty"
        if wanted < 1:
            return f'max_tokens "{wanted}" must be at least 1'
        if length + wanted > self._limit:
            return (
                f"{length} prompt and {wanted} output tokens are more than the {self._limit} "
                "one request may hold"
            )
        return None

    async def complete(self, request: Request) -> Completion:
        """Return the whole answer, or the error in its place; raises EngineError only when the server is gone."""
        if refusal := self._refusal(request):
            return Completion(request.request_id, "", (), "error", refusal)
        started = time.perf_counter()
        try:
            answer = await self._wire.ask(self._bodies.generation(request))
        except GoneError:
            raise
        except (EngineError, UnsupportedError) as error:
            elapsed = time.perf_counter() - started
            return Completion(request.request_id, "", (), "error", str(error), elapsed)
        return completion_of(
            request,
            answer,
            api=self._api,
            tokenizer=self._tokenizer,
            prompt_tokens=self._bodies.expected_prompt_tokens(request),
            elapsed_s=time.perf_counter() - started,
        )

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        """Yield chunks as they arrive, each with the time at which its bytes came in.

        Whatever goes wrong is an error chunk; only a server that is gone before it answers raises
        EngineError.
        """
        clock = time.perf_counter
        if refusal := self._refusal(request):
            yield Chunk((), clock(), "error", refusal)
            return
        maker, parser = self._maker(request), EventParser()
        failure: str | None = None
        try:
            async with self._wire.posted(self._bodies.generation(request, stream=True)) as response:
                read, arrived = response.content.readany, arrival_clock(response)
                while not maker.done and maker.error is None:
                    piece = await read()
                    at_s = arrived()
                    for event in parser.feed(piece) if piece else parser.finish():
                        chunk = maker.take(event, at_s)
                        if chunk is not None:
                            yield chunk
                    if not piece:
                        break
                if maker.error is None:
                    try:
                        yield self._clean(maker.end(clock()))
                    finally:
                        await _drain(response)
                    return
        except GoneError:
            raise
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            failure = str(await self._wire.remote.explain(error))
        except (EngineError, UnsupportedError) as error:
            failure = str(error)
        yield self._clean(maker.end(clock(), failure))

    def _clean(self, chunk: Chunk) -> Chunk:
        if chunk.error is None:
            return chunk
        return Chunk((), chunk.at_s, "error", self._wire.remote.clean(chunk.error))

    def _maker(self, request: Request) -> ChunkMaker:
        expected = None
        if self._can.stream_usage:
            with contextlib.suppress(QuantevalError):  # building the body says what is wrong
                expected = self._bodies.expected_prompt_tokens(request)
        return ChunkMaker(
            self._tokenizer.encode,
            api=self._api,
            prompt_tokens=expected,
            reasoning_in_text=self._reasoning_in_text,
            sent_s=time.perf_counter(),
        )

    async def score(self, request: ScoreRequest, k: int | None = None) -> PromptScores:
        """Return what the server says of a sequence's tokens. EngineError when it cannot or does not."""
        length = len(request.token_ids)
        if not 1 <= request.first_scored <= length or length > self._limit + 1:
            raise EngineError(
                f'"{request.request_id}": {length} tokens, scored from {request.first_scored}, cannot be '
                f"scored here (at most {self._limit + 1})"
            )
        body = self._bodies.scoring(request.token_ids, k)
        answer = await self._wire.ask(body, "completions")
        top = self._bodies.top(k)
        return prompt_scores(answer, request.token_ids, self._can.prompt_logprobs, top)


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read the little that follows the last event, so that the connection can be used again."""
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            while not response.content.at_eof():
                await response.content.readany()

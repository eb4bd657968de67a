"""The client beside a server that keeps the truth: its counts and times are the server's own."""

from __future__ import annotations

import asyncio
import itertools
import statistics

import pytest

from quanteval.engines.fake import ByteTokenizer
from quanteval.engines.http_session import HTTPSession
from quanteval.engines.http_wire import Remote
from quanteval.errors import EngineError, UnsupportedError
from quanteval.interfaces import Request, Sampling, ScoreRequest

mock = pytest.importorskip("quanteval.server.mock")
TOKENIZER = ByteTokenizer()
LATE_S = 0.25
"""More than a loaded machine holds back a chunk at the median; a wrong count or formula is off by whole gaps."""


def session_on(server, *, api="completions", **fields) -> HTTPSession:
    return HTTPSession(Remote(server.base_url, api=api), TOKENIZER, raw_as_user=True, **fields)


def ask(name: str = "r", tokens: int = 24) -> Request:
    return Request(name, TOKENIZER.raw("hello"), Sampling(max_tokens=tokens, ignore_eos=True))


async def both(session, count: int, tokens: int):
    async def one(i):
        return [chunk async for chunk in session.astream(ask(str(i), tokens))]

    return await asyncio.gather(*(one(i) for i in range(count)))


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tokens_per_chunk": 4},
        {"role_only_first_chunk": True, "usage_only_last_chunk": False},
        {"reasoning_tokens": 8, "tokens_per_chunk": 4, "cached_prompt_tokens": 3},
        {"reasoning_tokens": 5, "reasoning_field": "reasoning"},
        {"stall_at_s": 0.05, "stall_s": 0.4},
    ],
    ids=["one", "four", "role", "reasoning4", "reasoning", "stall"],
)
def test_counts_and_times_are_the_servers(api, settings):
    made = mock.MockSettings(ttft_s=0.05, itl_s=0.01, default_answer="abcdefg", **settings)
    with mock.MockServer(made) as server, session_on(server, api=api) as session:
        server.reset()
        found = asyncio.run(both(session, 5, 24))
        truths = server.truth()
        assert len(truths) == 5
        for chunks in found:
            arrivals = [chunk for chunk in chunks if chunk.count]
            counts = [chunk.count for chunk in arrivals]
            assert sum(counts) == 24 and chunks[-1].finish_reason == "length"
            assert chunks[-1].cached_prompt_tokens == made.cached_prompt_tokens
            # Requests go out at once and are alike: each arrival is matched with those of any of them.
            truth = min(
                (t for t in truths if t["chunk_tokens"] == counts),
                key=lambda t: abs(t["chunk_s"][0] - arrivals[0].at_s),
            )
            late = [c.at_s - at for c, at in zip(arrivals, truth["chunk_s"], strict=True)]
            assert statistics.median(late) < LATE_S
            if made.stall_s:
                gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(arrivals)]
                assert max([*gaps, arrivals[0].at_s - truth["received_s"]]) > made.stall_s


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stream_error_after": 6, "stream_error_text": "out of memory"}, "out of memory"),
        ({"drop_connection_after": 6}, "broke"),
        ({"stream_error_after": 0}, "scripted failure"),
    ],
)
def test_failures_in_the_middle_are_errors_after_the_tokens_that_came(settings, words):
    # The probing at the start must not fail: numbers count anew from the reset.
    made = mock.MockSettings(default_answer="abcdefghijkl", tokens_per_chunk=2, **settings)
    with mock.MockServer(mock.MockSettings()) as server:
        with session_on(server) as session, mock.MockServer(made) as failing:
            session._wire.remote = Remote(failing.base_url)
            chunks = list(session.stream(ask(tokens=10)))
        after = settings.get("stream_error_after", settings.get("drop_connection_after"))
        assert sum(chunk.count for chunk in chunks) == after
        assert chunks[-1].finish_reason == "error" and words in chunks[-1].error


@pytest.mark.parametrize("how", ["shifted", "refused", "ignored"])
def test_log_probabilities_that_are_wrong_or_missing_are_refused(how):
    made = mock.MockSettings(prompt_logprobs=how)
    scored = [ScoreRequest("s", (97, 98, 99))]
    with (
        mock.MockServer(made) as server,
        session_on(server) as session,
        pytest.raises(UnsupportedError, match="no log-probabilities of prompts"),
    ):
        list(session.loglikelihood(scored))


def test_a_killed_server_is_gone():
    with (
        mock.MockServer(mock.MockSettings(itl_s=0.05), subprocess=True) as server,
        session_on(server) as session,
    ):
        stream = session.stream(ask(tokens=200))
        assert next(stream).count == 1
        server.kill()
        *_, last = stream
        assert last.finish_reason == "error" and last.error
        with pytest.raises(EngineError, match="is gone"):
            list(session.generate([ask()]))


def test_metrics_are_read_while_it_serves():
    with mock.MockServer(mock.MockSettings()) as server, session_on(server) as session:
        server_side = session.server_metrics()
        assert any("generation_tokens" in name for name in server_side)

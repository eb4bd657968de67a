"""A session over HTTP: probing, generating, streaming, scoring, and every way in which a server fails."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from quanteval.engines.fake import ByteTokenizer
from quanteval.engines.http_bodies import ChatPrompt
from quanteval.engines.http_session import HTTPSession
from quanteval.engines.http_wire import Remote, Wire, base_url_of, key_from
from quanteval.errors import ConfigError, EngineError, UnsupportedError
from quanteval.interfaces import (
    GivesTopLogprobs,
    Prompt,
    Request,
    Sampling,
    ScoreRequest,
    StreamsAsync,
    TellsMetrics,
)
from tests.engines.scripted_server import (
    TABLE,
    Script,
    ScriptedServer,
    chat_event,
    text_event,
    usage_event,
)

TOKENIZER = ByteTokenizer()
ALL = Script().fields


def request(text: str = "hello", tokens: int = 8, name: str = "r", **sampling) -> Request:
    return Request(name, TOKENIZER.raw(text), Sampling(max_tokens=tokens, **sampling))


def session_on(server: ScriptedServer, *, api: str = "completions", key: str = "", **fields):
    return HTTPSession(
        Remote(server.url, api=api, key=key, silence_timeout_s=20), TOKENIZER, **fields
    )


@pytest.fixture
def server():
    with ScriptedServer() as running:
        yield running


@pytest.fixture
def session(server):
    with session_on(server) as opened:
        yield opened


def collect(session, asked=None):
    return list(session.stream(asked or request()))


async def acollect(session, asked):
    return [chunk async for chunk in session.astream(asked)]


# ---- what it is


def test_it_implements_the_seams(session):
    assert isinstance(session, StreamsAsync)
    assert isinstance(session, TellsMetrics)
    assert isinstance(session, GivesTopLogprobs)
    assert session.max_context == 510
    with pytest.raises(UnsupportedError, match="hidden states"):
        session.hidden_states([])
    with pytest.raises(UnsupportedError, match="output head"):
        session.output_head()


def test_what_an_endpoint_tells_is_marked_as_declared(server):
    with session_on(server, declared="awq, 4 bits a weight") as session:
        effective = session.describe()
        assert "declared, not read back: awq, 4 bits a weight" in effective.emulation
        assert np.isnan(effective.bits_per_weight) and np.isnan(effective.activation_bits)
        memory = session.memory()
        assert memory.process_peak_bytes == 0 and "not known" in memory.activation_peak_how


def test_the_longest_request_is_the_smallest_known(server):
    with session_on(server, max_context=100, fallback_context=90) as session:
        assert session.max_context == 100
    server.script.max_model_len = None
    with session_on(server, fallback_context=90) as session:
        assert session.max_context == 88
    with pytest.raises(UnsupportedError, match="longest context"), session_on(server):
        pass


def test_an_unopened_session_says_so(server):
    with pytest.raises(EngineError, match="not open"):
        list(session_on(server).generate([request()]))


# ---- probing


@pytest.mark.parametrize("strict", [False, True], ids=["ignores", "refuses"])
@pytest.mark.parametrize(
    "without", ["return_token_ids", "top_k", "prompt_logprobs", "stream_options"]
)
def test_probing_finds_what_is_missing(server, without, strict):
    server.script.fields = ALL - {without}
    server.script.strict = strict
    with session_on(server) as session:
        can = session.capabilities
        assert can.token_id_prompts
        assert can.return_token_ids == (without != "return_token_ids")
        assert can.stream_usage == (without != "stream_options")
        assert can.prompt_logprobs == (
            "echo" if without == "prompt_logprobs" else "prompt_logprobs"
        )
        assert bool(can.neutral) == (without != "top_k" or not strict)
        (done,) = session.generate([request(tokens=6)])
        assert done.finish_reason == "length" and done.error is None
        assert len(done.token_ids) == 6
        assert sum(chunk.count for chunk in session.stream(request(tokens=6))) == 6


def test_a_server_that_takes_text_only(server):
    server.script.takes_ids = False
    with session_on(server) as session:
        assert not session.capabilities.token_id_prompts
        (done,) = session.generate([request()])
        assert done.error is None
        assert isinstance(server.script.bodies[-1]["prompt"], str)
        with pytest.raises(UnsupportedError, match="no token ids as prompts"):
            list(session.loglikelihood([ScoreRequest("s", (1, 2, 3))]))


def test_text_that_arrives_as_another_number_of_tokens_is_an_error(server):
    server.script.takes_ids = False
    with session_on(server) as session:
        server.script.counts_prompt = 1
        (done,) = session.generate([request("hello")])
        assert done.finish_reason == "error" and done.text == ""
        assert 'counted "6" prompt tokens where the tokenizer here makes "5"' in done.error
        assert "arrive as it was made" in collect(session)[-1].error


def test_neither_ids_nor_usage_is_refused(server):
    server.script.takes_ids = server.script.tells_usage = False
    with (
        pytest.raises(UnsupportedError, match="nothing shows whether prompts arrive"),
        session_on(server),
    ):
        pass


def test_the_model_must_be_one_that_is_served(server):
    remote = Remote(server.url, model="other")
    with (
        pytest.raises(ConfigError, match=r'model "other" is not served at .* it serves: tiny'),
        HTTPSession(remote, TOKENIZER),
    ):
        pass


def test_a_server_without_a_list_of_models_is_taken_at_its_word(server):
    server.script.lists_models = False
    with HTTPSession(Remote(server.url, model="x"), TOKENIZER, max_context=64) as session:
        assert [c.error for c in session.generate([request()])] == [None]
        assert server.script.bodies[-1]["model"] == "x"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shift": 1}, "misaligned"),
        ({"shift": -1}, "misaligned"),
        ({"leak": 0.02}, "in a longer text differ"),
        ({"fields": ALL - {"prompt_logprobs", "echo"}}, "no logprobs|misaligned|log-probabilities"),
    ],
)
def test_log_probabilities_that_are_not_right_are_refused(server, change, reason):
    script = server.script
    script.fields = ALL - {"echo"}
    for name, value in change.items():
        setattr(script, name, value)
    with session_on(server) as session:
        assert session.capabilities.prompt_logprobs == ""
        with pytest.raises(UnsupportedError, match="no log-probabilities of prompts: ") as caught:
            list(session.loglikelihood([ScoreRequest("s", (97, 98, 99))]))
        assert caught.match(reason)
        assert [c.error for c in session.generate([request()])] == [None]


# ---- scoring


@pytest.mark.parametrize("how", ["prompt_logprobs", "echo"])
@pytest.mark.parametrize("ranks", [True, False])
def test_log_probabilities_are_the_models(server, how, ranks):
    server.script.ranks = ranks
    server.script.fields = ALL - ({"prompt_logprobs"} if how == "echo" else set())
    rng = np.random.default_rng(0)
    asked = []
    for i in range(40):
        ids = tuple(int(x) for x in rng.integers(97, 123, size=int(rng.integers(2, 40))))
        ids += (int(TABLE[ids[-1]].argmax()),)
        asked.append(ScoreRequest(f"s{i}", ids, first_scored=1 + i % 2))
    with session_on(server, max_in_flight=7) as session:
        assert session.capabilities.prompt_logprobs == how
        found = list(session.loglikelihood(iter(asked)))
        assert [f.request_id for f in found] == [a.request_id for a in asked]
        for one, result in zip(asked, found, strict=True):
            ids = one.token_ids
            want = [TABLE[ids[i - 1], ids[i]] for i in range(one.first_scored, len(ids))]
            assert result.logprobs.dtype == np.float64
            np.testing.assert_allclose(result.logprobs, want, rtol=0, atol=1e-12)
            best = [TABLE[ids[i - 1]].argmax() == ids[i] for i in range(one.first_scored, len(ids))]
            assert result.is_top1.tolist() == best
            assert result.is_top1[-1]
        tops = list(session.top_logprobs(asked[:3], 5))
        for one, top in zip(asked, tops, strict=False):
            assert top.ids.shape == (len(one.token_ids) - one.first_scored, 5)
            row = TABLE[one.token_ids[one.first_scored - 1]]
            assert top.ids[0].tolist() == np.argsort(-row, kind="stable")[:5].tolist()
            np.testing.assert_allclose(top.logprobs[0], row[top.ids[0]], atol=1e-12)


def test_a_sequence_one_longer_than_a_request_is_scored_and_no_longer_one(session):
    ids = (97,) * (session.max_context + 1)
    (found,) = session.loglikelihood([ScoreRequest("s", ids)])
    assert len(found.logprobs) == session.max_context
    with pytest.raises(EngineError, match="at most 511"):
        list(session.loglikelihood([ScoreRequest("s", (*ids, 97))]))
    assert list(session.loglikelihood([])) == []
    (none,) = session.loglikelihood([ScoreRequest("s", (97, 98), first_scored=2)])
    assert len(none.logprobs) == 0


def test_a_failure_while_scoring_is_raised(server, session):
    server.script.status = 503
    with pytest.raises(EngineError, match='answered 503: "no such luck"'):
        list(session.loglikelihood([ScoreRequest("s", (97, 98))]))


# ---- generating


def test_completions_are_the_models_and_every_parameter_is_sent(server, session):
    asked = [request("abc", name=f"r{i}", stop=("\n",)) for i in range(20)]
    done = {c.request_id: c for c in session.generate(iter(asked))}
    assert set(done) == {r.request_id for r in asked}
    ids, last = [], ord("c")
    for _ in range(8):
        last = int(TABLE[last].argmax())
        ids.append(last)
    assert all(c.token_ids == tuple(ids) and c.text == bytes(ids).decode() for c in done.values())
    body = server.script.bodies[-1]
    assert body["prompt"] == list(b"abc")
    sampling = (
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
        "top_k",
        "min_p",
        "repetition_penalty",
    )
    assert {k: body[k] for k in sampling} == {
        "max_tokens": 8, "temperature": 0.0, "top_p": 1.0, "seed": 0, "top_k": 0, "min_p": 0.0,
        "repetition_penalty": 1.0,
    }  # fmt: skip
    assert body["stop"] == ["\n"]
    assert list(session.generate([])) == []


def test_requests_that_cannot_be_done_are_completions_with_an_error(session):
    asked = [
        Request("empty", Prompt("", ()), Sampling(max_tokens=1)),
        request(tokens=0, name="none"),
        request(tokens=600, name="long"),
        request(name="fine"),
    ]
    done = {c.request_id: c for c in session.generate(asked)}
    assert done["fine"].error is None
    assert "empty" in done["empty"].error and "at least 1" in done["none"].error
    assert "more than the 510" in done["long"].error
    assert collect(session, asked[2])[-1].error == done["long"].error


@pytest.mark.parametrize(
    "answer",
    [
        {"error": {"message": "CUDA out of memory"}},
        {"object": "error", "message": "CUDA out of memory"},
        b"CUDA out of memory",
        {"choices": [{"text": "CUDA out of memory", "finish_reason": "error"}]},
        {"choices": [{"text": "CUDA out of memory", "finish_reason": None}]},
        {"choices": []},
        {},
        b"[]",
    ],
)
def test_an_error_under_status_200_is_never_an_answer(server, session, answer):
    server.script.answer = answer
    (done,) = session.generate([request()])
    assert done.finish_reason == "error" and done.text == "" and done.error


def test_stop_strings_end_the_text_even_where_the_server_keeps_them(server, session):
    choice = {"text": "def f\n\nrest", "finish_reason": "stop", "token_ids": [1, 2]}
    server.script.answer = {"choices": [choice], "usage": {"completion_tokens": 2}}
    (done,) = session.generate([request(stop=("\n\n", "rest"))])
    assert done.text == "def f"


def test_a_generation_that_is_left_early_is_cancelled(server, session):
    server.script.slow_s = 0.2
    running = session.generate([request(name=str(i)) for i in range(64)])
    next(running)
    running.close()
    count = len(server.script.bodies)
    time.sleep(0.3)
    assert len(server.script.bodies) - count <= 1


def test_ignore_eos_that_is_refused_is_an_error(server):
    server.script.fields, server.script.strict = ALL - {"ignore_eos"}, True
    with session_on(server) as session:
        (done,) = session.generate([request(ignore_eos=True)])
        assert "does not take ignore_eos" in done.error
        assert "does not take ignore_eos" in collect(session, request(ignore_eos=True))[-1].error


# ---- streaming


@pytest.mark.parametrize("chunk_tokens", [1, 4])
@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("tells", ["ids", "running usage", "nothing"])
def test_tokens_and_times_are_the_servers(server, chunk_tokens, api, tells):
    script = server.script
    script.chunk_tokens, script.gap_s, script.continuous = (
        chunk_tokens,
        0.004,
        tells == "running usage",
    )
    script.fields = ALL if tells == "ids" else ALL - {"return_token_ids"}
    with session_on(server, api=api, raw_as_user=True) as session:
        chunks = collect(session, request("hello", tokens=21))
        truth = [(at, count) for at, count in script.sent if count]
        arrivals = [chunk for chunk in chunks if chunk.count]
        assert [chunk.count for chunk in arrivals] == [count for _, count in truth]
        assert sum(chunk.count for chunk in chunks) == 21
        # One machine, one clock: an arrival lies between its own sending and that of the one after the next.
        times = [at for at, _ in truth]
        assert all(c.at_s >= at for c, at in zip(arrivals, times, strict=True))
        assert [c.at_s for c in arrivals] == sorted(c.at_s for c in arrivals)
        assert chunks[-1].finish_reason == "length" and chunks[-1].error is None
        assert chunks[-1].cached_prompt_tokens == 5
        assert (
            "".join(c.text for c in chunks)
            == TOKENIZER.decode(sum((c.token_ids for c in chunks), ()))
            or tells != "ids"
        )


def test_streams_work_on_the_callers_loops_and_keep_their_connections(server, session):
    asked = [request(name=str(i), tokens=5) for i in range(30)]

    async def main():
        first = await asyncio.gather(*(acollect(session, r) for r in asked[:3]))
        server.script.connections.clear()
        for one in asked:
            async for chunk in session.astream(one):
                if chunk.finish_reason is not None:
                    break
        return first

    for _ in range(2):
        first = asyncio.run(main())
        assert all(sum(c.count for c in chunks) == 5 for chunks in first)
        assert len(server.script.connections) <= 3
    assert len(session._wire._clients) == 1


def test_leaving_a_stream_cancels_it_on_the_server(server, session):
    server.script.stream = [text_event("a", {"token_ids": [97]}), 30.0, b"data: [DONE]\n\n"]
    stream = session.stream(request())
    assert next(stream).token_ids == (97,)
    stream.close()

    async def cancelled():
        task = asyncio.create_task(acollect(session, request()))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    until = time.monotonic() + 10
    while server.script.cancelled < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert server.script.cancelled == 2


LENGTH = {"finish_reason": "length"}
BAD_STREAMS = {
    "error object": ([text_event("a"), b'data: {"error": {"message": "boom"}}\n\n'], "boom"),
    "error text": ([text_event("a"), b"data: boom\n\n"], "not JSON"),
    "error event": ([text_event("a"), b'event: error\ndata: {"message": "boom"}\n\n'], "error"),
    "error field": ([text_event("a"), b'error: {"error": "boom"}\n\n'], "boom"),
    "error at once": ([b'data: {"error": "boom"}\n\n', b"data: [DONE]\n\n"], "boom"),
    "no end": ([text_event("a")], "without a finish reason or"),
    "no reason": ([text_event("a"), b"data: [DONE]\n\n"], "without a finish reason"),
    "nothing": ([], "without a finish reason"),
    "reset": ([text_event("a"), 0.05, "reset"], "broke"),
    "half an event": ([text_event("a"), text_event("b", LENGTH)[:-20], "reset"], "broke"),
    "unknown reason": ([text_event("a", {"finish_reason": "content_filter"})], "content_filter"),
    "too few": ([text_event("a", {**LENGTH, "token_ids": [97]}), usage_event(5, 9)], 'counted "9"'),
    "too many": (
        [text_event("a", {**LENGTH, "token_ids": [97]}), usage_event(5, 0)],
        'counted "0"',
    ),
    "no object": ([b"data: 3\n\n"], "no object"),
}


@pytest.mark.parametrize("name", BAD_STREAMS)
def test_a_stream_that_goes_wrong_ends_in_an_error(server, session, name):
    server.script.stream, words = BAD_STREAMS[name]
    chunks = collect(session)
    assert chunks[-1].finish_reason == "error" and words in chunks[-1].error
    assert chunks[-1].count == 0 and chunks[-1].text == ""
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    server.script.stream = None
    assert collect(session)[-1].error is None


def test_an_http_error_is_an_error_with_the_servers_words(server, session):
    server.script.status = 429
    assert 'answered 429: "no such luck"' in collect(session)[-1].error
    (done,) = session.generate([request()])
    assert 'answered 429: "no such luck"' in done.error


def test_silence_is_an_error(server):
    with HTTPSession(Remote(server.url, silence_timeout_s=0.3), TOKENIZER) as session:
        server.script.stream = [text_event("a"), 5.0]
        assert "sent nothing for 0.3 s" in collect(session)[-1].error


def test_role_only_first_and_usage_only_last_chunks_are_no_arrivals(server):
    server.script.stream = [
        chat_event({"role": "assistant", "content": ""}), 0.05,
        chat_event({"content": "ab"}, {"token_ids": [97, 98]}), 0.05,
        chat_event({}, {"finish_reason": "stop"}), 0.05, usage_event(10, 3, 7), b"data: [DONE]\n\n",
    ]  # fmt: skip
    with session_on(server, api="chat") as session:
        prompt = session.tokenizer.chat([{"role": "user", "content": "x"}])
        assert isinstance(prompt, ChatPrompt)
        server.script.stream[6] = usage_event(len(prompt.token_ids), 3, 7)
        chunks = collect(session, Request("r", prompt, Sampling(max_tokens=9)))
        assert [chunk.count for chunk in chunks] == [2, 1]
        assert chunks[0].at_s >= server.script.sent[1][0]
        # The end token is counted by the server and shown by no event: it came with the finish reason.
        assert server.script.sent[2][0] <= chunks[1].at_s < server.script.sent[3][0]
        assert chunks[1].finish_reason == "stop" and chunks[1].cached_prompt_tokens == 7
        assert server.script.bodies[-1]["messages"] == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("shown", [False, True])
def test_reasoning_counts_and_is_part_of_the_text_only_when_asked(server, field, shown):
    server.script.fields = ALL - {"return_token_ids"}
    with session_on(server, api="chat", reasoning_in_text=shown) as session:
        prompt = session.tokenizer.chat([{"role": "user", "content": "x"}])
        server.script.stream = [
            chat_event({"role": "assistant", "content": None}), chat_event({field: "abc"}), 0.03,
            chat_event({"content": "de"}), chat_event({"content": ""}, LENGTH),
            usage_event(len(prompt.token_ids), 5), b"data: [DONE]\n\n",
        ]  # fmt: skip
        chunks = collect(session, Request("r", prompt, Sampling(max_tokens=9)))
        assert sum(chunk.count for chunk in chunks) == 5 and chunks[0].count == 3
        assert "".join(c.text for c in chunks) == ("abcde" if shown else "de")
        assert chunks[-1].error is None


def test_a_raw_prompt_does_not_go_to_a_chat_endpoint_unless_told_to(server):
    with session_on(server, api="chat") as session:
        (done,) = session.generate([request()])
        assert "raw prompt cannot be sent to a chat endpoint" in done.error
    with session_on(server, api="chat", raw_as_user=True) as session:
        assert [c.error for c in session.generate([request()])] == [None]


# ---- a server that is gone, keys


def test_a_server_that_is_gone_is_raised_with_its_reason(server):
    with session_on(server) as session:
        server.stop()
        with pytest.raises(EngineError, match=r"the server at http://127.0.0.1:\d+/v1 is gone"):
            list(session.generate([request(name=str(i)) for i in range(3)]))
        with pytest.raises(EngineError, match="is gone"):
            collect(session)
        with pytest.raises(EngineError, match="is gone"):
            list(session.loglikelihood([ScoreRequest("s", (1, 2))]))
        assert session.server_metrics() == {}


def test_the_reason_of_a_dead_process_is_told():
    alive = [None]
    with ScriptedServer() as server:
        remote = Remote(server.url, alive=lambda: alive[0])
        with HTTPSession(remote, TOKENIZER) as session:
            server.script.stream = [text_event("a"), "reset"]
            alive[0] = "was ended by SIGKILL: Killed"
            assert "is gone: was ended by SIGKILL: Killed" in collect(session)[-1].error


def test_nothing_at_the_address_is_raised_at_the_start():
    with (
        pytest.raises(EngineError, match="is gone"),
        HTTPSession(Remote("http://127.0.0.1:9/v1"), TOKENIZER),
    ):
        pass


def test_the_key_is_sent_and_never_shown(server, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-very-secret")
    key = key_from("SOME_KEY")
    with session_on(server, key=key) as session:
        assert "sk-very-secret" not in repr(session.remote)
        assert server.script.headers[-1]["Authorization"] == "Bearer sk-very-secret"
        server.script.answer = {"error": {"message": "bad key sk-very-secret\nsecond line"}}
        (done,) = session.generate([request()])
        assert "bad key *** second line" in done.error
        server.script.stream = [b'data: {"error": {"message": "bad key sk-very-secret"}}\n\n']
        assert collect(session)[-1].error == "bad key ***"
    with pytest.raises(ConfigError, match='api_key_env "NO_SUCH_KEY" is not set'):
        key_from("NO_SUCH_KEY")
    assert key_from("") == ""


def test_addresses():
    assert base_url_of("http://host:8000") == "http://host:8000/v1"
    assert base_url_of("https://host/api/v1/") == "https://host/api/v1"
    for bad in ("host:8000", "ftp://host", "http://"):
        with pytest.raises(ConfigError, match="is not an address"):
            base_url_of(bad)
    with pytest.raises(ConfigError) as caught:
        base_url_of("http://me:secret@host/v1")
    assert "secret" not in str(caught.value)


def test_server_metrics(server, session):
    pytest.importorskip("quanteval.engines.prometheus")
    assert session.server_metrics() == {"requests_total": 3.0}


def test_a_kept_connection_that_the_server_closed_is_no_failure():
    asked = []

    async def serve(reader, writer):
        for turn in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            asked.append(turn)
            if turn:  # the second request on a connection meets its end
                break
            body = b'{"choices": [{"text": "a", "finish_reason": "stop", "token_ids": [97]}]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        wire = Wire(Remote(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"))
        answers = [await wire.ask({"prompt": "x"}) for _ in range(2)]
        await wire.close()
        server.close()
        return answers

    first, second = asyncio.run(main())
    assert first == second and asked == [0, 1, 0]

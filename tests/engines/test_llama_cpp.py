"""The llama_cpp engine: what it sends and makes of answers, on a scripted server; the embedded model."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest

from quanteval.engines.gguf_census import GGUFCensus
from quanteval.engines.llama_cpp import LlamaCppEngine
from quanteval.engines.llama_cpp_server import ServerBackend
from quanteval.errors import EngineError, UnsupportedError
from quanteval.interfaces import Prompt, Request, Sampling, ScoreRequest

CENSUS = GGUFCensus((), layers=2, kv_heads=2, head_dim=16, context=512, vocabulary=261)


def encode(text):
    """Two tokens for a character of more than one byte."""
    return tuple(i for c in text for i in ([ord(c) % 50 + 50, 99] if ord(c) > 127 else [ord(c)]))


class Scripted(ThreadingHTTPServer):
    """Answers every completion by what `answer(body)` yields; keeps the bodies."""

    daemon_threads = True

    def __init__(self, answer):
        self.answer = answer
        self.bodies = []
        self.broken = threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        status, events = self.server.answer(body)
        self.send_response(status)
        self.end_headers()
        try:
            for event in events:
                data = (
                    event if isinstance(event, bytes) else f"data: {json.dumps(event)}\n\n".encode()
                )
                self.wfile.write(data)
                self.wfile.flush()
        except OSError:
            self.server.broken.set()

    def log_message(self, *_):
        pass


@pytest.fixture
def make():
    made = []

    def make_one(answer, **fields):
        server = Scripted(answer)
        address = f"http://127.0.0.1:{server.server_port}"
        engine = LlamaCppEngine(**fields)
        backend = ServerBackend(None, address, encode, frozenset({2}), engine, CENSUS)
        made.append((server, backend))
        return server, backend

    yield make_one
    for server, backend in made:
        backend.close()
        server.shutdown()
        server.server_close()


class Sink(list):
    def __init__(self):
        self.ended = threading.Event()
        self.first = threading.Event()

    def __call__(self, piece):
        self.append(piece)
        self.first.set()
        if piece.finish_reason is not None:
            self.ended.set()

    def wait(self):
        assert self.ended.wait(20)
        return self


def request(**sampling):
    return Request("a", Prompt("", (5, 6)), Sampling(**{"max_tokens": 3, **sampling}))


def token(i):
    return {"tokens": [i], "stop": False}


def end(kind, **more):
    timings = {"cache_n": 0, "prompt_ms": 50.0, "predicted_ms": 20.0}
    return {"tokens": [], "stop": True, "stop_type": kind, "timings": timings, **more}


def test_ids_reasons_and_layers(make):
    server, backend = make(lambda _: (200, [token(7), token(8), token(9), end("limit")]))
    sink = Sink()
    backend.submit(request(seed=3, temperature=0.5, top_k=4, top_p=0.9), sink)
    sink.wait()
    assert [piece.token_ids for piece in sink] == [(7,), (8,), (9,), ()]
    assert sink[-1].finish_reason == "length"
    assert sink[-1].layers == {"prefill": 0.05, "decode": 0.02}
    assert sink[-1].cached_prompt_tokens == 0
    body = server.bodies[0]
    assert body["prompt"] == [5, 6]
    assert (body["n_predict"], body["seed"], body["temperature"]) == (3, 3, 0.5)
    assert (body["top_k"], body["top_p"], body["min_p"], body["repeat_penalty"]) == (4, 0.9, 0, 1)
    assert body["cache_prompt"] is False


def test_the_end_token_is_added_back(make):
    _, backend = make(lambda _: (200, [token(7), end("eos")]))
    sink = Sink()
    backend.submit(request(), sink)
    assert [piece.token_ids for piece in sink.wait()] == [(7,), (2,)]
    assert sink[-1].finish_reason == "stop"


def test_an_end_token_that_was_told_is_not_added_again(make):
    _, backend = make(lambda _: (200, [token(7), token(2), end("eos")]))
    sink = Sink()
    backend.submit(request(), sink)
    assert [piece.token_ids for piece in sink.wait()] == [(7,), (2,), ()]


def test_ids_withheld_until_a_character_is_whole_are_found_or_counted(make):
    found = {"content": "é", "tokens": [99], "tokens_predicted": 3, "stop": False}
    lost = {"content": "\ufffd", "tokens": [98], "tokens_predicted": 6, "stop": False}
    first = {"content": "a", "tokens": [7], "tokens_predicted": 1, "stop": False}
    _, backend = make(lambda _: (200, [first, found, lost, end("limit", tokens_predicted=7)]))
    sink = Sink()
    backend.submit(request(max_tokens=7), sink)
    pieces = [(piece.token_ids, piece.tokens) for piece in sink.wait()]
    assert pieces == [((7,), None), ((ord("é") % 50 + 50, 99), None), ((98,), 3), ((), 1)]


@pytest.mark.parametrize(
    ("status", "events", "named"),
    [
        (400, [b'{"error": {"message": "too long"}}'], "400.*too long"),
        (200, [token(7), b'error: {"message": "slot lost"}\n\n'], "slot lost"),
        (200, [token(7)], "before its end"),
        (200, [b"data: {broken\n\n"], "llama.cpp"),
    ],
)
def test_failures_end_with_an_error(make, status, events, named):
    _, backend = make(lambda _: (status, events))
    sink = Sink()
    backend.submit(request(), sink)
    assert sink.wait()[-1].finish_reason == "error"
    assert re.search(named, sink[-1].error)


def test_cancelling_closes_the_connection_and_delivers_nothing_more(make):
    def endless():
        while True:
            yield token(7)

    server, backend = make(lambda _: (200, endless()))
    sink = Sink()
    handle = backend.submit(request(max_tokens=500), sink)
    assert sink.first.wait(20)
    backend.cancel(handle)
    assert server.broken.wait(20)
    assert not sink.ended.is_set()
    backend.cancel(handle)


def test_closing_ends_running_requests_with_an_error(make):
    def endless():
        while True:
            yield token(7)

    _, backend = make(lambda _: (200, endless()))
    sink, late = Sink(), Sink()
    backend.submit(request(max_tokens=500), sink)
    assert sink.first.wait(20)
    backend.close()
    assert sink.wait()[-1].finish_reason == "error"
    backend.submit(request(), late)
    assert late.wait()[-1].error == "the session was closed"


def test_scores_force_each_token_in_turn(make):
    def answer(body):
        ((chosen, _),) = body["logit_bias"]
        top = {"id": 4, "logprob": -0.1}
        entry = {"id": chosen, "logprob": -float(chosen), "top_logprobs": [top]}
        return 200, [json.dumps({"completion_probabilities": [entry]}).encode()]

    server, backend = make(answer)
    result = backend.score(ScoreRequest("s", (9, 3, 4, 5), first_scored=2))
    np.testing.assert_array_equal(result.logprobs, [-4.0, -5.0])
    assert result.is_top1.tolist() == [True, False]
    assert [body["prompt"] for body in server.bodies] == [[9, 3], [9, 3, 4]]
    assert {body["id_slot"] for body in server.bodies} == {0}
    assert all(body["cache_prompt"] for body in server.bodies)


def test_scores_that_cannot_be_had_are_an_error(make):
    _, backend = make(lambda _: (200, [b'{"completion_probabilities": []}']))
    with pytest.raises(EngineError, match="no log-probability"):
        backend.score(ScoreRequest("s", (1, 2)))
    entry = {"id": 8, "logprob": -1.0, "top_logprobs": [{"id": 8}]}
    _, other = make(lambda _: (200, [json.dumps({"completion_probabilities": [entry]}).encode()]))
    with pytest.raises(EngineError, match='chose "8" where "2" was forced'):
        other.score(ScoreRequest("s", (1, 2)))


def test_the_cache_is_counted_by_its_formats(make):
    _, backend = make(lambda _: (200, []), n_ctx=64, n_parallel=4, cache_type_k="q8_0")
    use = backend.cache_use()
    assert use.tokens == 256
    assert use.bytes == 256 * 2 * 2 * 16 * (8.5 + 16) / 8


def test_check_and_fields():
    with pytest.raises(UnsupportedError, match='"transformers"'):
        LlamaCppEngine().check(SimpleNamespace(format="transformers"))
    with pytest.raises(ValueError, match="n_ctx"):
        LlamaCppEngine(n_ctx=0)
    with pytest.raises(ValueError, match="flash_attention"):
        LlamaCppEngine(cache_type_v="q8_0", flash_attention="off")

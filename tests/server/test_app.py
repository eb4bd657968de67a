"""The front on a session: what comes over HTTP is what the session gives, whatever goes wrong."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quanteval.engines.fake import ByteTokenizer, FakeEngine, FakeSession
from quanteval.engines.prometheus import parse
from quanteval.errors import EngineError
from quanteval.interfaces import Chunk, Request, Sampling, ScoreRequest, TopLogprobs
from quanteval.records import Effective, MemoryUse
from quanteval.server.app import Front
from quanteval.server.text import StopFilter, TextStream
from tests.server.asking import begun, call, chat, complete, served, text_of, until

ANSWER = "héllo wörld €5 😀!"
PRECISION = SimpleNamespace(
    weight_bits=16.0, weight_format="bf16", quantized=False, activation_bits=16.0
)
ARTIFACT = SimpleNamespace(scheme="bf16", precision=PRECISION)
FOREVER_S = 3600.0


def session(**fields):
    return FakeSession(FakeEngine(**{"default_answer": ANSWER, **fields}), ARTIFACT, 0.0)


@contextlib.contextmanager
def front(made=None, **fields):
    """Serve a fake session; yield the address and the session."""
    made = made or session(**fields)
    app = Front(made, "fake")
    with served(app, app.close) as server:
        yield server.url, made


def ids_of(events):
    return [i for event in events for choice in event["choices"] for i in choice["token_ids"]]


# ---- text


@pytest.mark.parametrize("ask", [complete, chat])
@pytest.mark.parametrize("step", [1, 3])
def test_an_answer_is_the_session_s_streamed_or_not(ask, step):
    with front(tokens_per_chunk=step) as (url, made):
        whole = ask(url, max_tokens=99, return_token_ids=True).json
        streamed = ask(
            url, max_tokens=99, stream=True, return_token_ids=True,
            stream_options={"include_usage": True},
        ).events  # fmt: skip
        prompt = made.tokenizer.raw("hi")
        if ask is chat:
            prompt = made.tokenizer.chat([{"role": "user", "content": "hi"}])
        (done,) = made.generate([Request("r", prompt, Sampling(max_tokens=99))])
    is_chat = ask is chat
    choice = whole["choices"][0]
    assert done.text == ANSWER
    assert (choice["message"]["content"] if is_chat else choice["text"]) == ANSWER
    assert text_of(streamed, is_chat) == ANSWER
    assert choice["token_ids"] == ids_of(streamed) == list(done.token_ids)
    assert choice["finish_reason"] == "stop"
    reasons = [c["finish_reason"] for event in streamed for c in event["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    places = [whole if is_chat else choice, streamed[0] if is_chat else streamed[0]["choices"][0]]
    assert all(place["prompt_token_ids"] == list(prompt.token_ids) for place in places)
    for usage in (whole["usage"], streamed[-1]["usage"]):
        assert usage["prompt_tokens"] == len(prompt.token_ids)
        assert usage["completion_tokens"] == len(done.token_ids)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert streamed[-1]["choices"] == []
    assert not any("usage" in event for event in streamed[:-1])
    if is_chat:
        deltas = [c["delta"] for event in streamed for c in event["choices"]]
        assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert whole["model"] == streamed[0]["model"] == "fake"
    kinds = (whole["object"], streamed[0]["object"])
    assert kinds == (
        ("chat.completion", "chat.completion.chunk") if is_chat else ("text_completion",) * 2
    )
    assert len({event["id"] for event in streamed}) == 1 and streamed[0]["id"] != whole["id"]


def test_characters_are_never_torn_between_chunks():
    with front(tokens_per_chunk=1) as (url, _):
        events = complete(url, max_tokens=99, stream=True, return_token_ids=True).events
        # Cut within the first character of two bytes: what came of it is told as it is.
        cut = complete(url, max_tokens=2, stream=True).events
    pieces = [choice["text"] for event in events for choice in event["choices"]]
    assert "�" not in "".join(pieces)
    assert pieces[:3] == ["h", "", "é"]
    assert [len(e["choices"][0]["token_ids"]) for e in events] == [1] * len(events)
    assert text_of(cut) == "h�"


def test_usage_can_run_along_and_tells_layers_at_the_end():
    options = {"include_usage": True, "continuous_usage_stats": True}
    with front(default_answer="abcd", tokens_per_chunk=2) as (url, _):
        events = complete(
            url, max_tokens=4, stream=True, ignore_eos=True, stream_options=options
        ).events
    assert [event["usage"]["completion_tokens"] for event in events] == [2, 4, 4]
    assert {"tokenize", "detokenize"} <= events[-1]["usage"]["layers"].keys()
    assert all(value >= 0 for value in events[-1]["usage"]["layers"].values())


STOPS = [
    ("wör", "héllo "),
    (["zzz", "€"], "héllo wörld "),
    ("never", ANSWER),
    ("h", ""),
    ([], ANSWER),
]


@pytest.mark.parametrize("step", [1, 2, 7, 50])
def test_a_stop_string_ends_the_text_before_it(step):
    with front(tokens_per_chunk=step) as (url, made):
        for stop, text in STOPS:
            streamed = complete(url, max_tokens=99, stream=True, stop=stop).events
            whole = complete(url, max_tokens=99, stop=stop).json["choices"][0]
            assert text_of(streamed) == whole["text"] == text, stop
            assert streamed[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "stop"
        assert until(lambda: made.in_flight == 0)


def test_a_stop_string_ends_the_request_in_the_session():
    with front(itl_s=0.02, default_answer="ab" * 40) as (url, made):
        choice = complete(url, max_tokens=70, stop="ba", return_token_ids=True).json["choices"][0]
        assert choice["text"] == "a" and len(choice["token_ids"]) == 3
        assert until(lambda: made.in_flight == 0)


def test_several_prompts_and_prompts_of_ids():
    with front(answers={"one": "1", "two": "22"}) as (url, _):
        answer = complete(url, ["one", "two"], max_tokens=9).json
        ids = complete(url, [list(b"one"), list(b"two")], max_tokens=9, echo=True).json
        assert [c["text"] for c in answer["choices"]] == ["1", "22"]
        assert [c["index"] for c in answer["choices"]] == [0, 1]
        assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 5, "total_tokens": 11}
        assert [c["text"] for c in ids["choices"]] == ["one1", "two22"]
        one = complete(url, list(b"one"), max_tokens=9, stream=True).events
        assert text_of(one) == "1"


def test_special_tokens_are_added_unless_they_are_not_wanted():
    with front(add_bos=True) as (url, _):
        wanted = complete(url, "a", max_tokens=1, return_token_ids=True).json["choices"][0]
        not_wanted = complete(
            url, "a", max_tokens=1, return_token_ids=True, add_special_tokens=False
        ).json["choices"][0]
    assert wanted["prompt_token_ids"] == [257, 97]
    assert not_wanted["prompt_token_ids"] == [97]


class Recording(FakeSession):
    """Keeps what was asked of it."""

    def stream(self, request):
        self.asked = request
        yield from super().stream(request)


def test_every_sampling_field_arrives():
    made = Recording(FakeEngine(default_answer="x", max_context=50), ARTIFACT, 0.0)
    with front(made) as (url, _):
        complete(
            url, "abc", max_tokens=7, temperature=0.5, top_p=0.25, top_k=3, seed=11,
            stop=["q", "r"], ignore_eos=True,
        )  # fmt: skip
        assert made.asked.sampling == Sampling(7, 0.5, 0.25, 3, 11, ("q", "r"), True)
        assert made.asked.prompt == ByteTokenizer().raw("abc")
        complete(url, "abc")
        assert made.asked.sampling.max_tokens == 16 and made.asked.sampling.temperature == 1.0
        first = made.asked.sampling.seed
        complete(url, "abc", top_k=-1, seed=None, stop=None)
        assert made.asked.sampling.seed != first, "without a seed, answers must differ"
        assert made.asked.sampling.top_k == 0
        chat(url, "a", max_completion_tokens=5, max_tokens=3)
        assert made.asked.sampling.max_tokens == 5
        chat(url, "a")
        assert made.asked.sampling.max_tokens == 50 - len(made.asked.prompt.token_ids)
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        chat(url, parts)
        assert "<user>ab\n" in made.asked.prompt.text


@given(text=st.text(max_size=30), step=st.integers(1, 5))
def test_pieces_of_text_join_to_the_whole(text, step):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer.decode)
    pieces = [stream.add(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert "".join([*pieces, stream.end()]) == tokenizer.decode(ids)


@given(
    text=st.text("abc", max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    step=st.integers(1, 4),
)
def test_the_stop_filter_cuts_at_the_stop_that_completes_first(text, stops, step):
    filtered = StopFilter(stops)
    pieces = []
    for start in range(0, len(text), step):
        pieces.append(filtered.add(text[start : start + step]))
        if filtered.stopped:
            break
    got = "".join(pieces) + filtered.end()
    assert text.startswith(got) and not any(stop in got for stop in stops)
    assert filtered.stopped == any(stop in text for stop in stops)
    if not filtered.stopped:
        assert got == text
    else:
        assert any(text[len(got) :].startswith(stop) for stop in stops)


# ---- log-probabilities


def test_the_prompt_s_log_probabilities_are_the_session_s():
    ids = list(b"abcdef")
    with front() as (url, made):
        (want,) = made.loglikelihood([ScoreRequest("s", tuple(ids))])
        scored = complete(
            url, ids, max_tokens=0, echo=True, logprobs=0, return_tokens_as_token_ids=True
        ).json
        longer = complete(url, ids, max_tokens=2, echo=True, logprobs=0, ignore_eos=True).json
        output = complete(url, ids, max_tokens=2, logprobs=0, ignore_eos=True).json
        one = complete(url, [97], max_tokens=0, echo=True, logprobs=0).json
    choice = scored["choices"][0]
    told = choice["logprobs"]
    assert choice["text"] == "abcdef" and choice["finish_reason"] == "length"
    assert told["tokens"] == [f"token_id:{i}" for i in ids]
    assert told["token_logprobs"] == [None, *want.logprobs.tolist()]
    assert told["is_top1"] == [None, *want.is_top1.tolist()]
    assert told["top_logprobs"] is None
    assert scored["usage"]["completion_tokens"] == 0
    both = longer["choices"][0]["logprobs"]
    assert both["token_logprobs"][: len(ids)] == told["token_logprobs"]
    assert both["tokens"][len(ids) :] == output["choices"][0]["logprobs"]["tokens"]
    alone = output["choices"][0]["logprobs"]["token_logprobs"]
    assert len(alone) == 2 and both["token_logprobs"][len(ids) :] == alone
    assert one["choices"][0]["logprobs"]["token_logprobs"] == [None]


class WithTops(FakeSession):
    """Tells the head of each distribution: the next ids after the token itself."""

    def top_logprobs(self, requests, k):
        for request in requests:
            scored = request.token_ids[request.first_scored :]
            ids = np.array([[(i + n) % 256 for n in range(1, k + 1)] for i in scored])
            values = np.array([[-0.5 * n for n in range(1, k + 1)] for _ in scored])
            yield TopLogprobs(request.request_id, ids, values)


def test_what_else_was_probable_where_the_session_tells():
    made = WithTops(FakeEngine(), ARTIFACT, 0.0)
    with front(made) as (url, _):
        told = complete(
            url, "abc", max_tokens=0, echo=True, logprobs=2, return_tokens_as_token_ids=True
        ).json["choices"][0]["logprobs"]
    assert told["top_logprobs"][0] is None
    for own, value, top in zip(
        told["tokens"][1:], told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True
    ):
        assert top[own] == value and len(top) == 3


# ---- what is refused


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"n": 2}, "n"),
        ({"logprobs": 101}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream": True, "echo": True}, "echo"),
        ({"stream_options": 3}, "stream_options"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, 258]}, "prompt"),
        ({"prompt": "x" * 20, "max_tokens": 13}, "max_tokens"),
        ({"prompt": [["x"]]}, "prompt"),
        ({"model": 3}, "model"),
    ],
    ids=str,
)
def test_bad_fields_are_named(refusing, fields, param):
    answer = call(refusing, "/v1/completions", {"prompt": "hi", **fields})
    assert answer.status == 400, answer
    error = answer.error
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert "\n" not in error["message"] and error["message"]


@pytest.fixture(scope="module")
def refusing():
    with front(max_context=32) as (url, _):
        yield url


def test_other_refusals_have_their_status(refusing):
    for messages in ([], None, [{"role": "user"}], [{"role": "robot", "content": "x"}], ["x"], "x"):
        answer = call(refusing, "/v1/chat/completions", {"messages": messages})
        assert (answer.status, answer.error["param"]) == (400, "messages"), messages
    assert complete(refusing, model="other").status == 404
    assert complete(refusing, model="fake", max_tokens=1).status == 200
    assert complete(refusing, model="", max_tokens=1).status == 200
    assert call(refusing, "/v1/completions", b"{]").status == 400
    assert call(refusing, "/v1/completions", b"\xff").status == 400
    assert call(refusing, "/v1/completions", b'"x"').status == 400
    assert call(refusing, "/v1/completions", method="GET").status == 405
    assert call(refusing, "/v2").status == 404
    full = chat(refusing, "x" * (32 - len("<user>\n<assistant>")))
    assert full.status == 400 and "no room" in full.error["message"]
    # Of a prompt that is only scored, the last token needs no place.
    assert complete(refusing, "x" * 33, max_tokens=0, echo=True, logprobs=0).status == 200
    assert complete(refusing, "x" * 34, max_tokens=0, echo=True, logprobs=0).status == 400


def test_a_model_without_a_chat_template():
    made = session()
    made.tokenizer = replace(made.tokenizer, chat_template=False)
    with front(made) as (url, _):
        answer = chat(url)
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert "no chat template" in answer.error["message"]


# ---- what goes wrong in the session


class Failing(FakeSession):
    """Fails after two tokens in the way its prompt says; "fine" never ends."""

    def stream(self, request):
        with contextlib.closing(super().stream(request)) as chunks:
            if request.prompt.text.startswith("fine"):
                yield from chunks
                return
            for chunk in itertools.islice(chunks, 2):
                if "at once" not in request.prompt.text:
                    yield chunk
        if "raise" in request.prompt.text:
            raise ValueError("CUDA out of memory")
        if "own" in request.prompt.text:
            raise EngineError("the engine is gone")
        if "chunk" in request.prompt.text:
            yield Chunk((), time.perf_counter(), "error", "the chunk says so")
        if "cancelled" in request.prompt.text:
            yield Chunk((), time.perf_counter(), "cancelled")

    def loglikelihood(self, requests):
        raise MemoryError("cannot allocate")


SAYS = {
    "raise": "ValueError: CUDA out of memory",
    "own": "the engine is gone",
    "chunk": "the chunk says so",
    "cancelled": "the request was cancelled",
    "nothing": "ended without a finish reason",
}


@pytest.fixture(scope="module")
def failing():
    with front(Failing(FakeEngine(default_answer="abcd"), ARTIFACT, 0.0)) as (url, _):
        yield url


@pytest.mark.parametrize("how", SAYS)
def test_a_failure_is_an_error_and_never_a_text(failing, how):
    whole = complete(failing, how, max_tokens=4)
    assert whole.status == 500 and SAYS[how] in whole.error["message"]
    at_once = complete(failing, f"{how} at once", max_tokens=4, stream=True)
    assert at_once.status == 500 and SAYS[how] in at_once.error["message"]
    *events, last = complete(failing, how, max_tokens=4, stream=True).events
    assert text_of(events) == "ab"
    assert SAYS[how] in last["error"]["message"] and last["error"]["code"] == 500
    assert all(c["finish_reason"] is None for event in events for c in event["choices"])


def test_scores_that_fail_are_an_error(failing):
    answer = complete(failing, "abc", max_tokens=0, echo=True, logprobs=0)
    assert answer.status == 500 and "MemoryError: cannot allocate" in answer.error["message"]


def test_one_prompt_that_fails_cancels_the_others():
    made = Failing(FakeEngine(default_answer="ab" * 100, itl_s=0.01), ARTIFACT, 0.0)
    with front(made) as (url, _):
        answer = complete(url, ["fine", "raise"], max_tokens=1000, ignore_eos=True)
        assert answer.status == 500 and "out of memory" in answer.error["message"]
        assert until(lambda: made.in_flight == 0, seconds=5), "it goes on for nobody"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_request(stream):
    with front(itl_s=0.01, default_answer="x") as (url, made):
        body = {"prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": stream}
        with begun(url, "/v1/completions", body) as connection:
            assert until(lambda: made.in_flight == 1)
            if stream:
                assert connection.getresponse().readline().startswith(b"data: ")
        assert until(lambda: made.in_flight == 0)
        assert until(lambda: neutral_counts(url)["running"] == 0)
        assert neutral_counts(url)["waiting"] == 0
        assert complete(url, max_tokens=1).status == 200


# ---- records and counts


def neutral_counts(url):
    found = parse(call(url, "/metrics").body.decode())
    return {name.partition("{")[0].rpartition("_")[2]: value for name, value in found.items()
            if "num_requests" in name}  # fmt: skip


def test_the_session_s_records():
    with front(weights_bytes=4096, max_context=77) as (url, made):
        described = call(url, "/quanteval/describe")
        memory = call(url, "/quanteval/memory")
        policy = call(url, "/quanteval/batch_policy")
        assert Effective.model_validate_json(described.body) == made.describe()
        assert MemoryUse.model_validate_json(memory.body) == made.memory()
        assert policy.json == {"batch_policy": "scripted"}
        assert call(url, "/health").status == 200
        assert call(url, "/v1/models").json == {
            "object": "list",
            "data": [
                {"id": "fake", "object": "model", "created": 0, "owned_by": "quanteval",
                 "max_model_len": 77}
            ],
        }  # fmt: skip


class Layered(FakeSession):
    """Tells how long each layer took."""

    def stream(self, request):
        for chunk in super().stream(request):
            last = chunk.finish_reason is not None
            layers = {"queue": 0.5, "prefill": 1.0, "decode": 2.0} if last else {}
            yield replace(chunk, layers=layers, cached_prompt_tokens=1 if last else None)


def test_metrics_count_requests_tokens_and_layers():
    made = Layered(FakeEngine(default_answer="abcd"), ARTIFACT, 0.0)
    with front(made) as (url, _):
        before = parse(call(url, "/metrics").body.decode())
        usage = complete(url, "hello", max_tokens=3).json["usage"]
        complete(url, "hi", max_tokens=3, stream=True)
        complete(url, max_tokens=0)
        found = parse(call(url, "/metrics").body.decode())
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
    assert set(before) == set(found) and set(before.values()) == {0.0}
    named = {name.removesuffix('{model_name="fake"}'): value for name, value in found.items()}
    assert named["quanteval:prompt_tokens_total"] == 7
    assert named["quanteval:generation_tokens_total"] == 6
    assert named["quanteval:request_success_total"] == 2
    assert named["quanteval:request_failure_total"] == 0
    assert named["quanteval:num_requests_running"] == named["quanteval:num_requests_waiting"] == 0
    assert named["quanteval:request_queue_time_seconds_sum"] == 1.0
    assert named["quanteval:request_prefill_time_seconds_sum"] == 2.0
    assert named["quanteval:request_decode_time_seconds_count"] == 2
    first = named["quanteval:time_to_first_token_seconds_sum"]
    assert 0 < first <= named["quanteval:e2e_request_latency_seconds_sum"]


def test_a_failed_request_is_counted_as_such(failing):
    def failures():
        found = parse(call(failing, "/metrics").body.decode())
        return found['quanteval:request_failure_total{model_name="fake"}']

    before = failures()
    complete(failing, "raise", max_tokens=4)
    assert failures() == before + 1


# ---- the end


@pytest.mark.parametrize("stream", [True, False])
def test_a_shutdown_gives_running_requests_an_end(stream, monkeypatch):
    monkeypatch.setattr("quanteval.server.running.GRACE_S", 0.3)
    made = session(itl_s=0.01)
    app = Front(made, "fake")
    found = []
    with served(app, app.close) as server:
        body = {"prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": stream}
        thread = threading.Thread(
            target=lambda: found.append(call(server.url, "/v1/completions", body))
        )
        thread.start()
        assert until(lambda: made.in_flight == 1)
        server.stop()
        server.thread.join(30)
        thread.join(30)
    assert not thread.is_alive()
    (answer,) = found
    if stream:
        *events, last = answer.events
        assert text_of(events).startswith("h")
    else:
        assert answer.status == 503
        last = answer.json
    assert last["error"]["message"] == "the server is shutting down"
    assert until(lambda: made.in_flight == 0)


def test_a_request_that_ends_in_time_is_finished(monkeypatch):
    monkeypatch.setattr("quanteval.server.running.GRACE_S", 30)
    made = session(itl_s=0.01, default_answer="x" * 30)
    app = Front(made, "fake")
    found = []
    with served(app, app.close) as server:
        thread = threading.Thread(target=lambda: found.append(complete(server.url, max_tokens=99)))
        thread.start()
        assert until(lambda: made.in_flight == 1)
        server.stop()
        thread.join(30)
    assert found[0].json["choices"][0]["text"] == "x" * 30


def test_once_it_closes_it_takes_no_more():
    app = Front(session(), "fake")
    with served(app) as server:
        app.close()
        assert call(server.url, "/health").status == 503
        answer = complete(server.url)
        assert answer.status == 503 and "shutting down" in answer.error["message"]


# ---- as a process


@contextlib.contextmanager
def process(arguments, **options):
    started = subprocess.Popen(
        [sys.executable, "-m", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip
    try:
        yield started
    finally:
        if started.poll() is None:
            started.kill()
        started.communicate()


def spec(folder, artifact, **fields):
    """Write a server's spec; return its path and that of its ready file."""
    (folder / "artifact.json").write_text(artifact.model_dump_json())
    ready = folder / "ready.json"
    node = {"_target_": "quanteval.engines.fake.FakeEngine", "default_answer": "ok", "itl_s": 0.01}
    made = {
        "artifact": str(folder / "artifact.json"), "engine": node, "prefixes": ["quanteval."],
        "host": "127.0.0.1", "port": 0, "model_name": "named", "threads": 1,
        "parent_pid": os.getpid(), "ready_file": str(ready), **fields,
    }  # fmt: skip
    path = folder / "server.json"
    path.write_text(json.dumps(made))
    return path, ready


def started(process, ready):
    until(lambda: ready.exists() or process.poll() is not None, 60)
    return ready.exists()


def test_a_server_process_says_where_it_is_and_ends_with_sigterm(fake_artifact, tmp_path):
    path, ready = spec(tmp_path, fake_artifact)
    with process(["quanteval.server", str(path)]) as server:
        assert started(server, ready)
        told = json.loads(ready.read_text())
        assert told["pid"] == server.pid
        url = f"http://127.0.0.1:{told['port']}"
        assert complete(url, max_tokens=9).json["choices"][0]["text"] == "ok"
        assert complete(url, max_tokens=9).json["model"] == "named"
        body = {"prompt": "x", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
        found = []
        thread = threading.Thread(target=lambda: found.append(call(url, "/v1/completions", body)))
        thread.start()
        running = 'quanteval:num_requests_running{model_name="named"}'
        assert until(lambda: parse(call(url, "/metrics").body.decode())[running] == 1)
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=30)
        thread.join(30)
    assert server.returncode in (0, 130), err
    assert out == err == ""
    assert found[0].events[-1]["error"]["message"] == "the server is shutting down"


def test_a_server_dies_with_its_parent(fake_artifact, tmp_path):
    path, ready = spec(tmp_path, fake_artifact, parent_pid=None)
    # The parent writes its own id into the spec, starts the server and waits.
    code = (
        "import json, os, pathlib, subprocess, sys\n"
        f"path = pathlib.Path({str(path)!r})\n"
        "path.write_text(json.dumps({**json.loads(path.read_text()), 'parent_pid': os.getpid()}))\n"
        "subprocess.Popen([sys.executable, '-m', 'quanteval.server', str(path)]).wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        assert started(parent, ready)
        child = psutil.Process(json.loads(ready.read_text())["pid"])
        assert child.ppid() == parent.pid
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_server_that_cannot_start_says_why_in_a_line(fake_artifact, tmp_path):
    path, ready = spec(tmp_path, fake_artifact, engine={"_target_": "os.system"})
    with process(["quanteval.server", str(path)]) as server:
        _, err = server.communicate(timeout=60)
    (line,) = err.strip().splitlines()
    assert server.returncode == 2 and line.startswith("error: ") and "not allowed" in line
    assert not ready.exists()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_the_mock_server_from_the_command_line(tmp_path, how):
    arguments = ["quanteval", "mock-server", "ttft_s=0.01", "default_answer=sure", "--port", "0"]
    with process(arguments, cwd=tmp_path) as server:
        address = server.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:") and address.endswith("/v1"), server.poll()
        url = address.removesuffix("/v1")
        assert complete(url, max_tokens=9).json["choices"][0]["text"] == "sure"
        server.send_signal(how)
        _, err = server.communicate(timeout=30)
    assert "Traceback" not in err
    assert server.returncode in (0, 130, -signal.SIGTERM)


def test_a_scheme_served_from_the_command_line(tmp_path, tiny_folder):
    arguments = [
        "quanteval", "serve", "engine=fake", "scheme=[bf16]", f"model={tiny_folder}",
        "runtime.threads=1", "engine.default_answer=served", "--port", "0",
    ]  # fmt: skip
    with process(arguments, cwd=tmp_path) as server:
        address = server.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), server.communicate(timeout=5)[1]
        url = address.removesuffix("/v1")
        assert call(url, "/v1/models").json["data"][0]["id"] == "bf16"
        assert complete(url, max_tokens=9).json["choices"][0]["text"] == "served"
        assert Effective.model_validate_json(call(url, "/quanteval/describe").body)
        server.send_signal(signal.SIGINT)
        _, err = server.communicate(timeout=30)
    assert server.returncode in (0, 130) and "Traceback" not in err
    assert not (tmp_path / "outputs").exists()


# ---- a real model


@pytest.mark.model
def test_a_model_behind_the_front_is_the_model(embedded_model, tmp_path):
    from quanteval.engines.transformers import TransformersEngine
    from quanteval.interfaces import Calibration
    from quanteval.schemes.none import Unquantized

    artifact = Unquantized("bfloat16").quantize(embedded_model, tmp_path, Calibration(), "cpu")
    with TransformersEngine(batching="padded", kv_cache_tokens=1024).serve(artifact) as made:
        prompt = made.tokenizer.raw("The days of the week are Monday, Tuesday,")
        sampling = Sampling(max_tokens=12)
        (done,) = made.generate([Request("own", prompt, sampling)])
        (want,) = made.loglikelihood([ScoreRequest("own", prompt.token_ids)])
        with front(made) as (url, _):
            fields = {"max_tokens": 12, "temperature": 0.0, "return_token_ids": True}
            whole = complete(url, prompt.text, **fields).json["choices"][0]
            events = complete(url, list(prompt.token_ids), stream=True, **fields).events
            told = complete(
                url, list(prompt.token_ids), max_tokens=0, echo=True, logprobs=2,
                return_tokens_as_token_ids=True,
            ).json["choices"][0]["logprobs"]  # fmt: skip
    assert whole["token_ids"] == ids_of(events) == list(done.token_ids)
    assert whole["text"] == text_of(events) == done.text
    np.testing.assert_allclose(told["token_logprobs"][1:], want.logprobs, atol=1e-9)
    assert told["is_top1"][1:] == want.is_top1.tolist()
    assert told["tokens"] == [f"token_id:{i}" for i in prompt.token_ids]
    for own, value, top in zip(
        told["tokens"][1:], told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True
    ):
        assert top[own] == value and len(top) in (2, 3)

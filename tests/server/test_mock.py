"""The mock server: every form, fault and answer of its settings, and the truth it keeps of them."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quanteval.engines.prometheus import neutral, parse
from quanteval.errors import ConfigError
from quanteval.server.mock import MockServer, MockSettings
from quanteval.server.mock_script import Script, logprob, pieces_of
from quanteval.server.pacing import StallingClock
from tests.server.asking import begun, call, chat, complete, text_of, until

ANSWER = "abcdefghij"
EARLY_S = 1e-3
"""What the plan's times and the truth's may differ by: less than any time that is set here."""


def mock(**fields):
    return MockServer(MockSettings(**{"default_answer": ANSWER, **fields}))


def stream(server, api="completions", **fields):
    ask = chat if api == "chat" else complete
    return ask(server.url, stream=True, **fields).events


def deltas(events):
    return [choice["delta"] for event in events for choice in event["choices"]]


# ---- forms


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("step", [1, 4])
def test_a_stream_has_so_many_tokens_a_chunk(api, step):
    with mock(tokens_per_chunk=step) as server:
        events = stream(server, api, max_tokens=7, ignore_eos=True, return_token_ids=True)
        (truth,) = server.truth()
    ids = [choice["token_ids"] for event in events for choice in event["choices"]]
    assert [len(some) for some in ids] == ([1] * 7 if step == 1 else [4, 3])
    assert bytes(itertools.chain.from_iterable(ids)) == b"abcdefg"
    assert text_of(events, api == "chat") == "abcdefg"
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(ids) - 1) + ["length"]
    assert truth["chunk_tokens"] == [len(some) for some in ids]
    assert truth["status"] == "ok" and truth["stream"]
    assert not any("usage" in event for event in events)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_prompt_ids_stand_on_the_first_chunk_where_they_are_asked_for(api):
    with mock() as server:
        first, *rest = stream(server, api, max_tokens=3, return_token_ids=True)
        without = stream(server, api, max_tokens=3)
        whole = (chat if api == "chat" else complete)(
            server.url, max_tokens=3, return_token_ids=True
        )
    told = [first if api == "chat" else first["choices"][0]]
    told.append(whole.json if api == "chat" else whole.json["choices"][0])
    for place in told:
        assert bytes(place["prompt_token_ids"]).endswith(b"<assistant>" if api == "chat" else b"hi")
    assert bytes(whole.json["choices"][0]["token_ids"]) == b"abc"
    assert b"prompt_token_ids" not in json.dumps(rest).encode()
    assert b"token_ids" not in json.dumps(without).encode()


def test_a_role_may_come_before_the_first_token():
    with mock(role_only_first_chunk=True, ttft_s=0.05) as server:
        first, second, *_ = deltas(stream(server, "chat", max_tokens=2))
        (truth,) = server.truth()
        assert "role" not in json.dumps(stream(server, max_tokens=2))
    assert first == {"role": "assistant", "content": ""}
    assert second == {"content": "a"}
    assert truth["chunk_tokens"] == [1, 1]
    assert truth["chunk_s"][0] - truth["started_s"] >= 0.05 - EARLY_S


def test_a_role_goes_out_long_before_the_first_token():
    with (
        mock(role_only_first_chunk=True, ttft_s=3600) as server,
        begun(
            server.url,
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "stream": True},
        ) as connection,
    ):
        line = connection.getresponse().readline()
        assert b'"role":"assistant"' in line
        (truth,) = server.truth()
        assert truth["chunk_s"] == []


@pytest.mark.parametrize("alone", [True, False])
def test_usage_comes_by_itself_or_with_the_end(alone):
    with mock(usage_only_last_chunk=alone, cached_prompt_tokens=1) as server:
        events = stream(server, max_tokens=3, stream_options={"include_usage": True})
    usage = {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert [event.get("usage") for event in events] == [None] * (len(events) - 1) + [usage]
    assert len(events) == (4 if alone else 3)
    assert bool(events[-1]["choices"]) is not alone


def test_usage_can_run_along():
    options = {"include_usage": True, "continuous_usage_stats": True}
    with mock(tokens_per_chunk=2) as server:
        events = stream(server, max_tokens=5, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events] == [2, 4, 5, 5]
    assert [bool(event["choices"]) for event in events] == [True, True, True, False]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("step", [1, 4])
def test_the_first_tokens_of_a_chat_may_be_reasoning(name, step):
    with mock(reasoning_tokens=4, reasoning_field=name, tokens_per_chunk=step) as server:
        found = deltas(stream(server, "chat", max_tokens=10))
        message = chat(server.url, max_tokens=10).json["choices"][0]["message"]
        assert text_of(stream(server, max_tokens=10)) == ANSWER
    assert "".join(delta.get(name, "") for delta in found) == "abcd"
    assert "".join(delta.get("content", "") for delta in found) == "efghij"
    assert all(len(delta) == 1 for delta in found)
    assert message == {"role": "assistant", "content": "efghij", name: "abcd"}


def test_known_answers_by_a_piece_of_the_prompt():
    with mock(answers={"two": "2", "one and two": "3", "é": "ü"}, default_answer="?") as server:
        for prompt, answer in [("two", "2"), ("one and two", "3"), ("none", "?"), ("é", "ü")]:
            choice = complete(server.url, prompt, max_tokens=9).json["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (answer, "stop")
            assert text_of(stream(server, prompt=prompt, max_tokens=9)) == answer
        assert chat(server.url, "two").json["choices"][0]["message"]["content"] == "2"
        cut = complete(server.url, "two", max_tokens=1).json["choices"][0]
        assert (cut["text"], cut["finish_reason"]) == ("2", "length")


def test_ignore_eos_repeats_the_answer_to_the_length():
    with mock(default_answer="ab") as server:
        answer = complete(server.url, max_tokens=5, ignore_eos=True).json
        empty = complete(server.url, "x", max_tokens=3, ignore_eos=True)
    assert answer["choices"][0]["text"] == "ababa"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 5
    assert empty.status == 200


def test_prompts_of_token_ids_one_or_many():
    with mock() as server:
        one = complete(server.url, [97, 98], max_tokens=2, echo=True).json
        many = complete(server.url, [[97], [98, 99]], max_tokens=2, echo=True).json
        texts = complete(server.url, ["x", "yz"], max_tokens=2).json
        assert [choice["text"] for choice in one["choices"]] == ["abab"]
        assert [choice["text"] for choice in many["choices"]] == ["aab", "bcab"]
        assert [choice["index"] for choice in many["choices"]] == [0, 1]
        assert many["usage"]["prompt_tokens"] == 3 and many["usage"]["completion_tokens"] == 4
        assert [choice["text"] for choice in texts["choices"]] == ["ab", "ab"]
        for wrong in ([97, 258], [-1], [], [[]], [97, True], [97, 1.5]):
            answer = complete(server.url, wrong)
            assert answer.status == 400 and answer.error["param"] == "prompt", wrong
        refused = complete(server.url, ["x", "y"], stream=True)
        assert refused.status == 400 and "one prompt" in refused.error["message"]


@given(text=st.text(max_size=20), step=st.integers(1, 5))
def test_pieces_join_to_the_text_whatever_their_size(text, step):
    ids = text.encode("utf-8", "surrogatepass")
    pieces = list(pieces_of(ids, step))
    assert bytes(i for some, _ in pieces for i in some) == ids
    assert "".join(piece for _, piece in pieces) == ids.decode("utf-8", "replace")


# ---- log-probabilities of prompts


def test_echo_gives_the_prompt_and_its_log_probabilities():
    prompt = tuple(b"The days")
    with mock() as server:
        answer = complete(
            server.url, list(prompt), max_tokens=1, echo=True, logprobs=1, ignore_eos=True
        ).json["choices"][0]
        alone = complete(server.url, list(prompt), max_tokens=0, echo=True, logprobs=0).json
        named = complete(
            server.url, "ab", max_tokens=0, echo=True, logprobs=1, return_tokens_as_token_ids=True
        ).json
    told = answer["logprobs"]
    joined = (*prompt, ord("a"))
    assert answer["text"] == "The daysa"
    assert told["tokens"] == list("The daysa")
    assert told["token_logprobs"] == [None, *itertools.starmap(logprob, itertools.pairwise(joined))]
    assert told["text_offset"] == list(range(9))
    assert told["top_logprobs"][0] is None and told["top_logprobs"][1] == {
        "h": logprob(ord("T"), ord("h"))
    }
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == told["token_logprobs"][:-1]
    assert alone["usage"]["completion_tokens"] == 0
    assert named["choices"][0]["logprobs"]["tokens"] == ["token_id:97", "token_id:98"]


def test_log_probabilities_may_be_refused_ignored_or_wrong():
    body = {"max_tokens": 1, "echo": True, "logprobs": 0, "ignore_eos": True}
    with mock(prompt_logprobs="refused") as server:
        answer = complete(server.url, "abc", **body)
        assert (answer.status, answer.error["param"]) == (400, "echo")
        assert complete(server.url, "abc", max_tokens=1, echo=True).status == 200
    with mock(prompt_logprobs="ignored") as server:
        choice = complete(server.url, "abc", **body).json["choices"][0]
        assert choice["text"] == "a"
        assert choice["logprobs"]["token_logprobs"] == [logprob(ord("c"), ord("a"))]
    with mock(prompt_logprobs="shifted") as server:
        values = complete(server.url, "abc", **body).json["choices"][0]["logprobs"]
    first = logprob(ord("a"), ord("b"))
    assert values["token_logprobs"] == [None, first, first, logprob(ord("c"), ord("a"))]


# ---- faults


def test_http_errors_by_number():
    with mock(http_error_requests=(1, 3), http_error_status=429) as server:
        answers = [complete(server.url) for _ in range(5)]
        assert [answer.status for answer in answers] == [200, 429, 200, 429, 200]
        assert answers[1].error == {
            "message": "scripted failure",
            "type": "rate_limit_error",
            "param": None,
            "code": 429,
        }
        assert [t["status"] for t in server.truth()] == ["ok", "http_error"] * 2 + ["ok"]
        server.reset()
        assert complete(server.url).status == 200
        assert complete(server.url, stream=True).status == 429
        assert [t["number"] for t in server.truth()] == [0, 1]


def test_http_errors_by_share_are_reproducible():
    def statuses(seed):
        with mock(http_error_share=0.5, seed=seed) as server:
            return [complete(server.url).status for _ in range(30)]

    first = statuses(1)
    assert first == statuses(1) != statuses(2)
    assert set(first) == {200, 500}


@settings(max_examples=20)
@given(share=st.floats(0.05, 0.95), seed=st.integers(0, 9))
def test_a_share_hits_about_so_many(share, seed):
    made = MockSettings(
        seed=seed, http_error_share=share, stream_error_after=3, stream_error_share=share
    )
    scripts = [Script(made, number) for number in range(1000)]
    # Six standard deviations of a binomial of 1000.
    slack = 6 * (share * (1 - share) / 1000) ** 0.5
    assert abs(sum(script.http_error for script in scripts) / 1000 - share) < slack
    assert abs(sum(script.error_after == 3 for script in scripts) / 1000 - share) < slack


@pytest.mark.parametrize("after", [0, 4, 10])
def test_an_error_in_the_middle_of_a_stream(after):
    made = mock(stream_error_after=after, stream_error_text="out of memory", tokens_per_chunk=2)
    with made as server:
        *events, last = stream(server, max_tokens=10, ignore_eos=True)
        (truth,) = server.truth()
        whole = complete(server.url, max_tokens=10, ignore_eos=True)
    assert text_of(events) == ANSWER[:after]
    assert last["error"]["message"] == "out of memory"
    assert truth["status"] == "stream_error" and sum(truth["chunk_tokens"]) == after
    assert whole.status == 500 and whole.error["message"] == "out of memory"


@pytest.mark.parametrize("stream", [True, False])
def test_the_connection_is_cut(stream):
    with mock(drop_connection_after=3, itl_s=0.001) as server:
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            complete(server.url, max_tokens=8, stream=stream)
        (truth,) = server.truth()
        assert truth["status"] == "dropped"
        assert sum(truth["chunk_tokens"]) == (3 if stream else 0)
        assert call(server.url, "/health").status == 200


def test_a_process_dies_of_one_request_too_many():
    dying = MockSettings(die_after_requests=2)
    with MockServer(dying, subprocess=True) as server:
        assert server.pid is not None and psutil.pid_exists(server.pid)
        assert complete(server.url).status == complete(server.url).status == 200
        server.reset()
        assert complete(server.url).status == complete(server.url).status == 200
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            complete(server.url)
        assert server._process.wait(30) == 1
    with pytest.raises(ConfigError, match="die_after_requests needs a process of its own"):
        MockServer(dying)


def test_a_killed_process_is_gone_and_a_thread_cannot_be_killed():
    with MockServer(subprocess=True) as server:
        pid = server.pid
        server.kill()
        assert not psutil.pid_exists(pid)
    with mock() as server, pytest.raises(ConfigError, match="subprocess=True"):
        server.kill()


# ---- timing


def test_times_are_never_shorter_than_set():
    with mock(ttft_s=0.03, itl_s=0.01, prefill_s_per_token=0.01) as server:
        stream(server, max_tokens=5, ignore_eos=True)
        complete(server.url, max_tokens=5, ignore_eos=True)
        streamed, whole = server.truth()
    first = streamed["chunk_s"][0]
    # Two prompt tokens; every chunk is sent at or after its moment of the plan.
    assert first - streamed["started_s"] >= 0.05 - EARLY_S
    for number, at_s in enumerate(streamed["chunk_s"]):
        assert at_s - streamed["started_s"] >= 0.05 + 0.01 * number - EARLY_S
    assert whole["end_s"] - whole["started_s"] >= 0.05 + 4 * 0.01 - EARLY_S
    assert whole["chunk_tokens"] == [5]


def test_drawn_times_keep_their_mean():
    made = MockSettings(ttft_s=0.5, itl_s=0.02, spread="lognormal", sigma=0.5)
    scripts = [Script(made, number) for number in range(4000)]
    firsts = [script.prefill_s(100) for script in scripts]
    gaps = [script.gap_s(1) for script in scripts]
    assert abs(sum(firsts) / 4000 - 0.5) < 0.03 and abs(sum(gaps) / 4000 - 0.02) < 0.0012
    assert len(set(firsts)) == 4000
    assert Script(made, 5).prefill_s(1) == Script(made, 5).prefill_s(1)


def test_gaps_grow_with_more_streams_than_run_at_full_speed():
    script = Script(MockSettings(itl_s=0.01, full_speed_streams=4), 0)
    assert script.gap_s(1) == script.gap_s(4) == 0.01
    assert script.gap_s(8) == pytest.approx(0.02)
    assert Script(MockSettings(itl_s=0.01), 0).gap_s(99) == 0.01


def test_one_prompt_is_read_at_a_time():
    with mock(ttft_s=0.05, exclusive_prefill=True) as server, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: stream(server, max_tokens=1), range(4)))
        truths = server.truth()
    firsts = sorted(truth["chunk_s"][0] for truth in truths)
    begin = min(truth["started_s"] for truth in truths)
    for number, first in enumerate(firsts, start=1):
        assert first - begin >= 0.05 * number - EARLY_S


def test_a_cancelled_prompt_holds_nobody_up():
    with mock(ttft_s=3600, exclusive_prefill=True, answers={}) as server:
        with begun(server.url, "/v1/completions", {"prompt": "x"}):
            assert until(lambda: [t["started_s"] for t in server.truth()] != [None])
            with begun(server.url, "/v1/completions", {"prompt": "y"}):
                assert until(lambda: len(server.truth()) == 2)
        assert until(lambda: {t["status"] for t in server.truth()} == {"cancelled"})


def test_a_stall_after_the_first_request():
    with mock(itl_s=0.02, stall_at_s=0.05, stall_s=0.3) as server:
        stream(server, max_tokens=8, ignore_eos=True)
        stream(server, max_tokens=8, ignore_eos=True)
        server.reset()
        stream(server, max_tokens=8, ignore_eos=True)
        (again,) = server.truth()
    gaps = [b - a for a, b in itertools.pairwise(again["chunk_s"])]
    assert max(gaps) >= 0.3 - EARLY_S
    assert again["end_s"] - again["received_s"] >= 0.3 + 7 * 0.02 - EARLY_S


def test_a_stall_on_request_takes_as_long_as_it_overlaps_the_work():
    with mock(ttft_s=0.4) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, server, max_tokens=1)
        assert until(lambda: [t["started_s"] for t in server.truth()] != [None])
        server.stall(0.1)
        running.result()
        (truth,) = server.truth()
        # It is over long before the first token is due, which comes later all the same.
        assert truth["chunk_s"][0] - truth["started_s"] >= 0.5 - EARLY_S
        assert call(server.url, "/stall?seconds=soon", b"").status == 400


@given(
    work=st.floats(0, 5), begin=st.floats(0, 5), start=st.floats(0, 5), length=st.floats(0.01, 5)
)
def test_work_takes_as_much_longer_as_a_stall_overlaps_it(work, begin, start, length):
    clock = StallingClock()
    clock.stall(start, length)
    done = clock.after(begin, work)
    end = start + length
    stalled = max(0.0, min(done, end) - max(begin, start))
    assert done - begin == pytest.approx(work + stalled, abs=1e-9)
    assert not start + 1e-9 < done < end - 1e-9
    clock.clear()
    assert clock.after(begin, work) == begin + work


# ---- slots


def test_slots_are_given_in_the_order_of_arrival():
    with mock(slots=1, ttft_s=0.05) as server:
        threads = []
        for number in range(4):
            thread = threading.Thread(target=complete, args=(server.url, "x" * (number + 1)))
            thread.start()
            threads.append(thread)
            assert until(lambda n=number: len(server.truth()) == n + 1)
        for thread in threads:
            thread.join()
        truths = server.truth()
    assert [truth["prompt_tokens"] for truth in truths] == [1, 2, 3, 4]
    for before, after in itertools.pairwise(truths):
        assert after["started_s"] >= before["end_s"]
        assert after["started_s"] - after["received_s"] > 0


def test_a_full_queue_is_answered_503():
    with mock(slots=1, max_waiting=1, ttft_s=3600) as server:
        body = {"prompt": "x"}
        with begun(server.url, "/v1/completions", body):
            assert until(lambda: 'running{model_name="mock"} 1.0' in server.metrics())
            with begun(server.url, "/v1/completions", body):
                assert until(lambda: 'waiting{model_name="mock"} 1.0' in server.metrics())
                refused = complete(server.url)
                assert refused.status == 503 and "try again later" in refused.error["message"]
        # Whoever leaves gives up a slot or a place in the queue.
        assert until(lambda: 'running{model_name="mock"} 0.0' in server.metrics())
        assert 'waiting{model_name="mock"} 0.0' in server.metrics()
        assert [t["status"] for t in server.truth()] == ["cancelled", "cancelled", "http_error"]


# ---- what it tells


def test_the_truth_tells_requests_apart():
    with mock() as server:
        call(server.url, "/v1/completions", {"prompt": "a"}, headers={"X-Request-Id": "one"})
        call(server.url, "/v1/completions", {"prompt": "abc", "request_id": "two"})
        before = time.perf_counter()
        stream(server, "chat", max_tokens=4)
        after = time.perf_counter()
        truths = server.truth()
    assert [truth["request_id"] for truth in truths] == ["one", "two", ""]
    assert [truth["number"] for truth in truths] == [0, 1, 2]
    assert [truth["prompt_tokens"] for truth in truths[:2]] == [1, 3]
    times = [truths[2]["received_s"], truths[2]["started_s"], *truths[2]["chunk_s"]]
    times = [before, *times, truths[2]["end_s"], after]
    assert times == sorted(times), "the clock is not the client's"


def test_metrics_are_counted_and_can_be_read():
    with mock(cached_prompt_tokens=3, itl_s=0.001) as server:
        for _ in range(3):
            complete(server.url, "hello", max_tokens=4, ignore_eos=True)
        stream(server, prompt="a", max_tokens=4, ignore_eos=True)
        known = neutral(parse(server.metrics()))
        every = parse(server.metrics(), buckets=True)
        truths = server.truth()
    assert known["requests_total"] == known["e2e_s_count"] == known["queue_s_count"] == 4
    assert known["prompt_tokens_total"] == known["prefix_cache_queries_total"] == 16
    assert known["prefix_cache_hits_total"] == 10
    assert known["output_tokens_total"] == 16
    assert known["requests_running"] == known["requests_waiting"] == 0
    true_e2e = sum(truth["end_s"] - truth["received_s"] for truth in truths)
    assert known["e2e_s_sum"] == pytest.approx(true_e2e)
    parts = known["queue_s_sum"] + known["prefill_s_sum"] + known["decode_s_sum"]
    assert parts == pytest.approx(true_e2e)
    name = 'vllm:e2e_request_latency_seconds_bucket{le="%s",model_name="mock"}'
    assert every[name % "+Inf"] == 4
    assert every[name % "0.001"] <= every[name % "0.1"] <= 4


def test_other_paths_and_bad_requests():
    with mock(max_context=16, model_name="m") as server:
        url = server.url
        assert call(url, "/v1/models").json["data"][0] == {
            "id": "m", "object": "model", "created": 0, "owned_by": "quanteval", "max_model_len": 16,
        }  # fmt: skip
        assert call(url, "/health").status == 200
        assert call(url, "/nothing").status == 404
        assert call(url, "/v1/completions").status == 405
        assert call(url, "/reset").status == 404
        assert complete(url, model="other").status == 404
        assert complete(url, model="m", max_tokens=1).status == 200
        assert call(url, "/v1/completions", b"{").status == 400
        assert call(url, "/v1/completions", b"[]").status == 400
        long = complete(url, "x" * 10, max_tokens=7)
        assert long.status == 400 and "context of 16" in long.error["message"]
        assert complete(url, "x" * 10, max_tokens=6).status == 200
        assert complete(url, max_tokens=0).status == 400


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"ttft_s": -1.0}, 'ttft_s "-1.0" must be 0 or more'),
        ({"itl_s": float("nan")}, 'itl_s "nan" must be 0 or more'),
        ({"tokens_per_chunk": 0}, 'tokens_per_chunk "0" must be at least 1'),
        ({"http_error_share": 1.5}, 'http_error_share "1.5" must be from 0 to 1'),
        ({"http_error_status": 200}, 'http_error_status "200" must be from 400 to 599'),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, says):
    with pytest.raises(ConfigError, match=says):
        MockSettings(**fields)


def test_two_servers_and_a_second_run_of_one():
    with mock() as one, mock(default_answer="z") as two:
        assert one.port != two.port
        assert complete(one.url, max_tokens=1).json["choices"][0]["text"] == "a"
        assert complete(two.url, max_tokens=1).json["choices"][0]["text"] == "z"
    with pytest.raises(OSError, match="refused"):
        complete(one.url)

"""Events from bytes cut anywhere, chunks from events, and token counts from text alone."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quanteval.engines import sse
from quanteval.engines.fake import ByteTokenizer
from quanteval.engines.http_chunks import ChunkMaker
from quanteval.engines.retokenize import SETTLE_CHARACTERS, Retokenizer
from quanteval.engines.sse import Event, EventParser
from quanteval.errors import EngineError
from tests.engines.scripted_server import chat_event, data, text_event, usage_event

DONE = b"data: [DONE]\n\n"
STREAM = (
    b"\xef\xbb\xbf: hello\n\nevent: note\r\ndata: one\r\ndata:two\r\ndata\r\n\r\n"
    b"retry: 3\ndata:  spaced\n\n\n\r\rid: 7\rdata: \xc3\xa4\xe2\x82\xac\r\revent: lost\n\n"
    b"data: plain\n\nerror: bad\n\ndata: [DONE]"
)
EVENTS = [
    Event(b"one\ntwo\n", b"note"),
    Event(b" spaced"),
    Event(b"\xc3\xa4\xe2\x82\xac"),
    Event(b"plain"),
    Event(b"bad", b"error"),
    Event(b"[DONE]"),
]


def parse(pieces) -> list[Event]:
    parser = EventParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


def test_events_of_a_whole_stream():
    assert parse([STREAM]) == EVENTS
    assert parse([]) == [] and parse([b"", b":\n\n"]) == []


def test_every_single_cut_and_every_byte_alone():
    for at in range(len(STREAM) + 1):
        assert parse([STREAM[:at], STREAM[at:]]) == EVENTS, at
    assert parse([STREAM[i : i + 1] for i in range(len(STREAM))]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
@settings(deadline=None)
def test_the_events_do_not_depend_on_the_cuts(cuts):
    ends = [0, *sorted(cuts), len(STREAM)]
    assert parse([STREAM[a:b] for a, b in itertools.pairwise(ends)]) == EVENTS


@given(
    st.lists(st.text(), min_size=1, max_size=5), st.sampled_from(["\n", "\r", "\r\n"]), st.data()
)
@settings(deadline=None)
def test_whatever_is_written_is_read(texts, end, draws):
    raw = "".join(
        "".join(f"data: {line}{end}" for line in _lines(text)) + end for text in texts
    ).encode("utf-8", "surrogatepass")
    cut = draws.draw(st.integers(0, len(raw)))
    want = ["\n".join(_lines(text)).encode("utf-8", "surrogatepass") for text in texts]
    assert [event.data for event in parse([raw[:cut], raw[cut:]])] == want


def _lines(text: str) -> list[str]:
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def test_a_line_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    parser = EventParser()
    with pytest.raises(EngineError, match="without ending an event"):
        for _ in range(200):
            parser.feed(b"data: 123")
    parser = EventParser()
    for _ in range(200):
        assert parser.feed(b"data: 123\n\n")


# ---- chunks


def chunks_of(parts, *, api="completions", **fields):
    maker = ChunkMaker(ByteTokenizer().encode, api=api, **fields)
    found = []
    for at, part in enumerate(parts):
        for event in EventParser().feed(part):
            chunk = maker.take(event, float(at))
            if chunk is not None:
                found.append(chunk)
    return [*found, maker.end(99.0)]


LAST = {"finish_reason": "stop"}


def test_what_the_chunks_say_does_not_depend_on_the_source_of_counts():
    pieces = ["ab", "c", "defg"]
    by_ids = [text_event(p, {"token_ids": list(p.encode())}) for p in pieces]
    by_logprobs = [text_event(p, {"logprobs": {"tokens": list(p)}}) for p in pieces]
    totals = [2, 3, 7]
    by_usage = [
        text_event(p, None, {"usage": {"completion_tokens": t}})
        for p, t in zip(pieces, totals, strict=True)
    ]
    by_text = [text_event(p) for p in pieces]
    for parts in (by_ids, by_logprobs, by_usage, by_text):
        found = chunks_of([*parts, text_event("", LAST), usage_event(3, 7, 2), DONE])
        assert [chunk.count for chunk in found] == [2, 1, 4, 0]
        assert [chunk.at_s for chunk in found] == [0, 1, 2, 3]
        assert found[-1].finish_reason == "stop" and found[-1].cached_prompt_tokens == 2


def test_ids_without_text_are_arrivals():
    found = chunks_of(
        [text_event("", {"token_ids": [200]}), text_event("é", {"token_ids": [9], **LAST})]
    )
    assert [chunk.count for chunk in found] == [1, 1, 0]


def test_text_that_the_server_held_back_brings_no_tokens():
    running = [{"usage": {"completion_tokens": n}} for n in (1, 2, 2)]
    parts = [text_event(t, None, r) for t, r in zip(("a", "", "bc"), running, strict=True)]
    found = chunks_of([*parts, text_event("", LAST, running[-1])])
    assert [chunk.count for chunk in found] == [1, 1, 0, 0]
    assert "".join(chunk.text for chunk in found) == "abc"


def test_a_count_that_stands_at_zero_is_no_running_count():
    zero = {"usage": {"completion_tokens": 0, "prompt_tokens": 3}}
    found = chunks_of(
        [text_event("ab", None, zero), text_event("c", LAST, zero), usage_event(3, 3)]
    )
    assert [chunk.count for chunk in found] == [2, 1, 0] and found[-1].error is None


def test_tokens_that_no_text_shows_come_with_the_end():
    found = chunks_of([text_event("ab" * 10), text_event("c", LAST), usage_event(3, 22)])
    assert [chunk.count for chunk in found] == [20, 1, 1]
    assert found[-1].at_s == 1.0 and found[-1].error is None


def test_a_difference_nothing_explains_is_an_error():
    found = chunks_of([text_event("ab" * 10), text_event("c", LAST), usage_event(3, 40)])
    assert (
        'counted "40" output tokens' in found[-1].error
        and "tokenizing its text anew" in found[-1].error
    )
    assert found[-1].finish_reason == "error"


def test_the_prompts_tokens_are_checked():
    parts = [text_event("a", LAST), usage_event(3, 1), DONE]
    assert chunks_of(parts, prompt_tokens=3)[-1].error is None
    assert 'counted "3" prompt tokens' in chunks_of(parts, prompt_tokens=4)[-1].error
    assert "did not tell" in chunks_of(parts[:1], prompt_tokens=4)[-1].error


def test_tool_calls_are_tokens_but_no_text():
    call = {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}
    end = {"finish_reason": "tool_calls"}
    found = chunks_of([chat_event(call), chat_event({}, end), usage_event(1, 3)], api="chat")
    assert [chunk.count for chunk in found] == [3, 0]
    assert found[0].text == "" and found[-1].finish_reason == "stop"


def test_chat_log_probabilities_count():
    parts = [chat_event({"content": "abc"}, {"logprobs": {"content": [{}, {}]}, **LAST})]
    assert [chunk.count for chunk in chunks_of(parts, api="chat")] == [2, 0]


def test_layers_come_from_our_server_or_from_vllm_and_leave_the_network():
    parts = [text_event("a"), text_event("b", LAST)]
    own = {"completion_tokens": 2, "layers": {"queue": 0.1, "tokenize": 0.2, "prefill": 0.3}}
    metrics = {
        "queue_time_ms": 100.0,
        "time_to_first_token_ms": 500.0,
        "generation_time_ms": 1000.0,
    }
    by_own = data({"object": "chunk", "choices": [], "usage": own})
    by_vllm = data({"object": "chunk", "choices": [], "metrics": metrics})
    found = chunks_of([*parts, by_own], sent_s=-1.0)[-1].layers
    assert found == {"queue": 0.1, "tokenize": 0.2, "prefill": 0.3, "network": pytest.approx(0.4)}
    found = chunks_of([*parts, by_vllm], sent_s=-1.0)[-1].layers
    assert found == {"queue": 0.1, "prefill": 0.5, "decode": 1.0, "network": pytest.approx(0.4)}
    assert chunks_of([*parts, by_vllm], sent_s=1.0)[-1].layers["network"] == 0.0
    assert chunks_of(parts, sent_s=-1.0)[-1].layers == {}


def test_nothing_after_an_error_or_the_end_counts():
    bad = b'data: {"error": {"message": "boom"}}\n\n'
    assert [c.count for c in chunks_of([bad, text_event("ab", LAST)])] == [0]
    assert [c.count for c in chunks_of([text_event("a", LAST), DONE, text_event("b")])] == [1, 0]


# ---- text counted anew


def words(text: str) -> list[str]:
    """Tokens that depend on what is around them: runs of three letters; a space belongs to what follows."""
    tokens: list[str] = []
    for character in text:
        if tokens and character != " " and len(tokens[-1].strip()) < 3:
            tokens[-1] += character
        else:
            tokens.append(character)
    return tokens


@given(st.lists(st.text("ab ", max_size=40), max_size=80))
@settings(deadline=None)
def test_a_growing_text_counts_as_a_whole_one(pieces):
    counter, text = Retokenizer(words), ""
    for piece in pieces:
        text += piece
        assert counter.add(piece) == len(words(text))


def test_only_the_last_stretch_is_tokenized_anew():
    lengths = []

    def encode(text):
        lengths.append(len(text))
        return words(text)

    counter = Retokenizer(encode)
    for _ in range(2000):
        counter.add("abcd ")
    assert counter.count == len(words("abcd " * 2000))
    assert max(lengths) <= 2 * SETTLE_CHARACTERS
    for _ in range(500):
        counter.add("aaaa")
    assert counter.count == len(words("abcd " * 2000 + "aaaa" * 500))

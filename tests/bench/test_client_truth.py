"""The load client against a server that knows the truth: every time, count and status it should have seen."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics

import pytest

from quanteval.bench.client import LoadPoint
from quanteval.bench.driver import drive_closed, drive_open
from quanteval.bench.loops import ClosedLoop
from quanteval.bench.overhead import measure_overhead
from quanteval.bench.workload import PlannedRequest, PromptMaker
from quanteval.engines.fake import ByteTokenizer
from quanteval.engines.http_session import HTTPSession
from quanteval.engines.http_wire import Remote
from quanteval.metrics.latency import itl_s, tpot_s, ttft_s
from quanteval.records import LoadPointRecord
from quanteval.server.mock import MockServer, MockSettings

MAKER = PromptMaker(ByteTokenizer(), 0, exact_text=True)
OUTPUT = 12
ITL_S = 0.02


def planned(count, role="measured", first=0):
    """Prompts of different lengths, by which requests are told apart in the truth."""
    return [
        PlannedRequest(f"t{first + i}", "b", 20 + first + i, OUTPUT, first + i, role)
        for i in range(count)
    ]


def session_on(mock, api="completions"):
    # Chat prompts are rendered by the server; a raw prompt goes as one user message.
    return HTTPSession(Remote(mock.base_url, api=api), ByteTokenizer(), raw_as_user=api == "chat")


def by_token(times, tokens):
    return [at for at, count in zip(times, tokens, strict=True) for _ in range(count)]


MODES = {
    "single tokens": ("completions", {}),
    "four tokens a chunk": ("completions", {"tokens_per_chunk": 4}),
    "usage on the chunk that ends": ("completions", {"usage_only_last_chunk": False}),
    "role first": ("chat", {"role_only_first_chunk": True}),
    "reasoning": ("chat", {"reasoning_tokens": 5, "role_only_first_chunk": True}),
    "reasoning, four a chunk": (
        "chat",
        {"reasoning_tokens": 4, "tokens_per_chunk": 4, "reasoning_field": "reasoning"},
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_figure_is_the_server_s(mode):
    api, fields = MODES[mode]
    settings = MockSettings(ttft_s=0.06, itl_s=ITL_S, cached_prompt_tokens=3, **fields)
    with MockServer(settings) as mock, session_on(mock, api) as session:
        mock.reset()
        loop = ClosedLoop(
            session, LoadPoint("closed", 2), 30.0,
            [(p, MAKER.request(p)) for p in planned(6)], iter(()),
        )  # fmt: skip
        loop.start()
        traces = list(loop.traces())
        loop.close()
        rows = [row for row in mock.truth() if row["stream"]]
    assert [t.status for t in traces] == ["ok"] * 6, [t.error for t in traces]
    lengths = sorted(t.prompt_tokens for t in traces)
    # In a chat the server's template adds as many tokens to each, so the order tells them apart.
    rows.sort(key=lambda row: row["prompt_tokens"])
    truth = dict(zip(lengths, rows, strict=True))
    added, ttft_off, gaps_off, tpot_off = [], [], [], []
    for trace in traces:
        row = truth[trace.prompt_tokens]
        sent = by_token(row["chunk_s"], row["chunk_tokens"])
        came = [loop.origin_s + at for at in by_token(trace.chunk_times_s, trace.chunk_tokens)]
        assert trace.output_tokens == len(sent) == len(came) == OUTPUT
        assert trace.cached_prompt_tokens == 3
        assert loop.origin_s + trace.sent_s <= row["received_s"]
        added += [ours - theirs for ours, theirs in zip(came, sent, strict=True)]
        ttft_off.append(ttft_s(trace) - (sent[0] - row["received_s"]))
        step = fields.get("tokens_per_chunk", 1)
        true_tpot = (sent[-1] - sent[0]) / (OUTPUT - 1)
        tpot_off.append(abs((tpot_s(trace) or math.nan) - true_tpot))
        chunks = list(itertools.pairwise(row["chunk_s"]))
        true_gaps = [(after - before) / step for before, after in chunks for _ in range(step)]
        gaps_off += [abs(a - b) for a, b in zip(itl_s(trace), true_gaps, strict=True)]
    assert min(added) >= 0
    # Medians, so that a busy machine does not matter; a role or a usage count taken for a token would be 20 ms off.
    assert statistics.median(added) < ITL_S / 2
    assert 0 <= statistics.median(ttft_off) < ITL_S / 2
    assert statistics.median(gaps_off) < ITL_S / 2
    assert statistics.median(tpot_off) < ITL_S / 4


@pytest.mark.parametrize(
    ("fields", "status", "tokens", "says"),
    [
        ({"stream_error_after": 5}, "error", 5, "scripted failure"),
        (
            {"stream_error_after": 5, "stream_error_text": "CUDA out of memory"},
            "out_of_memory",
            5,
            "out of memory",
        ),
        ({"drop_connection_after": 6}, "error", 6, ""),
    ],
)
def test_what_goes_wrong_on_the_server_is_told(fields, status, tokens, says):
    with MockServer(MockSettings(itl_s=0.002, **fields)) as mock, session_on(mock) as session:
        point = LoadPoint("closed", 1)
        items = list(drive_closed(session, MAKER, point, planned(2), iter(()), 20.0))
    traces = [item for item in items if not isinstance(item, LoadPointRecord)]
    assert [(t.status, t.output_tokens) for t in traces] == [(status, tokens)] * 2, traces
    assert all(says in t.error for t in traces)


def test_a_server_that_is_gone_is_an_error_for_every_request():
    with contextlib.ExitStack() as stack:
        mock = MockServer(MockSettings())
        with mock:
            session = stack.enter_context(session_on(mock))
        point = LoadPoint("closed", 2)
        *traces, record = drive_closed(session, MAKER, point, planned(4), iter(()), 20.0)
    assert [t.status for t in traces] == ["error"] * 4
    assert all("is gone" in t.error for t in traces)
    assert record.server == {}


def test_a_server_that_says_nothing_is_a_timeout_and_is_cancelled():
    with MockServer(MockSettings(itl_s=0.002)) as mock, session_on(mock) as session:
        mock.reset()
        mock.stall(3600.0)
        point = LoadPoint("closed", 2)
        items = list(drive_closed(session, MAKER, point, planned(4), iter(()), 0.3))
        traces, record = items[:-1], items[-1]
    assert [(t.status, t.output_tokens) for t in traces] == [("timeout", 0)] * 4
    assert record.client.reason == ""


def test_a_stall_of_two_seconds_shows_in_an_open_loop():
    """Requests go on being sent in the stall, so those that fall into it wait for its rest and count as such."""
    settings = MockSettings(ttft_s=0.01, itl_s=0.002)
    stall_s, rate, count = 2.0, 20.0, 60
    with MockServer(settings) as mock, session_on(mock) as session:
        point = LoadPoint("open_20", 0, loop="open", rate=rate)
        arrivals = ((p, i / rate) for i, p in enumerate(planned(count)))
        traces, stalled = [], False
        for item in drive_open(session, MAKER, point, arrivals, 60.0):
            if isinstance(item, LoadPointRecord):
                break
            traces.append(item)
            if len(traces) == 5 and not stalled:
                mock.stall(stall_s)
                stalled = True
    assert [t.status for t in traces] == ["ok"] * count
    assert all(t.sent_s >= t.scheduled_s - 0.002 for t in traces)
    traces.sort(key=lambda t: t.scheduled_s)
    came = [t.chunk_times_s[0] - t.scheduled_s for t in traces]
    worst = max(came)
    assert worst > 0.9 * stall_s
    # In the stall the schedule went on: its 40 requests wait for a rest of it that shrinks by 1/rate each.
    assert sum(wait > 0.1 * stall_s for wait in came) > 0.5 * stall_s * rate
    assert sorted(came)[math.ceil(0.99 * count) - 1] > 0.9 * stall_s


def test_the_client_s_own_share_is_measured():
    settings = MockSettings(ttft_s=0.01, itl_s=0.005)
    with MockServer(settings) as mock, session_on(mock) as session:
        points = measure_overhead(
            session, mock.truth, loads=(1, 8), requests_per_slot=1, output_tokens=8
        )
    assert [point.streams for point in points] == [1, 8]
    for point in points:
        assert point.tokens == 8 * point.streams
        assert 0 <= point.added_p50_s <= point.added_p99_s
        assert point.tokens_per_s > 0

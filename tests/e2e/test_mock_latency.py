"""Latency formulas end to end: a mock server that keeps the truth, the HTTP session, the load client, the metrics.

Every figure is computed twice: from the client's traces by `metrics.latency`, and from the server's own
times, which are on the same clock, by the formulas written out here. What may lie between is what the
client and the sockets added in this very run, token by token. That is never negative, and it bounds the
difference of every figure: quantiles move by no more than the values do.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from statistics import median

import numpy as np
import pytest

from quanteval.bench.client import LoadPoint
from quanteval.bench.driver import drive_closed, drive_open
from quanteval.bench.prompts import PlannedRequest, PromptMaker
from quanteval.engines.fake import ByteTokenizer
from quanteval.engines.http_session import HTTPSession
from quanteval.engines.http_wire import Remote
from quanteval.metrics.latency import (
    QUANTILES,
    ended_well,
    goodput,
    itl_s,
    steady_requests,
    summarize,
    tpot_s,
    ttft_s,
)
from quanteval.metrics.slo import Slo
from quanteval.records import LoadPointRecord
from quanteval.server.mock import MockServer, MockSettings

MAKER = PromptMaker(ByteTokenizer(), 0, exact_text=True)
OUTPUT = 9
TTFT_S, ITL_S = 0.03, 0.02
ROUNDING_S = 1e-6
TIMER_S = 1e-3
"""Event loops round timers to it, so that a request may go out so much before its time."""


class Watched(HTTPSession):
    """Notes when the first token of each request arrived, by the clock that the server uses too."""

    def __init__(self, mock, api):
        # Chat prompts are rendered by the server; a raw prompt goes as one user message.
        remote = Remote(mock.base_url, api=api)
        super().__init__(remote, ByteTokenizer(), raw_as_user=api == "chat")
        self.first_s = {}

    async def astream(self, request):
        async with contextlib.aclosing(super().astream(request)) as chunks:
            async for chunk in chunks:
                if chunk.count:
                    self.first_s.setdefault(request.request_id, chunk.at_s)
                yield chunk


@contextlib.contextmanager
def serving(api="completions", **fields):
    settings = MockSettings(**{"ttft_s": TTFT_S, "itl_s": ITL_S, **fields})
    with MockServer(settings, subprocess=True) as mock, Watched(mock, api) as session:
        yield mock, session


def planned(count, *, name="r", output=OUTPUT, length=20):
    """Prompts of different lengths, by which requests are told apart in the truth."""
    return [
        PlannedRequest(f"{name}{i}", "all", length + i, output, i, "measured") for i in range(count)
    ]


@dataclass
class Seen:
    """One load point from both sides; `rows` are the server's, in the order of `traces`."""

    traces: list
    rows: list
    record: LoadPointRecord
    origin_s: float

    def true(self, only=None):
        """Return the server's times of those requests, in seconds since the point began."""
        return [
            Truth(trace, row, self.origin_s)
            for trace, row in zip(self.traces, self.rows, strict=True)
            if only is None or trace in only
        ]

    @property
    def ways_in(self):
        """How long each request took to reach the server."""
        return [t.received_s - t.trace.sent_s for t in self.true()]

    @property
    def ways_out(self):
        """How long after its sending each token was seen."""
        return [
            ours - theirs
            for t in self.true()
            for ours, theirs in zip(by_token(t.trace), by_token(t), strict=True)
        ]


def by_token(item):
    pairs = zip(item.chunk_times_s, item.chunk_tokens, strict=True)
    return [at for at, count in pairs for _ in range(count)]


class Truth:
    """A request by the server's times, and its latencies as docs/metrics.md defines them."""

    def __init__(self, trace, row, origin_s):
        self.trace = trace
        self.received_s = row["received_s"] - origin_s
        self.chunk_times_s = [at - origin_s for at in row["chunk_s"]]
        self.chunk_tokens = row["chunk_tokens"]
        self.ok = row["status"] == "ok"
        self.start_s = trace.scheduled_s if trace.loop == "open" else self.received_s

    @property
    def ttft(self):
        return self.chunk_times_s[0] - self.start_s

    @property
    def e2e(self):
        return self.chunk_times_s[-1] - self.start_s

    @property
    def tpot(self):
        return (self.e2e - self.ttft) / (sum(self.chunk_tokens) - 1)

    @property
    def itl(self):
        gaps = []
        for number in range(1, len(self.chunk_times_s)):
            gap = self.chunk_times_s[number] - self.chunk_times_s[number - 1]
            gaps += [gap / self.chunk_tokens[number]] * self.chunk_tokens[number]
        return gaps


def drive(mock, session, driven):
    """Drive a load point to its end, and put the server's truth beside it."""
    mock.reset()
    *traces, record = driven
    rows = sorted(mock.truth(), key=lambda row: row["prompt_tokens"])
    traces.sort(key=lambda trace: trace.prompt_tokens)
    # A chat's template adds as many tokens to each.
    assert (
        len({r["prompt_tokens"] - t.prompt_tokens for r, t in zip(rows, traces, strict=True)}) == 1
    )
    origins = [
        session.first_s[trace.request_id] - trace.chunk_times_s[0]
        for trace in traces
        if trace.chunk_times_s
    ]
    assert max(origins) - min(origins) < ROUNDING_S
    return Seen(traces, rows, record, origins[0])


def closed(mock, session, requests, slots):
    point = LoadPoint("closed", slots)
    return drive(mock, session, drive_closed(session, MAKER, point, requests, iter(()), 60.0))


def opened(mock, session, requests, rate):
    point = LoadPoint("open", 0, loop="open", rate=rate)
    arrivals = ((request, i / rate) for i, request in enumerate(requests))
    return drive(mock, session, drive_open(session, MAKER, point, arrivals, 60.0))


def assert_same(found, values, bound_s, *, more=True):
    """Quantiles of a distribution are those of the true values, or at most the bound above (else: from) them."""
    assert found.n == len(values)
    for q in QUANTILES:
        off = found.at(q).value - float(np.quantile(values, q))
        assert -(ROUNDING_S if more else bound_s + ROUNDING_S) <= off <= bound_s + ROUNDING_S, q


def assert_figures(seen):
    """Every latency of a load point is the server's, but for what was added in this run."""
    assert [t.status for t in seen.traces] == ["ok"] * len(seen.traces), seen.traces
    assert [t.chunk_tokens for t in seen.traces] == [row["chunk_tokens"] for row in seen.rows]
    assert all(t.output_tokens == OUTPUT for t in seen.traces)
    assert min(seen.ways_out) >= -ROUNDING_S, "a token was seen before it was sent"
    assert min(seen.ways_in) >= -ROUNDING_S, "a request came before it was sent"
    steady = steady_requests(seen.traces)
    assert steady
    true = seen.true(steady)
    (summary,) = summarize(seen.traces)
    assert summary.steady_requests == len(steady) and summary.failed == 0
    out_s = max(seen.ways_out)
    both_s = out_s + (0.0 if seen.record.loop == "open" else max(seen.ways_in))
    # What is late at both ends of a gap cancels, so that gaps may be off to either side.
    assert_same(summary.ttft, [t.ttft for t in true], both_s)
    assert_same(summary.e2e, [t.e2e for t in true], both_s)
    assert_same(summary.itl, [gap for t in true for gap in t.itl], out_s, more=False)
    assert_same(summary.tpot, [t.tpot for t in true], out_s / (OUTPUT - 1), more=False)
    assert summary.stream_tps == pytest.approx(1 / median(tpot_s(t) for t in steady))
    # At the median a busy machine does not matter: a role or a usage count taken for a token is a gap off.
    assert median(seen.ways_out) < ITL_S / 2
    return summary


MODES = {
    "single tokens": ("completions", {}),
    "four tokens a chunk": ("completions", {"tokens_per_chunk": 4}),
    "role first, usage last": ("chat", {"role_only_first_chunk": True}),
    "reasoning": ("chat", {"reasoning_tokens": 4, "role_only_first_chunk": True}),
    "reasoning, four a chunk, usage on the chunk that ends": (
        "chat",
        {
            "reasoning_tokens": 4,
            "tokens_per_chunk": 4,
            "reasoning_field": "reasoning",
            "usage_only_last_chunk": False,
        },
    ),
    "drawn times": ("completions", {"spread": "lognormal", "tokens_per_chunk": 2}),
    "a stall": ("completions", {"stall_at_s": 0.1, "stall_s": 0.3}),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_latency_is_the_server_s_own(mode):
    api, fields = MODES[mode]
    with serving(api, **fields) as (mock, session):
        slots = closed(mock, session, planned(9, name="c"), 3)
        schedule = opened(mock, session, planned(8, name="o"), 40.0)
    for seen in (slots, schedule):
        summary = assert_figures(seen)
        if "spread" not in fields:
            # Set times are a floor, so that nothing is counted from later than it began.
            steady = steady_requests(seen.traces)
            step = fields.get("tokens_per_chunk", 1)
            assert min(ttft_s(t) for t in steady) >= TTFT_S - TIMER_S
            assert summary.itl.at(0.99).value >= ITL_S / step * 0.9
        if "stall_s" in fields:
            worst = max(max([ttft_s(t), *itl_s(t)]) for t in seen.traces)
            assert worst >= fields["stall_s"] - ROUNDING_S
    # The client's own lateness is in its record, and part of an open loop's latencies.
    late = [t.sent_s - t.scheduled_s for t in schedule.traces]
    assert min(late) >= -TIMER_S
    assert schedule.record.client.lag_p99_s == pytest.approx(max(late), abs=ROUNDING_S)
    for t in schedule.true():
        served_s = t.chunk_times_s[0] - t.received_s
        added_s = max(late) + max(schedule.ways_in) + max(schedule.ways_out)
        assert -TIMER_S <= ttft_s(t.trace) - served_s <= added_s + ROUNDING_S


def test_goodput_counts_the_requests_that_met_their_limits_in_time():
    limit_s, rate = 0.12, 20.0
    slo = Slo(ttft={"p99": limit_s}, e2e={"p99": 10.0})
    requests = [
        PlannedRequest(f"g{i}", bucket, length + i, OUTPUT, i)
        for i in range(16)
        for bucket, length in [("short", 20) if i % 2 else ("long", 500)]
    ]
    # A short prompt takes about 10 ms to read, a long one 200.
    with serving(ttft_s=0.0, itl_s=0.005, prefill_s_per_token=4e-4) as (mock, session):
        seen = opened(mock, session, requests, rate)
    window_s = (len(requests) - 1) / rate
    added_s = max(seen.ways_out) + ROUNDING_S

    def count(margin_s):
        # The window is open at its beginning, where no request can end.
        return sum(
            t.ok and t.ttft + margin_s <= limit_s and t.chunk_times_s[-1] + 2 * margin_s <= window_s
            for t in seen.true()
        )

    # The end of a stream comes after its last token, by another way out.
    end_s = max(t.end_s - t.chunk_times_s[-1] for t in seen.traces)
    good = round(goodput(seen.traces, slo)["open"] * window_s, 6)
    assert count(max(added_s, end_s)) <= good <= count(0.0)
    assert sum(slo.met_by(t) for t in seen.traces) == sum(
        t.ttft + out <= limit_s for t, out in zip(seen.true(), first_ways_out(seen), strict=True)
    )
    assert goodput(seen.traces, Slo(ttft={"p99": 1e-9})) == {"open": 0.0}
    by_bucket = {s.bucket: s for s in summarize(seen.traces, by_bucket=True)}
    assert by_bucket["short"].requests == by_bucket["long"].requests == 8
    for bucket, summary in by_bucket.items():
        true = [t.ttft for t in seen.true() if t.trace.bucket == bucket]
        assert_same(summary.ttft, true, added_s)


def first_ways_out(seen):
    return [t.trace.chunk_times_s[0] - t.chunk_times_s[0] for t in seen.true()]


def test_an_error_in_the_middle_of_a_stream_is_never_ok():
    fields = {"stream_error_after": 5, "stream_error_share": 0.5, "itl_s": 0.005}
    with serving("chat", role_only_first_chunk=True, **fields) as (mock, session):
        seen = closed(mock, session, planned(16), 1)
    by_server = [row["status"] for row in seen.rows]
    assert set(by_server) == {"ok", "stream_error"}
    assert [t.status for t in seen.traces] == [
        "ok" if status == "ok" else "error" for status in by_server
    ]
    failed = [t for t in seen.traces if t.status == "error"]
    assert all(t.output_tokens == 5 and "scripted failure" in t.error for t in failed)
    (summary,) = summarize(seen.traces)
    assert summary.failed == len(failed) and dict(summary.failures) == {"error": len(failed)}
    good = [t for t in seen.true() if t.ok]
    added_s = max(seen.ways_in) + max(seen.ways_out)
    # Their latencies, which are shorter, are in none of the figures.
    assert_same(summary.ttft, [t.ttft for t in good], added_s)
    assert_same(summary.e2e, [t.e2e for t in good], added_s)
    rate = goodput(seen.traces, Slo())["closed"]
    window_s = seen.traces[0].sent_s, max(t.end_s for t in seen.traces)
    assert rate == pytest.approx(len(good) / (window_s[1] - window_s[0]), rel=0.02)


def test_a_refused_request_and_a_cut_connection_are_errors_without_latencies():
    # The numbers of the requests count anew from the reset, after those that open the session.
    refused = (14, 15, 16)
    fields = {"http_error_requests": refused, "drop_connection_after": 6, "itl_s": 0.002}
    with serving(**fields, drop_connection_share=0.3, seed=3) as (mock, session):
        point = LoadPoint("closed", 1)
        mock.reset()
        *traces, _ = drive_closed(session, MAKER, point, planned(18), iter(()), 60.0)
        rows = mock.truth()
    kinds = {"ok": "ok", "http_error": "error", "dropped": "error"}
    assert {row["status"] for row in rows} == set(kinds)
    assert [t.status for t in traces] == [kinds[row["status"]] for row in rows]
    assert [t.output_tokens for t in traces] == [sum(row["chunk_tokens"]) for row in rows]
    (summary,) = summarize(traces)
    assert summary.failed == sum(not ended_well(t) for t in traces) > len(refused)
    assert summary.ttft.n == sum(row["status"] == "ok" for row in rows)


def test_a_server_that_dies_in_the_middle_ends_every_request_as_an_error():
    with serving(itl_s=0.01) as (mock, session):
        point = LoadPoint("closed", 2)
        driven = drive_closed(session, MAKER, point, planned(12), iter(()), 60.0)
        first = [next(driven), next(driven)]
        mock.kill()
        *rest, record = driven
    assert [t.status for t in first] == ["ok", "ok"]
    assert len(rest) == 10 and {t.status for t in rest} == {"error"}
    assert all(t.error for t in rest)
    assert isinstance(record, LoadPointRecord) and record.server == {}


STALL_S = 1.0


def test_a_stall_shows_at_p99_of_an_open_loop_and_in_as_many_requests_as_a_closed_one_has_slots():
    """Whoever waits for answers before sending more asks a stalled server little: coordinated omission."""
    rate, slots = 50.0, 2
    fields = {"ttft_s": 0.004, "itl_s": 0.001, "stall_at_s": 0.2, "stall_s": STALL_S}
    with serving(**fields) as (mock, session):
        schedule = opened(mock, session, planned(90, name="o", output=3), rate)
        waiting = closed(mock, session, planned(220, name="c", output=3), slots)
    (by_schedule,), (by_slots,) = summarize(schedule.traces), summarize(waiting.traces)
    assert by_schedule.failed == by_slots.failed == 0
    # Nothing is sent in the stall, and a request is scheduled into its first 1/rate seconds, the next into the second.
    assert by_schedule.ttft.at(0.99).value >= STALL_S - 2 / rate - ROUNDING_S
    waited = [ttft_s(t) for t in schedule.traces]
    assert sum(wait > STALL_S / 2 for wait in waited) >= rate * STALL_S / 2 - 1
    assert_same(by_schedule.ttft, [t.ttft for t in schedule.true()], max(schedule.ways_out))
    # Those that were in flight, and no other.
    hit = [t for t in waiting.traces if t.end_s - t.sent_s > STALL_S / 2]
    assert len(hit) == slots
    assert max(t.sent_s for t in hit) < min(t.end_s for t in hit)
    assert by_slots.ttft.at(0.99).value < STALL_S / 2
    gaps = [b - a for a, b in itertools.pairwise(sorted(t.sent_s for t in schedule.traces))]
    assert median(gaps) < 2 / rate, "an open loop goes on sending"

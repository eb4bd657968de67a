"""Slots under load: always full while it counts, never overfull, and gone when nobody wants them."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time

import pytest

from quanteval.bench import client
from quanteval.bench.client import LoadPoint, follow
from quanteval.bench.closed_loop import closed_loop
from quanteval.bench.plan import LoadBench
from quanteval.bench.workload import PREFIX_TOKENS, Bucket, PlannedRequest, PromptMaker
from quanteval.engines.fake import ByteTokenizer
from quanteval.errors import EngineError
from quanteval.interfaces import Chunk
from quanteval.metrics.latency import steady_requests, summarize

BENCH = LoadBench(
    buckets=(Bucket(8, 16),), output_tokens=4, single_stream_requests=2, concurrencies=(3,),
    requests_per_slot=2, timeout_s=20.0,
)  # fmt: skip
MAKER = PromptMaker(ByteTokenizer(), seed=0)


class Session:
    """Counts who is in flight; `script(session, request)` yields the chunks."""

    max_context = 1000
    tokenizer = ByteTokenizer()

    def __init__(self, script):
        self.script = script
        self.lock = threading.Lock()
        self.running: set[str] = set()
        self.most = 0
        self.started: list[str] = []
        self.prompts: list[tuple[int, ...]] = []

    def stream(self, request):
        with self.lock:
            self.running.add(request.request_id)
            self.started.append(request.request_id)
            self.prompts.append(request.prompt.token_ids[:PREFIX_TOKENS])
            self.most = max(self.most, len(self.running))
        try:
            yield from self.script(self, request)
        finally:
            with self.lock:
                self.running.discard(request.request_id)


def one_by_one(session, request):
    for left in reversed(range(request.sampling.max_tokens)):
        time.sleep(0.001)
        yield Chunk((1,), time.perf_counter(), None if left else "length")


def run(session, bench=BENCH):
    return list(bench.run(session))


def slots_are_gone():
    deadline = time.monotonic() + 10
    while any(t.name.startswith("closed_loop") for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return True


def test_no_measured_request_ends_before_all_slots_are_full():
    def waits_for_company(session, request):
        """Ends only beside two others; were the slots not kept full, it would run into its limit."""
        *most, last = one_by_one(session, request)
        yield from most
        if request.request_id.startswith("closed_loop") and "filler" not in request.request_id:
            limit = time.monotonic() + 10
            while len(session.running) < 3:
                assert time.monotonic() < limit, f"{request.request_id} ran alone"
                time.sleep(0.001)
        yield last

    session = Session(waits_for_company)
    traces = run(session)
    measured = [t for t in traces if t.load_point == "closed_loop_3" and not t.warmup]
    assert [t.status for t in measured] == ["ok"] * 6, [t.error for t in measured]
    assert session.most == 3
    assert not session.running
    # Fillers included, nobody's prompt begins like another's.
    assert any("filler" in request_id for request_id in session.started)
    assert len(set(session.prompts)) == len(session.started)
    assert slots_are_gone()


def test_fillers_are_cancelled_once_the_last_measured_request_has_ended():
    def endless_fillers(session, request):
        if "filler" not in request.request_id:
            yield from one_by_one(session, request)
            return
        while True:
            time.sleep(0.001)
            yield Chunk((1,), time.perf_counter())

    traces = run(Session(endless_fillers))
    fillers = [t for t in traces if "filler" in t.request_id]
    assert fillers
    assert all(t.warmup and t.status == "cancelled" for t in fillers)
    summary = summarize(traces)[-1]
    assert (summary.requests, summary.failed, dict(summary.failures)) == (6, 0, {})


def test_single_stream_needs_no_filler():
    traces = run(Session(one_by_one), LoadBench(**{**vars(BENCH), "concurrencies": ()}))
    assert [(t.load_point, t.warmup) for t in traces] == [
        ("warmup", True),
        ("single_stream", True),
        ("single_stream", False),
        ("single_stream", False),
    ]
    assert len(steady_requests(traces[1:])) == 2


def test_a_dead_server_is_an_error_for_every_request_and_ends():
    def refuses(session, request):
        raise ConnectionError("refused")
        yield

    traces = run(Session(refuses))
    measured = [t for t in traces if not t.warmup]
    assert len(measured) == 2 + 6
    assert {t.status for t in traces if "filler" not in t.request_id} == {"error"}
    for summary in summarize(traces):
        assert summary.failed == summary.requests
        assert summary.output_tps is None
        assert summary.ttft.n == 0


def test_fillers_that_fail_do_not_follow_each_other_without_end():
    def fails_or_lasts(session, request):
        if "filler" in request.request_id:
            yield Chunk((), time.perf_counter(), "error", "no room")
        elif request.request_id == "closed_loop_3-0-8":
            time.sleep(0.2)
        yield from one_by_one(session, request)

    traces = run(Session(fails_or_lasts))
    failed = [t for t in traces if "filler" in t.request_id]
    assert 1 <= len(failed) <= 3
    summary = summarize(traces)[-1]
    assert summary.failed == 0
    assert summary.failures == {"error": len(failed)}


@pytest.mark.parametrize("hung", ["warmup-0-0", "single_stream-0-1", "closed_loop_3-0-4"])
def test_a_stream_that_says_nothing_any_more_ends_the_bench(hung):
    release = threading.Event()

    def hangs(session, request):
        if request.request_id == hung:
            release.wait(30)
        yield from one_by_one(session, request)

    bench = LoadBench(**{**vars(BENCH), "timeout_s": 0.4})
    session = Session(hangs)
    seen = []
    threading.Timer(1.6, release.set).start()
    with pytest.raises(EngineError, match=f'"{hung}" has not ended'):
        seen.extend(bench.run(session))
    assert hung not in {t.request_id for t in seen}
    assert slots_are_gone()


@pytest.mark.parametrize("how", [KeyboardInterrupt, GeneratorExit])
def test_an_interrupt_ends_the_slots(how):
    def slow(session, request):
        for _ in range(1000):
            time.sleep(0.002)
            yield Chunk((1,), time.perf_counter())

    point = LoadPoint("closed_loop_2", 2)
    # One that ends, then some that would not.
    planned = [PlannedRequest(f"r{i}", "b", 9, 4, i) for i in range(6)]

    def script(session, request):
        return (one_by_one if request.request_id == "r0" else slow)(session, request)

    session = Session(script)
    traces = closed_loop(session, MAKER, point, planned, iter(()), timeout_s=60.0)
    assert next(traces).request_id == "r0"
    with pytest.raises(how):
        traces.throw(how)
    assert slots_are_gone()
    assert not session.running
    assert len(session.started) <= 4


def test_a_bug_in_a_slot_is_raised_and_not_waited_for():
    class BrokenError(BaseException):
        pass

    def breaks(session, request):
        raise BrokenError
        yield

    with pytest.raises(BrokenError):
        run(Session(breaks))


# --------------------------------------------------------------------------- one stream, on a scripted clock


class Clock:
    """Returns scripted seconds: sending at 100, then whatever, at 200 the end."""

    def __init__(self):
        self.times = itertools.chain([100.0], itertools.repeat(200.0))

    def __call__(self):
        return next(self.times)


class Stream:
    """An iterator of chunks whose closing can fail; no generator, as a client library's might be."""

    def __init__(self, chunks, closing=None):
        self.chunks = iter(chunks)
        self.closing = closing
        self.closed = 0

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.chunks)

    def close(self):
        self.closed += 1
        if self.closing is not None:
            raise self.closing


def at_times(monkeypatch, stream, *, output=3, timeout_s=10.0):
    monkeypatch.setattr(client, "perf_counter", Clock())
    planned = PlannedRequest("r", "b", 9, output, 0)

    class Serving:
        def stream(self, request):
            return stream

    following = follow(
        Serving(), planned, MAKER.request(planned), LoadPoint("p", 1),
        origin_s=90.0, timeout_s=timeout_s,
    )  # fmt: skip
    return asyncio.run(following)


def test_times_are_the_engine_s_and_relative_to_the_load_point(monkeypatch):
    role, usage = Chunk((), 100.5), Chunk((), 109.0)
    chunks = [role, Chunk((1,), 102.0), Chunk((2, 3), 103.0, "length"), usage]
    trace = at_times(monkeypatch, Stream(chunks))
    assert trace.status == "ok"
    assert (trace.sent_s, trace.end_s) == (10.0, 110.0)
    assert trace.chunk_times_s == [12.0, 13.0]
    assert trace.chunk_tokens == [1, 2]


@pytest.mark.parametrize("reason", [None, "length"])
def test_what_arrives_after_the_timeout_does_not_count(monkeypatch, reason):
    stream = Stream([Chunk((1,), 101.0), Chunk((2, 3), 110.5, reason)])
    trace = at_times(monkeypatch, stream)
    assert trace.status == "timeout"
    assert trace.output_tokens == 1
    assert stream.closed == 1


def test_exactly_at_the_timeout_is_in_time(monkeypatch):
    assert at_times(monkeypatch, Stream([Chunk((1, 2, 3), 110.0, "length")])).status == "ok"


def test_a_stream_that_cannot_be_closed_is_an_error(monkeypatch):
    stream = Stream([Chunk((1, 2, 3), 102.0, "length")], closing=OSError("socket gone"))
    trace = at_times(monkeypatch, stream)
    assert trace.status == "error"
    assert "closing the stream: OSError: socket gone" in trace.error


def test_an_iterator_without_close_will_do(monkeypatch):
    trace = at_times(monkeypatch, iter([Chunk((1, 2, 3), 102.0, "length")]))
    assert trace.status == "ok"


def test_an_error_beside_a_finish_reason_is_an_error(monkeypatch):
    trace = at_times(monkeypatch, Stream([Chunk((1, 2, 3), 102.0, "length", "half way")]))
    assert (trace.status, trace.error) == ("error", "half way")


def test_too_many_tokens_are_as_wrong_as_too_few(monkeypatch):
    trace = at_times(monkeypatch, Stream([Chunk((1, 2, 3, 4), 102.0, "length")]))
    assert trace.status == "error"
    assert "4 output tokens instead of 3" in trace.error


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes",
        "[enforce fail] DefaultCPUAllocator: can't allocate memory",
        "MemoryError: ",
        "std::bad_alloc",
        "torch.OutOfMemoryError",
    ],
)
def test_running_out_of_memory_is_told_from_other_errors(monkeypatch, text):
    chunks = [Chunk((1,), 101.0), Chunk((), 102.0, "error", text)]
    assert at_times(monkeypatch, Stream(chunks)).status == "out_of_memory"

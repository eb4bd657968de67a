"""Load points on an event loop: open loops keep their schedule, closed ones their slots, and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import threading
import time

import pytest

from quanteval.bench.client import LoadPoint
from quanteval.bench.driver import drive_closed, drive_open
from quanteval.bench.workload import PlannedRequest, PromptMaker
from quanteval.engines.fake import ByteTokenizer
from quanteval.errors import EngineError
from quanteval.interfaces import Chunk
from quanteval.records import LoadPointRecord, UtilizationSample

MAKER = PromptMaker(ByteTokenizer(), seed=0)


class AsyncSession:
    """Streams on the event loop; `script(session, request)` is an async generator of chunks."""

    max_context = 1000
    tokenizer = ByteTokenizer()

    def __init__(self, script):
        self.script = script
        self.running: set[str] = set()
        self.most = 0
        self.started: list[str] = []
        self.cancelled: list[str] = []

    def server_metrics(self):
        """A session that tells these is computed for in another process."""
        return {}

    async def astream(self, request):
        self.running.add(request.request_id)
        self.started.append(request.request_id)
        self.most = max(self.most, len(self.running))
        try:
            async for chunk in self.script(self, request):
                yield chunk
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        finally:
            self.running.discard(request.request_id)


async def at_once(session, request):
    count = request.sampling.max_tokens
    for left in reversed(range(count)):
        await asyncio.sleep(0)
        yield Chunk((1,), time.perf_counter(), None if left else "length")


async def never(session, request):
    await asyncio.Event().wait()
    yield Chunk((), 0.0)


def planned(i, role="measured", output=2):
    return PlannedRequest(f"r{i}", "b", 9, output, i, role)


def requests(count, role="measured", output=2):
    return [planned(i, role, output) for i in range(count)]


def fillers(start=1000):
    return (planned(i, "filler") for i in itertools.count(start))


def split(items):
    """Return the traces and the record, which must be one and the last."""
    *traces, record = items
    assert isinstance(record, LoadPointRecord)
    assert not any(isinstance(t, LoadPointRecord) for t in traces)
    return traces, record


def closed(session, count=6, slots=2, timeout_s=20.0, **fields):
    point = LoadPoint("closed", slots)
    return drive_closed(session, MAKER, point, requests(count), fillers(), timeout_s, **fields)


def every(gap_s, roles):
    """Yield arrivals at equal distances; `roles` is a string such as 'rmmf'."""
    names = {"r": "ramp", "m": "measured", "f": "filler"}
    for i, letter in enumerate(roles):
        yield planned(i, names[letter]), i * gap_s


def endless(gap_s, measured):
    for i in itertools.count():
        yield planned(i, "measured" if i < measured else "filler"), i * gap_s


def opened(session, arrivals, timeout_s=20.0, stop=None, to_s=math.inf):
    point = LoadPoint("open", 0, loop="open", rate=10.0, measured_to_s=to_s)
    return drive_open(session, MAKER, point, arrivals, timeout_s, stop)


def nothing_is_left():
    deadline = time.monotonic() + 10
    names = ("open", "closed", "stream-", "prompts")
    while any(t.name.startswith(names) for t in threading.enumerate()):
        assert time.monotonic() < deadline, [t.name for t in threading.enumerate()]
        time.sleep(0.005)
    return True


# --------------------------------------------------------------------------- closed


def test_a_closed_loop_keeps_its_slots_full_and_tells_how_it_went():
    async def waits_for_company(session, request):
        async for chunk in at_once(session, request):
            if chunk.finish_reason and request.request_id in {f"r{i}" for i in range(6)}:
                async with asyncio.timeout(10):
                    while len(session.running) < 3:
                        await asyncio.sleep(0.001)
            yield chunk

    session = AsyncSession(waits_for_company)
    before = time.time()
    traces, record = split(closed(session, slots=3))
    measured = [t for t in traces if not t.warmup]
    assert [t.status for t in measured] == ["ok"] * 6, [t.error for t in measured]
    assert session.most == 3
    assert not session.running
    assert (record.name, record.loop, record.concurrency, record.rate) == (
        "closed",
        "closed",
        3,
        0.0,
    )
    assert before <= record.started_s <= time.time()
    assert 0 <= record.measured_from_s <= record.measured_to_s <= record.duration_s
    assert record.client.lag_p99_s >= record.client.lag_p50_s >= 0
    assert record.client.cpu_share > 0
    assert not record.over_saturated
    assert nothing_is_left()


@pytest.mark.parametrize("slots", [1, 4])
def test_a_closed_loop_without_fillers_or_without_requests_ends(slots):
    session = AsyncSession(at_once)
    point = LoadPoint("closed", slots)
    traces, _ = split(drive_closed(session, MAKER, point, requests(2), iter(()), 20.0))
    assert len(traces) == 2
    traces, record = split(drive_closed(session, MAKER, point, [], fillers(), 20.0))
    assert traces == []
    assert record.client.lag_p99_s == 0.0


def test_prompts_that_cannot_be_made_are_an_error_not_a_hang():
    def breaks():
        yield planned(1000, "filler")
        raise EngineError("no more text")

    async def slow(session, request):
        async for chunk in at_once(session, request):
            await asyncio.sleep(0.05)
            yield chunk

    point = LoadPoint("closed", 2)
    with pytest.raises(EngineError, match="no more text"):
        list(drive_closed(AsyncSession(slow), MAKER, point, requests(1, output=40), breaks(), 20.0))
    assert nothing_is_left()


# --------------------------------------------------------------------------- open


def test_an_open_loop_sends_on_schedule_while_the_server_stands_still():
    """Nothing ends before the last has been sent: were the client to wait for anything, it would never end."""
    count = 12

    async def stands_still(session, request):
        async with asyncio.timeout(20):
            while len(session.started) < count:
                await asyncio.sleep(0.001)
        async for chunk in at_once(session, request):
            yield chunk

    session = AsyncSession(stands_still)
    traces, record = split(opened(session, every(0.02, "m" * count)))
    assert len(traces) == count
    assert session.most == count
    traces.sort(key=lambda t: t.scheduled_s)
    for i, trace in enumerate(traces):
        assert trace.scheduled_s == pytest.approx(i * 0.02)
        assert trace.sent_s >= trace.scheduled_s - 0.002
        assert (trace.loop, trace.concurrency, trace.rate) == ("open", 0, 10.0)
        assert trace.status == "ok"
    # The first waited for the last to be sent, so its latency shows the stall; the last one's does not.
    stall = traces[-1].sent_s - traces[0].sent_s
    assert traces[0].chunk_times_s[0] - traces[0].sent_s >= stall
    assert (record.loop, record.concurrency, record.rate) == ("open", 0, 10.0)


def test_unmeasured_arrivals_go_on_until_the_last_measured_request_has_ended():
    async def needs_fillers(session, request):
        if request.request_id == "r2":
            async with asyncio.timeout(20):
                while len(session.started) < 8:
                    await asyncio.sleep(0.001)
        script = at_once if int(request.request_id[1:]) < 3 else never
        async for chunk in script(session, request):
            yield chunk

    session = AsyncSession(needs_fillers)
    traces, _ = split(opened(session, endless(0.01, 3)))
    assert [t.status for t in traces if not t.warmup] == ["ok"] * 3
    rest = [t for t in traces if t.warmup]
    assert len(rest) >= 5
    assert {t.status for t in rest} == {"cancelled"}
    assert len(session.cancelled) == len(rest)
    assert nothing_is_left()


def test_a_far_filler_is_not_waited_for():
    arrivals = iter([(planned(0), 0.0), (planned(1, "filler"), 3600.0)])
    traces, _ = split(opened(AsyncSession(at_once), arrivals))
    assert [t.request_id for t in traces] == ["r0"]


def test_fillers_between_measured_requests_do_not_end_the_window():
    arrivals = every(0.01, "rmfmffff")
    traces, record = split(opened(AsyncSession(at_once), arrivals, to_s=0.04))
    assert [t.request_id for t in traces if not t.warmup] == ["r1", "r3"]
    assert record.measured_to_s == pytest.approx(0.04)


def test_an_open_loop_without_arrivals_ends():
    traces, record = split(opened(AsyncSession(at_once), iter(())))
    assert traces == []
    assert record.duration_s >= 0


def test_an_over_saturated_point_ends_with_a_note_and_keeps_its_traces(monkeypatch):
    monkeypatch.setattr("quanteval.bench.loops.ASK_S", 0.05)
    states = []

    def stop(state):
        states.append(state)
        return "queue grows" if state.in_flight >= 6 else ""

    session = AsyncSession(never)
    traces, record = split(opened(session, endless(0.02, 10**6), stop=stop))
    assert (record.over_saturated, record.note) == (True, "queue grows")
    assert {(t.status, t.warmup) for t in traces} == {("cancelled", False)}
    last = states[-1]
    assert len(traces) >= 6
    assert (last.in_flight, last.ended) == (last.sent, 0)
    assert [n for _, n in last.in_flight_history] == sorted(n for _, n in last.in_flight_history)
    assert len(last.in_flight_history) == len(states)
    assert 0 < last.oldest_s <= last.now_s
    assert nothing_is_left()


def test_a_stop_that_fails_is_raised(monkeypatch):
    monkeypatch.setattr("quanteval.bench.loops.ASK_S", 0.01)
    with pytest.raises(ZeroDivisionError):
        list(opened(AsyncSession(never), endless(0.02, 10**6), stop=lambda state: 1 / 0))
    assert nothing_is_left()


# --------------------------------------------------------------------------- statuses and ends


@pytest.mark.parametrize("drive", ["closed", "open"])
def test_every_status_is_told(drive):
    async def scripted(session, request):
        number = int(request.request_id[1:])
        if number == 0:
            async for chunk in at_once(session, request):
                yield chunk
        elif number == 1:
            yield Chunk((1,), time.perf_counter())
            yield Chunk((), time.perf_counter(), "error", "server broke")
        elif number == 2:
            raise MemoryError("too big")
        elif number == 3:
            await asyncio.sleep(60)
        elif number == 4:
            yield Chunk((), time.perf_counter(), "cancelled")
        elif number == 5:
            raise TimeoutError("the socket's own")

    session = AsyncSession(scripted)
    if drive == "closed":
        items = drive_closed(session, MAKER, LoadPoint("closed", 3), requests(6), iter(()), 0.3)
    else:
        items = opened(session, every(0.001, "mmmmmm"), timeout_s=0.3)
    traces, _ = split(items)
    found = {t.request_id: t.status for t in traces}
    assert found == {
        "r0": "ok", "r1": "error", "r2": "out_of_memory", "r3": "timeout", "r4": "cancelled", "r5": "error"
    }  # fmt: skip
    # The timeout fires though the stream says nothing at all.
    assert session.cancelled == ["r3"]
    assert not session.running


def test_what_the_last_chunk_tells_is_in_the_trace():
    async def tells(session, request):
        yield Chunk((), time.perf_counter())
        yield Chunk((), time.perf_counter(), tokens=2, text="ab")
        yield Chunk(
            (), time.perf_counter(), "length", cached_prompt_tokens=4, layers={"queue": 0.5}
        )

    traces, _ = split(closed(AsyncSession(tells), count=1, slots=1))
    trace = traces[0]
    assert (trace.status, trace.chunk_tokens, trace.output_tokens) == ("ok", [2], 2)
    assert (trace.cached_prompt_tokens, trace.layers) == (4, {"queue": 0.5})


@pytest.mark.parametrize("drive", ["closed", "open"])
@pytest.mark.parametrize("how", [KeyboardInterrupt, GeneratorExit])
def test_an_interrupt_leaves_no_task_and_no_thread(drive, how):
    async def first_ends(session, request):
        async for chunk in (at_once if request.request_id == "r0" else never)(session, request):
            yield chunk

    session = AsyncSession(first_ends)
    run = closed(session) if drive == "closed" else opened(session, endless(0.005, 10**6))
    assert next(run).request_id == "r0"
    with pytest.raises(how):
        run.throw(how)
    assert nothing_is_left()
    assert not session.running
    assert set(session.cancelled) == set(session.started) - {"r0"}


def test_a_run_that_is_never_begun_or_closed_at_once_leaves_nothing():
    run = closed(AsyncSession(never))
    run.close()
    assert nothing_is_left()


def test_a_stream_that_cannot_be_cancelled_ends_the_point():
    release = threading.Event()

    async def clings(session, request):
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.02)
        yield Chunk((), time.perf_counter(), "length")

    threading.Timer(2.0, release.set).start()
    with pytest.raises(EngineError, match='"r0" has not ended'):
        list(closed(AsyncSession(clings), slots=1, timeout_s=0.2))
    assert nothing_is_left()


def test_a_session_that_blocks_the_loop_ends_the_point():
    async def blocks(session, request):
        time.sleep(1.5)
        yield Chunk((), time.perf_counter(), "length")

    with pytest.raises(EngineError, match='"r0" has not ended'):
        list(closed(AsyncSession(blocks), count=1, slots=1, timeout_s=0.2))
    assert nothing_is_left()


# --------------------------------------------------------------------------- the record


class Telling(AsyncSession):
    """A session whose server counts."""

    def __init__(self, script, *tables):
        super().__init__(script)
        self.tables = iter(tables)

    def server_metrics(self):
        table = next(self.tables)
        if isinstance(table, Exception):
            raise table
        return table

    def rss_bytes(self):
        return 12345


def test_counters_are_told_by_their_rise_and_gauges_as_they_stand():
    before = {"a_total": 5.0, 'b_sum{model="x"}': 1.0, "reset_total": 9.0, "usage": 0.9}
    after = {
        "a_total": 8.0,
        'b_sum{model="x"}': 1.5,
        "reset_total": 2.0,
        "usage": 0.4,
        "new_count": 3.0,
    }
    _, record = split(closed(Telling(at_once, before, after)))
    assert record.server == {
        "a_total": 3.0, 'b_sum{model="x"}': 0.5, "reset_total": 2.0, "usage": 0.4, "new_count": 3.0
    }  # fmt: skip
    assert record.rss_bytes == 12345


def test_metrics_that_cannot_be_read_cost_nothing_else():
    traces, record = split(closed(Telling(at_once, OSError("gone"), OSError("gone"))))
    assert record.server == {}
    assert [t.status for t in traces if not t.warmup] == ["ok"] * 6


def test_a_sampler_watches_from_before_the_load_to_its_end():
    session = AsyncSession(at_once)
    seen = []

    @contextlib.contextmanager
    def sampler():
        seen.append(("enter", len(session.started)))
        yield lambda: UtilizationSample(source="test", power_w=float(len(session.started)))
        seen.append(("exit", len(session.started)))

    _, record = split(closed(session, sampler=sampler))
    assert record.utilization.power_w == len(session.started) >= 6
    assert [what for what, _ in seen] == ["enter", "exit"]
    assert seen[0] == ("enter", 0)

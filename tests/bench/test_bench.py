"""The load client and its plan on scripted sessions: exact prompts, full slots, honest traces."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest
import yaml

from quanteval.bench.client import LoadPoint, follow
from quanteval.bench.plan import LoadBench, NoBench
from quanteval.bench.workload import Bucket, PlannedRequest, PromptMaker, draw_buckets
from quanteval.engines.fake import ByteTokenizer, FakeEngine
from quanteval.errors import ConfigError
from quanteval.interfaces import Calibration, Chunk, Request, Sampling
from quanteval.resources import presets
from quanteval.schemes.none import Unquantized
from quanteval.targets import build

QUICK = LoadBench(
    buckets=(Bucket(8, 16, 3.0), Bucket(32, 64, 1.0)), output_tokens=4, single_stream_requests=2,
    concurrencies=(3,), requests_per_slot=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def artifact(tiny_source, tmp_path_factory):
    return Unquantized("float32").quantize(
        tiny_source, tmp_path_factory.mktemp("a"), Calibration(), "cpu"
    )


def planned(tokens, place=0, output=3):
    return PlannedRequest(f"r{place}", "b", tokens, output, place)


@pytest.mark.parametrize("bos", [False, True])
def test_prompts_have_exact_lengths_and_share_no_start(bos):
    tokenizer = ByteTokenizer(add_bos=bos)
    maker = PromptMaker(tokenizer, seed=1)
    lengths = (1, 5, 100, 100, 100)
    requests = [maker.request(planned(length, place)) for place, length in enumerate(lengths)]
    prompts = [request.prompt for request in requests]
    assert [len(p.token_ids) for p in prompts] == list(lengths)
    assert len({p.token_ids[:9] for p in prompts[2:]}) == 3
    if bos:
        assert {p.token_ids[0] for p in prompts} == {tokenizer.bos_token_id}
    again = PromptMaker(tokenizer, seed=1)
    assert [again.request(planned(n, place)) for place, n in enumerate(lengths)] == requests
    assert PromptMaker(tokenizer, seed=2).request(planned(100)) != requests[2]
    assert all(r.sampling.ignore_eos and r.sampling.max_tokens == 3 for r in requests)
    huge = maker.request(planned(10**6, 3)).prompt
    assert len(huge.token_ids) == 10**6


def test_shares_of_the_buckets_are_kept():
    buckets = [Bucket(1, 9, 0.7), Bucket(10, 19, 0.2), Bucket(20, 29, 0.1)]
    drawn = draw_buckets(buckets, 20, random.Random(0))
    assert [drawn.count(bucket) for bucket in buckets] == [14, 4, 2]


def test_a_plan_warms_up_then_measures_every_point(artifact):
    with FakeEngine(ttft_s=0.005, itl_s=0.001).serve(artifact) as session:
        traces = list(QUICK.run(session))
    first = [t for t in traces if t.load_point == "warmup"]
    assert traces[: len(first)] == first
    assert [t.bucket for t in first] == ["8-16", "32-64"]
    assert all(t.warmup for t in first)
    measured = [t for t in traces if not t.warmup]
    counts = {
        point: sum(t.load_point == point for t in measured)
        for point in ("single_stream", "closed_loop_3")
    }
    assert counts == {"single_stream": 4, "closed_loop_3": 9}
    for trace in measured:
        assert trace.status == "ok"
        assert trace.output_tokens == sum(trace.chunk_tokens) == 4
        assert trace.sent_s <= trace.chunk_times_s[0] <= trace.chunk_times_s[-1] <= trace.end_s


def test_the_slots_are_kept_full_and_never_overfull(artifact):
    with FakeEngine(ttft_s=0.01).serve(artifact) as session:
        list(QUICK.run(session))
        assert session.most_in_flight == 3


def test_the_same_seed_plans_the_same_requests():
    def plan(seed):
        bench = LoadBench(**{**vars(QUICK), "seed": seed})
        return [request for _, requests in bench.load_points() for request in requests]

    assert plan(1) == plan(1)
    assert plan(1) != plan(2)
    assert len({request.place for request in plan(1)}) == len(plan(1))
    assert LoadBench(seed=1).fingerprint() != LoadBench(seed=2).fingerprint()


class Scripted:
    """A session whose stream is a list of chunks, or something to raise."""

    max_context = 1000
    tokenizer = ByteTokenizer()

    def __init__(self, *steps):
        self.steps = steps
        self.closed = False

    def stream(self, request):
        try:
            for step in self.steps:
                if isinstance(step, BaseException):
                    raise step
                if isinstance(step, float):
                    time.sleep(step)
                else:
                    yield Chunk(step[0], time.perf_counter(), *step[1:])
        finally:
            self.closed = True


def trace_of(*steps, timeout_s=5.0):
    session = Scripted(*steps)
    request = Request("r", ByteTokenizer().raw("ab"), Sampling(3))
    following = follow(
        session, planned(2), request, LoadPoint("p", 1),
        origin_s=time.perf_counter(), timeout_s=timeout_s,
    )  # fmt: skip
    return asyncio.run(following), session


def test_chunks_without_tokens_are_no_arrivals():
    trace, _ = trace_of(((),), ((1,),), ((),), ((2, 3),), ((), "stop"))
    assert trace.chunk_tokens == [1, 2]
    assert len(trace.chunk_times_s) == 2
    assert trace.status == "ok"


@pytest.mark.parametrize(
    ("steps", "status", "says"),
    [
        ([((1,),), ((), "error", "broken pipe")], "error", "broken pipe"),
        ([((1,),), ((), "error", "CUDA out of memory")], "out_of_memory", "out of memory"),
        ([((1,),), MemoryError("too big")], "out_of_memory", "too big"),
        ([((1,),), ValueError("two\nlines")], "error", "ValueError: two lines"),
        ([((1,),)], "error", "without a finish reason"),
        ([((), "stop")], "error", "0 output tokens instead of 3"),
        ([((1, 2), "stop")], "error", "2 output tokens instead of 3"),
        ([((), "cancelled")], "cancelled", "cancelled"),
        ([], "error", "without a finish reason"),
    ],
)
def test_what_goes_wrong_is_a_status_never_a_success(steps, status, says):
    trace, session = trace_of(*steps)
    assert trace.status == status
    assert says in trace.error
    assert session.closed


def test_a_timeout_closes_the_stream():
    trace, session = trace_of(((1,),), 0.05, ((2,),), 0.05, ((3,), "stop"), timeout_s=0.02)
    assert trace.status == "timeout"
    assert session.closed


def test_failed_requests_stay_in_the_trace(artifact):
    failing = ("closed_loop_3-0-4", "single_stream-0-2")
    with FakeEngine(failing=failing).serve(artifact) as session:
        traces = list(QUICK.run(session))
    measured = [t for t in traces if not t.warmup]
    assert sorted(t.request_id for t in measured if t.status == "error") == sorted(failing)
    assert len(measured) == 4 + 9


def test_stopping_early_leaves_no_thread(artifact):
    with FakeEngine(ttft_s=0.01).serve(artifact) as session:
        run = QUICK.run(session)
        for trace in run:
            if trace.load_point == "closed_loop_3":
                break
        run.close()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(
        t.name.startswith("closed_loop") for t in threading.enumerate()
    ):
        time.sleep(0.01)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("closed_loop")]


def test_a_bucket_that_does_not_fit_is_named_before_anything_runs(artifact):
    with (
        FakeEngine(max_context=60).serve(artifact) as session,
        pytest.raises(ConfigError, match='"32-64" with 4'),
    ):
        next(QUICK.run(session))


@pytest.mark.parametrize(
    "fields",
    [
        {"buckets": ()},
        {"output_tokens": 0},
        {"concurrencies": (0,)},
        {"timeout_s": 0.0},
        {"repetitions": 0},
    ],
)
def test_wrong_fields_are_refused(fields):
    with pytest.raises(ValueError, match="must"):
        LoadBench(**fields)
    with pytest.raises(ValueError, match="low <= high"):
        Bucket(5, 4)


@pytest.mark.parametrize("name", sorted(presets("bench")))
def test_presets_state_every_field(name):
    node = yaml.safe_load(presets("bench")[name].read_text())
    for entry in node.pop("defaults", []):
        # '/workload@workload: mixed': another group's preset as a field.
        ((place, chosen),) = entry.items()
        group, _, field = place.strip("/").partition("@")
        node[field] = yaml.safe_load(presets(group)[chosen].read_text())
    bench = build(node)
    assert set(node) - {"_target_"} == set(vars(bench))
    assert bench.fingerprint() == build(node).fingerprint()


def test_no_bench_measures_nothing(artifact):
    with FakeEngine().serve(artifact) as session:
        assert list(NoBench().run(session)) == []

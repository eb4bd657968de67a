"""The serving plan on a scripted engine: its stages, and that every variant meets the same traffic."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from quanteval.bench.arrivals import Arrivals
from quanteval.bench.driver import OpenState
from quanteval.bench.lengths import Fixed, Mixture, Range
from quanteval.bench.serving import ServingBench, stop_when_growing
from quanteval.bench.workload import Workload
from quanteval.engines.fake import FakeEngine, FakeSession
from quanteval.metrics.latency import cold_start_s, point, summarize
from quanteval.metrics.load import loads_of
from quanteval.metrics.operating import WITH_TAIL, WITHOUT_TAIL
from quanteval.metrics.slo import Slo
from quanteval.records import LoadPointRecord, RequestTrace

SHORT = Mixture((Range(8, 20, 0.7), Range(21, 40, 0.3)))
WORKLOAD = Workload(prompts=SHORT, outputs=Fixed(3), buckets=(20,), exact_text=False)
QUICK = ServingBench(
    workload=WORKLOAD, slo=Slo(ttft={"p50": 5.0}), single_requests=2, start=16.0, min_load=16.0, max_load=32.0,
    per_octave=1, requests=8, min_window_s=0.3, max_window_s=0.5, repetitions=1, max_points=3, ramp_share=0.5,
    head_of_line_rate=20.0, head_of_line_blocks=2, timeout_s=30.0,
)  # fmt: skip
CLOSED = replace(
    QUICK, workload=replace(WORKLOAD, arrivals=Arrivals("closed")), stages=("single", "rising"),
    start=2.0, min_load=2.0, max_load=4.0,
)  # fmt: skip


def run(bench, **engine):
    session = FakeSession(FakeEngine(**{"ttft_s": 0.002, **engine}), None, 0.0)
    items = list(bench.run(session))
    traces = [item for item in items if isinstance(item, RequestTrace)]
    records = [item for item in items if isinstance(item, LoadPointRecord)]
    return items, traces, records


@pytest.fixture(scope="module")
def opened():
    return run(QUICK)


def test_the_stages_come_in_order_and_a_record_follows_each_point(opened):
    items, traces, records = opened
    names = [record.name for record in records]
    assert names[:4] == ["warmup", "single_stream", "open_loop_16", "open_loop_32"]
    assert names[-4:] == [WITH_TAIL, WITHOUT_TAIL, WITHOUT_TAIL, WITH_TAIL]
    assert [r.stage for r in records][:4] == ["single", "single", "rising", "rising"]
    assert {r.stage for r in records[-4:]} == {"head_of_line"}
    of_point = None
    for item in items:
        if isinstance(item, LoadPointRecord):
            assert of_point in (None, (item.name, item.repetition))
            of_point = None
        else:
            of_point = (item.load_point, item.repetition)
    ids = Counter(trace.request_id for trace in traces)
    assert max(ids.values()) == 1
    assert all(trace.status == "ok" for trace in traces if not trace.warmup)


def test_names_that_tables_and_rules_read_are_those_of_the_standard_plan(opened):
    _, traces, records = opened
    single = point(summarize(traces), "single_stream")
    assert (single.concurrency, single.requests, single.failed) == (1, 4, 0)
    assert cold_start_s(traces) is not None
    buckets = Counter(t.bucket for t in traces if t.load_point == "single_stream" and not t.warmup)
    assert buckets == {"1-20": 2, "21+": 2}
    _, traces, records = run(CLOSED)
    names = [r.name for r in records]
    assert names[:4] == ["warmup", "single_stream", "closed_loop_2", "closed_loop_4"]
    assert {t.concurrency for t in traces if t.load_point == "closed_loop_4"} == {4}


def test_notes_say_what_was_concluded(opened):
    _, _, records = opened
    notes = [r.note for r in records if r.name.startswith("open_loop") and not r.client.saturated]
    assert all("ttft p50" in note for note in notes)


def test_requests_outside_the_window_are_no_steady_ones(opened):
    _, traces, records = opened
    for record in records:
        mine = [
            t for t in traces if (t.load_point, t.repetition) == (record.name, record.repetition)
        ]
        if record.loop == "open":
            measured = [t.scheduled_s for t in mine if not t.warmup]
            assert all(record.measured_from_s <= at <= record.measured_to_s for at in measured)
        if record.name.startswith("open_loop"):
            assert any(t.warmup and t.scheduled_s < record.measured_from_s for t in mine)


def plan_of(traces):
    """What was sent: times, lengths and buckets by load point, in the order of the plan."""
    return {
        (t.load_point, t.repetition, t.request_id): (t.scheduled_s, t.prompt_tokens, t.bucket)
        for t in traces
        if t.loop == "open" and not t.warmup
    }


def test_a_slower_variant_meets_the_same_traffic(opened):
    _, slow, _ = run(QUICK, ttft_s=0.03)
    mine, other = plan_of(opened[1]), plan_of(slow)
    common = mine.keys() & other.keys()
    assert {key[0] for key in common} >= {"open_loop_16", WITH_TAIL, WITHOUT_TAIL}
    assert all(mine[key] == other[key] for key in common)


def test_short_requests_are_the_same_with_and_without_the_long_ones(opened):
    def short(name):
        chosen = [t for t in opened[1] if t.load_point == name and t.repetition == 0]
        return sorted(
            (t.scheduled_s, t.prompt_tokens) for t in chosen if t.bucket == "1-20" and not t.warmup
        )

    assert short(WITH_TAIL) == short(WITHOUT_TAIL) != []
    buckets = {t.bucket for t in opened[1] if t.load_point == WITHOUT_TAIL}
    assert buckets == {"1-20"}


def test_fixed_loads_replace_the_search_and_a_failing_engine_is_no_load_at_all():
    _, traces, records = run(replace(QUICK, stages=("rising",), loads=(20.0,), repetitions=2))
    assert [(r.name, r.repetition) for r in records[1:]] == [
        ("open_loop_20", 0),
        ("open_loop_20", 1),
    ]
    _, traces, records = run(
        replace(QUICK, stages=("rising",), loads=(20.0,)), default_answer="", max_context=30
    )
    assert "clipped" in records[0].note
    assert all(t.prompt_tokens + 3 <= 30 for t in traces)
    (load,) = loads_of(
        [t.model_copy(update={"status": "error"}) for t in traces if t.load_point != "warmup"],
        [
            r.model_copy(update={"client": r.client.model_copy(update={"saturated": False})})
            for r in records
        ],
    )
    assert load.goodput == load.achieved_rate == 0


def test_the_fingerprint_is_plain_and_holds_everything():
    plain = QUICK.fingerprint()
    assert json.loads(json.dumps(plain)) == json.loads(json.dumps(QUICK.fingerprint()))
    for changed in (
        replace(QUICK, slo=Slo(ttft={"p50": 4.0})),
        replace(QUICK, workload=replace(WORKLOAD, seed=1)),
        replace(QUICK, requests=9),
        replace(QUICK, stages=("rising",)),
        replace(QUICK, loads=(2.0,)),
    ):
        assert changed.fingerprint() != plain


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"requests": 0}, 'requests "0"'),
        ({"start": 64.0}, 'start "64"'),
        ({"min_window_s": 9.0}, 'min_window_s "9"'),
        ({"loads": (1.0, 1.0)}, "no two alike"),
        ({"stages": ("single", "search")}, 'needs the stage "rising"'),
        ({"head_of_line_rate": 0.0}, 'head_of_line_rate "0.0"'),
        ({"timeout_s": float("nan")}, 'timeout_s "nan"'),
        ({"ramp_share": -1.0}, "ramp_share"),
    ],
)
def test_plans_that_cannot_be_meant_are_refused(fields, message):
    with pytest.raises(ValueError, match=message.replace('"', ".")):
        replace(QUICK, **fields)
    with pytest.raises(ValueError, match="slots"):
        replace(CLOSED, loads=(1.5,))


def state(now, history, sent, ended):
    return OpenState(now, sent, ended, sent - ended, tuple(history), 1.0)


def test_a_queue_that_grows_without_end_stops_the_point_and_filling_up_does_not():
    # 10 requests/s. All in flight: nothing has had its turn yet, so nothing is known.
    filling = [(float(s), 10 * s) for s in range(1, 21)]
    assert stop_when_growing(state(20.0, filling, 200, 0)) == ""
    # Half of what is sent is served from the start: the queue grows by five a second.
    assert stop_when_growing(state(20.0, [(float(s), 5 * s) for s in range(1, 21)], 200, 100)) == ""
    growing = [(float(s), 8 * s) for s in range(1, 61)]
    assert "the queue grew by 240" in stop_when_growing(state(60.0, growing, 600, 120).__class__(
        60.0, 600, 300, 480, tuple(growing), 1.0
    ))  # fmt: skip
    steady = [(float(s), 20 + s % 3) for s in range(1, 61)]
    assert stop_when_growing(state(60.0, steady, 600, 579)) == ""
    assert stop_when_growing(state(3.0, [(1.0, 5), (2.0, 50)], 90, 10)) == ""


def test_over_saturation_ends_the_rise_and_what_is_left_behind_is_worked_off(monkeypatch):
    monkeypatch.setattr("quanteval.metrics.load.backlog_growth", lambda run: "the backlog grew")
    _, traces, records = run(replace(QUICK, stages=("rising",), slo=Slo()))
    calm = [(r.name, r.repetition) for r in records]
    assert calm[:3] == [("warmup", 0), ("open_loop_16", 0), ("warmup", 1)]
    assert records[1].over_saturated
    assert "the backlog grew" in records[1].note
    assert "open_loop_32" not in {r.name for r in records}
    after = traces[-1]
    assert (after.load_point, after.warmup, after.status) == ("warmup", True, "ok")

"""Soaks: windows of one unbroken load, and the drift of what they hold."""

from __future__ import annotations

import numpy as np
import pytest

from quanteval.bench.arrivals import Arrivals
from quanteval.bench.lengths import Fixed, Uniform
from quanteval.bench.soak import Soak
from quanteval.bench.workload import Workload
from quanteval.engines.fake import FakeEngine, FakeSession
from quanteval.metrics.soak import MIN_WINDOWS, TrendRow, drifts, hourly, slope, soak_windows
from quanteval.records import LoadPointRecord, RequestTrace

WORKLOAD = Workload(prompts=Uniform(8, 40), outputs=Fixed(2), buckets=(20,), exact_text=False)
PLAN = Soak(workload=WORKLOAD, rate=40.0, duration_s=2.4, window_s=0.3, ramp_s=0.2, timeout_s=30.0)


@pytest.fixture(scope="module")
def soaked():
    items = list(PLAN.run(FakeSession(FakeEngine(ttft_s=0.002), None, 0.0)))
    traces = [item for item in items if isinstance(item, RequestTrace)]
    return traces, [item for item in items if isinstance(item, LoadPointRecord)]


def test_windows_follow_each_other_without_a_gap(soaked):
    traces, records = soaked
    assert [r.repetition for r in records] == list(range(8))
    assert {r.stage for r in records} == {"soak"}
    begins = np.diff([r.started_s for r in records])
    assert begins == pytest.approx([0.3] * 7)
    measured = [t for t in traces if not t.warmup]
    assert all(-1e-9 <= t.scheduled_s <= 0.3 + 1e-9 for t in measured)
    assert all(t.load_point == "warmup" for t in traces if t.warmup)
    # Back on the soak's own clock the arrivals are those of the plan.
    own = sorted(0.2 + 0.3 * t.repetition + t.scheduled_s for t in measured)
    planned = [at for at in _until(WORKLOAD.times("soak", 40.0), 2.6) if at >= 0.2]
    assert own == pytest.approx(planned)


def _until(times, end):
    for at in times:
        if at >= end:
            return
        yield at


def test_rows_have_the_counts_of_their_windows(soaked):
    traces, records = soaked
    calm = [
        r.model_copy(update={"client": r.client.model_copy(update={"saturated": False})})
        for r in records
    ]
    rows = soak_windows(traces, calm)
    assert len(rows) == 8
    assert sum(row.requests for row in rows) == sum(not t.warmup for t in traces)
    assert [row.hour for row in rows] == pytest.approx([(0.15 + 0.3 * k) / 3600 for k in range(8)])
    assert rows[0].ttft_p50_s > 0
    (hour,) = hourly(rows)
    assert (hour.hour, hour.requests) == (0.5, sum(row.requests for row in rows))
    assert soak_windows(traces, []) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rate": 0.0}, 'rate "0.0"'),
        ({"window_s": 9.0}, 'window_s "9" is longer than duration_s "2.4"'),
        ({"ramp_s": -1.0}, "ramp_s"),
        ({"workload": Workload(arrivals=Arrivals("closed"))}, 'arrivals "closed"'),
    ],
)
def test_soaks_that_cannot_be_meant_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Soak(
            **{**{"workload": WORKLOAD, "rate": 1.0, "duration_s": 2.4, "window_s": 0.3}, **fields}
        )


def test_the_fingerprint_tells_soaks_apart():
    assert PLAN.fingerprint() == PLAN.fingerprint()
    assert Soak(workload=WORKLOAD).fingerprint() != Soak(workload=WORKLOAD, rate=2.0).fingerprint()


def noise(rng, n, memory):
    out = np.zeros(n)
    for k in range(n):
        out[k] = (memory * out[k - 1] if k else 0.0) + rng.standard_normal()
    return out


@pytest.mark.parametrize(("memory", "least"), [(0.0, 0.9), (0.6, 0.8)])
def test_the_interval_of_a_slope_covers_it_also_when_windows_depend_on_each_other(memory, least):
    rng = np.random.default_rng(3)
    hours = np.arange(60) / 60
    covered = 0
    for _ in range(100):
        found = slope("x", hours, (5 + 2 * hours + 0.2 * noise(rng, 60, memory)).tolist())
        covered += found.lower <= 2 <= found.upper
    assert covered >= 100 * least


def test_a_slope_stands_out_of_its_noise_and_one_bad_window_changes_little():
    rng = np.random.default_rng(1)
    hours = (np.arange(40) / 10).tolist()
    values = 1.0 + 0.5 * np.asarray(hours) + 0.01 * rng.standard_normal(40)
    found = slope("x", hours, values.tolist())
    assert found.drifts
    assert found.per_hour == pytest.approx(0.5, abs=0.02)
    assert found.start == pytest.approx(1.0, abs=0.05)
    values[7] = 100.0
    assert slope("x", hours, values.tolist()).per_hour == pytest.approx(0.5, abs=0.03)
    flat = slope("x", hours, [3.0] * 40)
    assert (flat.per_hour, flat.drifts) == (0.0, False)


def test_too_few_windows_have_no_slope():
    few = slope("x", [0.0, 1.0], [1.0, 2.0])
    assert (few.per_hour, few.drifts, few.reason) == (
        None,
        False,
        f"2 of at least {MIN_WINDOWS} windows",
    )
    assert slope("x", [1.0] * 9, [1.0] * 9).reason == "all windows are at one time"


def row(hour, **more):
    nothing = dict.fromkeys(TrendRow.__dataclass_fields__)
    return TrendRow(**{**nothing, "hour": hour, "requests": 10, "failed": 0, **more})


def test_a_leak_is_a_drift_of_memory_and_of_nothing_else():
    rows = [
        row(k / 60, rss_bytes=1e9 + 1e6 * k, ttft_p50_s=0.1 + 0.01 * (k % 2)) for k in range(120)
    ]
    found = {drift.quantity: drift for drift in drifts(rows)}
    assert found["rss_bytes"].per_hour == pytest.approx(6e7)
    assert found["rss_bytes"].drifts
    assert not found["ttft_p50_s"].drifts
    assert set(found) == {"rss_bytes", "ttft_p50_s"}
    hours = hourly(rows)
    assert [(h.hour, h.requests) for h in hours] == [(0.5, 600), (1.5, 600)]
    assert hours[1].rss_bytes - hours[0].rss_bytes == pytest.approx(6e7)

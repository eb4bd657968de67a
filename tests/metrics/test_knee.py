"""Where loads break, on curves and queues whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quanteval.metrics.knee import Judged, find_break, judge_term, knee, slo_break
from quanteval.metrics.load import loads_of
from quanteval.metrics.operating import WITH_TAIL, WITHOUT_TAIL, at_load, capacity, head_of_line
from quanteval.metrics.slo import Slo
from tests.bench.queues import HEALTH, open_point, trace
from tests.metrics.test_load_points import record, request


def loads_from(curve, *, spread=0.02, requests=60, seed=0):
    """Load points whose latencies scatter around a curve of slots."""
    rng = np.random.default_rng(seed)
    out = []
    for slots, middle in curve.items():
        name = f"closed_loop_{slots}"
        traces = []
        for slot in range(slots):
            clock = 0.0
            for _ in range(max(4, requests // slots)):
                latency = middle * float(np.exp(spread * rng.standard_normal()))
                traces.append(
                    trace(
                        name,
                        clock,
                        clock + latency,
                        loop="closed",
                        concurrency=slots,
                        n=len(traces),
                    )
                )
                clock += latency + 1e-6 * (slot + 1)
        out += loads_of(traces)
    return out


def broken_stick(c, slope=0.05, places=(1, 2, 4, 6, 8, 11, 16, 23, 32)):
    """Latency 1 + slope x slots as long as c slots are served together, in proportion to the slots beyond."""
    return {n: (1 + slope * n) if n <= c else (1 + slope * c) * n / c for n in places}


@pytest.mark.parametrize(("c", "low", "high"), [(4, 4, 8), (8, 8, 16), (16, 16, 32)])
def test_the_knee_of_a_server_that_serves_c_together(c, low, high):
    found = knee(loads_from(broken_stick(c)))
    assert low <= found.lower < found.load < found.upper <= high


def test_a_line_has_no_knee_however_steep():
    for slope in (0.0, 0.05, 2.0):
        found = knee(loads_from(broken_stick(64, slope)))
        assert found.load is None
        assert found.reason == "held at every load up to 32"
        assert found.lower == 32


def test_too_few_lower_loads_are_never_sure():
    found = knee(loads_from(broken_stick(64, places=(1, 2))))
    assert not any(item.sure for item in found.judged)
    assert found.lower is None
    assert knee([]).reason == "no load point has a steady state"


def test_an_over_saturated_load_is_beyond_the_knee():
    traces, records = [], []
    for rate in (1.0, 2.0, 4.0, 16.0):
        more = open_point(rate, 1, lambda rng, n: np.full(n, 0.1), requests=300)
        traces += more[0]
        records.append(more[1])
    loads = loads_of(traces, records)
    assert [bool(load.over_saturated) for load in loads] == [False, False, False, True]
    found = knee(loads)
    assert (found.lower, found.upper) == (4.0, 16.0)
    seen = capacity(loads, Slo(ttft={"p50": 0.5}))
    assert (seen.slo_load, seen.over_saturated_at) == (4.0, 16.0)
    assert seen.at_slo.request_rate == pytest.approx(4.0, rel=0.2)
    assert seen.at_knee_share.load == pytest.approx(0.7 * found.load)
    assert seen.breaks[0].upper == 16.0


def test_misses_are_judged_by_what_may_miss():
    term = Slo(ttft={"p90": 0.5}).terms[0]

    def load(slow, n=200, **more):
        # Multiples of 77 spread the slow ones, so that they do not cluster.
        gaps = [0.9 if (k * 77) % n < slow else 0.1 for k in range(n)]
        traces = [request(k / 20, gaps=(gap,), **more) for k, gap in enumerate(gaps)]
        return loads_of(traces, [record(0.0, n / 20)])[0]

    few, some, many = (judge_term(load(slow), term) for slow in (2, 20, 60))
    assert (few.holds, few.sure) == (True, True)
    assert (some.holds, some.sure) == (True, False)
    assert (many.holds, many.sure) == (False, True)
    assert few.text == "ttft p90: 2 of 200 above 0.5 s, 10 % may be"
    assert few.value == pytest.approx(0.1)
    none = judge_term(load(0, n=20), term)
    assert none.holds and not none.sure, "20 requests cannot show that nine in ten are fast enough"
    assert not judge_term(load(0, status="error"), term).holds


def test_misses_that_cluster_are_less_sure_than_misses_that_do_not():
    term = Slo(e2e={"p90": 0.5}).terms[0]
    rows = np.arange(400)
    scattered, clustered = rows % 25 == 0, rows < 16
    judged = []
    for slow in (scattered, clustered):
        traces = [request(k / 40, gaps=(0.9 if slow[k] else 0.1,)) for k in rows.tolist()]
        judged.append(judge_term(loads_of(traces, [record()])[0], term))
    assert judged[0].value == judged[1].value
    assert [item.sure for item in judged] == [True, False]


ROWS = st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0.01, 100)), max_size=12)


@settings(max_examples=200)
@given(ROWS)
def test_a_break_lies_within_its_interval_and_between_its_loads(rows):
    judged = [
        Judged(float(i + 1), h, s, min(v, 1.0) if h else 1 + v, 9)
        for i, (h, s, v) in enumerate(rows)
    ]
    found = find_break("x", judged)
    ends = [end for end in (found.lower, found.upper) if end is not None]
    assert ends == sorted(ends)
    if found.load is not None:
        assert found.lower is None or found.lower <= found.load
        assert found.upper is None or found.load <= found.upper
        assert any(not item.holds for item in judged)


def test_contradicting_sure_loads_widen_the_interval():
    rows = ((1.0, True, 0.5), (2.0, False, 2.0), (4.0, True, 0.9), (8.0, False, 3.0))
    judged = [Judged(x, h, True, v, 9) for x, h, v in rows]
    found = find_break("x", judged)
    assert (found.lower, found.upper) == (1.0, 4.0)
    assert 1.0 < found.load < 2.0


def test_slo_breaks_are_found_and_rates_interpolated():
    loads = loads_from(broken_stick(8, places=(1, 2, 4, 8, 16, 32)), requests=400)
    found = slo_break(loads, Slo(e2e={"p90": 2.0}).terms[0])
    assert (found.lower, found.upper) == (8, 16)
    between = at_load(loads, 12.0)
    ends = [at_load(loads, n).request_rate for n in (8.0, 16.0)]
    assert between.request_rate == pytest.approx(sum(ends) / 2)
    assert between.how == "between closed_loop_8 and closed_loop_16"
    assert at_load(loads, 64.0) is None


def test_without_any_steady_state_there_is_no_capacity():
    assert capacity([], Slo()) is None
    ill = HEALTH.model_copy(update={"saturated": True})
    assert capacity(loads_of([request()], [record(client=ill)]), Slo()) is None


def test_head_of_line_blocking_is_a_ratio_of_short_requests():
    traces, records = [], []
    for block in range(4):
        for name, factor in ((WITH_TAIL, 3.0), (WITHOUT_TAIL, 1.0)):
            more = {"load_point": name, "repetition": block}
            for k in range(100):
                traces.append(request(k / 10, gaps=(factor * (1 + k % 10 / 10),), **more))
            if name == WITH_TAIL:
                traces += [
                    request(k / 10 + 0.05, gaps=(50.0,), bucket="1001+", **more) for k in range(9)
                ]
            records.append(record(name=name, repetition=block, stage="head_of_line"))
    found = head_of_line(loads_of(traces, records))
    assert found.ratio == pytest.approx(3.0)
    assert found.lower <= found.ratio <= found.upper
    assert (found.bucket, found.requests, found.blocks) == ("1-199", (400, 400), (4, 4))
    assert head_of_line([]) is None
    # They are no loads of a rising series.
    assert capacity(loads_of(traces, records), Slo()) is None

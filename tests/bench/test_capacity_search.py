"""The largest batch of each length, against devices whose limits are known."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quanteval.bench.capacity_search import FitSearch, judge
from quanteval.engines.fake import FakeEngine, FakeSession
from quanteval.errors import EngineError
from quanteval.interfaces import Chunk
from quanteval.metrics.fit import FitRow, Outcome, fit_rows, search_fit
from quanteval.records import Artifact, LoadPointRecord, Precision, RequestTrace

LENGTHS = [64, 128, 256, 512]


def device(tokens, context=1 << 20):
    """Holds `tokens` tokens in all."""

    def attempt(length, batch):
        if length > context:
            return Outcome(False, "context", "too long")
        return Outcome(True) if length * batch <= tokens else Outcome(False, "memory", "full")

    return attempt


@given(tokens=st.integers(0, 20_000), most=st.integers(1, 200), context=st.integers(32, 1024))
def test_the_boundary_is_found_exactly(tokens, most, context):
    asked = []

    def attempt(length, batch):
        asked.append((length, batch))
        return device(tokens, context)(length, batch)

    rows = list(search_fit(LENGTHS, attempt, most))
    for row in rows:
        room = 0 if row.length > context else tokens // row.length
        assert row.largest == min(room, most)
        if row.smallest_failing is not None:
            assert row.smallest_failing == row.largest + 1
            assert row.limit in ("memory", "context")
        else:
            assert row.largest == most
    assert len(asked) == len(set(asked))
    # Nothing longer is tried once not even one fits.
    assert all(row.largest > 0 for row in rows[:-1])
    assert len(asked) <= 18 * len(LENGTHS)


@given(tokens=st.integers(64, 50_000), share=st.floats(0, 0.5))
def test_a_resolution_bounds_the_gap(tokens, share):
    for row in search_fit(LENGTHS, device(tokens), 4096, share):
        assert row.smallest_failing - row.largest <= max(1, share * row.largest)
        assert row.largest <= tokens // row.length < row.smallest_failing


def test_nothing_is_asked_of_the_dead():
    asked = []

    def attempt(length, batch):
        asked.append((length, batch))
        return Outcome(True) if batch < 4 else Outcome(False, "died", "the server is gone")

    rows = list(search_fit(LENGTHS, attempt, 64))
    assert rows == [FitRow(64, 2, 4, "died", "the server is gone")]
    assert asked[-1] == (64, 4)


# --------------------------------------------------------------------------- as a bench


class Device(FakeSession):
    """Holds `tokens` tokens; one more is out of memory, ends the server, or waits, as `full` says."""

    def __init__(self, tokens, full="oom", context=512):
        engine = FakeEngine(default_answer="x" * 64, itl_s=0.002, max_context=context)
        precision = Precision(
            weight_bits=16,
            activation_bits=16,
            weight_format="bfloat16",
            compute="float",
            quantized=False,
        )
        artifact = Artifact(
            scheme="a", scheme_config={}, precision=precision, model_id="", model_revision=None,
            model_provenance="", weights_digest="", path="", format="fake", bytes_on_disk=0, build_s=0,
        )  # fmt: skip
        super().__init__(engine, artifact, 0.0)
        self.room, self.full, self.dead = tokens, full, False
        self.free = threading.Condition()

    def stream(self, request):
        wanted = len(request.prompt.token_ids) + request.sampling.max_tokens
        with self.free:
            while not self.dead and wanted > self.room:
                if self.full == "wait":
                    self.free.wait()
                    continue
                self.dead = self.full == "die"
                why = "CUDA out of memory" if self.full == "oom" else "gone"
                yield Chunk((), time.perf_counter(), "error", why)
                return
            if self.dead:
                yield Chunk((), time.perf_counter(), "error", "gone")
                return
            self.room -= wanted
        try:
            yield from super().stream(request)
        finally:
            with self.free:
                self.room += wanted
                self.free.notify_all()


def run(session, **fields):
    items = list(FitSearch(shortest=128, max_batch=8, output_tokens=8, **fields).run(session))
    return items, fit_rows([item for item in items if isinstance(item, LoadPointRecord)])


@pytest.mark.parametrize(("full", "limit"), [("oom", "memory"), ("wait", "cache")])
def test_a_full_device_is_told(full, limit):
    items, rows = run(Device(1100, full))
    found = {row.length: (row.largest, row.smallest_failing, row.limit) for row in rows}
    assert found[256] == (4, 5, limit)
    assert found[512] == (2, 3, limit)
    assert all(item.warmup for item in items if isinstance(item, RequestTrace))
    assert all(item.stage == "search" for item in items if isinstance(item, LoadPointRecord))


def test_the_search_s_own_end_is_no_limit():
    _, rows = run(Device(10**6))
    assert [(row.largest, row.smallest_failing) for row in rows] == [(8, None)] * 3


def test_a_server_that_dies_ends_the_search():
    items, rows = run(Device(600, "die"))
    assert rows[-1].limit == "died"
    assert rows[-1].largest * rows[-1].length <= 600
    assert [row.length for row in rows] == [128]
    assert any(isinstance(item, RequestTrace) and item.status == "error" for item in items)


def test_an_engine_that_hangs_counts_as_dead():
    assert judge([], 2, "the engine hangs").limit == "died"


@given(tokens=st.integers(64, 20_000), most=st.integers(1, 64))
def test_records_tell_the_rows_that_were_found(tokens, most):
    points = []

    def attempt(length, batch):
        found = device(tokens)(length, batch)
        points.append(point(f"fit_{length}", batch, found.text))
        return found

    rows = list(search_fit(LENGTHS, attempt, most))
    points.append(point("closed_loop_4", 4, ""))
    assert [
        (r.length, r.largest, r.smallest_failing if r.smallest_failing else None)
        for r in fit_rows(points)
    ] == [(r.length, r.largest, r.smallest_failing) for r in rows if tried(points, r.length)]


def tried(points, length):
    return any(point.name == f"fit_{length}" for point in points)


def point(name, batch, note):
    return LoadPointRecord(
        name=name, loop="closed", stage="search", concurrency=batch, rate=0, repetition=0, started_s=0,
        duration_s=1, note=note,
        client={"lag_p50_s": 0, "lag_p99_s": 0, "loop_lag_p99_s": 0, "cpu_share": 0, "saturated": False},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"shortest": 0}, "shortest"),
        ({"longest": 5}, "longest"),
        ({"resolution": 1.0}, "resolution"),
        ({"timeout_s": 0.0}, "timeout_s"),
    ],
)
def test_fields_without_sense_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        FitSearch(**fields)


def test_lengths_double_up_to_the_context():
    assert FitSearch(shortest=128).lengths(1000) == [128, 256, 512, 1000]
    assert FitSearch(shortest=128, longest=300).lengths(1000) == [128, 256, 300]
    assert FitSearch(shortest=128).lengths(64) == [64]


def test_an_engine_error_is_an_answer(monkeypatch):
    def refuse(*_, **__):
        raise EngineError("the engine hangs")
        yield

    monkeypatch.setattr("quanteval.bench.capacity_search.drive_closed", refuse)
    assert list(FitSearch().run(Device(100))) == []

"""Memory rows that add up, utilization from shapes and times, what the device said, and the trend of a soak."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest

from quanteval.metrics.utilization import Utilization
from quanteval.records import MachinePeaks
from quanteval.report import details_text, load_files, trend_csv, trend_json, trend_text
from quanteval.report.memory import PEAK, UNACCOUNTED, fit_sheet, fragmentation, memory_sheet
from quanteval.report.trend import slopes_csv, trend_sheets
from quanteval.report.utilization import _row, device_sheet, utilization_sheet
from tests.gate import evidence as make
from tests.report.load_evidence import device_sample, loaded_variant, open_point, record


def values(memory):
    rows = memory_sheet([make.variant("v", memory=memory)]).rows
    return {row["part"].value: row["bytes"].value for row in rows if "bytes" in row}


def test_the_parts_add_up_to_the_peak():
    memory = make.memory().model_copy(
        update={
            "library_bytes": 5_000, "runtime_bytes": 3_000, "allocator_bytes": 1_000,
            "unaccounted_bytes": 100_000 - 16_000 - 15_000 - 9_000, "phase_peak_bytes": {"load": 70_000},
        }
    )  # fmt: skip
    found = values(memory)
    names = list(found)
    parts = names[: names.index(PEAK)]
    assert UNACCOUNTED in parts
    assert sum(found[name] for name in parts) == found[PEAK] == 100_000
    assert found["peak in load"] == 70_000


def test_a_part_that_a_device_does_not_have_is_no_row():
    assert "allocator: reserved and not in use" not in values(make.memory())


def test_a_device_shows_its_total_pool_and_fragmentation():
    memory = make.memory().model_copy(
        update={
            "device": "cuda", "allocated_peak_bytes": 80_000, "fragmentation_bytes": 2_000,
            "device_total_bytes": 150_000, "driver_other_bytes": 50_000, "kv_pool_tokens": 4096,
        }
    )  # fmt: skip
    found = values(memory)
    assert found["besides: driver's total on the device"] == 150_000
    assert found["within allocator: split blocks (fragmentation)"] == 2_000
    assert fragmentation(memory) == pytest.approx(0.2)
    assert fragmentation(make.memory()) is None
    text = details_text([make.variant("v", memory=memory)])
    assert "pool of 4096 tokens" in text
    assert max(map(len, text.splitlines())) <= 100


def test_what_fits_is_a_row_a_length():
    records = [
        record("fit_512", stage="capacity", loop="closed", concurrency=n, note=note)
        for n, note in ((4, "fits"), (8, "memory: out of memory"), (6, "fits"))
    ]
    variant = make.variant("v", load_points=records)
    (row,) = fit_sheet([variant]).rows
    assert [row[key].value for key in ("length", "largest", "failing", "limit")] == [
        "512", "6", "8", "memory",
    ]  # fmt: skip
    assert not fit_sheet([make.variant("v")]).rows
    assert "What fits" in details_text([variant])


def test_without_peaks_no_utilization_and_without_a_shape_its_reason():
    variant = make.variant("v")
    assert not utilization_sheet([variant]).rows
    peaks = MachinePeaks(device="cpu", copy_bytes_per_s=1e10, how="")
    sheet = utilization_sheet([replace(variant, peaks=peaks)])
    assert {row["phase"].value for row in sheet.rows} == {"prefill", "decode"}
    assert all("shape" in row["reason"].value for row in sheet.rows)
    assert all(row["mbu"].value is None for row in sheet.rows)
    assert not sheet.statements


def test_a_utilization_row_has_shares_and_what_bounds_it():
    found = Utilization("decode", 100, 4, 0.05, 2.0, 30.0, 0.03, 0.61, "memory", "bfloat16")
    row = _row("v", "closed_loop_4", found, 40)
    assert row["bound"].value == "memory-bound"
    assert (row["mbu"].value, row["mfu"].value, row["seconds"].n) == (0.61, 0.03, 40)


def test_the_device_tells_its_shares_or_why_not():
    records = [
        record("a", utilization=device_sample()),
        record("b", utilization=device_sample(source="nvml-gpm", reason="", sm_active=0.5)),
        record("c"),
    ]
    rows = device_sheet([make.variant("v", load_points=records)]).rows
    assert [row["load_point"].value for row in rows] == ["a", "b"]
    assert rows[0]["reason"].value == "no NVIDIA device"
    assert rows[0]["sm_active"].value is None
    assert rows[1]["sm_active"].value == 0.5


def soak(windows=16, growth=1e6):
    points = []
    for n in range(windows):
        traces, told = open_point(
            2, name="soak", stage="soak", repetition=n, seed=n, seconds=60.0,
            started_s=1.7e9 + 900.0 * n, rss_bytes=int(1e9 + growth * n),
        )  # fmt: skip
        points.append(([t.model_copy(update={"repetition": n}) for t in traces], told))
    return loaded_variant("v", rates=(), points=points)


def test_a_soak_has_a_row_an_hour_and_slopes_with_intervals():
    variant = soak()
    rows = list(csv.DictReader(io.StringIO(trend_csv([variant]))))
    assert [float(row["hour"]) for row in rows] == [0.5, 1.5, 2.5, 3.5]
    slopes = {r["quantity"]: r for r in csv.DictReader(io.StringIO(slopes_csv([variant])))}
    memory = slopes["rss_bytes"]
    assert float(memory["per_hour"]) == pytest.approx(4e6)
    assert memory["drifts"] == "drifts"
    assert int(memory["per_hour.n"]) == 16
    assert slopes["output_tps"]["drifts"] == "none shown"
    text = trend_text([variant])
    assert "Soak by hour" in text
    assert max(map(len, text.splitlines())) <= 100
    assert '"slopes"' in trend_json([variant])
    assert {"trend.csv", "trend_slopes.csv"} <= set(load_files([variant]))


def test_too_short_a_soak_says_why_it_has_no_slope():
    (row, *_) = trend_sheets([soak(windows=3)])[1].rows
    assert row["drifts"].value == "not known"
    assert row["reason"].value == "3 of at least 8 windows"
    assert trend_text([make.variant("v")]) == ""

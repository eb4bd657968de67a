"""The drift report: one summary line, rows with bands, conditions named, JSON for machines."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest

from quanteval.metrics.drift import drift
from quanteval.report import drift_csv, drift_json, drift_markdown, drift_summary, drift_text
from tests.gate import evidence as make
from tests.report.load_evidence import loaded_variant, open_point


@pytest.fixture(scope="module")
def stored():
    return loaded_variant("nf4", rates=(2,), sets=(make.scores(values=[1] * 200),))


@pytest.fixture(scope="module")
def slower(stored):
    points = [open_point(2, gap_s=0.02)]
    return drift(
        stored, loaded_variant("nf4", rates=(), points=points, sets=stored.scores.values())
    )


def test_the_summary_is_one_line_with_the_counts(stored, slower):
    assert drift_summary(slower).startswith("drift: nf4 against stored nf4: ")
    assert "drifted" in drift_summary(slower)
    assert "\n" not in drift_summary(slower)
    assert drift_summary(drift(stored, stored)).startswith("no drift: ")


def test_text_shows_what_left_its_band_and_markdown_everything(slower):
    text = drift_text(slower)
    assert max(map(len, text.splitlines())) <= 100
    shown = [line for line in text.splitlines() if line.startswith("  TPOT p50 ms")]
    assert any("+100.0 % [" in line for line in shown)
    assert "pass@1" not in text
    assert "DRIFT" in text
    assert "| pass@1 | code | 100.0 % | 100.0 % | +0.0 points [" in drift_markdown(slower)
    assert "pass@1" in drift_text(slower, every=True)


def test_a_quiet_comparison_is_the_summary_alone(stored):
    assert drift_text(drift(stored, stored)).strip() == drift_summary(drift(stored, stored))


def test_conditions_are_named(stored):
    conditions = {**stored.result.comparable, "cpu": "Other\x1b[31m"}
    other = replace(stored, result=stored.result.model_copy(update={"comparable": conditions}))
    found = drift(stored, other)
    assert drift_summary(found).startswith("not comparable: ")
    assert "unlike: cpu (A CPU and Other" in drift_text(found)
    assert "\x1b" not in drift_text(found) + drift_markdown(found)


def test_json_and_csv_hold_raw_values(slower):
    told = json.loads(drift_json(slower))
    assert told["exit_code"] == 3
    assert told["summary"] == drift_summary(slower)
    one = next(r for r in told["rows"] if r["metric"] == "TPOT p50")
    assert one["flag"] == "drift"
    assert one["stored"] == pytest.approx(0.01)
    assert one["band"][1] < one["fresh"]
    (row,) = [
        r for r in csv.DictReader(io.StringIO(drift_csv(slower))) if r["metric"] == "TPOT p50"
    ]
    assert float(row["fresh"]) == pytest.approx(0.02)
    assert row["flag"] == "drift"

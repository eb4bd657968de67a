"""Reports on load: every load point and bucket, knee and SLOs, capacity, layers, the client; all forms, all escaped."""

from __future__ import annotations

import csv
import io
import json

import pytest

from quanteval.metrics.capacity import statement
from quanteval.report import (
    details_markdown,
    details_text,
    load_csv,
    load_files,
    load_json,
    load_markdown,
    load_text,
)
from quanteval.report.capacity import capacity_sentence
from quanteval.report.layers import layer_sentence
from quanteval.report.load import load_sheets
from tests.gate import evidence as make
from tests.report.load_evidence import device_sample, health, loaded_variant, open_point, request

HOSTILE = 'x|<b>\x1b[31m\n"=1+1'


@pytest.fixture(scope="module")
def variants():
    return [
        loaded_variant("base", service_s=0.2, seconds=60.0),
        loaded_variant("nf4", service_s=0.25, seconds=60.0),
    ]


@pytest.fixture(scope="module")
def sheets(variants):
    return {sheet.key: sheet for sheet in load_sheets(variants)}


def test_every_load_point_has_a_row_and_every_bucket_one(sheets):
    rows = [r for r in sheets["load"].rows if r["variant"].value == "base"]
    assert [r["load_point"].value for r in rows if r["bucket"].value == "all"] == [
        f"open_loop_{rate:g}" for rate in (0.5, 1, 2, 3, 4, 6)
    ]
    assert [r["bucket"].value for r in rows[:3]] == ["all", "1-128", "129-512"]
    whole, short = rows[12], rows[13]
    assert whole["load_point"].value == "open_loop_4"
    assert whole["offered"].value == pytest.approx(4, rel=0.2)
    assert whole["offered"].note == "requests/s"
    assert whole["goodput"].value < whole["request_rate"].value
    assert whole["ttft_p99"].n == whole["request_rate"].n > short["ttft_p99"].n
    assert whole["itl_p50"].lower is None
    assert "request_rate" not in short
    assert "goodput" not in short


def test_over_saturation_and_failures_are_noted(sheets):
    last = [r for r in sheets["load"].rows if r["load_point"].value == "open_loop_6"][-3]
    assert last["notes"].value.startswith("over-saturated: the backlog grew by")


def test_a_saturated_client_is_named_and_in_no_figure():
    traces, told = open_point(2, client=health(saturated=True, reason="it used a core"))
    variant = loaded_variant("v", rates=(1,), points=[(traces, told)])
    found = {sheet.key: sheet for sheet in load_sheets([variant])}
    row = next(r for r in found["load"].rows if r["load_point"].value == "open_loop_2")
    assert row["ttft_p50"].value is None
    assert row["request_rate"].value is None
    assert row["notes"].value == "left out: repetition 0: client saturated (it used a core)"
    assert found["client"].rows[-1]["state"].value == "saturated: it used a core"


def test_knee_and_promises_have_their_loads_and_intervals(sheets):
    rows = {(r["variant"].value, r["target"].value): r for r in sheets["breaks"].rows}
    assert set(rows) == {
        (v, target) for v in ("base", "nf4") for target in ("knee", "ttft p99 <= 0.5 s")
    }
    knee = rows["base", "knee"]["load"]
    assert 1 < knee.value < 6
    assert knee.n > 500
    assert rows["base", "knee"]["unit"].value == "requests/s"


def test_one_load_point_has_no_knee():
    found = {s.key: s for s in load_sheets([loaded_variant("v", rates=(1,))])}
    assert not found["breaks"].rows


def test_capacity_is_a_sentence_with_unit_interval_n_and_device(sheets):
    text = sheets["capacity"].statements[1]
    assert text.startswith("nf4 serves ")
    assert " requests/s (" in text
    assert " tokens/s with ttft p99 <= 0.5 s; at 70 % of its knee " in text
    assert "x the baseline [" in text
    assert text.endswith("requests, on A CPU)")


def test_ratios_of_timings_that_took_no_turns_are_indicative(sheets):
    assert sheets["capacity"].notes[-1] == "Ratios are indicative: one run each, not interleaved."


def test_no_search_no_capacity():
    found = load_sheets([make.variant("base")])
    assert not next(s for s in found if s.key == "capacity").statements
    assert capacity_sentence(statement(make.variant("base"))) == (
        "base: capacity unknown, not measured: no search stage (on cpu)"
    )


def test_layers_point_at_the_queue(sheets):
    text = sheets["layers"].statements[0]
    assert text.startswith("base: at open_loop_6 queueing takes ")
    assert "queueing grew most since open_loop_0.5, from " in text
    assert layer_sentence("v", []) == ""


def test_cached_prompt_tokens_are_read_back():
    traces, told = open_point(1)
    warm = [t.model_copy(update={"cached_prompt_tokens": 25}) for t in traces]
    variant = loaded_variant("v", rates=(), points=[(warm, told)])
    row = load_sheets([variant])[0].rows[0]
    assert row["cached"].value == pytest.approx(0.25)
    assert row["cached"].n == len(traces)


def test_head_of_line_blocking_is_said_with_its_interval():
    pairs = []
    for name, first in (("head_of_line_with", 0.2), ("head_of_line_without", 0.1)):
        traces, told = open_point(
            4, name=name, service_s=0.001, first_s=first, long_share=0.0, stage="head_of_line",
            seconds=150.0,
        )  # fmt: skip
        pairs.append((traces, told))
    sheet = next(s for s in load_sheets([loaded_variant("v", points=pairs)]) if s.key == "head_of_line")  # fmt: skip
    assert sheet.rows[0]["ratio"].value == pytest.approx(2, rel=0.05)
    assert sheet.statements[0].startswith(
        "v: long requests change the TTFT p99 of short ones from "
    )


def test_csv_holds_raw_values_and_json_everything(variants):
    lines = list(csv.DictReader(io.StringIO(load_csv(variants))))
    assert len(lines) == 36
    assert float(lines[0]["ttft_p50"]) == pytest.approx(0.05)
    assert lines[0]["ttft_p50.n"] == lines[0]["request_rate.n"]
    told = json.loads(load_json(variants))
    assert told["slo"] == {"base": "ttft p99 <= 0.5 s", "nf4": "ttft p99 <= 0.5 s"}
    assert len(told["load"]["rows"]) == 36
    assert len(told["capacity"]["statements"]) == 2


def test_files_of_a_run_are_there_only_when_load_was_measured(variants):
    files = load_files(variants)
    assert set(files) == {"load.md", "load.csv", "load.json"}
    assert files["load.md"] == load_markdown(variants)
    assert files["load.json"] == load_json(variants)
    nothing = [make.variant("v", traces=[])]
    assert load_files(nothing) == {}
    assert load_text(nothing) == load_markdown(nothing) == ""
    assert details_markdown([make.variant("v", traces=[], memory=None)]) == ""


def test_the_terminal_keeps_its_width_and_names_every_row(variants):
    text = load_text(variants)
    assert max(map(len, text.splitlines())) <= 100
    assert sum(line.startswith("  base     open_loop_4") for line in text.splitlines()) > 5
    assert max(map(len, details_text(variants).splitlines())) <= 100


def test_text_from_outside_is_escaped_everywhere():
    traces, told = open_point(1, name=HOSTILE, note=HOSTILE, client=health(saturated=True, reason=HOSTILE))  # fmt: skip
    more = open_point(2)
    layers = [request(HOSTILE + "2", float(i), 0.1, 0.1, 0.1, 3, layers={HOSTILE: 0.2}) for i in range(5)]  # fmt: skip
    variant = loaded_variant(
        HOSTILE, rates=(), points=[(traces, told), more, (layers, more[1])],
        comparable={"cpu": HOSTILE},
    )  # fmt: skip
    told = told.model_copy(update={"utilization": device_sample(source=HOSTILE, reason=HOSTILE)})
    variant = type(variant)(**{**vars(variant), "load_points": [*variant.load_points, told]})
    for render in (load_text, load_markdown, details_markdown, load_csv):
        assert "\x1b" not in render([variant])
    assert "<b>" not in details_markdown([variant])
    rows = list(csv.reader(io.StringIO(load_csv([variant]))))
    assert {len(row) for row in rows} == {len(rows[0])}
    assert max(map(len, details_text([variant]).splitlines())) <= 100


def test_details_of_a_bench_without_records_keep_their_table():
    text = details_markdown([make.variant("base")])
    assert "## Latency and throughput by load point and prompt length" in text
    assert "Cold start" in text
    assert "## Memory by part" in text
    loaded = details_markdown([loaded_variant("v")])
    assert "## Latency and throughput against load" in loaded
    assert "by load point and prompt length" not in loaded

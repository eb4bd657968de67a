"""The table as values, and as Markdown, CSV, JSON and text for a terminal."""

from __future__ import annotations

import csv
import dataclasses
import io
import json

import numpy as np
import pytest
from pydantic import TypeAdapter

from quanteval.report import (
    Table,
    build_table,
    render_csv,
    render_json,
    render_markdown,
    render_terminal,
)
from tests.gate import evidence as make
from tests.report.conftest import TASKS, make_run, manifest, sets

RENDERERS = (render_markdown, render_csv, render_json, render_terminal)


def cells(table: Table, variant: str):
    (row,) = [row for row in table.rows if row.variant == variant]
    return row.cells


def test_costs_are_those_recorded_and_their_ratios(run):
    base, good = cells(run.table, "base"), cells(run.table, "good")
    assert base["weights"].value == 16_000
    assert good["weights"].value == 8_000
    assert good["weights_ratio"].value == 0.5
    assert good["bits"].value == 8
    assert good["ttft_p50"].value == pytest.approx(0.1)
    assert good["ttft_p50"].n == 5
    assert good["tpot_p95"].value == pytest.approx(0.02)
    assert good["tps_1"].value == pytest.approx(50)
    assert good["tps_1_ratio"].value == pytest.approx(1)
    assert good["tps_best"].note == "at 1"


def test_quality_has_value_interval_n_and_the_difference(run):
    good, bad = cells(run.table, "good"), cells(run.table, "bad")
    code = bad["code/pass@1"]
    assert (code.value, code.n) == (0.8, 200)
    assert code.lower < 0.8 < code.upper
    assert code.note.startswith("-20.0 points [")
    assert code.note.endswith("], 40/0")
    assert good["code/pass@1"].note == "+0.0 points [-1.9, +1.9], 0/0"
    assert bad["prose/token perplexity"].note == "x1.350 [1.350, 1.350]"
    assert good["distance/mean KL"].value == pytest.approx(0.005)
    assert good["distance/top-1 agreement"].value == pytest.approx(0.97)
    assert cells(run.table, "base")["code/pass@1"].note == ""


def test_the_verdict_stands_beside_its_main_reason(run):
    for name, outcome in (
        ("base", "baseline"),
        ("good", "accept"),
        ("bad", "reject"),
        ("nope", "error"),
    ):
        assert cells(run.table, name)["verdict"].value == outcome
    assert "40 worse" in cells(run.table, "bad")["reason"].value
    assert "needs a GPU" in cells(run.table, "nope")["reason"].value


def test_markdown_names_every_variant_column_and_circumstance(run):
    text = render_markdown(run.table)
    header, rule, *rows = [row for row in text.splitlines() if row.startswith("|")]
    labels = [label.strip() for label in header.strip("|").split("|")]
    assert len(set(labels)) == len(labels), "two columns have the same name"
    assert {row.count("|") for row in (header, rule, *rows)} == {len(labels) + 1}
    assert len(rows) == 4
    assert "unsupported: needs a GPU" in text
    assert "- device: A CPU" in text
    assert "numpy 2.0" in text
    for label in ("bits/weight", "peak MB", "code pass@1", "tok/s, best load"):
        assert f"- {label}: " in text
    assert "two one-sided 95 % bounds" in text


def test_csv_has_raw_values(run):
    rows = list(csv.DictReader(io.StringIO(render_csv(run.table))))
    assert [row["variant"] for row in rows] == ["base", "good", "bad", "nope"]
    good = rows[1]
    assert float(good["weights"]) == 8000
    assert float(good["code/pass@1"]) == 1.0
    assert int(good["code/pass@1.n"]) == 200
    assert float(good["code/pass@1.lower"]) < 1
    assert rows[3]["status_reason"] == "needs a GPU"
    assert rows[3]["weights"] == ""


def test_json_is_the_table(run):
    text = render_json(run.table)
    assert TypeAdapter(Table).validate_json(text) == run.table
    assert json.loads(text)["rows"][1]["cells"]["weights"]["value"] == 8000


def test_the_terminal_shows_it_in_a_hundred_columns(run):
    text = render_terminal(run.table)
    assert all(len(shown) <= 100 for shown in text.splitlines())
    for part in (
        "Size",
        "Speed",
        "code pass@1",
        "prose token perplexity",
        "Verdict",
        "n=200",
        "device: A CPU",
    ):
        assert part in text
    assert "n=5 and n=5 requests" in text
    assert "nope is unsupported: needs a GPU" in text


def test_long_names_and_reasons_stay_in_a_hundred_columns():
    name = "a-variant-with-a-name-" * 8
    long = make_run(
        make.variant(name, *sets()), make.variant("x", status="failed", reason="because " * 60)
    )
    text = render_terminal(long.table)
    assert all(len(shown) <= 100 for shown in text.splitlines())
    assert name in "".join(text.split())


# --------------------------------------------------------------------------- missing and broken pieces


@pytest.mark.parametrize("render", RENDERERS)
@pytest.mark.parametrize(
    "missing",
    [
        {"traces": []}, {"memory": None}, {"artifact": None}, {"scores": {}},
        {"traces": [], "memory": None, "artifact": None, "scores": {}},
        {"artifact": make.artifact(8).model_copy(update={"effective": None})},
        {"memory": make.memory(0)},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("side", [0, 1])
def test_a_piece_that_is_missing_leaves_its_cells_empty(run, render, missing, side):
    variants = list(run.variants)
    variants[side] = dataclasses.replace(variants[side], **missing)
    text = render(build_table(run.manifest, variants, run.verdicts))
    assert "base" in text
    assert "good" in text


@pytest.mark.parametrize("render", RENDERERS)
def test_nothing_at_all_is_still_a_table(render):
    assert isinstance(render(build_table(manifest([], []), [], [])), str)
    assert isinstance(render(build_table(manifest([], TASKS), [], [])), str)
    alone = make.variant("base", traces=[], memory=None, artifact=None)
    assert "base" in render(build_table(manifest(["base"]), [alone], []))


def test_without_verdicts_a_candidate_is_not_gated(run):
    table = build_table(run.manifest, run.variants, [])
    assert cells(table, "good")["verdict"].value == "not gated"


def broken_sets():
    code, prose, distance = sets()
    nan = prose.value.copy()
    nan[3] = np.nan
    yield "nan", (code, make.perplexity(nan), distance)
    yield "huge", (code, make.perplexity(prose.value * 1e4), distance)
    yield "errored", (code, make.perplexity(prose.value, status=("error",) * 40), distance)
    yield "other tokens", (code, dataclasses.replace(prose, weight=prose.weight + 1), distance)
    yield "no tokens", (code, dataclasses.replace(prose, weight=prose.weight * 0), distance)
    yield "one document", (code, make.perplexity([200.0]), distance)
    yield "fractions", (make.scores(values=np.linspace(0, 1, 200)), prose, distance)
    yield "not a share", (make.scores("code", "rating", np.full(200, 7.0)), prose, distance)
    yield "no samples", (make.scores(values=[]), prose, distance)


@pytest.mark.parametrize("render", RENDERERS)
@pytest.mark.parametrize(
    ("what", "scores"), list(broken_sets()), ids=lambda v: v if isinstance(v, str) else ""
)
def test_scores_that_say_nothing_do_not_break_the_table(render, what, scores):
    run = make_run(make.variant("cand", *scores))
    text = render(run.table)
    assert "cand" in text
    if render is render_json:
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    if what == "nan" and render is not render_terminal:
        assert "s3" in text


def test_an_infinite_perplexity_is_a_string_in_json():
    _, scores = next(item for item in broken_sets() if item[0] == "huge")
    text = render_json(make_run(make.variant("cand", *scores)).table)
    row = json.loads(text)["rows"][1]["cells"]["prose/token perplexity"]
    assert row["value"] == "inf"


# --------------------------------------------------------------------------- foreign text


EVIL = "\x1b[2J|<img src=x onerror=1>[a](http://e)`*"


def evil_table() -> Table:
    run = make_run(make.variant(EVIL, status="failed", reason=f"=cmd()\n{EVIL}"))
    return build_table(
        run.manifest.model_copy(update={"config": {"model": EVIL}}), run.variants, run.verdicts
    )


@pytest.mark.parametrize("render", RENDERERS)
def test_foreign_text_has_no_control_characters(render):
    text = render(evil_table())
    assert "\x1b" not in text
    assert "\r" not in text


def test_foreign_text_does_not_break_markdown():
    text = render_markdown(evil_table())
    rows = [row for row in text.splitlines() if row.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert "<img" not in text
    assert "](" not in text


@pytest.mark.parametrize(
    "start", ["=1+1", "@SUM(A1)", "+1", "-2+3+cmd|' /C calc'!A0", " =1", "\t=1"]
)
def test_foreign_text_is_no_formula(start):
    run = make_run(make.variant("cand", status="failed", reason=start))
    table = dataclasses.replace(
        run.table, rows=(dataclasses.replace(run.table.rows[1], variant=start),)
    )
    (row,) = csv.DictReader(io.StringIO(render_csv(table)))
    assert row["variant"].startswith("'")
    assert row["status_reason"].startswith("'")


def test_the_same_records_give_the_same_bytes(run):
    for render in RENDERERS:
        assert render(run.table) == render(run.table)

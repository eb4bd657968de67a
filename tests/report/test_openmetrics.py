"""OpenMetrics text, read back by a strict parser of the format's rules."""

from __future__ import annotations

import math
import re

import pytest

from quanteval.report import openmetrics_text
from tests.gate import evidence as make
from tests.report.conftest import sets
from tests.report.load_evidence import loaded_variant

NAME = r"[a-zA-Z_][a-zA-Z0-9_]*"
LABEL = re.compile(rf'({NAME})="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')
SAMPLE = re.compile(rf"({NAME})(?:\{{(.*)\}})? (\S+)")
SUFFIXES = {"gauge": ("",), "info": ("_info",), "stateset": ("",)}


def parse(text: str) -> dict[str, dict]:
    """Return families with their samples as {labels: value}; AssertionError for what the format forbids."""
    assert text.endswith("# EOF\n")
    families: dict[str, dict] = {}
    current: dict = {}
    for line in text.removesuffix("# EOF\n").splitlines():
        assert line.isprintable(), line
        if line.startswith("#"):
            word, name, rest = re.fullmatch(rf"# (TYPE|UNIT|HELP) ({NAME}) (.+)", line).groups()
            if word == "TYPE":
                assert name not in families, f"{name} is not in one block"
                current = families[name] = {"name": name, "type": rest, "unit": "", "samples": {}}
                assert rest in SUFFIXES
            assert name == current["name"]
            assert not current["samples"], "metadata comes before samples"
            assert word == "TYPE" or not current.get(word.lower())
            current[word.lower()] = rest
            continue
        name, labels, value = SAMPLE.fullmatch(line).groups()
        assert name in [current["name"] + suffix for suffix in SUFFIXES[current["type"]]]
        found = LABEL.findall(labels or "")
        assert "".join(f'{key}="{value}",' for key, value in found).rstrip(",") == (labels or "")
        assert len({key for key, _ in found}) == len(found)
        key = tuple(sorted((key, unescape(value)) for key, value in found))
        assert key not in current["samples"], f"twice: {line}"
        current["samples"][key] = float(value)
    for name, family in families.items():
        assert family["help"]
        assert family["samples"]
        assert not family["unit"] or name.endswith(f"_{family['unit']}")
        if family["type"] == "info":
            assert set(family["samples"].values()) == {1.0}
        if family["type"] == "stateset":
            assert set(family["samples"].values()) <= {0.0, 1.0}
            assert all(name in dict(key) for key in family["samples"])
        clashes = [f"{name}{end}" for end in ("_total", "_created", "_count", "_sum", "_bucket", "_info")]  # fmt: skip
        assert not set(clashes) & set(families)
    return families


def unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], text)


def at(families, name, **labels):
    want = {(key, str(value)) for key, value in labels.items()}
    (value,) = [v for key, v in families[name]["samples"].items() if want <= set(key)]
    return value


@pytest.fixture(scope="module")
def families():
    variants = [
        loaded_variant("base", rates=(1, 2, 4, 6), sets=sets()),
        loaded_variant("nf4", rates=(1, 2, 4, 6), sets=sets(lost=20)),
    ]
    return parse(openmetrics_text(variants, run_id="r1"))


def test_latencies_have_their_quantiles_bounds_and_n(families):
    where = {"variant": "nf4", "load_point": "open_loop_4", "bucket": "all", "quantile": 0.5}
    value = at(families, "quanteval_ttft_seconds", **where)
    lower = at(families, "quanteval_ttft_lower_seconds", **where)
    upper = at(families, "quanteval_ttft_upper_seconds", **where)
    assert lower <= value <= upper
    assert at(families, "quanteval_ttft_samples", **where) > 100
    assert at(families, "quanteval_ttft_seconds", **{**where, "bucket": "129-512"}) > 0
    assert families["quanteval_ttft_seconds"]["unit"] == "seconds"


def test_rates_scores_memory_and_capacity_are_there(families):
    where = {"variant": "base", "load_point": "open_loop_2"}
    rate = at(families, "quanteval_achieved_requests_per_second", **where)
    assert rate == pytest.approx(2, rel=0.3)
    assert at(families, "quanteval_output_tokens_per_second", **where) == pytest.approx(11 * rate)
    assert at(families, "quanteval_over_saturated", **{**where, "load_point": "open_loop_6"}) in (
        0,
        1,
    )
    assert at(families, "quanteval_score_ratio", variant="nf4", task="code") == 0.9
    assert at(families, "quanteval_score_samples", variant="nf4", task="code") == 200
    parts = families["quanteval_memory_bytes"]["samples"]
    total = sum(value for key, value in parts.items() if ("variant", "base") in key)
    assert total == at(families, "quanteval_memory_peak_bytes", variant="base") == 100_000
    assert at(families, "quanteval_capacity_requests_per_second", variant="base") > 0


def test_what_is_not_known_is_absent(families):
    assert "quanteval_kv_pool_tokens" not in families
    assert not any(math.isnan(v) for f in families.values() for v in f["samples"].values())
    assert parse(openmetrics_text([])) == {}
    bare = make.variant("v", traces=[], memory=None, artifact=None, status="failed", reason="x")
    found = parse(openmetrics_text([bare]))
    assert (
        at(found, "quanteval_variant_status", variant="v", quanteval_variant_status="failed") == 1
    )
    assert "quanteval_ttft_seconds" not in found


def test_a_verdict_is_a_state_set(run):
    found = parse(openmetrics_text(run.variants, run.verdicts))
    states = {
        dict(key)["quanteval_verdict"]: value
        for key, value in found["quanteval_verdict"]["samples"].items()
        if dict(key)["variant"] == "bad"
    }
    assert states == {
        "accept": 0, "reject": 1, "inconclusive": 0, "error": 0, "not_comparable": 0
    }  # fmt: skip


def test_names_from_outside_cannot_break_the_format():
    name = 'a"b\\c\n# EOF\x1b{}'
    found = parse(openmetrics_text([make.variant(name, *sets())], run_id=name))
    (label,) = {dict(key)["variant"] for key in found["quanteval_variant_status"]["samples"]}
    assert label == 'a"b\\c # EOF\\x1b{}'

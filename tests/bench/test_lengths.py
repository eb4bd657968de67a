"""Length distributions: their shares and ends, draws that are alike, and logs with bad lines."""

from __future__ import annotations

import itertools
import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quanteval.bench.lengths import (
    BLOCK,
    EDGES,
    Empirical,
    Fixed,
    Lognormal,
    Mixture,
    Range,
    Uniform,
    bucket_name,
    draw,
    stratified,
)
from quanteval.errors import ConfigError

KINDS = [Fixed(7), Uniform(3, 90), Lognormal(64, 0.8, 8, 512), Mixture()]


@pytest.mark.parametrize("lengths", KINDS, ids=lambda k: type(k).__name__)
def test_a_distribution_rises_from_its_lowest_to_its_highest(lengths):
    found = [lengths.at(u / 2000) for u in range(2000)]
    assert found == sorted(found)
    low, high = {Fixed: (7, 7), Uniform: (3, 90), Lognormal: (8, 512), Mixture: (16, 4096)}[
        type(lengths)
    ]
    assert (lengths.at(0.0), lengths.longest) == (low, high)


def test_every_length_of_a_uniform_distribution_is_as_frequent():
    found = [Uniform(1, 10).at(u / 1000) for u in range(1000)]
    assert {found.count(n) for n in range(1, 11)} == {100}


def test_half_of_a_lognormal_lies_below_its_median_and_no_length_piles_up_at_an_end():
    wide = Lognormal(100, 1.0, 1, 100_000)
    assert abs(wide.at(0.5) - 100) <= 1
    assert wide.at(0.8413) == pytest.approx(100 * math.e, rel=0.01)
    cut = Lognormal(100, 1.0, 50, 200)
    found = [cut.at(u / 5000) for u in range(5000)]
    assert found.count(200) < 3 * found.count(190)


def test_the_stated_default_has_exactly_its_shares_in_every_block():
    drawn = [p for p, _ in itertools.islice(draw(Mixture(), Fixed(1), 5), 50 * BLOCK)]
    for i in range(0, len(drawn), BLOCK):
        names = [bucket_name(n, EDGES) for n in drawn[i : i + BLOCK]]
        counts = {name: names.count(name) for name in set(names)}
        assert counts == {"1-199": 14, "200-1000": 4, "1001+": 2}


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_two_draws_of_one_size_are_nearly_alike(one, other):
    totals = [
        sum(p for p, _ in itertools.islice(draw(Uniform(1, 1000), Fixed(1), seed), 2 * BLOCK))
        for seed in (one, other)
    ]
    # Each twentieth of the range occurs twice in both, so each pair differs by at most 50.
    assert abs(totals[0] - totals[1]) <= 2 * BLOCK * 50


def test_a_draw_is_reproducible_and_in_random_order():
    def first(seed):
        return list(itertools.islice(stratified(seed), 3 * BLOCK))

    assert first("a") == first("a") != first("b")
    assert all(0 <= u < 1 for u in first("a"))
    assert first("a")[:BLOCK] != sorted(first("a")[:BLOCK])
    pairs = list(itertools.islice(draw(Uniform(1, 1000), Uniform(1, 1000), 0), 2000))
    assert abs(statistics.correlation(*zip(*pairs, strict=True))) < 0.1


@given(st.integers(1, 5000))
def test_a_length_is_in_the_bucket_that_names_it(tokens):
    name = bucket_name(tokens, (10, 100, 1000))
    if name.endswith("+"):
        assert tokens > 1000
    else:
        low, high = map(int, name.split("-"))
        assert low <= tokens <= high
    assert bucket_name(tokens, ()) == "1+"


# --------------------------------------------------------------------------- recorded lengths


def log(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_recorded_lengths_come_back_in_their_shares_and_pairs_stay_together(tmp_path):
    rows = [(n, 2 * n) for n in range(1, 41)]
    lines = "".join(json.dumps({"usage": {"in": p, "out": o}}) + "\n\n" for p, o in rows)
    file = log(tmp_path, "log.jsonl", lines)
    paired = Empirical(file, "usage.in", "usage.out")
    drawn = list(itertools.islice(draw(paired, Fixed(9), 0), 2 * BLOCK))
    assert all(output == 2 * prompt for prompt, output in drawn)
    alone = Empirical(file, "usage.in")
    assert {output for _, output in itertools.islice(draw(alone, Fixed(9), 0), 5)} == {9}
    assert (alone.at(0.0), alone.longest) == (1, 40)


def test_csv_and_plain_files_are_read(tmp_path):
    table = log(tmp_path, "log.csv", 'id,prompt,"output"\na,5,6\n"b, c",7,8\n')
    assert Empirical(table, "prompt", "output").pair_at(0.9) == (7, 8)
    plain = log(tmp_path, "log.txt", "5 6\n7;8\n\n9,10\n")
    assert Empirical(plain, "prompt", "output").pair_at(0.9) == (9, 10)
    assert Empirical(plain).longest == 9


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", '{"prompt_tokens": 3}\n{oops\n', 'line 2: "{oops" is not JSON'),
        ("a.jsonl", '{"prompt_tokens": 3}\n{"x": 1}\n', 'line 2: no field "prompt_tokens"'),
        ("a.jsonl", "[1]\n", 'line 1: no field "prompt_tokens"'),
        (
            "a.jsonl",
            '\n{"prompt_tokens": "many"}\n',
            'line 2: prompt_tokens "many" is not a number',
        ),
        ("a.jsonl", '{"prompt_tokens": true}\n', 'prompt_tokens "True" is not a number'),
        ("a.jsonl", '{"prompt_tokens": NaN}\n', 'prompt_tokens "nan" is not a number'),
        ("a.jsonl", '{"prompt_tokens": 4}\n{"prompt_tokens": 0}\n', 'line 2: prompt_tokens "0"'),
        ("a.jsonl", '{"prompt_tokens": 2.5}\n', 'line 1: prompt_tokens "2.5" is no length'),
        ("a.csv", "x,y\n1,2\n", 'line 1: no column "prompt_tokens"; columns: x, y'),
        ("a.csv", "x,prompt_tokens\n1\n", 'line 2: no value for column "prompt_tokens"'),
        ("a.txt", "12\nfew\n", 'line 2: prompt_tokens "few" is not a number'),
        ("a.txt", "", "holds no record"),
        ("a.csv", "prompt_tokens\n", "holds no record"),
    ],
)
def test_a_bad_line_is_named(tmp_path, name, text, says):
    with pytest.raises(ConfigError) as error:
        Empirical(log(tmp_path, name, text)).at(0.5)
    assert says in str(error.value)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


def test_records_of_length_zero_are_left_out_when_asked(tmp_path):
    file = log(tmp_path, "log.txt", "0\n5\n0\n")
    assert Empirical(file, skip_zero=True).at(0.0) == 5
    with pytest.raises(ConfigError, match="no record with a length"):
        Empirical(log(tmp_path, "none.txt", "0\n"), skip_zero=True).at(0.0)
    with pytest.raises(ConfigError, match="cannot be read"):
        Empirical(str(tmp_path / "missing.csv")).at(0.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fixed(0),
        lambda: Uniform(5, 4),
        lambda: Lognormal(5, 1.0, 6, 9),
        lambda: Lognormal(5, 0.0),
        lambda: Mixture(()),
        lambda: Range(1, 2, 0.0),
    ],
)
def test_distributions_that_mean_nothing_are_refused(make):
    with pytest.raises(ValueError, match=r"must|needs"):
        make()

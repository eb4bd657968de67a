"""Generated suites: any size, all distinct, right, and the same rows every time."""

from __future__ import annotations

import operator
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quanteval.errors import ConfigError
from quanteval.tasks.loading import Source, load_rows, make_samples
from quanteval.tasks.synthetic import ALPHABETS, arithmetic, copying, shuffled

COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@given(size=st.integers(1, 600), key=st.text(max_size=5))
def test_a_shuffle_has_every_number_once(size, key):
    assert sorted(shuffled(size, key)) == list(range(size))


def test_a_shuffle_depends_on_its_key_and_looks_random():
    assert list(shuffled(1000, "a")) != list(shuffled(1000, "b"))
    first = list(shuffled(1000, "a"))[:200]
    assert 400 < sum(first) / len(first) < 600
    assert len({value // 100 for value in first}) == 10
    assert next(shuffled(10**400, "a")) > 10**300


@pytest.mark.parametrize("make", [arithmetic, copying])
@given(n=st.integers(1, 200), more=st.integers(0, 200), seed=st.integers(0, 9))
def test_a_larger_suite_begins_with_the_smaller_one(make, n, more, seed):
    assert list(make(n + more, seed=seed))[:n] == list(make(n, seed=seed))


def test_rows_are_these_on_every_python():
    rows = [(row["id"], row["target"]) for row in arithmetic(6)]
    assert rows == [
        ("7+8", "15"), ("9-1", "8"), ("2*4", "8"), ("86+25", "111"), ("86-51", "35"), ("66*25", "1650")
    ]  # fmt: skip
    assert [row["target"] for row in copying(2, lengths=[2, 3], seed=1)] == [
        "piano dance", "onion snake robot"
    ]  # fmt: skip
    assert [r["id"] for r in arithmetic(6, seed=1)] != [r["id"] for r in arithmetic(6)]


@given(
    digits=st.lists(st.integers(1, 6), min_size=1, max_size=3, unique=True),
    operations=st.sets(st.sampled_from(["addition", "subtraction", "multiplication"]), min_size=1),
)
def test_every_target_is_right_and_every_operand_has_its_digits(digits, operations):
    for row in arithmetic(40, sorted(operations), digits):
        a, sign, b = row["expression"].split()
        assert row["target"] == str(COMPUTE[sign](int(a), int(b)))
        assert len(a) == len(b) == int(row["category"].split()[1])
        assert not row["target"].startswith("-")


def test_categories_take_turns_and_small_ones_drop_out():
    rows = list(arithmetic(1000, ["addition", "subtraction"], [1, 2]))
    assert len({row["id"] for row in rows}) == 1000
    assert len({row["category"] for row in rows[:4]}) == 4
    assert Counter(row["category"] for row in rows) == {
        "addition 1 digit": 81,
        "subtraction 1 digit": 45,
        "addition 2 digits": 437,
        "subtraction 2 digits": 437,
    }


def test_asking_for_more_than_there_is_says_how_many_there_are():
    assert len(list(arithmetic(81, ["multiplication"], [1]))) == 81
    with pytest.raises(ConfigError, match='n "82": there are only 81 distinct items'):
        arithmetic(82, ["multiplication"], [1])
    assert len({row["target"] for row in copying(110, [1, 2], "digits")}) == 110
    with pytest.raises(ConfigError, match="there are only 110"):
        copying(111, [1, 2], "digits")


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_sequences_have_their_lengths(alphabet):
    for row in copying(30, [1, 5, 40], alphabet):
        items = row["target"].split(" ")
        assert len(items) == row["length"] == int(row["category"])
        assert set(items) <= set(ALPHABETS[alphabet])


@pytest.mark.parametrize(
    ("make", "arguments", "says"),
    [
        (arithmetic, {"n": 0}, 'n "0"'),
        (arithmetic, {"n": 1.5}, 'n "1.5"'),
        (arithmetic, {"operations": ["adition"]}, 'did you mean "addition"'),
        (arithmetic, {"operations": []}, "at least one category"),
        (arithmetic, {"digits": [0]}, "digits"),
        (copying, {"lengths": [4, "8"]}, "lengths"),
        (copying, {"alphabet": "runes"}, 'no "runes"'),
    ],
)
def test_arguments_without_sense_are_refused(make, arguments, says):
    with pytest.raises(ConfigError, match=says):
        make(**arguments)


def test_a_repeated_category_counts_once():
    assert list(arithmetic(20, ["addition", "addition"], [1, 1])) == list(
        arithmetic(20, ["addition"], [1])
    )


def test_rows_load_as_a_suite_s():
    source = Source(loader="quanteval.tasks.synthetic.copying", arguments={"n": 500})
    assert len(make_samples(load_rows(source, ""), "id", None)) == 500

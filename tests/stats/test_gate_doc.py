"""The figures and function names in docs/gate.md are those of the package."""

import re
from pathlib import Path

import pytest

from quanteval import stats
from tests.stats import operating_tables as tables

TEXT = (Path(__file__).parents[2] / "docs" / "gate.md").read_text(encoding="utf-8")
QUICK = (tables.wrong_releases, tables.no_flips, tables.detectable)
SLOW = tuple(make for make in tables.ALL if make not in QUICK)


@pytest.mark.parametrize("make", QUICK, ids=lambda make: make.__name__)
def test_table_is_current(make):
    assert make() in TEXT


@pytest.mark.slow
@pytest.mark.parametrize("make", SLOW, ids=lambda make: make.__name__)
def test_slow_table_is_current(make):
    assert make() in TEXT


def test_every_public_function_is_named():
    named = set(re.findall(r"`([a-z_0-9]+)`", TEXT))
    functions = {name for name in stats.__all__ if name.islower()}
    assert functions - named == set()

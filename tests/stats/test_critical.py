"""The shipped critical values are those of the search, found by their exact numbers only, and they are all there."""

import math

import pytest

from quanteval import stats
from quanteval.stats import critical, exact

ENTRIES = [(n, sign * m) for n in critical.SIZES for m in critical.MARGINS for sign in (1, -1)]
QUICK = [entry for i, entry in enumerate(ENTRIES) if entry[0] <= 541 and i % 9 == 4]


@pytest.mark.parametrize(("n", "margin"), [*QUICK, (1319, 0.02), (1319, -0.02), (2000, 0.01)])
def test_entry_is_what_the_search_finds(n, margin):
    wanted = exact.search_critical_z(n, margin, critical.ALPHA)
    assert critical.shipped()[critical.key(n, margin, critical.ALPHA)] == pytest.approx(
        wanted, abs=1e-9
    )


@pytest.mark.slow
def test_entries_are_what_the_search_finds():
    """Every fourth of them; computing the file anew gives them all."""
    for n, margin in ENTRIES[::4]:
        wanted = exact.search_critical_z(n, margin, critical.ALPHA)
        assert critical.shipped()[critical.key(n, margin, critical.ALPHA)] == pytest.approx(
            wanted, abs=1e-9
        ), (n, margin)


def test_all_and_only_the_stated_entries_are_there():
    assert set(critical.shipped()) == {critical.key(*entry, critical.ALPHA) for entry in ENTRIES}
    assert all(-2.2 < z < -1.6 for z in critical.shipped().values())


def test_lookup_comes_first_and_search_otherwise(monkeypatch):
    searched = []

    def search(*arguments):
        searched.append(arguments)
        return -1.7

    monkeypatch.setattr(exact, "search_critical_z", search)
    stats.exact_critical_z.cache_clear()
    try:
        shipped = stats.exact_critical_z(164, 0.02)
        assert shipped == critical.shipped()["164/0.02/0.05"]
        assert stats.exact_critical_z(164, -0.02) == critical.shipped()["164/-0.02/0.05"]
        assert searched == []
        others = [(164, math.nextafter(0.02, 1), 0.05), (165, 0.02, 0.05), (164, 0.02, 0.04)]
        for other in others:
            assert stats.exact_critical_z(*other) == -1.7
        assert searched == others
    finally:
        stats.exact_critical_z.cache_clear()


def test_the_file_is_written_as_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(critical, "FILE", tmp_path / "critical_z.json")
    monkeypatch.setattr(critical, "SIZES", (20, 30))
    critical.shipped.cache_clear()
    try:
        critical.regenerate()
        written = critical.shipped()
    finally:
        critical.shipped.cache_clear()
    monkeypatch.undo()
    assert len(written) == 20
    assert written == {name: critical.shipped()[name] for name in written}

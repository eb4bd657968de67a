"""Objects from dotted targets: what is allowed, and how each mistake is answered."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass

import pytest

from quanteval.errors import ConfigError
from quanteval.targets import build, locate, near


@dataclass(frozen=True)
class Inner:
    size: int


@dataclass(frozen=True)
class Outer:
    name: str
    ratio: float = 1.0
    items: tuple[str, ...] = ()
    inner: Inner | None = None

    def __post_init__(self) -> None:
        if self.ratio < 0:
            raise ValueError(f'ratio "{self.ratio}" must not be negative')


@pytest.fixture(autouse=True)
def targets(monkeypatch):
    module = types.ModuleType("quanteval.testing_targets")
    module.Outer, module.Inner, module.text = Outer, Inner, "no class"
    monkeypatch.setitem(sys.modules, "quanteval.testing_targets", module)
    monkeypatch.setattr(sys.modules["quanteval"], "testing_targets", module, raising=False)


OUTER = "quanteval.testing_targets.Outer"


def test_fields_are_converted_and_nested_nodes_built():
    node = {
        "_target_": OUTER,
        "name": "a",
        "ratio": 2,
        "items": ["x", "y"],
        "inner": {"_target_": "quanteval.testing_targets.Inner", "size": 3},
    }
    built = build(node)
    assert built == Outer("a", 2.0, ("x", "y"), Inner(3))
    assert isinstance(built.ratio, float)


def test_a_plain_mapping_fills_a_nested_dataclass():
    assert build({"_target_": OUTER, "name": "a", "inner": {"size": 4}}).inner == Inner(4)


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (
            {"_target_": OUTER, "name": "a", "ratoi": 1},
            'unknown key "ratoi"; did you mean "ratio"?',
        ),
        ({"_target_": OUTER}, "name: this key is required"),
        ({"_target_": OUTER, "name": "a", "ratio": "fast"}, 'ratio: "fast" is not valid'),
        ({"_target_": OUTER, "name": "a", "ratio": -1}, 'ratio "-1.0" must not be negative'),
        ({"_target_": "os.system", "command": "true"}, 'target "os.system" is not allowed'),
        ({"_target_": "quanteval.nowhere.Thing"}, "there is no module"),
        ({"_target_": "quanteval.testing_targets.Oter"}, 'did you mean "Outer"?'),
        ({"_target_": "quanteval.testing_targets.text"}, "is not a dataclass"),
        ({"_target_": "plain"}, "is not a dotted path"),
        ({"name": "a"}, '"_target_" is missing'),
        ("text", '"_target_" is missing'),
    ],
)
def test_each_mistake_gets_one_clear_line(node, says):
    with pytest.raises(ConfigError) as caught:
        build(node, where="scheme.x")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_prefix_can_be_allowed():
    node = {"_target_": "tests_outside.Inner", "size": 1}
    sys.modules["tests_outside"] = types.ModuleType("tests_outside")
    sys.modules["tests_outside"].Inner = Inner
    try:
        with pytest.raises(ConfigError, match="not allowed"):
            build(node)
        assert build(node, prefixes=("tests_outside.",)) == Inner(1)
    finally:
        del sys.modules["tests_outside"]


def test_near_lists_what_is_known_when_nothing_is_close():
    assert near("zzz", ["b", "a"]) == "known: a, b"
    assert near("zzz", []) == "none is known"


@pytest.mark.parametrize("part", ["source", "prompt", "sandbox"])
def test_a_key_that_nothing_reads_is_refused_inside_a_part_too(part):
    node = {
        "_target_": "quanteval.tasks.code.CodeTask", "name": "t", "version": "1",
        "source": {"jsonl": "rows.jsonl"}, "prompt": {"form": "raw"}, "sandbox": {"cpu_s": 3},
    }  # fmt: skip
    assert build(node).prompt.form == "raw"
    node[part] = {**node[part], "misspelt": 1}
    with pytest.raises(ConfigError, match=rf'node\.{part}: unknown key "misspelt"'):
        build(node)


def test_a_key_that_nothing_reads_is_refused_in_a_list_too():
    buckets = [{"low": 1, "high": 2}, {"low": 3, "high": 4, "wait": 1.0}]
    with pytest.raises(
        ConfigError, match=r'buckets\[1\]: unknown key "wait"; did you mean "weight"'
    ):
        build({"_target_": "quanteval.bench.plan.LoadBench", "buckets": buckets})


def test_what_is_looked_up_later_follows_the_allowed_prefixes():
    from quanteval.targets import allow

    with pytest.raises(ConfigError, match="not allowed"):
        locate("tests.tiny.make_tiny_model")
    try:
        allow(("quanteval.", "tests."))
        assert locate("tests.tiny.make_tiny_model").__name__ == "make_tiny_model"
        with pytest.raises(ConfigError, match="not allowed"):
            locate("tests.tiny.make_tiny_model", ("quanteval.",))
    finally:
        allow(("quanteval.",))

"""What keeps two variants from being compared, each cause in its own words, with exit code 5."""

from __future__ import annotations

import pytest

from quanteval.comparability import incomparable
from quanteval.gate import decide
from quanteval.policy import load_policy
from tests.gate import evidence as make

CODE = "quanteval.rules.non_inferiority.NonInferiority"
POLICY = load_policy({"rules": {"code": {"_target_": CODE, "kind": "code", "margin": "5 points"}}})
CONDITIONS = {
    "model_weights": "d",
    "engine": {"_target_": "quanteval.engines.a.A", "max_batch_rows": 8, "page_tokens": 64},
    "batch_policy": "continuous, at most 8 rows",
    "packages": {"torch": "2.13", "transformers": "5.24"},
    "device": "cpu",
    "seed": 0,
}


def changed(path, value):
    out = {key: dict(v) if isinstance(v, dict) else v for key, v in CONDITIONS.items()}
    *parents, last = path.split("/")
    place = out
    for name in parents:
        place = place[name]
    place[last] = value
    return out


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (
            "engine/_target_",
            "quanteval.engines.b.B",
            "served by different engines: engine._target_ (",
        ),
        ("engine/max_batch_rows", 4, "batched differently: engine.max_batch_rows (8 and 4)"),
        ("batch_policy", "static", "batched differently: batch_policy ("),
        (
            "engine/page_tokens",
            32,
            "served with different settings: engine.page_tokens (64 and 32)",
        ),
        (
            "packages/torch",
            "2.14",
            "a stale baseline, measured with other versions: measure it again: packages.torch",
        ),
        ("device", "cuda", "measured on different hardware or threads: device (cpu and cuda)"),
        ("model_weights", "e", "not the same model: model_weights (d and e)"),
        ("seed", 1, "different seeds: seed (0 and 1)"),
        ("weather", "rain", "different conditions: weather (null and rain)"),
    ],
)
def test_each_cause_has_its_own_message(path, value, says):
    code = make.scores(values=[1.0] * 80)
    baseline = make.variant("base", code, comparable=CONDITIONS)
    candidate = make.variant("cand", code, comparable=changed(path, value))
    verdict = decide(POLICY, baseline, candidate)
    assert (verdict.outcome, verdict.exit_code) == ("not_comparable", 5)
    assert says in verdict.reason
    assert (
        decide(POLICY, baseline, make.variant("cand", code, comparable=CONDITIONS)).outcome
        == "accept"
    )


def test_settings_of_different_engines_are_not_listed_one_by_one():
    other = changed("engine/_target_", "b.B")
    other["engine"] = {"_target_": "b.B", "gpu_memory": 0.9}
    other["batch_policy"] = "paged"
    text = incomparable(
        make.variant("base", comparable=CONDITIONS), make.variant("cand", comparable=other)
    )
    assert text == "served by different engines: engine._target_ (quanteval.engines.a.A and b.B)"


def test_several_causes_are_all_named():
    other = changed("packages/torch", "2.14")
    other["device"] = "cuda"
    text = incomparable(
        make.variant("base", comparable=CONDITIONS), make.variant("cand", comparable=other)
    )
    assert "stale baseline" in text
    assert "hardware" in text
    assert "were not recorded" in incomparable(
        make.variant("base", comparable={}), make.variant("cand", comparable=other)
    )

"""A run made by hand: a baseline, a good and a bad candidate, one that is unsupported."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from quanteval.evidence import VariantEvidence
from quanteval.gate import decide
from quanteval.policy import load_policy
from quanteval.records import Manifest, Verdict
from quanteval.report import Table, build_table
from quanteval.resources import presets
from tests.gate import evidence as make

NLL = np.linspace(200, 300, 40)
TASKS = ["code", "prose", "distance"]


def manifest(variants, tasks=TASKS, **more) -> Manifest:
    fields = {
        "run_id": "tiny-1", "created_at": "2026-01-01T00:00:00+00:00", "command": [], "config": {"model": "tiny"},
        "baseline": "base", "variants": variants, "tasks": tasks, "policy_name": "default", "policy": {},
        "environment": {"cpu": "A CPU", "packages": {"numpy": "2.0"}}, "fingerprint": "f",
    }  # fmt: skip
    return Manifest(**{**fields, **more})


def sets(lost=0, rise=0.0, kl=0.5, agree=97):
    values = np.ones(200)
    values[:lost] = 0
    return (
        make.scores(values=values),
        make.perplexity(NLL + 100 * rise),
        make.divergence(np.full(20, kl), np.full(20, agree)),
    )


@dataclass(frozen=True)
class Run:
    manifest: Manifest
    variants: tuple[VariantEvidence, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def table(self) -> Table:
        return build_table(self.manifest, self.variants, self.verdicts)


def make_run(*candidates: VariantEvidence, baseline: VariantEvidence | None = None) -> Run:
    """Gate candidates against a baseline by the default policy."""
    base = baseline or make.variant("base", *sets(kl=0.0, agree=100))
    policy = load_policy(presets("gate")["default"])
    verdicts = tuple(decide(policy, base, c, tasks=TASKS) for c in candidates)
    return Run(manifest([base.name, *(c.name for c in candidates)]), (base, *candidates), verdicts)


@pytest.fixture
def run() -> Run:
    return make_run(
        make.variant("good", *sets()),
        make.variant("bad", *sets(lost=40, rise=0.3)),
        make.variant(
            "nope",
            status="unsupported",
            reason="needs a GPU",
            artifact=None,
            memory=None,
            traces=[],
        ),
    )

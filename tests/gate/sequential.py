"""Simulated releases that stop as soon as they are decided: every look is the shipped gate's own.

`python -m tests.gate.sequential [replicates]` prints the table of docs/gate.md.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from quanteval.gate import decide, is_decided
from quanteval.looks import sample_order
from quanteval.policy import Policy, load_policy
from tests.gate import evidence as make

CODE = "quanteval.rules.non_inferiority.NonInferiority"


def policy_of(margin: float, method: str | None) -> Policy:
    """Return a policy with one rule on 0/1 scores, sequential unless `method` is None."""
    node = {"rules": {"code": {"_target_": CODE, "kind": "code", "margin": {"absolute": margin}}}}
    return load_policy(node | ({"sequential": {"method": method}} if method else {}))


@dataclass(frozen=True)
class Results:
    """Shares of accepted and rejected replicates, and the mean number of samples evaluated."""

    accept: float
    reject: float
    samples: float
    replicates: int


class Simulation:
    """One suite size, margin and policy; outcomes at each look are remembered, as they depend on counts alone."""

    def __init__(self, n: int, margin: float, method: str | None = "obrien_fleming") -> None:
        self.n, self.policy = n, policy_of(margin, method)
        self.plan = self.policy.sequential
        ids = [f"s{i}" for i in range(n)]
        self.order = [int(i[1:]) for i in sample_order(ids, 0)]
        self.sizes = self.plan.sizes(n) if self.plan else [n]
        self.look = lru_cache(maxsize=None)(self._look)

    def _look(self, number: int, drops: tuple[int, ...]) -> str:
        """Return the verdict when the first samples of the order lost (1) or gained (-1), '' when undecided."""
        size = self.sizes[number - 1]
        base, cand = np.ones(self.n), np.ones(self.n)
        for place, drop in zip(self.order, drops, strict=False):
            cand[place] -= drop == 1
            base[place] -= drop == -1
        evaluated = sorted(self.order[:size])
        full = make.scores(values=base)
        sets = make.scores(values=cand[evaluated], expected=size)
        record = sets.record
        if self.plan:
            record = record.model_copy(update={"sequential": self.plan.at(self.n, number)})
        sets = dataclasses.replace(
            sets, record=record, sample_ids=tuple(f"s{i}" for i in evaluated),
            prompt_sha256=tuple(f"p{i}" for i in evaluated),
        )  # fmt: skip
        baseline, candidate = make.variant("base", full), make.variant("cand", sets)
        last = number == len(self.sizes)
        if not last and not is_decided(self.policy, baseline, candidate, "code"):
            return ""
        return decide(self.policy, baseline, candidate, tasks=["code"]).outcome

    def one(self, drops: np.ndarray) -> tuple[str, int]:
        """Return the verdict and the samples it took."""
        for number, size in enumerate(self.sizes, 1):
            seen = drops[:size]
            # The betting test depends on the order of the flips, the others on their numbers alone.
            betting = self.plan is not None and self.plan.method == "betting"
            broken, fixed = int((seen == 1).sum()), int((seen == -1).sum())
            key = tuple(seen.tolist()) if betting else (1,) * broken + (-1,) * fixed
            if outcome := self.look(number, key):
                return outcome, size
        raise AssertionError("the last look decides")

    def run(self, flips: float, loss: float, replicates: int, seed: int = 0) -> Results:
        """Simulate releases whose pairs flip at a rate and lose on average `loss`."""
        rng = np.random.default_rng(seed)
        broken, fixed = (flips + loss) / 2, (flips - loss) / 2
        outcomes = []
        for _ in range(replicates):
            u = rng.random(self.n)
            drops = np.where(u < broken, 1, np.where(u < broken + fixed, -1, 0))
            outcomes.append(self.one(drops))
        kinds = [kind for kind, _ in outcomes]
        return Results(
            kinds.count("accept") / replicates, kinds.count("reject") / replicates,
            float(np.mean([size for _, size in outcomes])), replicates,
        )  # fmt: skip


def main() -> None:
    replicates = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    print("| n | margin | flips | plan | loss 0 | loss = margin | loss = 2 margins |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for n, margin, flips in ((164, 0.05, 0.05), (500, 0.05, 0.10), (1319, 0.02, 0.05)):
        for method, label in (
            (None, "fixed"),
            ("obrien_fleming", "5 looks"),
            ("betting", "betting"),
        ):
            simulation = Simulation(n, margin, method)
            cells = []
            for loss in (0.0, margin, 2 * margin):
                found = simulation.run(max(flips, loss), loss, replicates)
                cells.append(
                    f"{100 * found.accept:.1f} / {100 * found.reject:.1f}, {found.samples:.0f}"
                )
            print(
                f"| {n} | {100 * margin:g} | {100 * flips:g}% | {label} | {' | '.join(cells)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

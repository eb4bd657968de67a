"""Stopping a task early without cheating: the order of its samples, its looks, and the level left at each.

A task that may stop is evaluated in a random order drawn beforehand, in blocks; after each block its
rules are asked at the level that the look may spend. Pure functions of records.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from quanteval.records import SequentialLook, TaskRecord
from quanteval.stats import SequentialDesign, sequential_design

Method = Literal["obrien_fleming", "betting"]


@dataclass(frozen=True)
class SequentialPlan:
    """When a task may stop: after each of `looks` equal blocks of its samples.

    'obrien_fleming' spends the level over the planned looks (Lan and DeMets); 'betting' keeps it at any
    look, planned or not, and costs more samples. `seed` draws the order of the samples.
    """

    method: Method = "obrien_fleming"
    looks: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in ("obrien_fleming", "betting"):
            raise ValueError(f'method "{self.method}" must be obrien_fleming or betting')
        if not 2 <= self.looks <= 100:
            raise ValueError(f'looks "{self.looks}" must be between 2 and 100')

    def sizes(self, samples: int) -> list[int]:
        """Return how many samples are evaluated at each look; the last one is all of them.

        Looks that would add no sample are left out, so a tiny task has fewer.
        """
        ends = [math.ceil(samples * (k + 1) / self.looks) for k in range(self.looks)]
        return sorted(set(ends))

    def at(self, samples: int, look: int) -> SequentialLook:
        """Return the record of a task after its look-th look (from 1)."""
        sizes = self.sizes(samples)
        return SequentialLook(
            method=self.method,
            fractions=[size / samples for size in sizes],
            look=look,
            order_seed=self.seed,
            samples_planned=samples,
        )


def sample_order(sample_ids: Sequence[str], seed: int) -> list[str]:
    """Return the ids in the random order of a seed, which depends on the ids alone, not on how they came."""
    return sorted(sample_ids, key=lambda i: (hashlib.sha256(f"{seed}/{i}".encode()).digest(), i))


@lru_cache(maxsize=64)
def _design(fractions: tuple[float, ...], alpha: float) -> SequentialDesign:
    return sequential_design(fractions, alpha)


def level(record: TaskRecord, alpha: float) -> float:
    """Return the level at which a task's bounds hold: alpha, or less for one that was looked at before its end."""
    look = record.sequential
    if look is None or look.method == "betting" or len(look.fractions) < 2:
        return alpha
    levels = _design(tuple(look.fractions), alpha).nominal_alpha
    return levels[min(max(look.look, 1), len(levels)) - 1]


def stopped_early(record: TaskRecord) -> bool:
    """Return whether a task was decided before all its samples were evaluated."""
    look = record.sequential
    return look is not None and record.samples_expected < look.samples_planned


def evaluated_ids(record: TaskRecord, all_ids: Sequence[str]) -> list[str]:
    """Return the samples that a task was to evaluate: all, or the first ones of its order where it stopped."""
    look = record.sequential
    if look is None:
        return list(all_ids)
    return sample_order(all_ids, look.order_seed)[: record.samples_expected]


def betting_order(record: TaskRecord, problem_ids: Sequence[str]) -> list[int] | None:
    """Return the rows of problems in the order in which they were evaluated, for the betting test; None without one."""
    look = record.sequential
    if look is None or look.method != "betting":
        return None
    rows = {problem: row for row, problem in enumerate(problem_ids)}
    return [rows[i] for i in sample_order(problem_ids, look.order_seed)]

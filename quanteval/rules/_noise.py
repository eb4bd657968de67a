"""The noise floor: by how much the baseline's own repetition differs from it, and what that says of a loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from quanteval.rules._common import Comparison, FloatArray, percent

TWO_SIDED_95 = float(ndtri(0.975))


@dataclass(frozen=True)
class Noise:
    """How the repetition differs: flips of either kind among n problems, and the difference they allow.

    `reach` is how far the mean difference of two runs of the same model strays from 0 with 95 %
    probability, as a share of samples: z sqrt(mean(d^2)/n) for d the difference of each problem.
    """

    worse: int
    better: int
    n: int
    reach: float

    @property
    def flip_rate(self) -> float:
        """Share of problems whose score changed, in either direction."""
        return (self.worse + self.better) / self.n

    def remark(self, loss: float, margin: float) -> str:
        """Say where a loss and a margin lie inside the noise, '' where they do not."""
        floor = f"the noise floor of {100 * self.reach:.1f} points ({flips_text(self)})"
        parts = []
        if loss != 0 and abs(loss) <= self.reach:
            parts.append(f"the difference is inside {floor}")
        if margin < self.reach:
            parts.append(f"the margin is below {floor if not parts else 'it'}")
        return "; ".join(parts)


def noise_between(x: FloatArray, y: FloatArray) -> Noise:
    """Return the noise between two runs' scores, one value a problem each."""
    d = x - y
    reach = TWO_SIDED_95 * math.sqrt(float(np.mean(d * d)) / d.size)
    return Noise(int((d > 0).sum()), int((d < 0).sum()), d.size, reach)


def noise_of(comparison: Comparison) -> Noise | None:
    """Return the noise of a task's scores, None without a repetition of the baseline."""
    found = comparison.noise
    if found is None:
        return None
    again, pairs = found
    x = pairs.means(comparison.base.value[pairs.baseline_rows])
    y = pairs.means(again.value[pairs.candidate_rows])
    return noise_between(x, y) if np.isfinite(x).all() and np.isfinite(y).all() else None


def flips_text(noise: Noise) -> str:
    """Return the flips of the repetition for a person."""
    changed = noise.worse + noise.better
    return f"the repeated baseline flipped {changed} of {noise.n} ({percent(noise.flip_rate)})"

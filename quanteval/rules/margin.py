"""The margin of a rule: the loss agreed to count as none, with its unit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator

from quanteval.rules._common import check_share

POINTS, RELATIVE = "points", "% of the baseline's score"
_TEXT = re.compile(
    r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(points?|%)\s*(of (?:the )?baseline(?:'s score)?)?\s*"
)


@dataclass(frozen=True)
class Margin:
    """A margin, `absolute` (share of samples) or `relative` (share of the baseline's score).

    A relative margin says little on a baseline that solves little: below `min_baseline` it is refused.
    In a policy it is a mapping ({absolute: 0.02}, {relative: 0.01, min_baseline: 0.3}) or a text with
    its unit ("2 points", "1 % of baseline").
    """

    absolute: float | None = None
    relative: float | None = None
    min_baseline: float = 0.2

    def __post_init__(self) -> None:
        if (self.absolute is None) == (self.relative is None):
            raise ValueError(
                f'absolute "{self.absolute}" and relative "{self.relative}": give exactly one'
            )
        if not 0 < self.value < 1:
            raise ValueError(f'margin "{self.value}" must be between 0 and 1 (0.02 is two points)')
        check_share("min_baseline", self.min_baseline)

    @property
    def value(self) -> float:
        """The margin in its own unit, as a share."""
        return self.absolute if self.absolute is not None else float(self.relative or 0)

    @property
    def is_relative(self) -> bool:
        """Whether the unit is a share of the baseline's score."""
        return self.relative is not None

    @property
    def text(self) -> str:
        """The margin for a person."""
        number = f"{100 * self.value:g}"
        unit = "point" if number == "1" else POINTS
        return f"{number} {'% of the baseline' if self.is_relative else unit}"


def parse_margin(value: Any) -> Any:
    """Return a margin written with its unit as a mapping, and anything else as it is. ValueError for other texts."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f'margin "{value}" has no unit: write "2 points" or "1 % of baseline"')
    if not isinstance(value, str):
        return value
    found = _TEXT.fullmatch(value)
    if not found or (found[2] == "%") != bool(found[3]):
        raise ValueError(f'margin "{value}" is not one: write "2 points" or "1 % of baseline"')
    # Through text, so that "2 points" is the 0.02 that a policy would name, to the last bit.
    share = float(f"{found[1]}e-2")
    return {"relative" if found[3] else "absolute": share}


MarginField = Annotated[Margin, BeforeValidator(parse_margin)]

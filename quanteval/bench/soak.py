"""A soak: one load of varying lengths at a fixed rate for a set time, cut into windows whose drift is looked at.

The load never pauses between windows. Each window leaves a load point of its own, whose times begin with it; what
drifts from one to the next is computed by `metrics.soak`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np

from quanteval.bench.client import LoadPoint
from quanteval.bench.driver import OpenState, drive_open
from quanteval.bench.health import LAG_FLOOR_S, LAG_SHARE
from quanteval.bench.plan import WARMUP
from quanteval.bench.serving import stop_when_growing
from quanteval.bench.streams import served_elsewhere
from quanteval.bench.workload import Workload
from quanteval.environment import rss_bytes
from quanteval.interfaces import Session
from quanteval.metrics.slo import Slo
from quanteval.records import ClientHealth, LoadPointRecord, RequestTrace

SOAK = "soak"


@dataclass(frozen=True)
class Soak:
    """The plan of a soak; fields are those of conf/bench/soak.yaml."""

    workload: Workload = field(default_factory=Workload)
    slo: Slo = field(default_factory=Slo)
    rate: float = 1.0
    duration_s: float = 3600.0
    window_s: float = 60.0
    ramp_s: float = 30.0
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("rate", "duration_s", "window_s", "timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f'{name} "{getattr(self, name)}" must be positive and finite')
        if not 0 <= self.ramp_s < math.inf:
            raise ValueError(f'ramp_s "{self.ramp_s}" must not be negative')
        if self.windows < 1:
            raise ValueError(
                f'window_s "{self.window_s:g}" is longer than duration_s "{self.duration_s:g}"'
            )
        if self.workload.loop == "closed":
            raise ValueError(
                'arrivals "closed": a soak offers a fixed rate; choose poisson, constant or gamma'
            )

    @property
    def windows(self) -> int:
        """Whole windows within the duration."""
        return int(self.duration_s / self.window_s + 1e-9)

    def fingerprint(self) -> dict[str, Any]:
        """Everything the traces depend on besides the served model."""
        return {"kind": "soak", **asdict(self), "workload": self.workload.fingerprint()}

    def run(self, session: Session) -> Iterator[RequestTrace | LoadPointRecord]:
        """Yield traces as requests end, those of the ramp-up and drain under 'warmup', then a record a window.

        Ends early, with a note in the last window, when the queue grows without end. Raises EngineError when the
        engine hangs.
        """
        begin, end = self.ramp_s, self.ramp_s + self.windows * self.window_s
        point = LoadPoint(
            SOAK, 0, loop="open", rate=self.rate, stage="soak", measured_from_s=begin, measured_to_s=end
        )  # fmt: skip
        arrivals = self.workload.arriving(
            SOAK, self.rate, measured_from_s=begin, measured_to_s=end, max_context=session.max_context
        )  # fmt: skip
        watch = _Watch(session)
        maker = self.workload.maker(session.tokenizer)
        late: dict[int, list[tuple[float, float]]] = {}
        for item in drive_open(session, maker, point, arrivals, self.timeout_s, watch):
            if isinstance(item, RequestTrace):
                if not item.warmup:
                    waited = item.sent_s - item.scheduled_s
                    first = item.chunk_times_s[0] - item.sent_s if item.chunk_times_s else 0.0
                    late.setdefault(self._window_of(item.scheduled_s), []).append((waited, first))
                yield self._placed(item)
            else:
                yield from self._records(item, watch, late)

    def _placed(self, trace: RequestTrace) -> RequestTrace:
        """Return a trace as one of its window, its times relative to the window's beginning."""
        if trace.warmup:
            return trace.model_copy(update={"load_point": WARMUP})
        number = self._window_of(trace.scheduled_s)
        origin = self.ramp_s + number * self.window_s
        moved = {
            "repetition": number,
            "scheduled_s": trace.scheduled_s - origin,
            "sent_s": trace.sent_s - origin,
            "chunk_times_s": [at - origin for at in trace.chunk_times_s],
            "end_s": trace.end_s - origin,
        }
        return trace.model_copy(update=moved)

    def _window_of(self, at_s: float) -> int:
        return min(max(int((at_s - self.ramp_s) / self.window_s), 0), self.windows - 1)

    def _records(
        self,
        whole: LoadPointRecord,
        watch: _Watch,
        late: Mapping[int, Sequence[tuple[float, float]]],
    ) -> Iterator[LoadPointRecord]:
        """Cut the record of the whole soak into those of its windows; one that was cut short is left out."""
        reached = min(
            self.windows, max(0, int((whole.measured_to_s - self.ramp_s) / self.window_s + 1e-6))
        )
        for number in range(reached):
            begin = self.ramp_s + number * self.window_s
            last = number == reached - 1
            yield whole.model_copy(
                update={
                    "repetition": number,
                    "started_s": whole.started_s + begin,
                    "measured_from_s": 0.0,
                    "measured_to_s": self.window_s,
                    "duration_s": self.window_s,
                    "client": _client(whole.client, late.get(number, ())),
                    "rss_bytes": watch.rss_between(begin, begin + self.window_s),
                    # Counters rose over the whole soak, so only the last window has them.
                    "server": whole.server if last else {},
                    "over_saturated": last and whole.over_saturated,
                    "note": whole.note if last else "",
                }
            )


def _client(whole: ClientHealth, late: Sequence[tuple[float, float]]) -> ClientHealth:
    """Return the client's health in one window: a moment in which it lagged must not void a day."""
    if not late:
        return whole
    waits = [wait for wait, _ in late]
    lag = float(np.quantile(waits, 0.99, method="higher"))
    limit = max(LAG_FLOOR_S, LAG_SHARE * median(first for _, first in late))
    own = {"lag_p50_s": median(waits), "lag_p99_s": lag}
    if whole.saturated and whole.lag_p99_s > limit >= lag:
        return whole.model_copy(update={**own, "saturated": False, "reason": ""})
    return whole.model_copy(update=own)


class _Watch:
    """Asked about once a second: notes the serving process's resident memory, and says when the queue grows."""

    def __init__(self, session: Session) -> None:
        self._read = getattr(session, "rss_bytes", None)
        # Of another process only the session can tell the memory.
        self._here = not served_elsewhere(session)
        self._seen: list[tuple[float, int]] = []

    def __call__(self, state: OpenState) -> str:
        self._seen.append((state.now_s, self._rss()))
        return stop_when_growing(state)

    def _rss(self) -> int:
        try:
            if callable(self._read):
                return int(self._read() or 0)
        except Exception:
            return 0
        return rss_bytes() if self._here else 0

    def rss_between(self, begin_s: float, end_s: float) -> int:
        """Return the median of what was seen in a stretch of time, 0 for nothing."""
        seen = [rss for at, rss in self._seen if begin_s <= at < end_s and rss > 0]
        return int(median(seen)) if seen else 0

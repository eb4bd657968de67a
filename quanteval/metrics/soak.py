"""Drift over a long run: latency, throughput, errors and memory by window, and their slopes with intervals.

Windows of one run resemble their neighbours, so a slope's interval is Theil and Sen's with the variance of Kendall's
statistic corrected for the autocorrelation of the detrended windows (Hamed and Rao, Journal of Hydrology 204, 1998).
It is robust against single bad windows, and it assumes no distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from quanteval.metrics.load import Load, loads_of
from quanteval.metrics.slo import Slo
from quanteval.records import LoadPointRecord, RequestTrace

HOUR_S = 3600.0
LEVEL = 0.95
MIN_WINDOWS = 8
SOAK = "soak"


@dataclass(frozen=True)
class TrendRow:
    """One stretch of a soak: a window of its plan, or an hour of windows. None where nothing is known."""

    hour: float
    """Middle of the stretch, in hours since the soak began."""
    requests: int
    failed: int
    error_rate: float | None
    achieved_rate: float | None
    output_tps: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    e2e_p50_s: float | None
    e2e_p99_s: float | None
    rss_bytes: float | None
    fragmentation: float | None
    """Share of the reserved device memory that is not allocated, where the server tells both."""


@dataclass(frozen=True)
class Drift:
    """The slope of one quantity per hour, two-sided interval at `LEVEL`; None, with a reason, where it is not known."""

    quantity: str
    windows: int
    start: float | None
    """Value at the beginning, by the fitted line."""
    per_hour: float | None
    lower: float | None
    upper: float | None
    reason: str = ""

    @property
    def drifts(self) -> bool:
        """Whether the interval leaves no room for a slope of zero."""
        return (
            self.lower is not None and self.upper is not None and not self.lower <= 0 <= self.upper
        )


def soak_windows(
    traces: Sequence[RequestTrace], records: Sequence[LoadPointRecord], slo: Slo | None = None
) -> list[TrendRow]:
    """Return a row for each window of a soak, in order of time; [] when there was none."""
    mine = [record for record in records if record.stage == SOAK]
    names = {record.name for record in mine}
    own = [trace for trace in traces if trace.load_point in names]
    if not mine:
        return []
    origin = min(record.started_s for record in mine)
    rows = []
    for record in sorted(mine, key=lambda r: (r.started_s, r.repetition)):
        key = (record.round, record.name, record.repetition)
        inside = [t for t in own if (t.round, t.load_point, t.repetition) == key]
        found = loads_of(inside, [record], slo)
        middle = record.started_s - origin + (record.measured_from_s + record.measured_to_s) / 2
        rows.append(_row(middle / HOUR_S, found[0] if found else None, record))
    return rows


def _row(hour: float, load: Load | None, record: LoadPointRecord) -> TrendRow:
    def at(name: str, q: float) -> float | None:
        found = None if load is None else getattr(load.all, name).at(q)
        return None if found is None else float(found.value)

    return TrendRow(
        hour=hour,
        requests=0 if load is None else load.requests,
        failed=0 if load is None else load.failed,
        error_rate=load.error_rate.point if load is not None and load.error_rate else None,
        achieved_rate=None if load is None else load.achieved_rate,
        output_tps=None if load is None else load.output_tps,
        ttft_p50_s=at("ttft", 0.5),
        ttft_p99_s=at("ttft", 0.99),
        tpot_p50_s=at("tpot", 0.5),
        e2e_p50_s=at("e2e", 0.5),
        e2e_p99_s=at("e2e", 0.99),
        rss_bytes=float(record.rss_bytes) or None,
        fragmentation=_fragmentation(record),
    )


def _fragmentation(record: LoadPointRecord) -> float | None:
    reserved = record.server.get("memory_reserved_bytes", 0.0)
    allocated = record.server.get("memory_allocated_bytes")
    return None if allocated is None or reserved <= 0 else 1 - allocated / reserved


def hourly(rows: Sequence[TrendRow]) -> list[TrendRow]:
    """Return one row for each hour that has windows: counts and their rates summed, everything else a median."""
    hours: dict[int, list[TrendRow]] = {}
    for row in rows:
        hours.setdefault(int(row.hour), []).append(row)
    out = []
    for hour in sorted(hours):
        group = hours[hour]
        values: dict[str, float | None] = {}
        for field in fields(TrendRow):
            known = [v for row in group if (v := getattr(row, field.name)) is not None]
            values[field.name] = float(np.median(known)) if known else None
        requests, failed = sum(row.requests for row in group), sum(row.failed for row in group)
        values |= {"hour": hour + 0.5, "error_rate": failed / requests if requests else None}
        counts = {"requests": requests, "failed": failed}
        out.append(TrendRow(**{**values, **counts}))  # type: ignore[arg-type]
    return out


def drifts(rows: Sequence[TrendRow]) -> list[Drift]:
    """Return the slope per hour of every quantity that the windows know."""
    out = []
    for field in fields(TrendRow):
        if field.name in ("hour", "requests", "failed"):
            continue
        known = [
            (row.hour, float(v)) for row in rows if (v := getattr(row, field.name)) is not None
        ]
        if known:
            out.append(slope(field.name, [h for h, _ in known], [v for _, v in known]))
    return out


def slope(quantity: str, hours: Sequence[float], values: Sequence[float]) -> Drift:
    """Return the median of all pairwise slopes and its interval (Theil 1950, Sen, JASA 63, 1968).

    The interval's ranks among the N pairwise slopes are (N -+ z sqrt(v))/2 with v = n(n-1)(2n+5)/18, times Hamed and
    Rao's factor 1 + 2/(n(n-1)(n-2)) sum over lags i of (n-i)(n-i-1)(n-i-2) r_i, with r_i the autocorrelation of the
    detrended ranks, of lags up to n/4 as long as they are positive.
    """
    x, y = np.asarray(hours, dtype=float), np.asarray(values, dtype=float)
    n = len(x)
    if n < MIN_WINDOWS:
        return Drift(quantity, n, None, None, None, None, f"{n} of at least {MIN_WINDOWS} windows")
    i, j = np.triu_indices(n, 1)
    apart = x[j] != x[i]
    slopes = np.sort((y[j] - y[i])[apart] / (x[j] - x[i])[apart])
    if not slopes.size:
        return Drift(quantity, n, None, None, None, None, "all windows are at one time")
    middle = float(np.median(slopes))
    residual = y - middle * x
    variance = n * (n - 1) * (2 * n + 5) / 18 * _inflation(residual)
    reach = -float(ndtri((1 - LEVEL) / 2)) * math.sqrt(variance)
    low = math.floor((slopes.size - reach) / 2) - 1
    high = math.ceil((slopes.size + reach) / 2)
    if low < 0 or high >= slopes.size:
        start = float(np.median(residual) + middle * x.min())
        why = "the windows depend on each other too much"
        return Drift(quantity, n, start, middle, None, None, why)
    start = float(np.median(residual) + middle * x.min())
    return Drift(quantity, n, start, middle, float(slopes[low]), float(slopes[high]))


def _inflation(residual: NDArray[np.float64]) -> float:
    """Return the factor by which autocorrelation widens the variance of Kendall's statistic, at least 1."""
    n = len(residual)
    ranks = np.argsort(np.argsort(residual, kind="stable"), kind="stable").astype(float)
    ranks -= ranks.mean()
    power = float((ranks**2).sum())
    total = 0.0
    for lag in range(1, n // 4 + 1):
        r = float((ranks[lag:] * ranks[:-lag]).sum()) / power if power > 0 else 0.0
        if r <= 0:
            break
        # The detrended series shows less correlation than there is; the usual first-order correction.
        r = min(0.99, r + (1 + 4 * r) / n)
        total += (n - lag) * (n - lag - 1) * (n - lag - 2) * r
    return 1 + 2 * total / (n * (n - 1) * (n - 2))

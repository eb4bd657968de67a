"""Where a request's time goes: seconds by layer, from the requests themselves or from the server's own metrics.

A layer that was not told apart is missing, and what no layer explains is the layer 'unattributed'; layers that
overlap make it negative. docs/metrics.md has the definitions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quanteval.evidence import VariantEvidence
from quanteval.metrics.latency import e2e_s, ended_well, start_s, steady_requests
from quanteval.records import LoadPointRecord, RequestTrace

LAYERS = ("client", "network", "queue", "tokenize", "prefill", "decode", "detokenize")
"""In the order in which a request meets them; 'client' is how late an open loop sent it."""
UNATTRIBUTED = "unattributed"
SERVER_METRICS: Mapping[str, tuple[str, ...]] = {
    "queue": ("request_queue_time_seconds",),
    "tokenize": ("request_tokenize_time_seconds",),
    "prefill": ("request_prefill_time_seconds",),
    "decode": ("request_decode_time_seconds",),
    "detokenize": ("request_detokenize_time_seconds",),
}
"""Histograms of servers by layer; what stands before a colon in a name (the server's own prefix) is ignored."""
SERVER_E2E = ("e2e_request_latency_seconds",)


@dataclass(frozen=True)
class LayerTime:
    """One layer of one load point, seconds a request; quantiles are None where only a sum is known."""

    layer: str
    n: int
    """Requests that told of it."""
    mean_s: float
    p50_s: float | None
    p99_s: float | None
    share: float
    """Its part of all requests' E2E."""


@dataclass(frozen=True)
class Breakdown:
    """The layers of one load point, those that were told apart, 'unattributed' last."""

    load_point: str
    source: str
    """'requests' (measured in each) or 'server' (its metrics: means over every request of the point)."""
    n: int
    """Requests behind the mean of E2E."""
    e2e_mean_s: float
    layers: tuple[LayerTime, ...]

    @property
    def slowest(self) -> LayerTime | None:
        """The layer with the largest share, 'unattributed' left out; None without any."""
        told = [item for item in self.layers if item.layer != UNATTRIBUTED]
        return max(told, key=lambda item: item.share, default=None)

    def at(self, layer: str) -> LayerTime | None:
        """Return a layer by name, None when it was not told apart."""
        return next((item for item in self.layers if item.layer == layer), None)


def breakdowns(variant: VariantEvidence) -> list[Breakdown]:
    """Return the layers of each load point that has any, in order of appearance."""
    groups: dict[str, list[RequestTrace]] = {}
    for trace in variant.traces:
        groups.setdefault(trace.load_point, []).append(trace)
    found = []
    for name, group in groups.items():
        records = [record for record in variant.load_points if record.name == name]
        told = from_requests(name, group) or from_server(name, group, records)
        if told is not None:
            found.append(told)
    return found


def from_requests(name: str, group: Sequence[RequestTrace]) -> Breakdown | None:
    """Return the layers that steady requests carry themselves; None when none does."""
    steady = [trace for trace in _steady(group) if any(_known(trace))]
    if not steady:
        return None
    total = math.fsum(e2e_s(trace) for trace in steady)
    names = dict.fromkeys(layer for layer in LAYERS if any(layer in _layers(t) for t in steady))
    names.update(dict.fromkeys(layer for trace in steady for layer in _known(trace)))
    times = [
        _time(layer, [_layers(trace)[layer] for trace in steady if layer in _layers(trace)], total)
        for layer in names
    ]
    rest = [e2e_s(trace) - math.fsum(_layers(trace).values()) for trace in steady]
    times.append(_time(UNATTRIBUTED, rest, total))
    return Breakdown(name, "requests", len(steady), total / len(steady), tuple(times))


def _known(trace: RequestTrace) -> Iterable[str]:
    return (layer for layer, seconds in trace.layers.items() if math.isfinite(seconds))


def _layers(trace: RequestTrace) -> dict[str, float]:
    """Return a request's layers, with how late an open loop sent it."""
    told = {layer: s for layer, s in trace.layers.items() if math.isfinite(s)}
    return {"client": trace.sent_s - start_s(trace), **told} if trace.loop == "open" else told


def _time(layer: str, values: Sequence[float], total: float) -> LayerTime:
    p50, p99 = (float(np.quantile(values, q)) for q in (0.5, 0.99))
    share = math.fsum(values) / total if total > 0 else math.nan
    return LayerTime(layer, len(values), float(np.mean(values)), p50, p99, share)


def _steady(group: Sequence[RequestTrace]) -> list[RequestTrace]:
    runs: dict[tuple[int, int], list[RequestTrace]] = {}
    for trace in group:
        runs.setdefault((trace.round, trace.repetition), []).append(trace)
    return [trace for run in runs.values() for trace in steady_requests(run) if ended_well(trace)]


# --------------------------------------------------------------------------- the server's own metrics


def from_server(
    name: str, group: Sequence[RequestTrace], records: Sequence[LoadPointRecord]
) -> Breakdown | None:
    """Return the layers that the server's metrics tell, over every request of the point; None without any.

    The server counts ramp and fillers too, so E2E is here the mean over all requests that ended well. What the
    client saw beyond the server's own E2E is the layer 'network', the client's share of it included.
    """
    seen = [e2e_s(trace) for trace in group if ended_well(trace)]
    if not seen or not records:
        return None
    mean = math.fsum(seen) / len(seen)
    times = []
    for layer, names in SERVER_METRICS.items():
        histogram = read_histogram([record.server for record in records], names)
        if histogram is not None:
            times.append(_server_time(layer, histogram, mean))
    if not times:
        return None
    whole = read_histogram([record.server for record in records], SERVER_E2E)
    if whole is not None:
        beyond = mean - whole.mean_s
        times.insert(0, LayerTime("network", len(seen), beyond, None, None, beyond / mean))
    rest = mean - math.fsum(item.mean_s for item in times)
    times.append(LayerTime(UNATTRIBUTED, len(seen), rest, None, None, rest / mean))
    return Breakdown(name, "server", len(seen), mean, tuple(times))


@dataclass(frozen=True)
class Histogram:
    """A histogram of seconds as servers export it: counts of values up to each bound."""

    total_s: float
    count: float
    buckets: tuple[tuple[float, float], ...]
    """(upper bound in seconds, values up to it), by rising bound; the last bound is infinite."""

    @property
    def mean_s(self) -> float:
        """Seconds a value."""
        return self.total_s / self.count

    def quantile(self, q: float) -> float | None:
        """Return the q-quantile, interpolated within its bucket; None without buckets, or beyond the last bound."""
        wanted, below, low = q * self.count, 0.0, 0.0
        for bound, upto in self.buckets:
            if upto >= wanted and upto > below:
                if math.isinf(bound):
                    return None
                return low + (bound - low) * (wanted - below) / (upto - below)
            below, low = upto, bound
        return None


def read_histogram(
    metrics: Sequence[Mapping[str, float]], names: Sequence[str]
) -> Histogram | None:
    """Return the first of these histograms that has counted, summed over records and label sets; else None."""
    for wanted in names:
        total = count = 0.0
        buckets: dict[float, float] = {}
        for key, value in ((k, v) for record in metrics for k, v in record.items()):
            name, _, labels = key.partition("{")
            base = name.rpartition(":")[2]
            if base == f"{wanted}_sum":
                total += value
            elif base == f"{wanted}_count":
                count += value
            elif base == f"{wanted}_bucket" and (bound := _bound(labels)) is not None:
                buckets[bound] = buckets.get(bound, 0.0) + value
        if count > 0 and math.isfinite(total):
            return Histogram(total, count, tuple(sorted(buckets.items())))
    return None


def _bound(labels: str) -> float | None:
    _, found, rest = ("," + labels).partition(',le="')
    try:
        return float(rest.partition('"')[0]) if found else None
    except ValueError:
        return None


def _server_time(layer: str, histogram: Histogram, e2e_mean_s: float) -> LayerTime:
    mean = histogram.mean_s
    p50, p99 = histogram.quantile(0.5), histogram.quantile(0.99)
    return LayerTime(layer, round(histogram.count), mean, p50, p99, mean / e2e_mean_s)


# --------------------------------------------------------------------------- what points somewhere


@dataclass(frozen=True)
class Growth:
    """The layer whose mean a request grew most between two load points."""

    layer: str
    first: str
    last: str
    before_s: float
    after_s: float


def grew_most(first: Breakdown, last: Breakdown) -> Growth | None:
    """Return the layer that grew most in seconds a request; None when none that both have grew."""
    grown = [
        Growth(item.layer, first.load_point, last.load_point, before.mean_s, item.mean_s)
        for item in last.layers
        if (before := first.at(item.layer)) is not None and item.mean_s > before.mean_s
    ]
    return max(grown, key=lambda g: g.after_s - g.before_s, default=None)

"""What the front counts: requests, tokens and seconds by layer, as Prometheus text."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from time import perf_counter

LAYERS = ("queue", "prefill", "decode")


class Counts:
    """Counters and gauges of one server; used on its event loop alone."""

    def __init__(self) -> None:
        self.running = 0
        """Requests that have given a token and go on."""
        self.waiting = 0
        """Requests that have given none yet: queued, or their prompt is being read."""
        self._totals: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def following(self, prompt_tokens: int) -> Iterator[Following]:
        """Count a request while the block runs."""
        following = Following(self)
        self._totals["prompt_tokens"] += prompt_tokens
        self.waiting += 1
        try:
            yield following
        finally:
            if following.first_s is None:
                self.waiting -= 1
            else:
                self.running -= 1
            self._totals["request_success" if following.done else "request_failure"] += 1

    def add(self, name: str, by: int) -> None:
        """Raise a counter."""
        self._totals[name] += by

    def observe(self, name: str, seconds: float) -> None:
        """Add a duration."""
        self._totals[f"{name}_count"] += 1
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def text(self, model_name: str) -> str:
        """Return Prometheus text; durations are summaries with a sum and a count."""
        label = 'model_name="' + model_name.replace("\\", "\\\\").replace('"', '\\"') + '"'
        lines = []
        for name in ("prompt_tokens", "generation_tokens", "request_success", "request_failure"):
            lines.append(f"# TYPE quanteval:{name}_total counter")
            lines.append(f"quanteval:{name}_total{{{label}}} {float(self._totals[name])}")
        for name, value in (("running", self.running), ("waiting", self.waiting)):
            lines.append(f"# TYPE quanteval:num_requests_{name} gauge")
            lines.append(f"quanteval:num_requests_{name}{{{label}}} {float(value)}")
        for name in (*(f"request_{layer}_time" for layer in LAYERS), "time_to_first_token",
                     "e2e_request_latency"):  # fmt: skip
            lines.append(f"# TYPE quanteval:{name}_seconds summary")
            total, count = self._seconds.get(name, 0.0), float(self._totals[f"{name}_count"])
            lines.append(f"quanteval:{name}_seconds_sum{{{label}}} {total}")
            lines.append(f"quanteval:{name}_seconds_count{{{label}}} {count}")
        return "\n".join(lines) + "\n"


class Following:
    """One request that is counted."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._started_s = perf_counter()
        self.first_s: float | None = None
        self.done = False

    def tokens(self, count: int) -> None:
        """Count tokens that have come."""
        if count and self.first_s is None:
            self.first_s = perf_counter()
            self._counts.waiting -= 1
            self._counts.running += 1
            self._counts.observe("time_to_first_token", self.first_s - self._started_s)
        self._counts.add("generation_tokens", count)

    def end(self, layers: Mapping[str, float]) -> None:
        """Count a request that ended well."""
        self.done = True
        self._counts.observe("e2e_request_latency", perf_counter() - self._started_s)
        for layer in LAYERS:
            if layer in layers:
                self._counts.observe(f"request_{layer}_time", layers[layer])

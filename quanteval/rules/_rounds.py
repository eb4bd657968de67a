"""The rounds of a bench: which requests each has, and whether those of two variants took turns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from quanteval.evidence import VariantEvidence
from quanteval.metrics.latency import e2e_s, steady_requests, tpot_s, ttft_s
from quanteval.records import RequestTrace

LATENCIES = {"ttft": ttft_s, "tpot": tpot_s, "e2e": e2e_s}


def rounds_of(evidence: VariantEvidence) -> dict[int, list[RequestTrace]]:
    """Return the traces of each round by its number (0: a run without rounds); a round without traces is there too."""
    rounds: dict[int, list[RequestTrace]] = {
        number: [] for stage in evidence.result.stages if (number := _round_number(stage))
    }
    for trace in evidence.traces:
        rounds.setdefault(trace.round, []).append(trace)
    return {number: rounds[number] for number in sorted(rounds)}


def _round_number(stage: str) -> int:
    kind, _, number = stage.partition(":")
    return int(number) if kind == "bench" and number.isdecimal() else 0


def interleaving(baseline: VariantEvidence, candidate: VariantEvidence) -> str:
    """Return '' when the rounds of two variants took turns, otherwise the reason why they did not.

    They did when both have the same rounds, measured in this run, and in order of time the 1st and 2nd, the 3rd
    and 4th, ... are one round of each, of the same number; which of the two comes first may change.
    """
    sides = (baseline, candidate)
    base, cand = (list(rounds_of(side)) for side in sides)
    if base in ([], [0]) and cand in ([], [0]):
        return "one run each, not interleaved"
    for side, numbers in zip(sides, (base, cand), strict=True):
        unusable = (_unusable(side, number) for number in numbers)
        if reason := next((reason for reason in unusable if reason), ""):
            return reason
    if base != cand:
        return f"not the same rounds: {baseline.name} has {_listed(base)}, {candidate.name} has {_listed(cand)}"
    starts = sorted(
        (side.result.stages[f"bench:{n}"].started_s, n, i) for i, side in enumerate(sides) for n in base
    )  # fmt: skip
    for (at, n, i), (next_at, next_n, next_i) in zip(starts[::2], starts[1::2], strict=True):
        if at == next_at or n != next_n:
            came = "began with" if at == next_at else "was followed by"
            return f"round {n} of {sides[i].name} {came} round {next_n} of {sides[next_i].name}"
    return ""


def _unusable(evidence: VariantEvidence, number: int) -> str:
    """Say why one round cannot be placed among those of another variant, '' when it can."""
    which = f"round {number} of {evidence.name}"
    stage = evidence.result.stages.get(f"bench:{number}")
    if number == 0:
        return f"{evidence.name} was measured without rounds"
    if stage is None:
        return f"{which} was not finished"
    if stage.reused_from is not None:
        return f"{which} was measured in another run"
    return "" if 0 < stage.started_s < math.inf else f"when {which} began is not recorded"


def _listed(numbers: Sequence[int]) -> str:
    word = "round" if len(numbers) == 1 else "rounds"
    return f"{word} {', '.join(str(n) for n in numbers)}" if numbers else "no rounds"


def _ended_well(trace: RequestTrace) -> bool:
    return trace.status == "ok" and bool(trace.chunk_times_s)


def steady_of(traces: Sequence[RequestTrace]) -> list[RequestTrace]:
    """Return the steady requests of one load point of one round; failed ones are among them."""
    runs: dict[int, list[RequestTrace]] = {}
    for trace in traces:
        runs.setdefault(trace.repetition, []).append(trace)
    return [trace for run in runs.values() for trace in steady_requests(run)]


def latencies(kind: str, traces: Sequence[RequestTrace]) -> list[float]:
    """Return the latencies of requests that ended well; a request of one chunk has no TPOT."""
    of = LATENCIES[kind]
    found = (of(trace) for trace in traces if _ended_well(trace))
    return [value for value in found if value is not None]


def rounds_at(evidence: VariantEvidence, load_point: str) -> dict[int, list[RequestTrace]]:
    """Return the traces of one load point by round."""
    rounds = rounds_of(evidence)
    return {n: [t for t in traces if t.load_point == load_point] for n, traces in rounds.items()}


def failed_requests(rounds: Mapping[int, Sequence[RequestTrace]]) -> list[RequestTrace]:
    """Return the requests sent to be measured that did not end well."""
    return [t for group in rounds.values() for t in group if not t.warmup and not _ended_well(t)]


def oddity(values: Sequence[float]) -> str:
    """Name the first value that is no duration or rate, '' when all are."""
    bad = next((value for value in values if not 0 < value < math.inf), None)
    return "" if bad is None else f"it is {bad:g}"

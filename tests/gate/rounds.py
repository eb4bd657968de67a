"""Variants measured in interleaved rounds, made by hand for tests of rules on timings."""

from __future__ import annotations

from collections.abc import Sequence

from quanteval.evidence import VariantEvidence
from quanteval.records import RequestTrace, StageRecord
from tests.gate import evidence as make


def requests(ttfts, gaps=0.01, load_point="single_stream", **changes) -> list[RequestTrace]:
    """Return requests of two tokens, one after the other; each takes its TTFT and its gap."""
    pauses = [gaps] * len(ttfts) if isinstance(gaps, float) else gaps
    sent, out = 0.0, []
    for i, (ttft, gap) in enumerate(zip(ttfts, pauses, strict=True)):
        times = [sent + ttft, sent + ttft + gap]
        fields = {
            "load_point": load_point, "concurrency": 1, "repetition": 0, "warmup": False,
            "request_id": f"r{i}", "bucket": "1-10", "scheduled_s": sent, "sent_s": sent,
            "chunk_times_s": times, "chunk_tokens": [1, 1], "end_s": times[1], "prompt_tokens": 10,
            "output_tokens": 2, "status": "ok", "error": "", "round": 0,
        }  # fmt: skip
        # Simulations make hundreds of thousands: nothing to validate.
        out.append(RequestTrace.model_construct(**{**fields, **changes}))
        sent = times[1]
    return out


def rate(tps, load_point="single_stream") -> list[RequestTrace]:
    """Return three requests with `tps` output tokens/s, overall and each stream; half as many requests/s."""
    step = 1 / float(tps)
    return requests([step] * 3, step, load_point)


def stage(name, started_s, reused_from=None) -> StageRecord:
    """Return a finished stage."""
    return StageRecord(
        name=name, fingerprint="f", inputs={}, started_s=started_s, finished_at="", elapsed_s=5.0,
        reused_from=reused_from,
    )  # fmt: skip


def in_rounds(
    name: str,
    rounds: Sequence[Sequence[RequestTrace]],
    starts: Sequence[float] | None = None,
    **more,
) -> VariantEvidence:
    """Return a variant measured in these rounds; `starts` defaults to taking turns, "base" first."""
    late = 0.0 if name == "base" else 10.0
    starts = [1000.0 + 20.0 * i + late for i in range(len(rounds))] if starts is None else starts
    traces = [
        trace.model_copy(update={"round": number})
        for number, group in enumerate(rounds, 1)
        for trace in group
    ]
    found = make.variant(name, traces=traces, **more)
    stages = {f"bench:{n}": stage(f"bench:{n}", at) for n, at in enumerate(starts, 1)}
    found.result.stages.update(stages)
    return found

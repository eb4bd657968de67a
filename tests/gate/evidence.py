"""Evidence made by hand for tests of rules, gate and report."""

from __future__ import annotations

import numpy as np

from quanteval.evidence import ScoreSet, VariantEvidence
from quanteval.records import (
    Artifact,
    Effective,
    MemoryUse,
    Precision,
    RequestTrace,
    TaskRecord,
    VariantResult,
)


def scores(task="code", kind="code", values=(1, 0, 1), **more) -> ScoreSet:
    """Return a complete score set; `more` replaces columns."""
    n = len(values)
    record = TaskRecord(
        task=task, kind=kind, suite_version="1", fingerprint="suite", inputs={"version": "1"},
        status="complete", samples_expected=more.pop("expected", n),
    )  # fmt: skip
    columns = {
        "record": record,
        "sample_ids": tuple(f"s{i}" for i in range(n)),
        "prompt_sha256": tuple(f"p{i}" for i in range(n)),
        "value": np.array(values, dtype=np.float64),
        "weight": np.ones(n) if kind == "code" else np.full(n, 100.0),
        "status": ("ok",) * n,
        "finish_reason": ("stop",) * n,
        "output_tokens": np.full(n, 40 if kind == "code" else 0),
        "outcome": tuple("passed" if v else "wrong" for v in values)
        if kind == "code"
        else ("",) * n,
    }
    return ScoreSet(**{**columns, **more})


def perplexity(values, task="prose", **more) -> ScoreSet:
    """Return NLL sums of documents of 100 tokens."""
    n = len(values)
    numbers = {"words": np.full(n, 60.0), "bytes": np.full(n, 400.0)}
    return scores(task, "perplexity", values, **{"numbers": numbers, **more})


def divergence(kl, agree, task="distance", **more) -> ScoreSet:
    """Return KL sums and top-1 agreement counts of documents of 100 tokens."""
    series = {"kl": tuple(np.full(100, total / 100) for total in kl)}
    numbers = {"top1_agree": np.array(agree, dtype=np.float64)}
    return scores(task, "divergence", kl, **{"numbers": numbers, "series": series, **more})


def artifact(
    bits=16.0, *, effective_bits=None, quantized=None, activation=16.0, ran_activation=None
):
    """Return an artifact that asks for `bits` and reports `effective_bits`."""
    is_quantized = bits < 16 if quantized is None else quantized
    ran = bits if effective_bits is None else effective_bits
    return Artifact(
        scheme="s", scheme_config={}, model_id="m", model_revision=None, model_provenance="",
        weights_digest="d", path="/p", format="transformers", bytes_on_disk=int(1000 * bits), build_s=1.0,
        precision=Precision(
            weight_bits=bits, activation_bits=activation, weight_format="int8", compute="float",
            quantized=is_quantized,
        ),
        effective=Effective(
            linear_layers=[], dtype_bytes={}, bits_per_weight=ran, linear_bits_per_weight=ran,
            quantized_fraction=1.0 if is_quantized and ran < 16 else 0.0, left_alone=[],
            activation_bits=activation if ran_activation is None else ran_activation,
            compute_dtype="bfloat16", emulated=False, emulation="", resident_weight_bytes=int(1000 * ran),
            parameters=8000,
        ),
    )  # fmt: skip


def memory(weights=16_000, peak=100_000) -> MemoryUse:
    """Return a memory account."""
    return MemoryUse(
        device="cpu", before_load_bytes=10_000, weights_bytes=weights, kv_cache_bytes=2_000,
        kv_cache_tokens=100, kv_bytes_per_token_formula=20, kv_bytes_per_token_measured=20,
        activation_peak_bytes=3_000, activation_peak_how="", process_peak_bytes=peak,
        unaccounted_bytes=peak - weights - 15_000,
    )  # fmt: skip


def traces(gap_s=0.02, ttft_s=0.1, n=5) -> list[RequestTrace]:
    """Return single-stream traces of 11 tokens each."""
    out = []
    for i in range(n):
        start = float(i)
        times = [start + ttft_s + gap_s * k for k in range(11)]
        out.append(
            RequestTrace(
                load_point="single_stream", concurrency=1, repetition=0, warmup=False, request_id=f"r{i}",
                bucket="1-10", scheduled_s=start, sent_s=start, chunk_times_s=times, chunk_tokens=[1] * 11,
                end_s=times[-1], prompt_tokens=10, output_tokens=11, status="ok",
            )
        )  # fmt: skip
    return out


CONDITIONS = {"model_weights": "d", "threads": 2, "engine": {"device": "cpu", "rows": 8}}


def variant(name, *sets, status="ok", reason="", comparable=None, **more) -> VariantEvidence:
    """Return a variant with these score sets."""
    result = VariantResult(
        name=name, is_baseline=name == "base", status=status, reason=reason,
        comparable=CONDITIONS if comparable is None else comparable,
    )  # fmt: skip
    parts = {
        "artifact": artifact(16.0 if name == "base" else 8.0),
        "memory": memory(16_000 if name == "base" else 8_000),
        "traces": traces(),
    }
    return VariantEvidence(
        name=name, result=result, scores={s.record.task: s for s in sets}, **{**parts, **more}
    )

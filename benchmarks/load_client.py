"""Whether our load client sees what its peers see: one vLLM server, the same load, medians side by side.

Ours, `vllm bench serve` and, where an environment that holds it is named, guidellm take turns on one server: a
closed loop of a fixed number of requests, prompts and outputs of fixed length. Only ratios of medians are compared.
Where a definition differs, a note under the table says so.

    python benchmarks/load_client.py [--rounds 3] [--requests 24] [--concurrency 4] [--prompt 128] [--output 64]
        [--vllm ENVIRONMENT] [--guidellm ENVIRONMENT] [--eager]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quanteval.bench.client import LoadPoint
from quanteval.bench.closed_loop import closed_loop
from quanteval.bench.prompts import PlannedRequest, PromptMaker
from quanteval.engines.vllm import VLLMEngine
from quanteval.interfaces import Calibration
from quanteval.metrics.latency import e2e_s, ended_well, itl_s, tpot_s, ttft_s
from quanteval.models import resolve_model
from quanteval.records import RequestTrace
from quanteval.schemes.none import Unquantized

METRICS = ("ttft", "itl", "tpot", "e2e")
NOTES = {
    "vllm bench": "vllm bench: every gap between chunks is one ITL, whatever number of tokens a chunk holds; E2E ends "
    "with the last token, as ours does. It sends prompts as text, which the server tokenizes; ours sends ids.",
    "guidellm": "guidellm: TPOT is E2E over all output tokens, the first one included, where ours is the time after "
    "the first token over the rest; ITL is a mean a request, and its median is over requests, not over gaps.",
}
PATIENCE_S = 900


@dataclass(frozen=True)
class Load:
    """What is sent, by everybody."""

    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int


def ours(session: Any, load: Load, turn: int) -> dict[str, float]:
    """Drive the load with our client; median seconds by metric."""
    maker = PromptMaker(session.tokenizer, seed=turn)
    planned = [
        PlannedRequest(f"{turn}-{i}", "all", load.prompt_tokens, load.output_tokens, place=i)
        for i in range(load.requests)
    ]
    point = LoadPoint("side_by_side", load.concurrency, repetition=turn)
    traces = list(closed_loop(session, maker, point, planned, iter(()), PATIENCE_S))
    failed = [trace for trace in traces if not ended_well(trace)]
    if failed:
        raise SystemExit(f"our client: {len(failed)} requests failed: {failed[0].error}")
    return medians(traces)


def medians(traces: list[RequestTrace]) -> dict[str, float]:
    """Return the median of each metric over requests, that of ITL over all gaps."""
    return {
        "ttft": statistics.median(map(ttft_s, traces)),
        "itl": statistics.median(gap for trace in traces for gap in itl_s(trace)),
        "tpot": statistics.median(value for t in traces if (value := tpot_s(t)) is not None),
        "e2e": statistics.median(map(e2e_s, traces)),
    }


def vllm_bench(
    command: Path, session: Any, tokenizer: str, load: Load, turn: int
) -> dict[str, float]:
    """Drive the load with `vllm bench serve`."""
    with tempfile.TemporaryDirectory() as place:
        run(
            [
                str(command), "bench", "serve", "--backend", "openai", "--base-url", session.remote.root,
                "--endpoint", "/v1/completions", "--model", session.remote.model, "--tokenizer", tokenizer,
                "--dataset-name", "random", "--random-input-len", str(load.prompt_tokens),
                "--random-output-len", str(load.output_tokens), "--num-prompts", str(load.requests),
                "--max-concurrency", str(load.concurrency), "--seed", str(turn), "--ignore-eos",
                "--temperature", "0", "--disable-tqdm", "--save-result", "--result-dir", place,
                "--result-filename", "result.json", "--percentile-metrics", "ttft,tpot,itl,e2el",
            ],
            "vllm bench",
        )  # fmt: skip
        result = json.loads((Path(place) / "result.json").read_text(encoding="utf-8"))
    if result["completed"] != load.requests:
        raise SystemExit(f"vllm bench: {result['completed']} of {load.requests} requests completed")
    names = {"ttft": "ttft", "itl": "itl", "tpot": "tpot", "e2e": "e2el"}
    return {ours: result[f"median_{theirs}_ms"] / 1000 for ours, theirs in names.items()}


def guidellm(
    command: Path, session: Any, tokenizer: str, load: Load, turn: int
) -> dict[str, float]:
    """Drive the load with guidellm."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "result.json"
        backend = {"kind": "openai_http", "target": session.remote.root, "model": session.remote.model,
                   "request_format": "/v1/completions", "http2": False}  # fmt: skip
        data = {"kind": "synthetic_text", "prompt_tokens": load.prompt_tokens,
                "output_tokens": load.output_tokens}  # fmt: skip
        options = {
            "backend": backend,
            "profile": {"kind": "concurrent", "streams": [load.concurrency]},
            "constraint": {"kind": "max_requests", "count": load.requests},
            "tokenizer": {"kind": "huggingface_auto", "model": tokenizer},
            "data": data,
            "seed": {"kind": "static", "value": turn},
            "output": {"kind": "json", "path": str(path)},
        }
        arguments = [
            part for key, value in options.items() for part in (f"--{key}", json.dumps(value))
        ]
        run([str(command), "run", *arguments, "--disable-console"], "guidellm")
        metrics = json.loads(path.read_text(encoding="utf-8"))["benchmarks"][0]["metrics"]
    names = {"ttft": ("time_to_first_token_ms", 1e-3), "itl": ("inter_token_latency_ms", 1e-3),
             "tpot": ("time_per_output_token_ms", 1e-3), "e2e": ("request_latency", 1.0)}  # fmt: skip
    return {
        ours: metrics[theirs]["successful"]["median"] * scale
        for ours, (theirs, scale) in names.items()
    }


def run(command: list[str], who: str) -> None:
    """Run a peer; SystemExit with its last words when it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PATIENCE_S,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{who} failed:\n{(done.stdout + done.stderr)[-2000:]}")


def show(seen: dict[str, list[dict[str, float]]], load: Load) -> None:
    """Print the table: medians over the rounds' medians, and each peer as a ratio to ours."""
    middle = {
        who: {m: statistics.median(turn[m] for turn in turns) for m in METRICS}
        for who, turns in seen.items()
    }
    print(f"{load.requests} requests, {load.concurrency} at a time, {load.prompt_tokens} tokens in, "
          f"{load.output_tokens} out; medians in ms, ratio to ours\n")  # fmt: skip
    print("| client | " + " | ".join(m.upper() for m in METRICS) + " |")
    print("| --- |" + " ---: |" * len(METRICS))
    for who, values in middle.items():
        cells = [
            f"{1000 * values[m]:.1f}" + ("" if who == "ours" else f" ({values[m] / middle['ours'][m]:.3f})")
            for m in METRICS
        ]  # fmt: skip
        print(f"| {who} | " + " | ".join(cells) + " |")
    # How far a client is from itself between rounds: no smaller difference between clients means anything.
    print("\n| largest over smallest round | " + " | ".join(m.upper() for m in METRICS) + " |")
    print("| --- |" + " ---: |" * len(METRICS))
    for who, turns in seen.items():
        apart = [max(t[m] for t in turns) / min(t[m] for t in turns) for m in METRICS]
        print(f"| {who} | " + " | ".join(f"{ratio:.3f}" for ratio in apart) + " |")
    for who in middle:
        if who in NOTES:
            print(f"\n{NOTES[who]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--vllm", default="", help="environment of vLLM; default: as engine=vllm")
    parser.add_argument("--guidellm", default="", help="environment that holds guidellm")
    parser.add_argument("--eager", action="store_true", help="no compilation: starts sooner")
    arguments = parser.parse_args()
    load = Load(arguments.requests, arguments.concurrency, arguments.prompt, arguments.output)
    engine = VLLMEngine(
        executable=arguments.vllm,
        enforce_eager=arguments.eager,
        max_model_len=1024,
        kv_cache_gb=0.5,
    )
    command = engine.find_executable()
    with tempfile.TemporaryDirectory() as place:
        artifact = Unquantized(dtype="bfloat16").quantize(
            resolve_model("smollm2_135m"), Path(place), Calibration(), "cpu"
        )
        with engine.serve(artifact) as session:
            clients: dict[str, Callable[[int], dict[str, float]]] = {
                "ours": lambda turn: ours(session, load, turn),
                "vllm bench": lambda turn: vllm_bench(command, session, artifact.path, load, turn),
            }
            if arguments.guidellm:
                peer = Path(arguments.guidellm) / "bin" / "guidellm"
                clients["guidellm"] = lambda turn: guidellm(
                    peer, session, artifact.path, load, turn
                )
            # The first requests of a server are slower than all that follow; these have texts of their own.
            ours(session, load, arguments.rounds)
            seen: dict[str, list[dict[str, float]]] = {who: [] for who in clients}
            for turn in range(arguments.rounds):
                # Who goes first changes with the round.
                names = list(clients)
                for who in names[turn % len(names) :] + names[: turn % len(names)]:
                    seen[who].append(clients[who](turn))
    show(seen, load)


if __name__ == "__main__":
    main()

"""How fast our serving path does what an evaluation script built on `model.generate` does.

The two sides take turns on the same model in one process, and only their ratio is reported: code
problems answered greedily (padded static batches against our session), and documents scored (padded
batches against one sequence at a time). Answers and scores are compared as well.

    python benchmarks/serving.py [--rounds 3] [--problems 24] [--documents 24]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quanteval.engines.transformers import TransformersEngine
from quanteval.environment import describe_environment
from quanteval.interfaces import Calibration, Request, Sampling, ScoreRequest
from quanteval.models import resolve_model
from quanteval.schemes.none import Unquantized

BATCH = 8
MAX_TOKENS = 128


def problems(count: int) -> list[str]:
    """Return the first prompts of the pyeasy suite."""
    path = Path(__file__).parent.parent / "tasks" / "pyeasy" / "problems.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [f"Complete this function:\n\n```python\n{row['prompt']}\n```" for row in rows[:count]]


def documents(count: int, tokenizer: Any) -> list[tuple[int, ...]]:
    """Return pieces of the standard library's prose, of mixed length."""
    from pydoc_data.topics import topics

    texts = [text for _, text in sorted(topics.items()) if len(text) > 400][:count]
    return [tuple(tokenizer(text)["input_ids"][:512]) for text in texts]


def script_generate(model: Any, tokenizer: Any, prompts: list[tuple[int, ...]]) -> list[str]:
    """Answer in left-padded static batches."""
    answers = []
    for start in range(0, len(prompts), BATCH):
        rows = prompts[start : start + BATCH]
        longest = max(map(len, rows))
        pad = tokenizer.pad_token_id
        ids = torch.tensor([(pad,) * (longest - len(r)) + r for r in rows])
        mask = torch.tensor([(0,) * (longest - len(r)) + (1,) * len(r) for r in rows])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=pad
        )
        answers += tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)
    return answers


def script_score(model: Any, rows: list[tuple[int, ...]]) -> list[float]:
    """Score in right-padded batches, sorted by length."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    scores = [0.0] * len(rows)
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        longest = max(len(rows[i]) for i in chosen)
        ids = torch.tensor([rows[i] + (0,) * (longest - len(rows[i])) for i in chosen])
        mask = torch.tensor([(1,) * len(rows[i]) + (0,) * (longest - len(rows[i])) for i in chosen])
        logprobs = model(ids, attention_mask=mask).logits.float().log_softmax(-1)
        picked = logprobs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0] * mask[:, 1:]
        for i, value in zip(chosen, picked.sum(-1).tolist(), strict=True):
            scores[i] = value
    return scores


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return seconds and the result."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--problems", type=int, default=24)
    parser.add_argument("--documents", type=int, default=24)
    options = parser.parse_args()
    source = resolve_model("smollm2_135m")
    tokenizer = AutoTokenizer.from_pretrained(source.path)
    plain = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.bfloat16).eval()
    rows = documents(options.documents, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        artifact = Unquantized("bfloat16").quantize(source, Path(folder), Calibration(), "cpu")
        with TransformersEngine().serve(artifact) as session, torch.no_grad():
            prompts = [
                session.tokenizer.chat([{"role": "user", "content": text}])
                for text in problems(options.problems)
            ]

            def ours_generate() -> list[str]:
                requests = (Request(str(i), p, Sampling(MAX_TOKENS)) for i, p in enumerate(prompts))
                done = {c.request_id: c.text for c in session.generate(requests)}
                return [done[str(i)] for i in range(len(prompts))]

            def ours_score() -> list[float]:
                requests = (ScoreRequest(str(i), row) for i, row in enumerate(rows))
                return [float(r.logprobs.sum()) for r in session.loglikelihood(requests)]

            ids = [prompt.token_ids for prompt in prompts]
            pairs = {
                "generate": (lambda: script_generate(plain, tokenizer, ids), ours_generate),
                "score": (lambda: script_score(plain, rows), ours_score),
            }
            report: dict[str, Any] = {
                "environment": describe_environment(),
                "rounds": options.rounds,
            }
            for name, (theirs, mine) in pairs.items():
                ratios, equal = [], 0.0
                for _ in range(options.rounds):
                    their_s, expected = timed(theirs)
                    our_s, got = timed(mine)
                    ratios.append(their_s / our_s)
                    if name == "generate":
                        equal = sum(a == b for a, b in zip(expected, got, strict=True)) / len(got)
                    else:
                        equal = max(abs(a - b) for a, b in zip(expected, got, strict=True))
                report[name] = {
                    "times_as_fast_median": round(statistics.median(ratios), 2),
                    "times_as_fast_all": [round(r, 2) for r in ratios],
                    "equal_answers" if name == "generate" else "largest_difference_nats": equal,
                }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

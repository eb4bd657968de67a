"""Our scoring against lm-evaluation-harness's own, on the same items, model and threads.

Both sides take turns in one process, each from the suite's rows to the suite's figures, and are compared
item by item. Data sets are public ones in a local folder, laid out as the loaders take them; suites whose
data is not there are named and left out.

    python -m benchmarks.tasks --data FOLDER [--items 100] [--rounds 2] [--dtype float32] [--suites arc_easy,mmlu]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from quanteval.config import load_task_node
from quanteval.engines.transformers import TransformersEngine
from quanteval.environment import describe_environment
from quanteval.errors import QuantevalError
from quanteval.interfaces import Calibration, Sample, TaskContext
from quanteval.models import resolve_model
from quanteval.resources import task_folders
from quanteval.schemes.none import Unquantized
from quanteval.targets import build
from quanteval.tasks import public
from tests.tasks.hub_rows import as_hub_rows
from tests.tasks.shipped import CHOICE_METRICS, shipped_task, write_rows

SUITES = ("arc_easy", "piqa", "openbookqa", "lambada", "mmlu", "wikitext2", "gsm8k")
SUBJECTS = ("abstract_algebra", "anatomy", "astronomy", "world_religions")
WINDOW = 2048


class Case:
    """One suite on local rows, as both sides take it."""

    def __init__(self, suite: str, data: Path, folder: Path, items: int) -> None:
        self.suite = suite
        self.folder = folder
        folder.mkdir()
        shots, subject, metrics = 0, "", ("acc",)
        if suite == "mmlu":
            shots, subject, metrics = 5, SUBJECTS[0], CHOICE_METRICS
            rows = {
                split: list(public.mmlu(str(data / "mmlu"), split=split, subjects=[subject]))
                for split in ("test", "dev")
            }
            write_rows(folder, test=rows["test"][:items], dev=rows["dev"])
        elif suite == "gsm8k":
            rows = [dict(row) for row in public.gsm8k(str(data / "gsm8k"))]
            shots, metrics = 5, ("exact_match",)
            write_rows(folder, test=rows[5 : 5 + max(2, items // 20)], train=rows[:5], dev=rows[:5])
        elif suite == "wikitext2":
            metrics = ("word_perplexity",)
            found = public.wikitext2(str(data / "wikitext2_raw"))
            pages = [{"page": row["page"]} for row in found][: max(2, items // 20)]
            write_rows(folder, test=pages, dev=pages)
        else:
            rows = as_hub_rows(suite, data)[:items]
            metrics = CHOICE_METRICS if suite != "lambada" else ("acc",)
            write_rows(folder, test=rows, dev=rows, validation=rows)
        aggregation = "weighted_perplexity" if suite == "wikitext2" else "mean"
        self.name, self.manager = shipped_task(
            folder, suite, metrics, shots=shots, subject=subject, aggregation=aggregation
        )
        node = load_task_node(task_folders()[suite])
        node["source"]["arguments"] |= {"path": str(folder)}
        if "MultipleChoice" in node["_target_"]:
            # An extra measurement that the other side does not make.
            node["noise_probe"] = 0
        self.task: Any = build(node, where=suite)
        self.samples: list[Sample] = self.task.samples()

    def ours(self, session: Any) -> list[float]:
        """Run our task on a session."""
        context = TaskContext(self.folder, self.folder, True)
        scores = {s.sample_id: s for s in self.task.evaluate(session, self.samples, context)}
        return [scores[sample.sample_id].value for sample in self.samples]

    def theirs(self, lm: Any) -> list[float]:
        """Run the harness's own task: its requests, its model, its figures."""
        task = self.manager.load_task_or_group(self.name)[self.name]
        task.build_all_requests(rank=0, world_size=1)
        requests = task.instances
        replies = getattr(lm, requests[0].request_type)(requests)
        for request, reply in zip(requests, replies, strict=True):
            request.resps.append(reply)
        task.apply_filters()
        by_doc: dict[int, list[Any]] = {}
        for request in requests:
            by_doc.setdefault(request.doc_id, []).append(request)
        key = next(iter(requests[0].filtered_resps))
        values = []
        for number, doc in enumerate(task.eval_docs):
            found = sorted(by_doc[number], key=lambda request: request.idx)
            figures = task.process_results(doc, [request.filtered_resps[key] for request in found])
            values.append(self._value(figures))
        return values

    def _value(self, figures: dict[str, Any]) -> float:
        if self.suite == "wikitext2":
            return -float(figures["word_perplexity"][0])
        wanted = {"gsm8k": "exact_match"}.get(self.suite, getattr(self.task, "score", "acc"))
        return float(figures[wanted])


def timed(work: Callable[[Any], Any], side: Any) -> tuple[float, Any]:
    """Return the seconds that some work takes, and what it returns."""
    started = time.perf_counter()
    found = work(side)
    return time.perf_counter() - started, found


def agreement(suite: str, ours: Sequence[float], theirs: Sequence[float]) -> str:
    if suite == "wikitext2":
        worst = max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))
        return f"summed log-likelihoods within {worst:.1e} relative"
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    return f"{same} of {len(ours)} scores equal ({statistics.mean(ours):.3f} and {statistics.mean(theirs):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=8, help="rows of a batch of the harness")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--suites", default=",".join(SUITES))
    options = parser.parse_args()
    if options.data is None:
        print("tasks.py: no --data FOLDER with public data sets, nothing to compare")
        return
    torch.set_num_threads(options.threads)
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = resolve_model("smollm2_135m")
    environment = describe_environment()
    print(
        f"{environment['cpu']}, {options.threads} threads, {options.dtype}, harness in batches of {options.batch}"
    )
    with tempfile.TemporaryDirectory() as folder:
        artifact = Unquantized(options.dtype).quantize(source, Path(folder), Calibration(), "cpu")
        model = AutoModelForCausalLM.from_pretrained(artifact.path, dtype=options.dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(artifact.path)
        lm = HFLM(
            pretrained=model, tokenizer=tokenizer, batch_size=options.batch, max_length=WINDOW
        )
        with TransformersEngine().serve(artifact) as session:
            for suite in options.suites.split(","):
                try:
                    case = Case(suite, options.data, Path(folder) / suite, options.items)
                except (QuantevalError, OSError) as error:
                    print(f"{suite}: left out, {error}")
                    continue
                ratios = []
                for _ in range(options.rounds):
                    mine, ours = timed(case.ours, session)
                    other, theirs = timed(case.theirs, lm)
                    ratios.append(other / mine)
                told = {
                    "suite": suite,
                    "items": len(case.samples),
                    "harness_over_ours": [round(ratio, 2) for ratio in ratios],
                    "ours_s": round(mine, 2),
                    "agreement": agreement(suite, ours, theirs),
                }
                print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()

"""Tasks that lm-evaluation-harness ships, put on local rows: everything but the data is its own."""

from __future__ import annotations

import json
from pathlib import Path

TEMPLATE = Path(__file__).parent / "lm_eval_shipped" / "local.yaml"
CHOICE_METRICS = ("acc", "acc_norm", "acc_bytes")
# By suite. MMLU has a file a subject.
SHIPPED = {
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "piqa": "piqa/piqa.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "lambada": "lambada/lambada_openai.yaml",
    "mmlu": "mmlu/default/mmlu_{subject}.yaml",
    "gsm8k": "gsm8k/gsm8k.yaml",
    "wikitext2": "wikitext/wikitext.yaml",
}


def write_rows(folder, **splits):
    """Write each split's rows as `<split>.jsonl`."""
    for split, rows in splits.items():
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def shipped_task(folder, suite, metrics=("acc",), shots=0, subject="", aggregation="mean"):
    """Return a shipped task's name and the manager that knows it, on test.jsonl and dev.jsonl in `folder`."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    shipped = Path(lm_eval.__file__).parent / "tasks" / SHIPPED[suite].format(subject=subject)
    fields = {
        "SHIPPED": str(shipped),
        "NAME": f"local_{suite}",
        "TEST": str(folder / "test.jsonl"),
        "DEV": str(folder / "dev.jsonl"),
        "CACHE": str(folder / "cache"),
        "SHOTS": str(shots),
        "METRICS": json.dumps(
            [{"metric": m, "aggregation": aggregation, "higher_is_better": True} for m in metrics]
        ),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for key, value in fields.items():
        text = text.replace(key, value)
    (folder / f"local_{suite}.yaml").write_text(text, encoding="utf-8")
    return f"local_{suite}", TaskManager(include_path=str(folder), include_defaults=False)

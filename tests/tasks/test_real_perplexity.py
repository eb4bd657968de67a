"""Token perplexity of the embedded model against ten lines of transformers."""

from __future__ import annotations

import math

import pytest
import torch

from quanteval.engines.transformers import TransformersEngine
from quanteval.interfaces import Calibration, Sample, TaskContext
from quanteval.schemes.none import Unquantized
from quanteval.tasks.loaders import pydoc_topics
from quanteval.tasks.loading import Source
from quanteval.tasks.perplexity import PerplexityTask

pytestmark = [pytest.mark.model, pytest.mark.slow]


def script(path, dtype, texts):
    """Return the token perplexity as one would compute it by hand."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    nll = tokens = 0.0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            logprobs = model(ids).logits.float().log_softmax(-1)
        nll -= logprobs[:, :-1].gather(-1, ids[:, 1:, None]).double().sum().item()
        tokens += ids.shape[1] - 1
    return math.exp(nll / tokens)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_agrees_at_any_batch_size(dtype, embedded_model, tmp_path):
    texts = [row["text"] for row in pydoc_topics(maximum_characters=1500)][:6]
    samples = [Sample(str(i), {"text": text}) for i, text in enumerate(texts)]
    suite = PerplexityTask(name="t", version="1", source=Source(jsonl="x"))
    artifact = Unquantized(dtype).quantize(embedded_model, tmp_path, Calibration(), "cpu")
    found = []
    for rows in (1, 8):
        with TransformersEngine(max_batch_rows=rows, kv_cache_tokens=2048).serve(
            artifact
        ) as session:
            context = TaskContext(tmp_path, tmp_path, True)
            scores = list(suite.evaluate(session, samples, context))
        found.append(math.exp(sum(s.value for s in scores) / sum(s.weight for s in scores)))
    expected = script(embedded_model.path, getattr(torch, dtype), texts)
    assert found[0] == found[1]
    assert found[0] == pytest.approx(expected, rel=1e-4)

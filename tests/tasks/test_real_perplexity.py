"""Token perplexity of the embedded model against a few lines of transformers."""

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
    """Return the token perplexity as one would compute it by hand, the output head in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    nll = tokens = 0.0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            # The last token predicts nothing that is scored; in bfloat16 even its presence changes the rounding.
            hidden = model.model(ids[:, :-1]).last_hidden_state.float()
            logprobs = (hidden @ model.lm_head.weight.float().T).log_softmax(-1)
        nll -= logprobs.gather(-1, ids[:, 1:, None]).double().sum().item()
        tokens += ids.shape[1] - 1
    return math.exp(nll / tokens)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_agrees_at_any_batch_size(dtype, embedded_model, tmp_path):
    texts = [row["text"] for row in pydoc_topics(maximum_characters=1500)][:6]
    samples = [Sample(str(i), {"text": text}) for i, text in enumerate(texts)]
    suite = PerplexityTask(name="t", version="1", source=Source(jsonl="x"))
    artifact = Unquantized(dtype).quantize(embedded_model, tmp_path, Calibration(), "cpu")
    context = TaskContext(tmp_path, tmp_path, True)

    def measured(**engine):
        with TransformersEngine(kv_cache_tokens=2048, **engine).serve(artifact) as session:
            scores = list(suite.evaluate(session, samples, context))
        return math.exp(sum(s.value for s in scores) / sum(s.weight for s in scores))

    expected = script(embedded_model.path, getattr(torch, dtype), texts)
    packed = measured(max_batch_rows=1)
    assert measured(max_batch_rows=8) == packed
    # A document a forward is what the script computes; packed ones round differently, in bfloat16 visibly.
    assert measured(score_batch_tokens=1) == pytest.approx(expected, rel=1e-4)
    assert packed == pytest.approx(expected, rel=1e-4 if dtype == "float32" else 2e-3)

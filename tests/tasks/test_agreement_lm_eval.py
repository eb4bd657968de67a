"""Log-likelihoods and metrics of the embedded model, item by item, against lm-evaluation-harness's own tasks."""

from __future__ import annotations

import importlib.util

import pytest

from quanteval.config import load_task_node
from quanteval.engines.transformers import TransformersEngine
from quanteval.interfaces import Calibration, TaskContext
from quanteval.resources import task_folders
from quanteval.schemes.none import Unquantized
from quanteval.targets import build
from quanteval.tasks import public
from tests.tasks.hub_rows import HELLASWAG, as_hub_rows
from tests.tasks.shipped import CHOICE_METRICS, shipped_task, write_rows

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed"
    ),
]

NATS = 1e-3
# How many items of each; those of MMLU have some hundred tokens.
ITEMS = {
    "arc_easy": 12,
    "piqa": 12,
    "openbookqa": 12,
    "winogrande": 12,
    "hellaswag": len(HELLASWAG),
}
SUBJECTS = ("abstract_algebra", "world_religions")


@pytest.fixture(scope="module")
def served(embedded_model, tmp_path_factory):
    """Yield our session and lm-evaluation-harness's model, both in float32."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("fp32")
    artifact = Unquantized("float32").quantize(embedded_model, folder, Calibration(), "cpu")
    model = AutoModelForCausalLM.from_pretrained(artifact.path, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(artifact.path)
    other = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8)
    with TransformersEngine(kv_cache_tokens=2048).serve(artifact) as session:
        yield session, other


def theirs(lm, folder, suite, metrics, **fields):
    """Return lm-evaluation-harness's samples of a shipped task, in order."""
    import lm_eval

    name, manager = shipped_task(folder, suite, metrics, **fields)
    found = lm_eval.simple_evaluate(
        model=lm, tasks=[name], task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    return sorted(found["samples"][name], key=lambda sample: sample["doc_id"])


def ours(session, folder, name, **fields):
    """Return our suite, its samples in order, and its scores."""
    node = load_task_node(task_folders()[name])
    node["source"]["arguments"] |= {"path": str(folder)}
    suite = build({**node, **fields}, where=name)
    samples = suite.samples()
    scores = {
        s.sample_id: s for s in suite.evaluate(session, samples, TaskContext(folder, folder, True))
    }
    return suite, samples, [scores[sample.sample_id] for sample in samples]


def compare_choices(session, suite, samples, scores, expected):
    assert len(expected) == len(samples) == len(scores)
    for sample, score, other in zip(samples, scores, expected, strict=True):
        asked = texts_of(other)
        assert [suite.render(session, sample, i) for i in range(len(asked))] == asked
        wanted = [float(reply[0][0]) for reply in other["resps"]]
        assert score.series["loglikelihoods"] == pytest.approx(wanted, abs=NATS)
        assert score.status == "ok"
        found = [score.numbers[key] for key in ("acc", "acc_norm", "acc_norm_bytes")]
        assert found == [other[key] for key in CHOICE_METRICS], sample.sample_id
        assert score.value == score.numbers[suite.score]
        assert score.numbers.get("batch_noise", 0.0) < NATS


def texts_of(sample):
    return [(context, continuation) for context, continuation in sample["arguments"]]


@pytest.mark.parametrize("name", sorted(ITEMS))
def test_choices(name, served, shared_data, tmp_path):
    session, lm = served
    rows = HELLASWAG if name == "hellaswag" else as_hub_rows(name, shared_data)[: ITEMS[name]]
    write_rows(tmp_path, test=rows, dev=rows, validation=rows)
    suite, samples, scores = ours(session, tmp_path, name, noise_probe=1)
    expected = theirs(lm, tmp_path, name, CHOICE_METRICS)
    compare_choices(session, suite, samples, scores, expected)
    assert 0 < sum(score.value for score in scores) < len(scores)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_five_examples_of_a_subject(subject, served, shared_data, tmp_path):
    session, lm = served
    rows = {
        split: list(public.mmlu(str(shared_data / "mmlu"), split=split, subjects=[subject]))
        for split in ("test", "dev")
    }
    write_rows(tmp_path, test=rows["test"][:2], dev=rows["dev"])
    suite, samples, scores = ours(session, tmp_path, "mmlu", noise_probe=0)
    expected = theirs(lm, tmp_path, "mmlu", CHOICE_METRICS, shots=5, subject=subject)
    compare_choices(session, suite, samples, scores, expected)


def test_last_words(served, shared_data, tmp_path):
    session, lm = served
    rows = as_hub_rows("lambada", shared_data)[:8]
    write_rows(tmp_path, test=rows, dev=rows)
    suite, samples, scores = ours(session, tmp_path, "lambada")
    expected = theirs(lm, tmp_path, "lambada", ("acc", "perplexity"))
    for sample, score, other in zip(samples, scores, expected, strict=True):
        assert [suite.render(session, sample)] == texts_of(other)
        assert score.value == other["acc"]
        assert score.numbers["logprob"] == pytest.approx(other["perplexity"], abs=NATS)
    assert 0 < sum(score.value for score in scores) < len(scores)


def test_articles(served, tmp_path, monkeypatch):
    session, lm = served
    line = (
        " The river , which is 12 @.@ 5 km long , ' runs ' through ( two ) towns ; it 's old . \n"
    )
    pages = [
        f" = River = \n \n{line * 12} = = Course = = \n \n{line}",
        " = Short = \n \n A text . \n",
    ]
    write_rows(tmp_path, test=[{"page": page} for page in pages], dev=[{"page": "x"}])
    monkeypatch.setattr(lm, "_max_length", 128)
    _, samples, scores = ours(session, tmp_path, "wikitext2", window=129)
    metrics = ("word_perplexity", "byte_perplexity", "bits_per_byte")
    expected = theirs(lm, tmp_path, "wikitext2", metrics, aggregation="weighted_perplexity")
    assert len(expected) == len(samples) == 2
    assert scores[0].weight > 2 * 129
    for score, other in zip(scores, expected, strict=True):
        loglikelihood, words = other["word_perplexity"]
        assert -score.value == pytest.approx(loglikelihood, rel=1e-5)
        assert score.numbers["words"] == words
        assert score.numbers["bytes"] == other["byte_perplexity"][1]

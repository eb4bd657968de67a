"""Quality metrics against direct computation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quanteval.errors import EvidenceError
from quanteval.metrics.quality import metrics_of
from tests.gate import evidence as make


def by_name(scores):
    return {metric.name: metric for metric in metrics_of(scores)}


def test_pass_rate_has_a_wilson_interval():
    metric = by_name(make.scores(values=[1] * 8 + [0] * 2))["pass@1"]
    assert (metric.value, metric.n, metric.units, metric.unit) == (0.8, 10, "problems", "share")
    # Wilson 95 % of 8 of 10: 0.4902, 0.9433.
    assert metric.lower == pytest.approx(0.490162471537, abs=1e-9)
    assert metric.upper == pytest.approx(0.943317848546, abs=1e-9)


def test_perplexities_divide_by_tokens_words_and_bytes():
    values = np.array([200.0, 300.0])
    found = by_name(make.perplexity(values))
    assert found["token perplexity"].value == pytest.approx(math.exp(500 / 200))
    assert found["word perplexity"].value == pytest.approx(math.exp(500 / 120))
    assert found["byte perplexity"].value == pytest.approx(math.exp(500 / 800))
    assert found["bits per byte"].value == pytest.approx(500 / 800 / math.log(2))
    assert found["bits per byte"].value == pytest.approx(math.log2(found["byte perplexity"].value))
    assert found["token perplexity"].n == 2


def test_divergence_metrics():
    found = by_name(make.divergence([1.0, 3.0], [90, 100]))
    assert found["mean KL"].value == pytest.approx(0.02)
    assert found["top-1 agreement"].value == pytest.approx(0.95)
    assert found["median KL"].value == pytest.approx(0.02)
    assert found["median KL"].n == 200
    assert found["mean KL"].lower >= 0
    assert found["top-1 agreement"].upper <= 1


def test_one_document_has_no_interval():
    metric = by_name(make.perplexity([200.0]))["token perplexity"]
    assert (metric.lower, metric.upper, metric.n) == (None, None, 1)


@pytest.mark.parametrize(
    ("values", "says"), [([], "no samples"), ([1, math.nan], '"s1"'), ([math.inf], '"s0"')]
)
def test_unusable_evidence_is_an_error_that_names_it(values, says):
    with pytest.raises(EvidenceError, match=says):
        metrics_of(make.scores(values=values))

"""Quality metrics against direct computation."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

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
    # The smallest value with half of the tokens at or below it.
    assert found["median KL"].value == pytest.approx(0.01)
    assert found["median KL"].n == 200
    assert found["mean KL"].lower >= 0
    assert found["top-1 agreement"].upper <= 1


def ratio_interval(totals, weights):
    """Return the ratio and its two-sided 95 % t interval with the jackknife's standard error, written out."""
    totals, weights = np.asarray(totals), np.asarray(weights)
    ratio, n = totals.sum() / weights.sum(), len(totals)
    without = np.array([np.delete(totals, i).sum() / np.delete(weights, i).sum() for i in range(n)])
    spread = np.sqrt((n - 1) / n * ((without - without.mean()) ** 2).sum())
    reach = stats.t.ppf(0.975, weights.sum() ** 2 / (weights**2).sum() - 1) * spread
    return ratio - reach, ratio + reach


def test_documents_are_the_unit_of_every_interval():
    nll, tokens = np.array([200.0, 330.0, 90.0]), np.array([100.0, 120.0, 50.0])
    words, octets = np.array([60.0, 70.0, 30.0]), np.array([400.0, 500.0, 210.0])
    numbers = {"words": words, "bytes": octets}
    found = by_name(make.perplexity(nll, weight=tokens, numbers=numbers))
    for name, weights in (("token", tokens), ("word", words), ("byte", octets)):
        metric = found[f"{name} perplexity"]
        assert metric.value == pytest.approx(math.exp(nll.sum() / weights.sum()))
        assert (metric.lower, metric.upper) == pytest.approx(np.exp(ratio_interval(nll, weights)))
        assert (metric.n, metric.units, metric.unit) == (3, "documents", "")
    bits = found["bits per byte"]
    assert (bits.lower, bits.upper) == pytest.approx(ratio_interval(nll / math.log(2), octets))
    assert not bits.higher_is_better
    kl, agree = np.array([2.0, 3.0, 2.5]), np.array([90.0, 70.0, 95.0])
    found = by_name(make.divergence(kl, agree))
    weights = np.full(3, 100.0)
    assert (found["mean KL"].lower, found["mean KL"].upper) == pytest.approx(
        ratio_interval(kl, weights)
    )
    agreement = found["top-1 agreement"]
    lower, upper = ratio_interval(agree, weights)
    assert (agreement.lower, agreement.upper) == pytest.approx((lower, min(upper, 1.0)))


def test_shares_of_passed_samples_are_clustered_by_problem():
    values = np.array([1.0, 0.5, 0.25, 0.0])
    metric = by_name(make.scores(values=values))["pass@1"]
    lower, upper = ratio_interval(values, np.ones(4))
    assert metric.value == pytest.approx(values.mean())
    assert (metric.lower, metric.upper) == pytest.approx((max(lower, 0), min(upper, 1)))


def test_an_errored_answer_counts_as_wrong_and_stays_in_the_denominator():
    status = ("error", "timeout", "truncated", "ok")
    metric = by_name(make.scores(values=[1, 0, 1, 1], status=status))["pass@1"]
    assert (metric.value, metric.n) == (0.5, 4)


@pytest.mark.parametrize("status", ["error", "timeout"])
def test_a_sum_over_tokens_without_one_document_has_no_value(status):
    for scores in (
        make.perplexity([200.0, 300.0], status=("ok", status)),
        make.divergence([1.0, 2.0], [99, 98], status=("ok", status)),
    ):
        with pytest.raises(EvidenceError, match=f'"s1" is an {status}'):
            metrics_of(scores)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_document_needs_scored_tokens(weight):
    with pytest.raises(EvidenceError, match=r'"s1" has .* scored tokens'):
        metrics_of(make.perplexity([200.0, 300.0], weight=np.array([100.0, weight])))


def test_a_kind_of_another_package_has_its_mean():
    (metric,) = metrics_of(make.scores("rating", "rating", [1.0, 4.0, 4.0]))
    assert (metric.name, metric.value, metric.n) == ("mean", 3.0, 3)


def test_one_document_has_no_interval():
    metric = by_name(make.perplexity([200.0]))["token perplexity"]
    assert (metric.lower, metric.upper, metric.n) == (None, None, 1)


@pytest.mark.parametrize(
    ("values", "says"), [([], "no samples"), ([1, math.nan], '"s1"'), ([math.inf], '"s0"')]
)
def test_unusable_evidence_is_an_error_that_names_it(values, says):
    with pytest.raises(EvidenceError, match=says):
        metrics_of(make.scores(values=values))


def of_kind(kind, values, **more):
    return make.scores(values=values, kind=kind, weight=np.ones(len(values)), **more)


def test_pass_at_k_is_estimated_from_all_samples_of_a_problem():
    # Three problems with 4 samples each, of which 4, 1 and 0 pass.
    values = [1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    problems = tuple(f"p{i // 4}" for i in range(12))
    found = by_name(dataclasses.replace(make.scores(values=values), problem_ids=problems))
    assert list(found) == ["pass@1", "pass@4"]
    assert found["pass@1"].value == pytest.approx(5 / 12)
    assert found["pass@4"].value == pytest.approx(2 / 3)
    assert {metric.n for metric in found.values()} == {3}
    ten = tuple(f"p{i // 20}" for i in range(60))
    values = [1] * 20 + [1] * 5 + [0] * 15 + [0] * 20
    found = by_name(dataclasses.replace(make.scores(values=values), problem_ids=ten))
    assert list(found) == ["pass@1", "pass@10", "pass@20"]
    expected = (1 + 1 - math.comb(15, 10) / math.comb(20, 10)) / 3
    assert found["pass@10"].value == pytest.approx(expected)


def test_multiple_choice_shows_each_way_to_compare_and_what_rounding_could_turn():
    numbers = {
        "acc": np.array([1.0, 0, 1, np.nan]), "acc_norm": np.array([1.0, 1, 1, np.nan]),
        "near_tie": np.array([0.0, 1, 0, np.nan]), "batch_noise": np.array([1e-5, 1e-5, 1e-5, np.nan]),
    }  # fmt: skip
    scores = of_kind("multiple_choice", [1, 1, 1, 0], numbers=numbers)
    scores = dataclasses.replace(scores, status=("ok", "ok", "ok", "error"))
    found = by_name(scores)
    assert list(found) == ["accuracy", "acc", "acc_norm", "near-ties", "batch noise"]
    assert found["accuracy"].value == 0.75
    assert (found["acc"].value, found["acc"].n) == (0.5, 4)
    assert (found["near-ties"].value, found["near-ties"].higher_is_better) == (0.25, False)
    assert (found["batch noise"].value, found["batch noise"].unit) == (1e-5, "nats")


def test_an_errored_sample_is_wrong_whatever_its_value():
    for kind in ("multiple_choice", "cloze", "generate", "needle", "code"):
        scores = dataclasses.replace(of_kind(kind, [1, 1]), status=("ok", "error"))
        assert metrics_of(scores)[0].value == 0.5, kind


def test_cloze_perplexity_is_that_of_whole_targets():
    numbers = {"logprob": np.array([-1.0, -3.0, np.nan]), "tokens": np.array([1.0, 2.0, np.nan])}
    found = by_name(of_kind("cloze", [1, 0, 0], numbers=numbers))
    assert found["accuracy"].value == pytest.approx(1 / 3)
    assert found["target perplexity"].value == pytest.approx(math.exp(2))
    assert found["target perplexity"].n == 2


def test_needle_and_generated_answers():
    found = by_name(of_kind("needle", [1, 0], numbers={"value_logprob": np.array([-1.0, -2.0])}))
    assert found["value log-likelihood"].value == -1.5
    (only,) = metrics_of(of_kind("generate", [0.25, 0.5, 1.0]))
    assert (only.name, only.value) == ("accuracy", pytest.approx(1.75 / 3))
    assert 0 <= only.lower < only.value < only.upper <= 1


def test_greedy_continuations_of_the_divergence_kind():
    scores = make.divergence([1.0, 3.0], [90, 100])
    numbers = {
        **scores.numbers, "greedy_same": np.array([1.0, 0.0]), "first_divergence": np.array([32.0, 5])
    }  # fmt: skip
    found = by_name(dataclasses.replace(scores, numbers=numbers))
    assert found["greedy agreement"].value == 0.5
    assert (found["first divergence"].value, found["first divergence"].unit) == (18.5, "tokens")


def test_one_long_text_has_the_interval_of_its_windows():
    sums, tokens = np.array([90.0, 110, 100]), np.full(3, 50.0)
    scores = make.perplexity(np.array([300.0]))
    assert by_name(scores)["token perplexity"].lower is None
    scores = dataclasses.replace(
        scores, weight=np.array([150.0]), series={"window_nll": (sums,), "window_tokens": (tokens,)}
    )
    metric = by_name(scores)["token perplexity"]
    assert (metric.value, metric.n, metric.units) == (pytest.approx(math.exp(2)), 3, "windows")
    low, high = ratio_interval(sums, tokens)
    assert (metric.lower, metric.upper) == (
        pytest.approx(math.exp(low)),
        pytest.approx(math.exp(high)),
    )

"""Every entry of the shared golden file that the package computes, reproduced to the entry's own tolerance."""

import json
import math
import os
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from quanteval import stats
from quanteval.stats.exact import region_probability
from quanteval.stats.paired import PairCounts
from quanteval.tasks.distributions import kl_of_logits

FOLDER = os.environ.get("QUANTEVAL_SHARED_DATA", "")
FILE = Path(FOLDER) / "golden_stats.json"
CONTENT = json.loads(FILE.read_text(encoding="utf-8")) if FOLDER and FILE.is_file() else {}
pytestmark = pytest.mark.skipif(
    not CONTENT, reason="QUANTEVAL_SHARED_DATA holds no golden_stats.json"
)

POSITIONAL = ("ni_margin80_", "naive_accept_", "mlperf_n_", "retry3")


def ends(interval):
    return [interval.lower, interval.upper]


def drops(b, c, n):
    return [1.0] * b + [-1.0] * c + [0.0] * (n - b - c)


def tang_ratio(a, b, c, d, level):
    # published with the ratio (a + b)/(a + c): the row with b is the numerator
    base = [1.0] * (a + c) + [0.0] * (b + d)
    var = [1.0] * a + [0.0] * c + [1.0] * b + [0.0] * d
    alpha = (1.0 - level) / 2.0
    return [stats.recovery_bound(base, var, alpha, side) for side in ("lower", "upper")]


def wald_size_all_breaks(n, margin):
    """Probability that the Wald bound lies below the margin when every flip is a break."""
    region = np.full(n + 1, -1)
    region[0] = max(b for b in range(n) if stats.wald_interval(b, 0, n, 0.90).upper < margin)
    return region_probability(region, n, margin, 0.0)


def sequential(K, alpha):  # noqa: N803
    return [*stats.sequential_design(K, alpha).z_bounds, alpha]


def cluster_t(d, margin):
    result = stats.cluster_mean(d)
    return [result.estimate, result.se, result.p_at_least(margin)]


def throughput(base, variant):
    result = stats.throughput_ratio(base, variant)
    return [result.ratio, result.lower]


def kl(base, variant):
    import torch

    p, q = (torch.tensor([row], dtype=torch.float64) for row in (base, variant))
    return float(kl_of_logits(p, q)[0])


def kl_reversed(base, variant):
    return kl(variant, base)


def bootstrap_items(b, c, n):
    """The file has the quantile of an infinite resampling, which ten thousand resamples of counts hit."""
    return stats.bootstrap_ratio(drops(b, c, n), [1.0] * n, 0.05).upper * n


COMPUTE = {
    "kl_row_1": kl,
    "kl_row_1_rev": kl_reversed,
    "kl_extreme": kl,
    "boot_perc_": bootstrap_items,
    "tango_ci_": lambda b, c, n, level: ends(stats.tango_interval(b, c, n, level)),
    "tango_ni_p_": stats.tango_p,
    "exact_unc_p_": stats.exact_p,
    "newcombe10_": lambda a, b, c, d, level: ends(
        stats.newcombe_interval(PairCounts(a, b, c, d), level, 10)
    ),
    "newcombe8_": lambda a, b, c, d, level: ends(
        stats.newcombe_interval(PairCounts(a, b, c, d), level, 8)
    ),
    "wald_paired_": lambda b, c, n, level: ends(stats.wald_interval(b, c, n, level)),
    "mcnemar_exact_": stats.mcnemar_exact,
    "mcnemar_midp_": stats.mcnemar_midp,
    "mcnemar_chi2cc_": lambda b, c: list(stats.mcnemar_chi2(b, c, continuity=True)),
    "mcnemar_chi2_": lambda b, c: list(stats.mcnemar_chi2(b, c)),
    "pass_at_": stats.pass_at_k,
    "pass_hat_": stats.pass_hat_k,
    "tang_ratio_": tang_ratio,
    "ni_margin80_approx_": stats.certifiable_margin_approx,
    "tango_exact_accept_": lambda n, flip, margin, drop, alpha: stats.accept_probability(
        n, flip, drop, margin, alpha=alpha, rule="tango"
    ),
    "naive_accept_": stats.point_rule_error,
    "rule_of_three_exact_": lambda x, n: stats.clopper_pearson_bound(x, n, 0.05, "upper"),
    "wilson_": lambda x, n: ends(stats.wilson_interval(x, n)),
    "cluster_t_ni": cluster_t,
    "min_n_upper_": stats.min_n_quantile_bound,
    "mlperf_n_": stats.query_count,
    "mlperf_earlystop_": lambda p, t, c: stats.early_stopping_queries(t, p, c),
    "holm": lambda p: list(stats.holm(p)),
    "throughput_ratio_lower": throughput,
    "obf_ld_": sequential,
    "aa_flip_from_std": stats.flip_rate_from_sd,
    "retry3": stats.retry_probability,
    "gscore_b": lambda b, c, n, margin: stats.bounded_score(drops(b, c, n), margin),
    "gscore_frac_": stats.bounded_score,
    "wald_size_alldown_": wald_size_all_breaks,
}


def printed_rounding(value):
    """Half a unit of the last digit of a value written with ten or more decimals."""
    exponent = Decimal(repr(value)).as_tuple().exponent
    return 0.5000001 * 10.0**exponent if exponent <= -10 else 0.0


def computation(entry_id):
    matching = [prefix for prefix in COMPUTE if entry_id.startswith(prefix)]
    return COMPUTE[max(matching, key=len)] if matching else None


@pytest.mark.parametrize("entry", CONTENT.get("golden", []), ids=lambda entry: entry["id"])
def test_entry_is_reproduced(entry):
    compute = computation(entry["id"])
    assert compute is not None, entry["id"]
    inputs = entry["inputs"]
    by_position = entry["id"].startswith(POSITIONAL)  # the file names these inputs its own way
    got = np.atleast_1d(compute(*inputs.values()) if by_position else compute(**inputs))
    wanted = np.atleast_1d(entry["value"])
    if entry["id"] == "kl_extreme":  # stated as: not negative, and below 1e-12
        assert 0.0 <= got[0] < 1e-12
        return
    tolerance = float(entry["agree_tol"])
    assert got.shape == wanted.shape
    for ours, theirs in zip(got, wanted, strict=True):
        relative = tolerance if entry["id"].startswith("mlperf_n_") else 0.0
        slack = tolerance + printed_rounding(float(theirs))
        assert math.isclose(ours, theirs, rel_tol=relative, abs_tol=slack), (ours, theirs)


def test_most_entries_are_computed():
    computed = [entry for entry in CONTENT["golden"] if computation(entry["id"]) is not None]
    assert len(computed) >= 60


@pytest.mark.parametrize(
    "row", CONTENT.get("exact_size_of_tango_noninferiority_at_5_percent", []), ids=str
)
def test_size_and_power_of_tango(row):
    n, margin, flips = row["n"], row["margin"], row["discordance"]
    at_margin = stats.accept_probability(n, flips, margin, margin, rule="tango")
    at_zero = stats.accept_probability(n, flips, 0.0, margin, rule="tango")
    assert at_margin == pytest.approx(row["size"], abs=6e-5)
    assert at_zero == pytest.approx(row["power_at_zero_difference"], abs=6e-4)


@pytest.mark.parametrize("row", CONTENT.get("tango_candidate_minus_baseline", []), ids=str)
def test_tango_as_candidate_minus_baseline(row):
    n, lost, gained = row["n"], row["lost"], row["gained"]
    for key, level in (("one_sided_95", 0.90), ("two_sided_95", 0.95)):
        interval = stats.tango_interval(lost, gained, n, level)
        assert [-interval.upper, -interval.lower] == pytest.approx(row[key], abs=1e-9)
    assert stats.mcnemar_exact(lost, gained) == pytest.approx(row["mcnemar_exact_p"], rel=1e-10)


@pytest.mark.parametrize("row", CONTENT.get("pass_at_k", []), ids=str)
def test_pass_at_k_rows(row):
    assert stats.pass_at_k(row["n"], row["c"], row["k"]) == pytest.approx(row["value"], abs=1e-12)

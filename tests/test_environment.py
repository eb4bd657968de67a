"""What is recorded of the machine, and the peaks of this process's memory."""

from __future__ import annotations

import json

import numpy as np

from quanteval.environment import (
    describe_environment,
    package_version,
    peak_rss_bytes,
    release_free_memory,
    reset_peak_rss,
    rss_bytes,
    set_thread_variables,
    usable_cores,
)


def test_the_environment_is_plain_json_with_versions():
    found = describe_environment()
    assert json.loads(json.dumps(found)) == found
    assert found["packages"]["torch"].startswith("2.")
    assert found["memory_bytes"] > 2**28
    assert usable_cores() >= 1


def test_unknown_packages_have_no_version():
    assert package_version("quanteval-no-such-package") is None


def test_the_peak_follows_an_allocation_and_starts_again():
    block = np.ones(64 * 2**20, dtype=np.uint8)
    assert peak_rss_bytes() >= rss_bytes() - 2**20
    high = peak_rss_bytes()
    del block
    release_free_memory()
    if reset_peak_rss():
        assert peak_rss_bytes() < high


def test_thread_variables_are_written_for_every_library():
    env = {"TOKENIZERS_PARALLELISM": "true"}
    set_thread_variables(3, env)
    assert {env["OMP_NUM_THREADS"], env["MKL_NUM_THREADS"], env["OPENBLAS_NUM_THREADS"]} == {"3"}
    assert env["TOKENIZERS_PARALLELISM"] == "true"

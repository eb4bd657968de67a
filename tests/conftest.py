"""Fixtures shared by all tests: the embedded model, fetched and converted once per cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# One thread per process: results and timings of small models are steadier, and two OpenMP
# threads on a shared machine can be several times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def embedded_model():
    """Return the ModelSource of the embedded model (marks: use with `@pytest.mark.model`)."""
    from quanteval.models import resolve_model

    return resolve_model("smollm2_135m")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of public test sets, or skip when QUANTEVAL_SHARED_DATA is not set."""
    folder = os.environ.get("QUANTEVAL_SHARED_DATA")
    if not folder:
        pytest.skip("QUANTEVAL_SHARED_DATA is not set")
    return Path(folder)

"""Fixtures shared by all tests: the embedded model, fetched and converted once per cache."""

from __future__ import annotations

import os
import shutil
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


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    """Return the folder of a tiny random Llama."""
    from tests.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_source(tiny_folder):
    """Return the ModelSource of the tiny random Llama."""
    from quanteval.models import resolve_model

    return resolve_model(str(tiny_folder))


@pytest.fixture(scope="session")
def fake_artifact(tiny_source, tmp_path_factory):
    """Return an artifact for engines that read nothing of it but its names."""
    from quanteval.interfaces import Calibration
    from quanteval.schemes.none import Unquantized

    folder = tmp_path_factory.mktemp("artifact")
    return Unquantized("float32").quantize(tiny_source, folder, Calibration(), "cpu")


@pytest.fixture(autouse=True)
def no_earlier_attempts(own_cache):
    """Forget the attempts of other tests: each asks its own question."""
    shutil.rmtree(own_cache / "quanteval" / "attempts", ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Keep artifacts and digests of the tests out of the user's cache, but share its models."""
    before = os.environ.get("XDG_CACHE_HOME")
    real = Path(before) if before else Path.home() / ".cache"
    cache = tmp_path_factory.mktemp("cache")
    (cache / "quanteval").mkdir()
    (real / "quanteval" / "models").mkdir(parents=True, exist_ok=True)
    (cache / "quanteval" / "models").symlink_to(real / "quanteval" / "models")
    os.environ["XDG_CACHE_HOME"] = str(cache)
    yield cache
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before

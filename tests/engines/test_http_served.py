"""An engine behind our own server: the same answers and scores as in process, and no process left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from quanteval.engines.fake import FakeEngine
from quanteval.engines.served import ServedEngine
from quanteval.engines.transformers import TransformersEngine
from quanteval.errors import ConfigError, EngineError, UnsupportedError
from quanteval.interfaces import Calibration, OwnsProcesses, Request, Sampling, ScoreRequest
from quanteval.schemes.none import Unquantized
from quanteval.targets import build
from tests.engines.scripted_server import Broken

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture
def artifact(tiny_source, tmp_path):
    return Unquantized("float32").quantize(tiny_source, tmp_path, Calibration(), "cpu")


def test_the_preset_builds_and_names_the_inner_engine(tmp_path):
    engine = build(yaml.safe_load((CONF / "engine/served.yaml").read_text()))
    assert engine == ServedEngine()
    inner = yaml.safe_load((CONF / "engine/transformers.yaml").read_text())
    node = engine.spec(tmp_path)["engine"]
    assert build(node) == build(inner) == TransformersEngine()


def test_bad_fields():
    with pytest.raises(ValueError, match="must be another engine"):
        ServedEngine(inner=ServedEngine())
    with pytest.raises(ValueError, match="must be another engine"):
        ServedEngine(inner={"device": "cpu"})
    with pytest.raises(ConfigError, match=r"not a dataclass|does not exist"):
        build(
            {
                "_target_": "quanteval.engines.served.ServedEngine",
                "inner": {"_target_": "quanteval.errors.X"},
            }
        )


def test_what_the_inner_engine_refuses_is_refused(artifact):
    with pytest.raises(UnsupportedError, match='does not serve "gguf" artifacts'):
        ServedEngine().check(artifact.model_copy(update={"format": "gguf"}))


def test_a_fake_engine_answers_over_http(artifact):
    inner = FakeEngine(answers={"two": "2, of course"}, tokens_per_chunk=4, itl_s=0.001)
    with ServedEngine(inner).serve(artifact) as session:
        raw = session.tokenizer.raw
        asked = [
            Request("a", raw("one and two"), Sampling(max_tokens=50)),
            Request("b", raw("x"), Sampling(max_tokens=7, ignore_eos=True)),
        ]
        done = {c.request_id: c for c in session.generate(asked)}
        assert done["a"].text == "2, of course" and done["a"].finish_reason == "stop"
        assert len(done["b"].token_ids) == 7 and done["b"].finish_reason == "length"
        chunks = list(session.stream(asked[0]))
        assert [chunk.count for chunk in chunks if chunk.count] == [4, 4, 4, 1]
        assert chunks[-1].finish_reason == "stop"
        assert session.batch_policy == "scripted; over HTTP"
        assert session.describe().emulation == "scripted"
        assert session.memory().weights_bytes == 1_000_000
        assert isinstance(session, OwnsProcesses)
        assert session.take_peak_bytes() >= session.rss_bytes() > 10_000_000
        assert session.gone() == ""
        pid = session._process.pid
        assert psutil.pid_exists(pid)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"is gone: the server was ended by SIGKILL"):
            until = time.monotonic() + 20
            while time.monotonic() < until:
                list(session.generate(asked))
        assert "SIGKILL" in session.gone()
    assert not psutil.pid_exists(pid)


def test_a_server_that_cannot_load_says_why(artifact):
    with pytest.raises(EngineError, match=r"ended with exit code 1: .*the weights are torn"):
        ServedEngine(Broken()).serve(artifact).__enter__()


@pytest.mark.slow
def test_a_model_behind_http_scores_and_generates_as_in_process(artifact):
    inner = TransformersEngine(batching="padded", kv_cache_tokens=256, max_batch_rows=4)
    rng = np.random.default_rng(0)
    scored = [
        ScoreRequest(f"s{n}", tuple(map(int, rng.integers(5, 260, size=n))), first_scored=1)
        for n in (2, 9, 40, 257)
    ]
    with inner.serve(artifact) as here:
        asked = [
            Request(str(i), here.tokenizer.raw("a" * i), Sampling(max_tokens=12))
            for i in range(1, 6)
        ]
        want = {c.request_id: c for c in here.generate(asked)}
        likelihoods = list(here.loglikelihood(scored))
        effective, longest, policy = here.describe(), here.max_context, here.batch_policy
    with ServedEngine(inner).serve(artifact) as session:
        assert session.max_context == longest
        assert policy in session.batch_policy
        assert session.describe() == effective
        memory = session.memory()
        assert memory.weights_bytes and memory.process_peak_bytes > memory.weights_bytes
        got = {c.request_id: c for c in session.generate(asked)}
        assert {k: (c.text, c.token_ids, c.finish_reason) for k, c in got.items()} == {
            k: (c.text, c.token_ids, c.finish_reason) for k, c in want.items()
        }
        for mine, theirs in zip(session.loglikelihood(scored), likelihoods, strict=True):
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)
            assert (mine.is_top1 == theirs.is_top1).mean() > 0.98

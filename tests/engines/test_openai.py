"""Attaching to an endpoint: the scheme that names it, the engine that opens it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from quanteval.engines.openai import OpenAIEngine, positions_of
from quanteval.errors import ConfigError, EngineError, UnsupportedError
from quanteval.interfaces import Calibration, Message, Request, Sampling, ScoreRequest
from quanteval.records import Effective
from quanteval.schemes.endpoint import Endpoint
from quanteval.targets import build
from tests.engines.scripted_server import Script, ScriptedServer

CONF = Path(__file__).parents[2] / "conf"


@pytest.fixture
def server():
    with ScriptedServer(Script()) as running:
        yield running


def artifact_of(server, source, tmp_path, **fields):
    scheme = Endpoint(base_url=server.url, **fields)
    scheme.check(source, "remote")
    return scheme.quantize(source, tmp_path, Calibration(), "remote")


def test_the_presets_build():
    engine = build(yaml.safe_load((CONF / "engine/openai.yaml").read_text()))
    assert engine == OpenAIEngine()
    scheme = build(yaml.safe_load((CONF / "scheme/endpoint.yaml").read_text())["endpoint"])
    assert scheme == Endpoint(base_url="http://127.0.0.1:8000/v1")
    assert not scheme.precision.quantized


def test_the_artifact_names_the_endpoint_and_holds_no_weights(server, tiny_source, tmp_path):
    artifact = artifact_of(server, tiny_source, tmp_path, weight_bits=4, weight_format="awq")
    assert artifact.format == "endpoint" and artifact.bytes_on_disk == 0
    assert artifact.load == {"base_url": server.url, "model": "", "api": "completions"}
    assert artifact.path == str(tiny_source.path)
    assert artifact.precision.quantized and artifact.precision.weight_bits == 4
    assert not list(tmp_path.iterdir())
    OpenAIEngine().check(artifact)
    with pytest.raises(UnsupportedError, match='does not serve "transformers" artifacts'):
        OpenAIEngine().check(artifact.model_copy(update={"format": "transformers"}))


def test_the_endpoint_is_served_with_the_sources_tokenizer(server, tiny_source, tmp_path):
    artifact = artifact_of(server, tiny_source, tmp_path, weight_bits=4, weight_format="awq")
    with OpenAIEngine(max_context=100).serve(artifact) as session:
        assert session.max_context == 100
        prompt = session.tokenizer.raw("hello")
        assert prompt.token_ids[0] == session.tokenizer.bos_token_id
        (done,) = session.generate([Request("r", prompt, Sampling(max_tokens=5))])
        assert done.error is None and len(done.token_ids) == 5
        assert server.script.bodies[-1]["prompt"] == list(prompt.token_ids)
        (scored,) = session.loglikelihood([ScoreRequest("s", prompt.token_ids)])
        assert len(scored.logprobs) == len(prompt.token_ids) - 1
        effective = session.describe()
        assert "awq, 4 bits a weight, activations 16 bits" in effective.emulation
        again = Effective.model_validate_json(effective.model_dump_json())
        assert np.isnan(again.linear_bits_per_weight)


def test_a_rendered_chat_as_text_does_not_get_a_second_begin_token(server, tiny_source, tmp_path):
    server.script.takes_ids = False
    artifact = artifact_of(server, tiny_source, tmp_path)
    with OpenAIEngine().serve(artifact) as session:
        messages: list[Message] = [{"role": "user", "content": "x"}]
        for prompt in (session.tokenizer.chat(messages), session.tokenizer.raw("x")):
            list(session.generate([Request("r", prompt, Sampling(max_tokens=5))]))
        chat, raw = server.script.bodies[-2:]
        assert chat["add_special_tokens"] is False and "add_special_tokens" not in raw


def test_the_key_comes_from_the_environment_and_stays_there(
    server, tiny_source, tmp_path, monkeypatch
):
    artifact = artifact_of(server, tiny_source, tmp_path)
    engine = OpenAIEngine(api_key_env="AN_API_KEY")
    with pytest.raises(ConfigError, match='api_key_env "AN_API_KEY" is not set'):
        engine.serve(artifact).__enter__()
    monkeypatch.setenv("AN_API_KEY", "sk-secret")
    with engine.serve(artifact) as session:
        assert server.script.headers[-1]["Authorization"] == "Bearer sk-secret"
        assert "sk-secret" not in repr(engine) + session.describe().model_dump_json()
    assert "sk-secret" not in artifact.model_dump_json()


def test_an_endpoint_that_is_not_there(tiny_source, tmp_path):
    scheme = Endpoint(base_url="http://127.0.0.1:9")
    artifact = scheme.quantize(tiny_source, tmp_path, Calibration(), "remote")
    with pytest.raises(EngineError, match=r"the server at http://127.0.0.1:9/v1 is gone"):
        OpenAIEngine().serve(artifact).__enter__()


@pytest.mark.parametrize(
    "fields",
    [
        {"max_in_flight": 0},
        {"max_context": 1},
        {"silence_timeout_s": 0},
        {"extra_body": {"model": "x"}},
    ],
)
def test_bad_fields_of_the_engine(fields):
    with pytest.raises(ValueError, match=f'{next(iter(fields))} "'):
        OpenAIEngine(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"base_url": "localhost:8000"},
        {"base_url": "http://a:b@host/v1"},
        {"base_url": "http://host/v1", "weight_bits": 0},
    ],
)
def test_bad_fields_of_the_scheme(fields):
    with pytest.raises(ValueError, match=r"must be|must hold"):
        Endpoint(**fields)


def test_extra_fields_go_with_every_request(server, tiny_source, tmp_path):
    artifact = artifact_of(server, tiny_source, tmp_path)
    with OpenAIEngine(extra_body={"priority": 3}).serve(artifact) as session:
        list(session.generate([Request("r", session.tokenizer.raw("x"), Sampling(max_tokens=2))]))
    assert all(body["priority"] == 3 for body in server.script.bodies)


def test_the_longest_context_of_a_config(tmp_path):
    assert positions_of(tmp_path) is None
    for config, want in (
        ({"max_position_embeddings": 7}, 7),
        ({"text_config": {"max_position_embeddings": 8}}, 8),
        ({}, None),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert positions_of(tmp_path) == want

"""The openvino engine: its loop on a scripted pipeline, what it reports, and the embedded model through it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from quanteval.engines.openvino import OpenVINOEngine
from quanteval.engines.openvino_runner import PipelineRunner
from quanteval.errors import EngineError, UnsupportedError
from quanteval.interfaces import Prompt, Request, Sampling, ScoreRequest

EOS = 9


@dataclass
class Handle:
    """A scripted request: emits its script one token a step."""

    script: list[int]
    limit: int
    echo: list[float] = field(default_factory=list)
    status: str = "RUNNING"
    ready: list[SimpleNamespace] = field(default_factory=list)

    def step(self):
        token = self.script.pop(0)
        self.limit -= 1
        end = "STOP" if token == EOS else "LENGTH" if self.limit == 0 else "NONE"
        self.ready.append(
            SimpleNamespace(
                generated_ids=[token],
                generated_log_probs=[*self.echo, -0.5],
                finish_reason=SimpleNamespace(name=end),
            )
        )
        if end != "NONE":
            self.status = "FINISHED"

    def get_status(self):
        return SimpleNamespace(name=self.status)

    def can_read(self):
        return bool(self.ready)

    def read(self):
        return {0: self.ready.pop(0)}

    def cancel(self):
        self.status = "CANCEL"

    def get_perf_metrics(self):
        raw = SimpleNamespace(
            m_new_token_times=[1000.0, 1010.0, 1030.0], m_times_to_first_token=[5e4]
        )
        return SimpleNamespace(raw_metrics=raw)


class Pipeline:
    """A pipeline whose answers are fixed; every prompt beginning with 7 is ignored, with 6 breaks a step."""

    def __init__(self, answer=(1, 2, 3, 4, 5)):
        self.answer = answer
        self.handles: list[Handle] = []
        self.threads = set()
        self.added = threading.Event()

    def add_request(self, number, ids, config):
        self.threads.add(threading.get_ident())
        if not ids:
            raise RuntimeError("Exception from src:1\nno ids")
        echo = [1.0, *[-float(i) for i in range(1, len(ids))]] if config == "scoring" else []
        limit = 1 if config == "scoring" else config.max_tokens
        handle = Handle([*self.answer] * 20, limit, echo)
        if ids[0] == 7:
            handle.status = "IGNORED"
        handle.breaks = ids[0] == 6
        self.handles.append(handle)
        self.added.set()
        return handle

    def has_non_finished_requests(self):
        return any(handle.status == "RUNNING" for handle in self.handles)

    def step(self):
        self.threads.add(threading.get_ident())
        for handle in self.handles:
            if handle.status == "RUNNING":
                if handle.breaks:
                    raise RuntimeError("Exception from src:2\nout of luck")
                handle.step()
        time.sleep(0.001)

    def get_metrics(self):
        return SimpleNamespace(kv_cache_size_in_bytes=4096)


class Calls:
    """Stands for the library's objects."""

    def ids(self, token_ids):
        return token_ids

    def config(self, sampling, eos):
        return sampling

    def scoring(self):
        return "scoring"


@pytest.fixture
def make():
    runners = []

    def make_one(pipeline):
        runner = PipelineRunner(
            pipeline, Calls(), frozenset({EOS}), rows=2, policy="scripted", blocks=4, values_per_token=32
        )  # fmt: skip
        runners.append(runner)
        return runner

    yield make_one
    for runner in runners:
        runner.close()


def request(name="a", ids=(1, 2), **sampling):
    return Request(name, Prompt("", ids), Sampling(**{"max_tokens": 3, **sampling}))


class Sink(list):
    """Collects pieces; `wait` returns when the last has come."""

    def __init__(self):
        self.ended = threading.Event()

    def __call__(self, piece):
        self.append(piece)
        if piece.finish_reason is not None:
            self.ended.set()

    def wait(self):
        assert self.ended.wait(20)
        return self

    @property
    def ids(self):
        return [i for piece in self for i in piece.token_ids]


def test_tokens_come_one_by_one_with_reason_and_layers(make):
    pipeline = Pipeline()
    runner, sink = make(pipeline), Sink()
    runner.submit(request(), sink)
    sink.wait()
    assert sink.ids == [1, 2, 3]
    assert [len(piece.token_ids) for piece in sink] == [1, 1, 1]
    assert sink[-1].finish_reason == "length"
    assert sink[-1].layers["prefill"] == pytest.approx(0.05)
    assert sink[-1].layers["decode"] == pytest.approx(0.03)
    assert sink[-1].cached_prompt_tokens == 0
    assert [p.at_s for p in sink] == sorted(p.at_s for p in sink)


def test_the_end_token_ends_with_stop_and_is_delivered(make):
    runner, sink = make(Pipeline((1, EOS))), Sink()
    runner.submit(request(max_tokens=8), sink)
    assert sink.wait().ids == [1, EOS]
    assert sink[-1].finish_reason == "stop"


def test_many_requests_from_many_threads_use_one_pipeline_thread(make):
    pipeline = Pipeline()
    runner = make(pipeline)
    sinks = [Sink() for _ in range(20)]
    threads = [
        threading.Thread(target=runner.submit, args=(request(str(i)), s))
        for i, s in enumerate(sinks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(sink.wait().ids == [1, 2, 3] for sink in sinks)
    assert len(pipeline.threads) == 1
    assert threading.get_ident() not in pipeline.threads


def test_a_cancelled_request_delivers_nothing_more_and_leaves_the_pipeline(make):
    pipeline = Pipeline()
    runner, sink, other = make(pipeline), Sink(), Sink()
    handle = runner.submit(request(max_tokens=90), sink)
    assert pipeline.added.wait(20)
    runner.cancel(handle)
    seen = len(sink)
    runner.submit(request("b"), other)
    other.wait()
    assert pipeline.handles[0].status == "CANCEL"
    assert not sink.ended.is_set()
    assert len(sink) <= seen + 1
    runner.cancel(handle)  # a second time, and after its end, does nothing
    runner.submit(request("c"), Sink())


def test_a_request_without_room_ends_with_an_error(make):
    runner, sink = make(Pipeline()), Sink()
    runner.submit(request(ids=(7,)), sink)
    assert sink.wait()[-1].finish_reason == "error"
    assert "kv_cache_tokens" in sink[-1].error


def test_a_refused_request_is_an_error_and_others_go_on(make):
    runner, bad, good = make(Pipeline()), Sink(), Sink()
    runner.submit(request(ids=()), bad)
    runner.submit(request(), good)
    assert bad.wait()[-1].error == "openvino refused the request: no ids"
    assert good.wait().ids == [1, 2, 3]


def test_a_broken_pipeline_ends_every_request_and_refuses_new_ones(make):
    runner = make(Pipeline())
    sinks = [Sink(), Sink()]
    runner.submit(request(max_tokens=90), sinks[0])
    runner.submit(request("b", ids=(6,)), sinks[1])
    for sink in sinks:
        assert sink.wait()[-1].error == "openvino's pipeline failed: out of luck"
    late = Sink()
    runner.submit(request("c"), late)
    assert "out of luck" in late.wait()[-1].error
    with pytest.raises(EngineError, match="out of luck"):
        runner.score(ScoreRequest("s", (1, 2, 3)))


def test_closing_ends_running_requests(make):
    pipeline = Pipeline()
    runner, sink = make(pipeline), Sink()
    runner.submit(request(max_tokens=95), sink)
    assert pipeline.added.wait(20)
    runner.close()
    assert sink.wait()[-1].finish_reason in ("error", "length")


def test_scores_are_those_of_the_echo(make):
    runner = make(Pipeline())
    result = runner.score(ScoreRequest("s", (5, 4, 3, 2), first_scored=2))
    np.testing.assert_array_equal(result.logprobs, [-2.0, -3.0])
    assert not result.is_top1.any()


def test_top1_is_found_by_asking_for_one_token(make):
    # The scripted answer to every prefix is 1: the second token agrees, the third does not.
    result = make(Pipeline()).score(ScoreRequest("s", (5, 1, 4, 1)))
    assert result.is_top1.tolist() == [True, False, False]


def test_check_and_fields():
    engine = OpenVINOEngine()
    with pytest.raises(UnsupportedError, match='"transformers"'):
        engine.check(SimpleNamespace(format="transformers"))
    with pytest.raises(ValueError, match="step_tokens"):
        OpenVINOEngine(step_tokens=0)
    with pytest.raises(ValueError, match="group_size"):
        OpenVINOEngine(dynamic_quantization_group_size=-1)
    assert engine.properties == {}
    told = OpenVINOEngine(dynamic_quantization_group_size=0, kv_cache_precision="f32", threads=2)
    assert told.properties == {
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0, "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 2,
    }  # fmt: skip

"""The in-process engine on a tiny random model: both batchers, scoring, limits, memory, readback."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from quanteval.engines.transformers import TransformersEngine
from quanteval.errors import EngineError, UnsupportedError
from quanteval.interfaces import (
    Calibration,
    Chunk,
    Request,
    Sampling,
    ScoreRequest,
    StreamsAsync,
)
from quanteval.schemes.bitsandbytes import FourBit, Int8
from quanteval.schemes.none import Unquantized
from quanteval.schemes.torchao import Int8DynamicActivationInt8Weight, Int8WeightOnly

TEXTS = [
    "def f(x):",
    "The cat",
    "a",
    "Numbers: 1 2 3 4 5 6 7 8 9",
    "zzz zzz",
    "é",
    "x = [",
    "import",
]


def serve(source, scheme, tmp_path, **fields):
    artifact = scheme.quantize(source, Path(tmp_path), Calibration(), "cpu")
    return TransformersEngine(kv_cache_tokens=512, page_tokens=16, **fields).serve(artifact)


@pytest.fixture(scope="module", params=["continuous", "padded"])
def session(request, tiny_source, tmp_path_factory):
    scheme = Unquantized("float32")
    with serve(tiny_source, scheme, tmp_path_factory.mktemp("a"), batching=request.param) as live:
        yield live


@pytest.fixture(scope="module")
def reference(tiny_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


def requests(session, sampling, texts=TEXTS):
    return [Request(f"r{i}", session.tokenizer.raw(t), sampling) for i, t in enumerate(texts)]


def test_greedy_is_what_the_library_generates_alone(session, reference):
    done = {c.request_id: c for c in session.generate(requests(session, Sampling(24)))}
    assert len(done) == len(TEXTS)
    for request in requests(session, Sampling(24)):
        ids = torch.tensor([request.prompt.token_ids])
        expected = reference.generate(
            ids, max_new_tokens=24, do_sample=False, eos_token_id=1, pad_token_id=1
        )
        got = done[request.request_id]
        assert list(got.token_ids) == expected[0, ids.shape[1] :].tolist()
        ended = got.token_ids[-1] == 1
        assert got.finish_reason == ("stop" if ended else "length")
        assert got.text == session.tokenizer.decode(got.token_ids)


def test_ignore_eos_gives_exactly_max_tokens(session):
    for completion in session.generate(requests(session, Sampling(40, ignore_eos=True))):
        assert len(completion.token_ids) == 40
        assert completion.finish_reason == "length"


def test_a_stop_string_ends_and_cuts_the_text(session):
    free = next(session.generate(requests(session, Sampling(24, ignore_eos=True), TEXTS[:1])))
    stop = free.text[5:7]
    sampling = Sampling(24, stop=(stop,), ignore_eos=True)
    cut = next(session.generate(requests(session, sampling, TEXTS[:1])))
    assert cut.text == free.text.split(stop)[0]
    assert cut.finish_reason == "stop"
    assert len(cut.token_ids) < 24


def test_streaming_delivers_the_same_tokens_one_by_one(session):
    request = requests(session, Sampling(12, ignore_eos=True), TEXTS[:1])[0]
    whole = next(session.generate([request]))
    chunks = list(session.stream(request))
    assert tuple(i for c in chunks for i in c.token_ids) == whole.token_ids
    assert [len(c.token_ids) for c in chunks if c.token_ids] == [1] * 12
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"
    times = [c.at_s for c in chunks]
    assert times == sorted(times)


def test_a_request_that_is_too_long_is_refused_and_the_others_go_on(session):
    sampling = Sampling(8, ignore_eos=True)
    long = Request("long", session.tokenizer.raw("x" * 600), sampling)
    empty = Request("empty", type(long.prompt)("", ()), sampling)
    rest = requests(session, sampling, TEXTS[:3])
    done = {c.request_id: c for c in session.generate([rest[0], long, empty, *rest[1:]])}
    assert done["long"].finish_reason == "error"
    assert "more than the 512" in done["long"].error
    assert done["empty"].error == "the prompt is empty"
    assert all(len(done[r.request_id].token_ids) == 8 for r in rest)
    assert done["long"].text == ""


def test_a_closed_stream_frees_its_row(session):
    request = requests(session, Sampling(300, ignore_eos=True), TEXTS[:1])[0]
    stream = session.stream(request)
    next(stream)
    stream.close()
    done = list(session.generate(requests(session, Sampling(4, ignore_eos=True))))
    assert {c.finish_reason for c in done} == {"length"}


def test_the_last_chunk_says_where_the_time_went(session):
    request = requests(session, Sampling(12, ignore_eos=True), TEXTS[:1])[0]
    before = time.perf_counter()
    chunks = list(session.stream(request))
    assert all(not c.layers and c.cached_prompt_tokens is None for c in chunks[:-1])
    last = chunks[-1]
    assert last.cached_prompt_tokens == 0
    assert set(last.layers) == {"queue", "prefill", "decode"}
    assert all(seconds >= 0 for seconds in last.layers.values())
    assert last.layers["decode"] == pytest.approx(chunks[-1].at_s - chunks[0].at_s, abs=1e-6)
    assert sum(last.layers.values()) <= chunks[-1].at_s - before
    refused = next(session.stream(replace(request, prompt=session.tokenizer.raw("x" * 600))))
    assert not refused.layers


def test_a_request_that_waits_for_a_row_has_queued(tiny_source, tmp_path):
    with serve(tiny_source, Unquantized("float32"), tmp_path, max_batch_rows=1) as live:
        one, two = requests(live, Sampling(60, ignore_eos=True), TEXTS[:2])
        first, second = live.stream(one), live.stream(two)
        begun = time.perf_counter()
        next(first)
        late = threading.Thread(target=lambda: chunks.extend(second))
        chunks: list[Chunk] = []
        late.start()
        ended = list(first)[-1].at_s
        late.join(60)
    assert chunks[0].at_s > ended
    assert chunks[-1].layers["queue"] > 0.5 * (ended - begun) or ended - begun < 0.01


async def collect(session, request):
    return [chunk async for chunk in session.astream(request)]


def test_streams_on_an_event_loop_need_no_threads(session):
    assert isinstance(session, StreamsAsync)
    wanted = requests(session, Sampling(10, ignore_eos=True))
    alone = [next(session.generate([r])).token_ids for r in wanted]
    threads = threading.active_count()

    async def main():
        most = []
        tasks = [asyncio.create_task(collect(session, r)) for r in wanted * 4]
        while not all(task.done() for task in tasks):
            most.append(threading.active_count())
            await asyncio.sleep(0.001)
        return max(most), [task.result() for task in tasks]

    most, streams = asyncio.run(main())
    assert most <= threads
    got = [tuple(i for c in chunks for i in c.token_ids) for chunks in streams]
    assert got == alone * 4
    assert all(c[-1].finish_reason == "length" and c[-1].layers for c in streams)


def test_an_async_stream_that_is_closed_or_outlives_its_loop_harms_nobody(session):
    (request,) = requests(session, Sampling(300, ignore_eos=True), TEXTS[:1])

    async def closed():
        stream = session.astream(request)
        await anext(stream)
        await stream.aclose()

    asyncio.run(closed())
    loop = asyncio.new_event_loop()
    abandoned = session.astream(request)
    loop.run_until_complete(anext(abandoned))
    loop.close()
    done = list(session.generate(requests(session, Sampling(4, ignore_eos=True))))
    assert {c.finish_reason for c in done} == {"length"}
    with pytest.raises(StopIteration):
        abandoned.aclose().send(None)


def test_cancelled_requests_of_a_batcher_hear_their_end(session):
    heard: queue.Queue = queue.Queue()
    (request,) = requests(session, Sampling(300, ignore_eos=True), TEXTS[:1])
    batcher = session._batchers.greedy
    handle = batcher.submit(request, heard.put)
    heard.get(timeout=60)
    batcher.cancel(handle)
    list(session.generate(requests(session, Sampling(4), TEXTS[:1])))
    reasons = [heard.get_nowait().finish_reason for _ in range(heard.qsize())]
    assert reasons == [None] * (len(reasons) - 1) + ["cancelled"]


def test_the_batcher_for_sampled_requests_is_made_once(tiny_source, tmp_path):
    with serve(tiny_source, Unquantized("float32"), tmp_path, batching="continuous") as live:
        (request,) = requests(live, Sampling(4, temperature=1.0), TEXTS[:1])
        barrier = threading.Barrier(8)
        made = []

        def ask():
            barrier.wait()
            made.append(live._batchers.for_request(request))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(batcher) for batcher in made}) == 1
        before = live.memory().kv_cache_bytes
        next(live.generate([request]))
        assert live.memory().kv_cache_bytes > before


def test_many_threads_stream_at_once(session):
    sampling = Sampling(10, ignore_eos=True)
    alone = {
        r.request_id: next(session.generate([r])).token_ids for r in requests(session, sampling)
    }
    got: dict[str, tuple[int, ...]] = {}

    def run(request):
        got[request.request_id] = tuple(i for c in session.stream(request) for i in c.token_ids)

    threads = [threading.Thread(target=run, args=(r,)) for r in requests(session, sampling)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == alone


def test_sampling_depends_on_the_seed_alone(session):
    def draw(seed, texts=TEXTS):
        sampling = Sampling(12, temperature=0.8, top_p=0.95, top_k=50, seed=seed, ignore_eos=True)
        return {
            c.request_id: c.token_ids for c in session.generate(requests(session, sampling, texts))
        }

    first = draw(1)
    assert draw(1) == first
    assert draw(1, TEXTS[:1])["r0"] == first["r0"]
    assert draw(2) != first


def test_loglikelihood_is_the_plain_forward(session, reference):
    ids = session.tokenizer.encode("Some text that is scored, with a few numbers: 12 345.")
    for first in (1, 5, len(ids) - 1):
        scored = next(session.loglikelihood([ScoreRequest("a", ids, first)]))
        with torch.no_grad():
            logits = reference(torch.tensor([ids])).logits[0].float()
        logprobs = logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        np.testing.assert_allclose(scored.logprobs, logprobs[first - 1 :].numpy(), atol=1e-5)
        top = logits.argmax(-1)[:-1] == torch.tensor(ids[1:])
        np.testing.assert_array_equal(scored.is_top1, top[first - 1 :].numpy())


def test_scores_do_not_depend_on_what_is_scored_beside_them(session):
    many = [ScoreRequest(f"s{i}", session.tokenizer.encode("word " * (i + 2))) for i in range(6)]
    together = [lp.logprobs for lp in session.loglikelihood(many)]
    for request, logprobs in zip(many, together, strict=True):
        alone = next(session.loglikelihood([request])).logprobs
        np.testing.assert_allclose(alone, logprobs, atol=1e-5)


@pytest.mark.parametrize(
    ("ids", "first", "says"),
    [
        ((1,), 1, "cannot be scored"),
        ((1, 2), 0, "cannot be scored"),
        (tuple(range(5)) * 200, 1, "more than the 513"),
    ],
)
def test_what_cannot_be_scored_is_named(session, ids, first, says):
    with pytest.raises(EngineError, match=f'"bad".*{says}'):
        list(session.loglikelihood([ScoreRequest("bad", ids, first)]))


def test_hidden_states_and_head_rebuild_the_logits(session, reference):
    ids = session.tokenizer.encode("hidden states")
    hidden = next(session.hidden_states([ScoreRequest("h", ids, 3)])).values
    head = session.output_head()
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0, 2:-1]
        rebuilt = functional.linear(hidden, head.weight, head.bias)
    torch.testing.assert_close(rebuilt, expected, rtol=0, atol=1e-5)


def test_the_memory_account_adds_up(session):
    list(session.generate(requests(session, Sampling(8, ignore_eos=True))))
    use = session.memory()
    assert sum(use.parts.values()) + use.unaccounted_bytes == use.process_peak_bytes
    assert use.kv_bytes_per_token_formula == 2 * 2 * 2 * 16 * 4
    assert use.kv_bytes_per_token_measured == pytest.approx(use.kv_bytes_per_token_formula, rel=0.1)
    assert use.activation_peak_bytes > 0
    assert use.weights_bytes == pytest.approx(session.describe().resident_weight_bytes)


def test_closing_answers_whoever_still_waits(tiny_source, tmp_path):
    for batching in ("continuous", "padded"):
        with serve(tiny_source, Unquantized("float32"), tmp_path, batching=batching) as live:
            request = requests(live, Sampling(400, ignore_eos=True), TEXTS[:1])[0]
            stream = live.stream(request)
            next(stream)
        ends = [chunk.finish_reason for chunk in stream]
        assert ends[-1] in ("error", "length")


def test_a_dead_generation_loop_is_an_error_not_a_hang(tiny_source, tmp_path, monkeypatch):
    with serve(tiny_source, Unquantized("float32"), tmp_path, batching="continuous") as live:
        batcher = live._batchers.greedy
        next(live.generate(requests(live, Sampling(2), TEXTS[:1])))

        def broken(*_):
            raise RuntimeError("no more room")

        monkeypatch.setattr(batcher._manager.batch_processor.scheduler, "schedule_batch", broken)
        done = list(live.generate(requests(live, Sampling(4))))
        assert {c.finish_reason for c in done} == {"error"}
        deadline = time.monotonic() + 10
        while batcher._manager.is_running() and time.monotonic() < deadline:
            time.sleep(0.01)
        after = next(live.generate(requests(live, Sampling(4), TEXTS[:1])))
        assert "no more room" in after.error


def test_other_formats_and_missing_devices_are_refused(tiny_source, tmp_path):
    artifact = Unquantized("float32").quantize(tiny_source, tmp_path, Calibration(), "cpu")
    with pytest.raises(UnsupportedError, match='"gguf"'):
        TransformersEngine().check(artifact.model_copy(update={"format": "gguf"}))
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="no CUDA device"):
            TransformersEngine(device="cuda").check(artifact)


@pytest.mark.parametrize(
    ("scheme", "bits", "activation_bits", "weight_format"),
    [
        (Unquantized("float32"), 32, 32, "float32"),
        (Unquantized("bfloat16"), 16, 16, "bfloat16"),
        (Int8(), 8, 8, "int8"),
        (FourBit("nf4"), 4, 16, "nf4"),
        (FourBit("fp4", double_quant=True), 4, 16, "fp4"),
        (Int8WeightOnly(), 8, 16, "int8"),
        (Int8DynamicActivationInt8Weight(), 8, 8, "int8"),
    ],
    ids=["fp32", "bf16", "int8_bnb", "nf4_bnb", "fp4_bnb", "int8wo", "w8a8"],
)
def test_readback_says_what_runs(
    tiny_source, tmp_path, scheme, bits, activation_bits, weight_format
):
    with serve(tiny_source, scheme, tmp_path) as live:
        effective = live.describe()
        assert live.batch_policy.startswith("padded")
        done = list(live.generate(requests(live, Sampling(4, ignore_eos=True))))
        assert {c.finish_reason for c in done} == {"length"}
    blocks = [layer for layer in effective.linear_layers if layer.example != "lm_head"]
    assert {layer.weight_format for layer in blocks} == {weight_format}
    assert sum(layer.count for layer in blocks) == 14
    assert effective.activation_bits == activation_bits
    assert effective.quantized_fraction == (1.0 if scheme.precision.quantized else 0.0)
    assert effective.left_alone == (["lm_head"] if scheme.precision.quantized else [])
    # Scales cost extra: one a row of 64 or 128 weights here.
    assert bits <= effective.linear_bits_per_weight <= bits + 0.8
    assert effective.resident_weight_bytes == sum(effective.dtype_bytes.values())
    assert (
        effective.parameters == 261 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 5 * 64
    )

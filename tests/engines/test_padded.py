"""The padded batch: slots are refilled, and what a row writes depends on nobody else's."""

from __future__ import annotations

import queue
import threading

import pytest
import torch

from quanteval.engines.padded import PaddedBatcher
from quanteval.engines.slots import Batch, Row
from quanteval.interfaces import Prompt, Request, Sampling

EOS = frozenset({1})
PROMPTS = [tuple(range(5, 5 + n)) for n in (3, 40, 7, 1, 25, 12, 2, 30)]


def request(i, length=12, temperature=0.0, **more):
    sampling = Sampling(length, temperature=temperature, seed=i, ignore_eos=True, **more)
    return Request(f"r{i}", Prompt("", PROMPTS[i % len(PROMPTS)]), sampling)


@pytest.fixture(scope="module")
def model(tiny_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()


@pytest.fixture
def make(model):
    made = []

    def start(rows=3, on=model, cache_tokens=8192):
        made.append(PaddedBatcher(on, EOS, rows=rows, cache_tokens=cache_tokens, why="test"))
        return made[-1]

    yield start
    for batcher in made:
        batcher.close()


def run(batcher, requests):
    """Return each request's tokens and how it ended."""
    events = queue.Queue()
    handles = {}
    for one in requests:
        handles[one.request_id] = batcher.submit(
            one, lambda event, name=one.request_id: events.put((name, event))
        )
    tokens = {one.request_id: [] for one in requests}
    ends = {}
    while len(ends) < len(requests):
        name, event = events.get(timeout=60)
        tokens[name] += event.token_ids
        if event.finish_reason:
            ends[name] = (event.finish_reason, event.error)
    return tokens, ends


def greedy(model, prompt, length):
    ids = list(prompt)
    for _ in range(length):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_rows_write_what_they_write_alone_however_they_are_batched(make, model):
    wanted = [request(i, length=4 + 5 * (i % 4)) for i in range(12)]
    expected = {
        r.request_id: greedy(model, r.prompt.token_ids, r.sampling.max_tokens) for r in wanted
    }
    for rows in (1, 3, 20):
        tokens, ends = run(make(rows), wanted)
        assert tokens == expected
        assert set(ends.values()) == {("length", None)}


def test_sampled_rows_too(make):
    wanted = [request(i, length=3 + 4 * (i % 3), temperature=1.0, top_p=0.9) for i in range(9)]
    alone = run(make(1), wanted)[0]
    assert run(make(4), wanted)[0] == alone


def test_a_freed_slot_is_filled_while_others_go_on(make):
    batcher = make(2)
    order = queue.Queue()
    long, short, late = request(0, 60), request(1, 3), request(2, 3)
    done = threading.Event()
    for one in (long, short, late):

        def deliver(event, name=one.request_id):
            if event.finish_reason:
                order.put(name)
                if name == "r0":
                    done.set()

        batcher.submit(one, deliver)
    assert done.wait(60)
    assert [order.get_nowait() for _ in range(3)] == ["r1", "r2", "r0"]


def started(model, *prompts):
    """Return a batch whose rows have written one token each."""
    rows = [
        Row(str(i), Request(str(i), Prompt("", p), Sampling(99))) for i, p in enumerate(prompts)
    ]
    batch = Batch(model)
    first, logits = batch.begin(rows)
    for row, scores in zip(rows, logits, strict=True):
        row.written.append(int(scores.argmax()))
    batch.join(first)
    return batch, rows


def test_columns_and_slots_that_belong_to_nobody_are_given_back(model):
    """A long prompt that has ended must not weigh on those that follow it for ever."""
    batch, (long, short) = started(model, tuple(range(5, 105)), PROMPTS[3])
    assert batch.mask.shape == (2, 100)
    batch.drop([long])
    batch.tidy()
    assert batch.mask.tolist() == [[1]]
    assert {layer.keys.shape[2] for layer in batch.cache.layers} == {1}
    more, (other,) = started(model, PROMPTS[2])
    batch.join(more)
    assert batch.mask.tolist() == [[0] * 6 + [1], [1] * 7]
    assert batch.live == [short, other]
    assert batch.positions.tolist() == [[0], [6]]


def test_a_freed_slot_is_taken_in_place(model):
    batch, (first, second) = started(model, PROMPTS[4], PROMPTS[2])
    before = [layer.keys.untyped_storage().data_ptr() for layer in batch.cache.layers]
    batch.drop([first])
    more, (third,) = started(model, PROMPTS[0])
    batch.join(more)
    assert batch.slots == [third, second]
    assert [layer.keys.untyped_storage().data_ptr() for layer in batch.cache.layers] == before
    for _ in range(5):
        for row, scores in zip(batch.live, batch.advance(), strict=True):
            row.written.append(int(scores.argmax()))
    for row in (third, second):
        assert row.written == greedy(model, row.request.prompt.token_ids, 6)
    assert [layer.keys.untyped_storage().data_ptr() for layer in batch.cache.layers] == before


def test_slots_without_a_row_never_become_nan(model):
    batch, rows = started(model, *PROMPTS[:4])
    batch.drop([rows[0], rows[2]])
    for _ in range(3):
        logits = batch.advance()
        assert logits.shape[0] == 2
        assert torch.isfinite(logits).all()
        for row, scores in zip(batch.live, logits, strict=True):
            row.written.append(int(scores.argmax()))
    for layer in batch.cache.layers:
        assert torch.isfinite(layer.values).all()


def test_when_the_cache_is_full_the_latest_wait_and_go_on_where_they_were(make, model):
    wanted = [request(i, length=60) for i in range(6)]
    batcher = make(6, cache_tokens=220)
    most = []
    real = Batch.cache_use
    tokens, ends = None, None
    try:
        Batch.cache_use = lambda self: most.append(len(self.slots) * self.columns) or real(self)
        tokens, ends = run(batcher, wanted)
    finally:
        Batch.cache_use = real
    assert max(most) <= 220
    assert set(ends.values()) == {("length", None)}
    assert tokens == {
        r.request_id: greedy(model, r.prompt.token_ids, r.sampling.max_tokens) for r in wanted
    }


def test_a_waiting_sampled_row_draws_on_as_if_nothing_had_happened(make):
    wanted = [request(i, length=60, temperature=1.0) for i in range(5)]
    assert run(make(5, cache_tokens=200), wanted)[0] == run(make(1), wanted)[0]


def test_one_request_may_fill_the_cache_alone(make, model):
    (tokens,) = run(make(3, cache_tokens=50), [request(1, length=9)])[0].values()
    assert tokens == greedy(model, PROMPTS[1], 9)


def test_cancelled_requests_make_room_and_hear_of_their_end_last(make):
    batcher = make(1)
    heard = queue.Queue()
    first = batcher.submit(request(0, 10_000 - 3), heard.put)
    heard.get(timeout=60)
    batcher.cancel(first)
    tokens, _ = run(batcher, [request(1, 5)])
    assert len(tokens["r1"]) == 5
    reasons = [heard.get_nowait().finish_reason for _ in range(heard.qsize())]
    assert reasons == [None] * (len(reasons) - 1) + ["cancelled"]
    batcher.cancel(first)
    assert heard.empty()


def test_a_request_cancelled_while_it_waits_hears_its_end(make):
    batcher = make(1)
    running, waiting = queue.Queue(), queue.Queue()
    first = batcher.submit(request(0, 10_000 - 3), running.put)
    running.get(timeout=60)
    second = batcher.submit(request(1, 5), waiting.put)
    batcher.cancel(second)
    assert waiting.get(timeout=60).finish_reason == "cancelled"
    batcher.cancel(first)
    assert len(run(batcher, [request(2, 5)])[0]["r2"]) == 5
    assert waiting.empty()


def test_events_say_when_the_prompt_was_begun_also_after_giving_way(make):
    batcher = make(6, cache_tokens=220)
    begun = {}
    ends = queue.Queue()
    for one in [request(i, length=60) for i in range(6)]:

        def deliver(event, name=one.request_id):
            begun.setdefault(name, set()).add(event.started_s)
            if event.finish_reason:
                ends.put(name)

        batcher.submit(one, deliver)
    order = [ends.get(timeout=60) for _ in range(6)]
    assert {len(times) for times in begun.values()} == {1}
    assert len({*order}) == 6
    assert None not in set().union(*begun.values())


def test_while_paused_nothing_is_computed(make, model):
    batcher = make(2)
    heard = queue.Queue()
    batcher.submit(request(0, 200), heard.put)
    heard.get(timeout=60)
    with batcher.paused(), batcher.paused():
        before = heard.qsize()
        list(model(torch.tensor([PROMPTS[0]])).logits)
        assert heard.qsize() == before
        assert not batcher._computing
    while (event := heard.get(timeout=60)).finish_reason is None:
        pass
    assert event.finish_reason == "length"


def test_a_failing_forward_ends_its_rows_and_not_the_batcher(make, model):
    class Failing:
        device, config = model.device, model.config
        broken = True

        def forward(self, cache=None, **inputs): ...

        def __call__(self, **inputs):
            if self.broken:
                raise RuntimeError("out of memory")
            return model(**inputs)

    failing = Failing()
    batcher = make(2, failing)
    _, ends = run(batcher, [request(0), request(1)])
    assert set(ends.values()) == {("error", "RuntimeError: out of memory")}
    failing.broken = False
    tokens, ends = run(batcher, [request(2, 4)])
    assert ends == {"r2": ("length", None)}
    assert len(tokens["r2"]) == 4


def test_after_closing_requests_are_answered_at_once(make):
    batcher = make(1)
    batcher.close()
    _, ends = run(batcher, [request(0)])
    assert ends == {"r0": ("error", "the session was closed")}


def test_other_caches_are_not_refilled_while_rows_run(make):
    """A sliding window's cache counts columns of its own, so its batch runs to its end."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=16, initializer_range=0.2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    wanted = [request(i, length=4 + 5 * (i % 2)) for i in range(5)]
    tokens, _ = run(make(2, model), wanted)
    assert tokens == {
        r.request_id: greedy(model, r.prompt.token_ids, r.sampling.max_tokens) for r in wanted
    }

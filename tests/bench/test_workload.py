"""Prompts and plans: exact lengths, no shared beginnings, the same requests wherever they are planned."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quanteval.bench.plan import LoadBench
from quanteval.bench.workload import (
    PREFIX_TOKENS,
    Bucket,
    PlannedRequest,
    PromptMaker,
    corpus,
    corpus_fingerprint,
    draw_buckets,
)
from quanteval.engines.fake import ByteTokenizer

PLAIN, WITH_BOS = (PromptMaker(ByteTokenizer(add_bos=bos), seed=0) for bos in (False, True))
BENCH = LoadBench(buckets=(Bucket(8, 16, 3.0), Bucket(32, 64, 1.0, output_tokens=9)))


def prompt(maker, tokens, place):
    return maker.request(PlannedRequest("r", "b", tokens, 3, place)).prompt


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(-(10**5), 10**5))
def test_every_length_is_exact_at_every_place(tokens, place):
    tokenizer = ByteTokenizer()
    plain, with_bos = prompt(PLAIN, tokens, place), prompt(WITH_BOS, tokens, place)
    assert len(plain.token_ids) == len(with_bos.token_ids) == tokens
    assert with_bos.token_ids[1:] == plain.token_ids[: tokens - 1]
    assert plain.text == tokenizer.decode(plain.token_ids)
    # Cutting bytes may split a character at either end, never the text between.
    assert plain.text.strip("\ufffd") in corpus() * 2


def test_no_two_prompts_begin_alike_though_the_text_repeats_whole_sections():
    places = [*range(3000), *range(-3000, 0)]
    starts = [prompt(PLAIN, 40, place).token_ids[:PREFIX_TOKENS] for place in places]
    assert len(set(starts)) == len(places)
    text = corpus().encode()
    naive = [text[i : i + PREFIX_TOKENS] for i in range(0, len(text) - 40, 77)]
    assert len(set(naive)) < len(naive)


def test_the_text_is_named_by_its_hash_and_the_python_it_comes_from():
    found = corpus_fingerprint()
    assert found["sha256"] == hashlib.sha256(corpus().encode()).hexdigest()
    assert found["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    st.integers(0, 200),
    st.integers(0, 9),
)
def test_shares_are_as_near_to_the_weights_as_the_count_allows(weights, count, seed):
    buckets = [Bucket(i + 1, i + 1, weight) for i, weight in enumerate(weights)]
    drawn = draw_buckets(buckets, count, random.Random(seed))
    assert len(drawn) == count
    for bucket in buckets:
        exact = count * bucket.weight / sum(weights)
        assert abs(drawn.count(bucket) - exact) < 1 + 1e-9


def test_a_plan_keeps_its_promises():
    places = []
    for point, requests in BENCH.load_points():
        ramp = [r for r in requests if r.role == "ramp"]
        assert requests[: len(ramp)] == ramp
        assert len(ramp) == (0 if point.warmup else point.concurrency)
        places += [r.place for r in requests]
        for request in requests:
            low, high = map(int, request.bucket.split("-"))
            output = 9 if low == 32 else BENCH.output_tokens
            assert low <= request.prompt_tokens <= high
            assert request.output_tokens == output or request.role == "ramp"
            assert request.prompt_tokens == high or not point.warmup
    assert len(set(places)) == len(places)


def test_slots_do_not_start_in_step():
    bench = LoadBench(buckets=(Bucket(8, 8),), output_tokens=18, concurrencies=(8,))
    *_, (_, requests) = bench.load_points()
    outputs = [r.output_tokens for r in requests if r.role == "ramp"]
    assert outputs == [2, 4, 6, 8, 10, 12, 14, 16]


def test_repetitions_do_equal_work_on_other_texts():
    plans = [
        requests
        for point, requests in LoadBench(repetitions=2).load_points()
        if point.name == "closed_loop_8"
    ]
    first, second = ([(r.prompt_tokens, r.output_tokens) for r in plan] for plan in plans)
    assert first == second
    assert not {r.place for r in plans[0]} & {r.place for r in plans[1]}


CHANGES = {
    "buckets": (Bucket(8, 16, 2.0), Bucket(32, 64, 1.0, output_tokens=9)),
    "output_tokens": 25,
    "single_stream_requests": 6,
    "concurrencies": (4,),
    "requests_per_slot": 3,
    "repetitions": 2,
    "timeout_s": 301.0,
    "seed": 1,
}


def test_the_fingerprint_is_plain_json_and_covers_every_field():
    assert set(CHANGES) == set(vars(BENCH))
    before = BENCH.fingerprint()
    assert json.loads(json.dumps(before)) == before
    for name, value in CHANGES.items():
        assert LoadBench(**{**vars(BENCH), name: value}).fingerprint() != before, name
    # What the requests are like is hashed as well, so that planning otherwise cannot go unnoticed.
    hashes = {
        name: LoadBench(**{**vars(BENCH), name: value}).fingerprint()["requests_sha256"]
        for name, value in CHANGES.items()
    }
    same = {name for name, digest in hashes.items() if digest == before["requests_sha256"]}
    assert same <= {"timeout_s", "buckets"}


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_another_process_plans_the_same_requests(hash_seed):
    code = "from quanteval.bench.plan import LoadBench; print(LoadBench().fingerprint()['requests_sha256'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == LoadBench().fingerprint()["requests_sha256"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"buckets": (Bucket(1, 2), Bucket(1, 2, 3.0))}, "no two alike"),
        ({"concurrencies": (4, 4)}, "no two alike"),
        ({"timeout_s": float("nan")}, "positive and finite"),
        ({"timeout_s": float("inf")}, "positive and finite"),
        ({"seed": -1}, "negative"),
    ],
)
def test_plans_that_mean_nothing_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        LoadBench(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        (0, 5),
        (5, 4),
        (1, 2, 0.0),
        (1, 2, float("nan")),
        (1, 2, float("inf")),
        (1, 2, 1.0, 0),
    ],
)
def test_buckets_that_mean_nothing_are_refused(fields):
    with pytest.raises(ValueError, match="must be"):
        Bucket(*fields)


def test_ids_are_unique_within_a_session():
    ids = [r.request_id for _, requests in LoadBench(repetitions=3).load_points() for r in requests]
    assert len(set(ids)) == len(ids)

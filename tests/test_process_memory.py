"""The account of a process: kinds of mappings, what the allocator holds, and parts that add up to the peak."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quanteval.engines.memory import with_cuda_stats
from quanteval.process_memory import (
    Mappings,
    ProcessMemory,
    explain_peak,
    mapped_bytes,
    parse_smaps,
    snapshot,
)
from quanteval.records import MemoryUse

MB = 10**6
SMAPS = """\
5581a0000000-5581a0100000 r-xp 00000000 08:01 11 /usr/bin/python3.11
Size:               1024 kB
Rss:                 512 kB
Anonymous:             0 kB
5581c0000000-5581c8000000 rw-p 00000000 00:00 0                          [heap]
Rss:                2048 kB
7f0000000000-7f0003ff0000 rw-p 00000000 00:00 0
Rss:                4096 kB
7f0003ff0000-7f0004000000 ---p 00000000 00:00 0
Rss:                   0 kB
7f1234567000-7f1334567000 rw-p 00000000 00:00 0
Rss:                8192 kB
7f2000000000-7f2010000000 r--p 00000000 08:01 12 /models/a b/model.safetensors
Rss:               16384 kB
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
Rss:                  64 kB
"""


def test_mappings_by_kind():
    found = parse_smaps(SMAPS.splitlines())
    assert found == Mappings(
        library=512 << 10, weight_file=16384 << 10, malloc=6144 << 10, anonymous=8256 << 10
    )
    assert found.resident == (512 + 2048 + 4096 + 8192 + 16384 + 64) << 10


def use(**fields):
    given_fields = {
        "device": "cpu",
        "before_load_bytes": 0,
        "weights_bytes": 0,
        "kv_cache_bytes": 0,
        "kv_cache_tokens": 0,
        "kv_bytes_per_token_formula": 0,
        "kv_bytes_per_token_measured": 0,
        "activation_peak_bytes": 0,
        "activation_peak_how": "",
        "process_peak_bytes": 0,
        "unaccounted_bytes": 0,
        **fields,
    }
    return MemoryUse(**given_fields)


def memory(library=0, weight_file=0, malloc=0, anonymous=0, in_use=0, peak=0):
    mappings = Mappings(library * MB, weight_file * MB, malloc * MB, anonymous * MB)
    return ProcessMemory(mappings, in_use * MB, 0, (peak or mappings.resident // MB) * MB)


BEFORE = memory(library=90, malloc=140, anonymous=170, in_use=140)


def test_every_part_lands_where_it_belongs():
    # 30 of the 100 weights are mapped; 20 of the file's pages are left from weights that were repacked.
    at = memory(library=130, weight_file=50, malloc=300, anonymous=200, in_use=250, peak=720)
    told = use(
        weights_bytes=100 * MB,
        weights_mapped_bytes=30 * MB,
        kv_cache_bytes=25 * MB,
        activation_peak_bytes=5 * MB,
    )
    made = explain_peak(told, BEFORE, {"bench": at}, ["bench"])
    parts = {name: size // MB for name, size in made.parts.items()}
    # In use at rest: (250 + 200) - (140 + 170) = 140, of them 70 weights. Freed: 50, and 40 given back.
    assert parts == {
        "before_load": 400,
        "library": 40,
        "weights": 100,
        "weight_file": 20,
        "kv_cache": 25,
        "activation_peak": 5,
        "runtime": 70,
        "allocator": 60,
    }
    assert made.unaccounted_bytes == 0
    assert made.process_peak_bytes == 720 * MB
    assert made.account_phase == "bench"


def test_a_cache_allocated_once_is_in_use_at_rest():
    at = memory(library=130, malloc=300, anonymous=200, in_use=250)
    told = use(kv_cache_bytes=25 * MB, kv_cache_tokens=64, kv_pool_tokens=64)
    made = explain_peak(told, BEFORE, {"bench": at}, ["bench"])
    assert made.runtime_bytes == (140 - 25) * MB
    assert made.allocator_bytes == 50 * MB


def test_the_highest_peak_among_the_serving_phases_is_explained():
    phases = {
        "load": memory(malloc=2000, in_use=2000, peak=3000),
        "warmup": memory(library=90, malloc=400, anonymous=170, in_use=400, peak=700),
        "bench": memory(library=90, malloc=300, anonymous=170, in_use=300),
        "task:a": None,
    }
    made = explain_peak(use(), BEFORE, phases, ["warmup", "bench", "task:a"])
    assert (made.account_phase, made.process_peak_bytes) == ("warmup", 700 * MB)


@pytest.mark.parametrize(
    ("told", "before", "phases"),
    [
        (use(device="cuda"), BEFORE, {"bench": BEFORE}),
        (use(), None, {"bench": BEFORE}),
        (use(), BEFORE, {"bench": None}),
        (use(), BEFORE, {}),
    ],
)
def test_without_snapshots_nothing_is_made_up(told, before, phases):
    assert explain_peak(told, before, phases, ["bench"]) is told


sizes = st.integers(0, 2000)


@given(
    at=st.builds(
        memory,
        library=sizes,
        weight_file=sizes,
        malloc=sizes,
        anonymous=sizes,
        in_use=sizes,
        peak=sizes,
    ),
    weights=sizes,
    cache=sizes,
    activation=sizes,
)
def test_parts_and_remainder_always_add_up(at, weights, cache, activation):
    told = use(
        weights_bytes=weights * MB, kv_cache_bytes=cache * MB, activation_peak_bytes=activation * MB
    )
    made = explain_peak(told, BEFORE, {"x": at}, ["x"])
    assert sum(made.parts.values()) + made.unaccounted_bytes == made.process_peak_bytes


# --------------------------------------------------------------------------- this process


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_buffer_is_held_and_then_returned():
    before = snapshot()
    assert before is not None
    buffer = bytearray(b"x") * (64 * MB)
    during = snapshot()
    assert during.held - before.held == pytest.approx(64 * MB, rel=0.1)
    del buffer
    after = snapshot()
    assert after.held - before.held < 16 * MB
    assert after.returned >= 40 * MB or after.freed - before.freed >= 40 * MB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_read_from_a_mapped_file_are_told_apart(tmp_path):
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1 << 20)}, path)
    with safe_open(path, "pt") as file:
        mapped, copied = file.get_tensor("a"), torch.ones(1 << 20)
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (mapped, copied)
        }
        assert mapped_bytes(storages) in (4 << 20, 0)
        assert mapped_bytes({copied.untyped_storage().data_ptr(): 4 << 20}) == 0


# --------------------------------------------------------------------------- CUDA, from recorded figures

STATS = {
    "allocated_bytes.all.current": 8_000 * MB,
    "allocated_bytes.all.peak": 9_000 * MB,
    "reserved_bytes.all.current": 9_800 * MB,
    "reserved_bytes.all.peak": 10_000 * MB,
    "inactive_split_bytes.all.current": 300 * MB,
    "inactive_split_bytes.all.peak": 700 * MB,
}


def test_cuda_figures():
    told = use(
        device="cuda",
        before_load_bytes=1,
        weights_bytes=6_000 * MB,
        kv_cache_bytes=2_000 * MB,
        activation_peak_bytes=900 * MB,
    )
    made = with_cuda_stats(told, STATS, in_use_bytes=10_600 * MB)
    assert made.process_peak_bytes == 10_000 * MB
    assert made.allocator_bytes == 1_000 * MB
    assert made.fragmentation_bytes == 300 * MB
    assert made.driver_other_bytes == 800 * MB
    assert made.unaccounted_bytes == 100 * MB
    assert sum(made.parts.values()) + made.unaccounted_bytes == made.process_peak_bytes


def test_cuda_without_statistics_says_so():
    made = with_cuda_stats(use(device="cuda"), {}, 0)
    assert (made.process_peak_bytes, made.allocator_bytes, made.driver_other_bytes) == (0, 0, 0)

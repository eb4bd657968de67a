"""Peaks of this machine, measured."""

from __future__ import annotations

import pytest

from quanteval.engines import machine


def test_peaks_are_measured_once(monkeypatch):
    monkeypatch.setattr(machine, "BUDGET_S", 0.02)
    monkeypatch.setitem(machine.COPY_BYTES, "cpu", 8 << 20)
    monkeypatch.setitem(machine.SIDE, "cpu", 128)
    machine.measure_peaks.cache_clear()
    found = machine.measure_peaks("cpu")
    assert found.copy_bytes_per_s > 1e8
    assert {"float32", "bfloat16"} <= set(found.matmul_flops_per_s)
    assert all(rate > 1e6 for rate in found.matmul_flops_per_s.values())
    assert machine.measure_peaks("cpu") is found
    machine.measure_peaks.cache_clear()


def test_what_the_device_refuses_is_left_out(monkeypatch):
    def refuse(name, device):
        raise RuntimeError(f"{name} is not implemented")

    monkeypatch.setattr(machine, "_flops_per_s", refuse)
    monkeypatch.setattr(machine, "_copy_bytes_per_s", lambda device: 1e9)
    machine.measure_peaks.cache_clear()
    found = machine.measure_peaks("cpu")
    assert (found.copy_bytes_per_s, found.matmul_flops_per_s) == (1e9, {})
    machine.measure_peaks.cache_clear()


def test_the_shortest_call_counts(monkeypatch):
    # One call to warm up, three measured ones of 5, 2 and 7 s; each asks the clock twice.
    ticks = iter([0, 9, 10, 10, 15, 100, 102, 200, 207, 300])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: float(next(ticks)))
    assert machine._best_s(lambda: None, "cpu") == 2.0


def test_a_device_that_is_not_there_has_no_figures():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert machine._attempt(lambda: machine._copy_bytes_per_s("cuda")) is None

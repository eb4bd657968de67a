"""Readings of a device through a driver that is played from a record."""

# The driver's own names.
# ruff: noqa: N802

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from quanteval.engines.nvml import Sampler

VALUES = {2: 90.0, 3: 42.0, 5: 31.5, 10: 77.0}


class Played:
    """The part of pynvml that is used; `refuses` names functions that raise, `failing` metrics that do."""

    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL = 2
    NVML_GPM_METRIC_SM_OCCUPANCY = 3
    NVML_GPM_METRIC_ANY_TENSOR_UTIL = 5
    NVML_GPM_METRIC_DRAM_BW_UTIL = 10

    def __init__(self, *, gpm=True, refuses=(), failing=()):
        self.gpm, self.refuses, self.failing = gpm, refuses, failing
        self.open_samples = 0
        self.initialized = 0

    def __getattribute__(self, name):
        if name.startswith("nvml") and name in object.__getattribute__(self, "refuses"):

            def refuse(*_):
                raise RuntimeError("Not Supported\n(code 3)")

            return refuse
        return object.__getattribute__(self, name)

    def nvmlInit(self):
        self.initialized += 1

    def nvmlShutdown(self):
        self.initialized -= 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return f"device {index}"

    def nvmlDeviceGetPowerUsage(self, handle):
        return 350_000

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=80, memory=40)

    def nvmlGpmQueryDeviceSupport(self, handle):
        return SimpleNamespace(isSupportedDevice=int(self.gpm))

    def nvmlGpmSampleAlloc(self):
        self.open_samples += 1
        return object()

    def nvmlGpmSampleFree(self, sample):
        self.open_samples -= 1

    def nvmlGpmSampleGet(self, handle, sample):
        return sample

    def c_nvmlGpmMetricsGet_t(self):
        return SimpleNamespace(metrics=[SimpleNamespace() for _ in range(333)])

    def nvmlGpmMetricsGet(self, asked):
        assert asked.sample1 is not asked.sample2
        for metric in asked.metrics[: asked.numMetrics]:
            metric.nvmlReturn = 3 if metric.metricId in self.failing else 0
            metric.value = VALUES[metric.metricId]


def sampled(driver):
    with Sampler(nvml=driver, every_s=60) as sampler:
        pass
    assert (driver.open_samples, driver.initialized) == (0, 0)
    return sampler.sample


def test_a_device_that_tells_everything():
    sample = sampled(Played())
    assert sample.source == "nvml-gpm"
    assert (sample.sm_active, sample.sm_occupancy) == (0.9, 0.42)
    assert (sample.tensor_active, sample.memory_bandwidth) == (0.315, 0.77)
    assert sample.power_w == 350
    assert sample.reason == ""


def test_a_metric_that_fails_is_none_and_named():
    sample = sampled(Played(failing=(5,)))
    assert sample.tensor_active is None
    assert "tensor_active" in sample.reason
    assert sample.sm_occupancy == 0.42


def test_an_older_device_tells_power_and_why_there_is_no_more():
    sample = sampled(Played(gpm=False))
    assert (sample.source, sample.power_w, sample.sm_occupancy) == ("nvml", 350, None)
    assert "Hopper" in sample.reason
    assert "DCGM" in sample.reason
    assert "80 %" in sample.reason


@pytest.mark.parametrize(
    "refused",
    [
        "nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmMetricsGet",
        "nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates",
    ],
)  # fmt: skip
def test_what_a_driver_refuses_never_raises_and_is_said(refused):
    sample = sampled(Played(refuses=(refused,)))
    if "Gpm" in refused:
        assert "Not Supported (code 3)" in sample.reason
        assert sample.sm_occupancy is None
    else:
        assert sample.sm_occupancy == 0.42


@pytest.mark.parametrize("refused", ["nvmlInit", "nvmlDeviceGetHandleByIndex"])
def test_without_a_driver_there_is_a_reason(refused):
    with Sampler(nvml=Played(refuses=(refused,))) as sampler:
        pass
    assert sampler.sample.source == "none"
    assert "Not Supported" in sampler.sample.reason


def test_without_the_package_there_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Sampler() as sampler:
        pass
    assert "nvidia-ml-py" in sampler.sample.reason


def test_the_block_s_own_error_passes():
    driver = Played()
    with pytest.raises(ZeroDivisionError), Sampler(nvml=driver):
        1 / 0  # noqa: B018
    assert (driver.open_samples, driver.initialized) == (0, 0)


def test_the_installed_binding_has_what_is_used():
    pynvml = pytest.importorskip("pynvml")
    for name in [n for n in vars(Played) if n.startswith(("nvml", "NVML", "c_nvml"))]:
        assert hasattr(pynvml, name), name
        if name.startswith("NVML"):
            assert getattr(pynvml, name) == getattr(Played, name)
    asked = pynvml.c_nvmlGpmMetricsGet_t()
    asked.metrics[0].metricId = 3
    assert (asked.metrics[0].nvmlReturn, asked.metrics[0].value) == (0, 0.0)

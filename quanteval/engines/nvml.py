"""What an NVIDIA device did during a load point, read from its driver through NVML.

Hopper and newer tell SM occupancy, tensor activity and memory bandwidth (GPM: a difference of two samples). Older
devices tell utilization rates and power only; there DCGM's profiling fields have the rest (1002 SM active, 1003 SM
occupancy, 1004 tensor active, 1005 DRAM active), which need a DCGM host engine and are not read here. What is not told
is None, with the reason. `pynvml` is imported when a sampler is opened, and may be missing.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from quanteval.records import UtilizationSample

GPM = {
    "sm_active": "SM_UTIL",
    "sm_occupancy": "SM_OCCUPANCY",
    "tensor_active": "ANY_TENSOR_UTIL",
    "memory_bandwidth": "DRAM_BW_UTIL",
}
"""Fields of UtilizationSample and the NVML_GPM_METRIC_* that each comes from, in per cent there."""
DCGM_HINT = "DCGM's profiling fields 1002-1005 tell it where a DCGM host engine runs"


def nothing(reason: str) -> UtilizationSample:
    """Return a sample without figures."""
    return UtilizationSample(source="none", reason=reason)


class Sampler:
    """Reads the device at the beginning and the end of a block, and power in between; `sample` tells after it.

    Never raises: a driver that fails leaves a reason. With MIG, figures are those of the whole device, or refused.
    """

    def __init__(self, index: int = 0, *, every_s: float = 0.2, nvml: Any = None) -> None:
        self._index = index
        self._every_s = every_s
        self._nvml = nvml
        self._handle: Any = None
        self._begin: Any = None
        self._why = ""
        self._readings: list[tuple[float | None, float | None]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.sample = nothing("nothing was sampled")

    def __enter__(self) -> Sampler:
        """Open the driver and take the first sample."""
        try:
            if self._nvml is None:
                self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByIndex(self._index)
        except ImportError:
            self.sample = nothing("pynvml is not installed: pip install nvidia-ml-py")
            return self
        except Exception as error:
            self.sample = nothing(f"NVML: {_line(error)}")
            return self
        self._begin, self._why = self._gpm_sample()
        self._thread = threading.Thread(target=self._loop, name="nvml", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the last sample and close the driver."""
        if self._handle is None:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.sample = self.read()
        if self._begin is not None:
            self._quietly(self._nvml.nvmlGpmSampleFree, self._begin)
        self._quietly(self._nvml.nvmlShutdown)

    def read(self) -> UtilizationSample:
        """Return what was seen since the beginning; inside the block."""
        if self._handle is None:
            return self.sample
        self._read()
        try:
            return self._summary()
        except Exception as failure:
            return nothing(f"NVML: {_line(failure)}")

    # ---- readings

    def _loop(self) -> None:
        while not self._stop.wait(self._every_s):
            self._read()

    def _read(self) -> None:
        """Note power in watts and the share of time in which any kernel ran."""
        power = self._quietly(self._nvml.nvmlDeviceGetPowerUsage, self._handle)
        rates = self._quietly(self._nvml.nvmlDeviceGetUtilizationRates, self._handle)
        self._readings.append(
            (None if power is None else power / 1e3, None if rates is None else rates.gpu / 100)
        )

    def _quietly(self, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception:
            return None

    def _gpm_sample(self) -> tuple[Any, str]:
        """Return a GPM sample, or None and why there is none."""
        nvml = self._nvml
        try:
            support = nvml.nvmlGpmQueryDeviceSupport(self._handle)
            if not getattr(support, "isSupportedDevice", support):
                return None, f"this device has no GPM (Hopper and newer have it); {DCGM_HINT}"
            sample = nvml.nvmlGpmSampleAlloc()
        except Exception as error:
            return None, f"GPM: {_line(error)}; {DCGM_HINT}"
        try:
            nvml.nvmlGpmSampleGet(self._handle, sample)
        except Exception as error:
            self._quietly(nvml.nvmlGpmSampleFree, sample)
            return None, f"GPM: {_line(error)}; {DCGM_HINT}"
        return sample, ""

    def _summary(self) -> UtilizationSample:
        power = _mean([watts for watts, _ in self._readings])
        busy = _mean([share for _, share in self._readings])
        shares: Mapping[str, float | None] = {}
        reason = self._why
        if self._begin is not None:
            end, reason = self._gpm_sample()
            if end is not None:
                try:
                    shares, reason = self._gpm_shares(end)
                finally:
                    self._quietly(self._nvml.nvmlGpmSampleFree, end)
        if any(value is not None for value in shares.values()):
            return UtilizationSample(source="nvml-gpm", power_w=power, reason=reason, **shares)
        if busy is not None:
            reason = f"{reason}; a kernel ran {100 * busy:.0f} % of the time, which says nothing of occupancy"
        return UtilizationSample(source="nvml", power_w=power, reason=reason)

    def _gpm_shares(self, end: Any) -> tuple[dict[str, float | None], str]:
        """Ask for the metrics between the first sample and `end`; a metric that fails is None and named."""
        nvml = self._nvml
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = len(GPM)
        asked.sample1, asked.sample2 = self._begin, end
        for i, name in enumerate(GPM.values()):
            asked.metrics[i].metricId = getattr(nvml, f"NVML_GPM_METRIC_{name}")
        nvml.nvmlGpmMetricsGet(asked)
        shares: dict[str, float | None] = {}
        missing = []
        for i, field in enumerate(GPM):
            ok = asked.metrics[i].nvmlReturn == 0
            shares[field] = asked.metrics[i].value / 100 if ok else None
            if not ok:
                missing.append(f"{field} (NVML error {asked.metrics[i].nvmlReturn})")
        return shares, f"not told: {', '.join(missing)}" if missing else ""


@contextlib.contextmanager
def watch_device(index: int = 0) -> Iterator[Callable[[], UtilizationSample]]:
    """Watch a device while the block runs; what is yielded tells, once, at the block's end, what it did."""
    with Sampler(index) as sampler:
        yield sampler.read


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__

"""Readings of an NVIDIA device through its management library, and through GPM where the driver has it.

A reading that the device or driver does not support is left out for good after its first failure, any other for once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import pynvml

Reading = dict[str, float]
PERCENT = 100.0

THROTTLES = {  # bits of NVML's clock event reasons that mean less speed than asked for -> the word for a reader
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
GPM = {  # column -> name of the metric in pynvml; each a percentage
    "gpm_sm_active": "NVML_GPM_METRIC_SM_UTIL",
    "gpm_tensor_active": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "gpm_dram_active": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}


def throttles(bits: int) -> list[str]:
    """Return the words for the throttling among NVML's clock event reasons."""
    return [word for bit, word in THROTTLES.items() if bits & bit]


FOR_GOOD = ("NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "NO_PERMISSION", "ARGUMENT_VERSION_MISMATCH", "DEPRECATED")


class Nvml:
    """One device. Making one raises `pynvml.NVMLError` (or ImportError) where there is no library or no such device."""

    def __init__(self, bus_id: str | None = None, index: int = 0) -> None:
        self._library: Any = pynvml
        self._for_good = {getattr(pynvml, f"NVML_ERROR_{name}", None) for name in FOR_GOOD}
        pynvml.nvmlInit()
        try:
            self.handle = (
                pynvml.nvmlDeviceGetHandleByPciBusId(bus_id) if bus_id else pynvml.nvmlDeviceGetHandleByIndex(index)
            )
        except pynvml.NVMLError:
            pynvml.nvmlShutdown()
            raise
        self._ways: dict[str, Callable[[], Mapping[str, float]]] = {
            "utilisation": self._utilisation,
            "sm clock": lambda: {"nvml_sm_mhz": pynvml.nvmlDeviceGetClockInfo(self.handle, pynvml.NVML_CLOCK_SM)},
            "memory clock": lambda: {"nvml_mem_mhz": pynvml.nvmlDeviceGetClockInfo(self.handle, pynvml.NVML_CLOCK_MEM)},
            "clock events": lambda: {"nvml_clock_events": pynvml.nvmlDeviceGetCurrentClocksEventReasons(self.handle)},
            "power": lambda: {"nvml_power_w": pynvml.nvmlDeviceGetPowerUsage(self.handle) / 1e3},
            "energy": lambda: {"nvml_energy_j": pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1e3},
            "memory": lambda: {"nvml_used_bytes": pynvml.nvmlDeviceGetMemoryInfo(self.handle).used},
            "processes": self._processes,
        }
        self.gpm = self._gpm_or_none()
        if self.gpm is not None:
            self._ways["gpm"] = self.gpm.read

    @property
    def name(self) -> str:
        """Return the device's name."""
        name = self._library.nvmlDeviceGetName(self.handle)
        return name.decode() if isinstance(name, bytes) else str(name)

    def read(self) -> Reading:
        """Return what the device says now. Shares are 0 to 1, clocks MHz, power watts, energy joules since boot."""
        found: Reading = {}
        for way, ask in list(self._ways.items()):
            try:
                found.update(ask())
            except self._library.NVMLError as error:
                if error.value in self._for_good:
                    del self._ways[way]
        return found

    def close(self) -> None:
        """Give the library back."""
        with contextlib.suppress(self._library.NVMLError):
            if self.gpm is not None:
                self.gpm.close()
            self._library.nvmlShutdown()

    def _utilisation(self) -> Reading:
        rates = self._library.nvmlDeviceGetUtilizationRates(self.handle)
        return {"nvml_kernel_busy": rates.gpu / PERCENT, "nvml_memory_busy": rates.memory / PERCENT}

    def _processes(self) -> Reading:
        """Processes that compute there besides this one, which is among them: it has its model there.

        In a container the numbers of processes are the host's, so this one is not looked for by its own.
        """
        there = len(self._library.nvmlDeviceGetComputeRunningProcesses(self.handle))
        return {"nvml_foreign_processes": max(0, there - 1)}

    def _gpm_or_none(self) -> _Gpm | None:
        try:
            if self._library.nvmlGpmQueryDeviceSupport(self.handle).isSupportedDevice:
                return _Gpm(self._library, self.handle)
        except (self._library.NVMLError, AttributeError):  # an old driver, or an old binding
            pass
        return None


class _Gpm:
    """Activity between two samples of the device's performance counters."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle
        self._last, self._next = library.nvmlGpmSampleAlloc(), library.nvmlGpmSampleAlloc()
        library.nvmlGpmSampleGet(handle, self._last)
        self._asked = library.c_nvmlGpmMetricsGet_t()
        self._asked.version, self._asked.numMetrics = library.NVML_GPM_METRICS_GET_VERSION, len(GPM)
        for place, metric in enumerate(GPM.values()):
            self._asked.metrics[place].metricId = getattr(library, metric)

    def read(self) -> Reading:
        """Return the shares since the last reading."""
        self._library.nvmlGpmSampleGet(self._handle, self._next)
        self._asked.sample1, self._asked.sample2 = self._last, self._next
        self._library.nvmlGpmMetricsGet(self._asked)
        self._last, self._next = self._next, self._last
        got = zip(GPM, self._asked.metrics, strict=False)
        return {column: metric.value / PERCENT for column, metric in got if metric.nvmlReturn == 0}

    def close(self) -> None:
        """Free both samples."""
        for sample in (self._last, self._next):
            self._library.nvmlGpmSampleFree(sample)

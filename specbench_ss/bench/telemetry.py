"""Telemetry of a sample: host and GPU readings, and noise detection.

A reading that the device or driver does not support is dropped after its first failure.
Other failures skip one reading.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import psutil
import pynvml
import torch

from specbench_ss.errors import UserError, error_text
from specbench_ss.runs.config import Recording
from specbench_ss.runs.records import SampleRecord
from specbench_ss.runs.run_dir import TELEMETRY, Readings, RunStore

DECIMALS = 4  # of a stored reading
MEANS = (  # columns whose mean over the sample is a field of its record
    "host_cpu_share", "host_foreign_share", "nvml_kernel_busy", "nvml_memory_busy", "nvml_sm_mhz", "nvml_power_w",
    "gpm_sm_active", "gpm_tensor_active", "gpm_dram_active",
)  # fmt: skip


class Seen:
    """Readings of one sample by column; None if a reading lacks a column.

    The first reading is before the sample and the last one after it. The first one's shares are of the time before and
    excluded from means. problem: reason of a failed reading, or ''; a failed reading has no column.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.columns: dict[str, list[float | None]] = {}
        self.core_shares: list[list[float | None]] = []
        self.problem = ""

    def add(self, when: float, reading: Mapping[str, float], core_share: Sequence[float] = ()) -> None:
        """Add a reading. when: Unix time. Values that are not finite become None.

        Counters whose SM activity is exactly 0 had no new measurement, since the device works during a sample.
        """
        if reading.get("gpm_sm_active") == 0:
            reading = {name: value for name, value in reading.items() if name not in GPM}
        for name in reading:
            self.columns.setdefault(name, [None] * len(self.times))
        self.times.append(when)
        for name, column in self.columns.items():
            column.append(_finite(reading.get(name)))
        self.core_shares.append([_finite(share) for share in core_share])

    @property
    def span(self) -> float:
        """Return the seconds from the first reading to the last."""
        return self.times[-1] - self.times[0] if self.times else 0.0

    def within(self, name: str) -> list[float]:
        """Return the values of a column since the start of the sample."""
        return [value for value in self.columns.get(name, [])[1:] if value is not None]

    def mean(self, name: str) -> float | None:
        """Return the mean over time; each reading is weighted by the time since the one before that has a value."""
        pairs = list(zip(self.times, self.columns.get(name, []), strict=False))
        present = [*pairs[:1], *((when, value) for when, value in pairs[1:] if value is not None)]
        spans = [b - a for (a, _), (b, _) in zip(present, present[1:], strict=False)]
        total = sum(spans)
        weighted = sum(span * (value or 0.0) for span, (_, value) in zip(spans, present[1:], strict=True))
        return weighted / total if total > 0 else None

    def growth(self, name: str) -> float | None:
        """Return the increase of a counter from the first reading to the last; None if either lacks it."""
        first, *_, last = self.columns.get(name) or [None, None] if len(self.times) > 1 else [None, None]
        return last - first if first is not None and last is not None else None

    def summary(self, tokens: int) -> dict[str, Any]:
        """Return the telemetry fields of the sample's record. tokens: of its answer."""
        fields: dict[str, Any] = {name: _rounded(self.mean(name)) for name in MEANS}
        faults, energy = self.growth("host_page_faults"), self.growth("nvml_energy_j")
        rss = self.within("host_rss_bytes")
        fields["host_rss_bytes"] = int(max(rss)) if rss else None
        fields["host_page_faults"] = None if faults is None else int(faults)
        fields["energy_j"] = _rounded(energy)
        fields["joules_per_token"] = _rounded(energy / tokens) if energy is not None and tokens else None
        return fields

    def as_columns(self) -> dict[str, Any]:
        """Return the readings as JSON-ready data: `t_s` since the first one, then every column."""
        start = self.times[0] if self.times else 0.0
        shares = {name: [_rounded(value) for value in column] for name, column in self.columns.items()}
        cores = {"host_core_share": [[None if x is None else round(x, 2) for x in row] for row in self.core_shares]}
        return {"t_s": [round(t - start, DECIMALS) for t in self.times], **shares, **cores}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DECIMALS)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


Reading = dict[str, float]  # column -> value
BUSY = ("user", "nice", "system", "irq", "softirq", "steal")  # CPU times; guest times are included in user


class Host:
    """CPU of this machine, limited to the cores of this process.

    cores: those that the process may run on. Shares are of the time since the last reading.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        affinity = getattr(os, "sched_getaffinity", None)
        self.cores: list[int] = sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))
        self.core_share: list[float] = []
        self._before = self._times()

    def read(self, slow: bool = False) -> Reading:
        """Return the CPU usage since the last reading. Shares are of all usable cores, 0 to 1.

        host_cpu_share: by this process; host_foreign_share: by all others. core_share: busy share of each core.
        slow: also read the frequency, which takes milliseconds.
        """
        reading = self._shares()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        reading["host_rss_bytes"] = self._process.memory_info().rss
        reading["host_page_faults"] = usage.ru_minflt + usage.ru_majflt
        if slow:
            with contextlib.suppress(Exception):  # unsupported on some systems, with various errors
                reading["host_mhz"] = psutil.cpu_freq().current
        return reading

    def _shares(self) -> Reading:
        (wall_0, busy_0, own_0), now = self._before, self._times()
        wall, busy, own = now
        if wall <= wall_0:
            return {}
        self._before = now
        spent = [max(0.0, b - a) / (wall - wall_0) for a, b in zip(busy_0, busy, strict=True)]
        self.core_share = [min(1.0, share) for share in spent]
        process_share = (own - own_0) / (wall - wall_0) / len(busy)
        total_share = sum(self.core_share) / len(busy)
        return {"host_cpu_share": min(1.0, process_share), "host_foreign_share": max(0.0, total_share - process_share)}

    def _times(self) -> tuple[float, list[float], float]:
        """Return wall seconds, busy seconds of each usable core, and CPU seconds of this process."""
        all_cores = psutil.cpu_times(percpu=True)
        chosen = [all_cores[core] for core in self.cores if core < len(all_cores)] or all_cores
        busy = [sum(getattr(core, kind, 0.0) for kind in BUSY) for core in chosen]
        used = resource.getrusage(resource.RUSAGE_SELF)
        return time.perf_counter(), busy, used.ru_utime + used.ru_stime


PERCENT = 100.0

THROTTLES = {  # bits of NVML's clock event reasons that mean throttling -> description
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
GPM_S = 0.2  # the driver updates the counters every 0.1 s; samples closer together differ by nothing

FOR_GOOD = {  # errors of unsupported readings
    getattr(pynvml, f"NVML_ERROR_{name}", None)
    for name in ("NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "NO_PERMISSION", "ARGUMENT_VERSION_MISMATCH", "DEPRECATED")
}


def _utilisation(device: Any) -> Reading:
    rates = pynvml.nvmlDeviceGetUtilizationRates(device)
    return {"nvml_kernel_busy": rates.gpu / PERCENT, "nvml_memory_busy": rates.memory / PERCENT}


def _processes(device: Any) -> Reading:
    """Return the number of other compute processes on the device; this process is one of those listed.

    In a container process ids are the host's, so this process cannot be identified by its id.
    """
    count = len(pynvml.nvmlDeviceGetComputeRunningProcesses(device))
    return {"nvml_foreign_processes": max(0, count - 1)}


READERS: Mapping[str, Callable[[Any], Reading]] = {
    "utilisation": _utilisation,
    "sm clock": lambda device: {"nvml_sm_mhz": pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM)},
    "memory clock": lambda device: {"nvml_mem_mhz": pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_MEM)},
    "clock events": lambda device: {"nvml_clock_events": pynvml.nvmlDeviceGetCurrentClocksEventReasons(device)},
    "power": lambda device: {"nvml_power_w": pynvml.nvmlDeviceGetPowerUsage(device) / 1e3},
    "energy": lambda device: {"nvml_energy_j": pynvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1e3},
    "memory": lambda device: {"nvml_used_bytes": pynvml.nvmlDeviceGetMemoryInfo(device).used},
    "processes": _processes,
}


class Nvml:
    """One NVML device. Raise `pynvml.NVMLError` (or ImportError) without a library or such a device."""

    def __init__(self, bus_id: str | None = None, index: int = 0) -> None:
        pynvml.nvmlInit()
        try:
            self.handle = (
                pynvml.nvmlDeviceGetHandleByPciBusId(bus_id) if bus_id else pynvml.nvmlDeviceGetHandleByIndex(index)
            )
        except pynvml.NVMLError:
            pynvml.nvmlShutdown()
            raise
        self._readers, self.gpm = dict(READERS), None
        with contextlib.suppress(pynvml.NVMLError, AttributeError):  # an old driver, or an old binding
            if pynvml.nvmlGpmQueryDeviceSupport(self.handle).isSupportedDevice:
                self.gpm = _Gpm(self.handle)
                self._readers["gpm"] = self.gpm.read

    def read(self) -> Reading:
        """Return the device's readings. Shares are 0 to 1, clocks MHz, power watts, energy joules since boot."""
        readings: Reading = {}
        for name, read in list(self._readers.items()):
            try:
                readings.update(read(self.handle))
            except pynvml.NVMLError as error:
                if error.value in FOR_GOOD:
                    del self._readers[name]
        return readings

    def restart(self) -> None:
        """Begin the next reading of the performance counters now."""
        with contextlib.suppress(pynvml.NVMLError):
            if self.gpm is not None:
                self.gpm.restart(self.handle)

    def close(self) -> None:
        """Shut the library down."""
        with contextlib.suppress(pynvml.NVMLError):
            if self.gpm is not None:
                self.gpm.close()
            pynvml.nvmlShutdown()


class _Gpm:
    """Activity between two samples of the device's performance counters, at least GPM_S apart."""

    def __init__(self, device: Any) -> None:
        self._last, self._next = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        self.restart(device)
        self._request = pynvml.c_nvmlGpmMetricsGet_t()
        self._request.version, self._request.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(GPM)
        for i, metric in enumerate(GPM.values()):
            self._request.metrics[i].metricId = getattr(pynvml, metric)

    def restart(self, device: Any) -> None:
        """Begin the next reading now."""
        pynvml.nvmlGpmSampleGet(device, self._last)
        self._began = time.monotonic()

    def read(self, device: Any) -> Reading:
        """Return the shares since the last reading; nothing if it was less than GPM_S ago."""
        if time.monotonic() - self._began < GPM_S:
            return {}
        pynvml.nvmlGpmSampleGet(device, self._next)
        self._began = time.monotonic()
        self._request.sample1, self._request.sample2 = self._last, self._next
        pynvml.nvmlGpmMetricsGet(self._request)
        self._last, self._next = self._next, self._last
        metrics = zip(GPM, self._request.metrics, strict=False)
        return {column: metric.value / PERCENT for column, metric in metrics if metric.nvmlReturn == 0}

    def close(self) -> None:
        """Free both samples."""
        for sample in (self._last, self._next):
            pynvml.nvmlGpmSampleFree(sample)


class Sampler:
    """Sampler that reads `host` and `device`, if any, every `interval` seconds during samples."""

    def __init__(self, host: Any, device: Any = None, interval: float = 0.1) -> None:
        self.host, self.device, self.interval = host, device, interval
        self._reading = threading.Lock()
        self._running, self._ended = threading.Event(), threading.Event()
        self._current = Seen()
        self._thread = threading.Thread(target=self._loop, name="telemetry", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def watch(self) -> Iterator[Seen]:
        """Read before, during and after the block; the readings are complete after the block.

        A failed reading does not raise; it sets `Seen.problem`.
        """
        readings = Seen()
        self._read(readings)
        if isinstance(self.device, Nvml):
            self.device.restart()
        self._current = readings
        self._running.set()
        try:
            yield readings
        finally:
            self._running.clear()
            self._read(readings)

    def close(self) -> None:
        """End the thread and shut the device's library down."""
        self._ended.set()
        self._running.set()
        self._thread.join()
        if self.device is not None:
            self.device.close()

    def _loop(self) -> None:
        while True:
            self._running.wait()
            readings = self._current
            if self._ended.wait(self.interval):
                return
            with self._reading:
                if (
                    self._running.is_set() and readings is self._current
                ):  # checked under the lock: the sample may have ended
                    self._add(readings)

    def _read(self, readings: Seen) -> None:
        with self._reading:
            self._add(readings, slow=True)

    def _add(self, readings: Seen, slow: bool = False) -> None:
        """Add a reading; a failed one is empty and sets `problem`, so that neither sample nor thread ends."""
        try:
            reading = self.host.read(slow)
            if self.device is not None:
                reading |= self.device.read()
            readings.add(time.time(), reading, self.host.core_share)
        except Exception as error:  # libraries and drivers raise many types
            readings.problem = error_text(error)
            readings.add(time.time(), {})


def sampler_for(device: torch.device | None, interval: float) -> Sampler | None:
    """Return the sampler for a device, or for the host only; None for interval 0, which disables telemetry."""
    return Sampler(Host(), None if device is None else _nvml(device), interval) if interval > 0 else None


def _nvml(device: torch.device) -> Nvml | None:
    """Return the NVML device of a torch device, by its PCI bus id, since the two number devices differently."""
    if device.type != "cuda":
        return None

    with contextlib.suppress(Exception):  # without library, permission or device there is no GPU telemetry
        properties = torch.cuda.get_device_properties(device)
        domain, bus, slot = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id  # type: ignore[attr-defined]
        return Nvml(f"{domain:08x}:{bus:02x}:{slot:02x}.0")
    return None


FOREIGN_SHARE = 0.10  # of the usable cores; a larger share of other processes is noise
TICKS = 20  # of the system's CPU clock; in shorter samples the share of other processes is too inexact
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
GIVE_UP = 3  # noisy samples in a row, each after all its re-runs, after which re-runs are disabled


def noise_of(readings: Seen) -> str:
    """Return the reasons why a sample is noisy, separated by '; ', or ''.

    A changing clock alone is no reason, since it follows the load; throttling reported by the driver is one.
    """
    others = int(max(readings.within("nvml_foreign_processes"), default=0))
    reasons = [f"{others} other {'process' if others == 1 else 'processes'} on the device"] if others else []
    bits = [int(value) for value in readings.within("nvml_clock_events")]
    if words := [word for bit, word in THROTTLES.items() if any(value & bit for value in bits)]:
        reasons.append(f"the device was slowed down: {', '.join(words)}")
    share = readings.mean("host_foreign_share") or 0.0
    if share > FOREIGN_SHARE and readings.span >= TICKS * TICK_S:  # shorter samples have rounding errors
        reasons.append(f"other processes used {share:.0%} of the CPU")
    return "; ".join(reasons)


class RerunPolicy:
    """Limit of re-runs of noisy samples. most: None is twice on a GPU, and never elsewhere."""

    def __init__(self, most: int | None, on_gpu: bool) -> None:
        self.most = (2 if on_gpu else 0) if most is None else most
        self.failures = 0

    def again(self, reason: str, reruns: int) -> bool:
        """Return True if a sample with this number of re-runs is to be run again."""
        if not reason:
            self.failures = 0
        elif reruns >= self.most:
            self.failures += 1
        return bool(reason) and reruns < self.most and not self.given_up

    @property
    def given_up(self) -> bool:
        """Return True if re-runs are disabled, since they did not help several times."""
        return self.most > 0 and self.failures >= GIVE_UP


class MachineRecord:
    """Telemetry of one session of a run. Records nothing if `recording` disables telemetry."""

    def __init__(
        self, recording: Recording, devices: Sequence[torch.device], run_dir: RunStore, warn: Callable[[str], None]
    ) -> None:
        device = devices[0] if len(devices) == 1 else None  # one of several GPUs would not represent all
        self.sampler = sampler_for(device, recording.telemetry)
        self.run_dir, self.warn = run_dir, warn
        self._warned: set[str] = set()
        self.tries = RerunPolicy(recording.rerun_noisy, devices[0].type == "cuda")

    def watch(self) -> contextlib.AbstractContextManager[Seen | None]:
        """Read the machine during the block; give None without telemetry."""
        return contextlib.nullcontext() if self.sampler is None else self.sampler.watch()

    def note(self, row: SampleRecord, readings: Seen | None) -> None:
        """Set the record's telemetry fields and store the readings. `row.n_reruns` counts the earlier runs."""
        if readings is None:
            return
        row.n_reruns = row.n_reruns or 0
        reason = noise_of(readings)
        row.noise_reason = reason or (None if readings.problem else "")  # None: noise cannot be excluded
        if readings.problem:
            self._warn_once(f"telemetry is incomplete, readings failed: {readings.problem}")
        for name, value in readings.summary(row.tokens or 0).items():
            setattr(row, name, value)
        line = Readings(
            *row.key,
            attempt=row.n_reruns,
            started=readings.times[0],
            noise_reason=reason,
            columns=readings.as_columns(),
        )
        if problem := self.run_dir.append_optional(TELEMETRY, line):
            self._warn_once(f"telemetry is incomplete: {problem}")

    def _warn_once(self, text: str) -> None:
        """Warn once of missing readings; failing to store the warning does not end the sample."""
        if text not in self._warned:
            self._warned.add(text)
            with contextlib.suppress(UserError):
                self.warn(text)

    def again(self, row: SampleRecord, stateful: bool) -> bool:
        """Return True to run the sample again. Methods with cross-request state are never run again.

        They would answer from their stored state.
        """
        if row.noise_reason is None or stateful:
            return False
        before = self.tries.given_up
        if self.tries.again(row.noise_reason, row.n_reruns or 0):
            return True
        if self.tries.given_up and not before:
            self.warn(f"samples stay noisy ({row.noise_reason}); re-runs are disabled")
        return False

    def close(self) -> None:
        """End the sampler's thread."""
        if self.sampler is not None:
            self.sampler.close()

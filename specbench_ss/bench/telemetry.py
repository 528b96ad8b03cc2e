"""Telemetry of a sample: host and GPU readings, and disturbances.

A reading that the device or driver does not support is left out for good after its first failure, any other for once.
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

PLACES = 4  # digits kept after the point of a reading
MEANS = (  # columns whose mean over the sample becomes a field of its row
    "host_cpu_share", "host_foreign_share", "nvml_kernel_busy", "nvml_memory_busy", "nvml_sm_mhz", "nvml_power_w",
    "gpm_sm_active", "gpm_tensor_active", "gpm_dram_active",
)  # fmt: skip


class Seen:
    """The readings of one sample, column by column; None where a reading lacks a column.

    The first reading was made before the sample and the last one after it. Its shares are of the time before, so they
    are no part of a mean. problem: why a reading failed, or ''; a failed one has no column.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.columns: dict[str, list[float | None]] = {}
        self.core_shares: list[list[float | None]] = []
        self.problem = ""

    def add(self, when: float, reading: Mapping[str, float], core_share: Sequence[float] = ()) -> None:
        """Add a reading. when: Unix time. What is not finite counts as not read."""
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
        """Return what was read of a column after the sample had begun."""
        return [value for value in self.columns.get(name, [])[1:] if value is not None]

    def mean(self, name: str) -> float | None:
        """Return the mean over time: each reading stands for the time since the one before."""
        spans = [b - a for a, b in zip(self.times, self.times[1:], strict=False)]
        found = [
            (span, value)
            for span, value in zip(spans, self.columns.get(name, [])[1:], strict=False)
            if value is not None
        ]
        whole = sum(span for span, _ in found)
        return sum(span * value for span, value in found) / whole if whole > 0 else None

    def growth(self, name: str) -> float | None:
        """Return by how much a counter grew from the first reading to the last; None where one of the two lacks it."""
        first, *_, last = self.columns.get(name) or [None, None] if len(self.times) > 1 else [None, None]
        return last - first if first is not None and last is not None else None

    def summary(self, tokens: int) -> dict[str, Any]:
        """Return the fields of the sample's row. tokens: of its answer."""
        found: dict[str, Any] = {name: _rounded(self.mean(name)) for name in MEANS}
        faults, energy = self.growth("host_page_faults"), self.growth("nvml_energy_j")
        rss = self.within("host_rss_bytes")
        found["host_rss_bytes"] = int(max(rss)) if rss else None
        found["host_page_faults"] = None if faults is None else int(faults)
        found["energy_j"] = _rounded(energy)
        found["joules_per_token"] = _rounded(energy / tokens) if energy is not None and tokens else None
        return found

    def as_columns(self) -> dict[str, Any]:
        """Return the readings as JSON-ready data: `t_s` since the first one, then every column."""
        start = self.times[0] if self.times else 0.0
        shares = {name: [_rounded(value) for value in column] for name, column in self.columns.items()}
        cores = {"host_core_share": [[None if x is None else round(x, 2) for x in row] for row in self.core_shares]}
        return {"t_s": [round(t - start, PLACES) for t in self.times], **shares, **cores}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, PLACES)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


Reading = dict[str, float]  # column -> value
BUSY = ("user", "nice", "system", "irq", "softirq", "steal")  # of a core's times; guests' are the user's as well


class Host:
    """This machine's processor, as this process may use it.

    cores: those that it may run on. Shares are over the time since the last reading.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        affinity = getattr(os, "sched_getaffinity", None)
        self.cores: list[int] = sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))
        self.core_share: list[float] = []
        self._before = self._times()

    def read(self, slow: bool = False) -> Reading:
        """Return what was used since the last reading. Shares are of the usable cores together, 0 to 1.

        host_cpu_share: by this process; host_foreign_share: by everything else. core_share: busy share of each core.
        slow: whether to read what takes milliseconds too, which is the frequency.
        """
        found = self._shares()
        used = resource.getrusage(resource.RUSAGE_SELF)
        found["host_rss_bytes"] = self._process.memory_info().rss
        found["host_page_faults"] = used.ru_minflt + used.ru_majflt
        if slow:
            with contextlib.suppress(Exception):  # not every system tells, and each fails in its own way
                found["host_mhz"] = psutil.cpu_freq().current
        return found

    def _shares(self) -> Reading:
        (wall_0, busy_0, own_0), now = self._before, self._times()
        wall, busy, own = now
        if wall <= wall_0:
            return {}
        self._before = now
        spent = [max(0.0, b - a) / (wall - wall_0) for a, b in zip(busy_0, busy, strict=True)]
        self.core_share = [min(1.0, share) for share in spent]
        mine = (own - own_0) / (wall - wall_0) / len(busy)
        together = sum(self.core_share) / len(busy)
        return {"host_cpu_share": min(1.0, mine), "host_foreign_share": max(0.0, together - mine)}

    def _times(self) -> tuple[float, list[float], float]:
        """(seconds on the wall, busy seconds of each usable core, processor seconds of this process)."""
        all_cores = psutil.cpu_times(percpu=True)
        chosen = [all_cores[core] for core in self.cores if core < len(all_cores)] or all_cores
        busy = [sum(getattr(core, kind, 0.0) for kind in BUSY) for core in chosen]
        used = resource.getrusage(resource.RUSAGE_SELF)
        return time.perf_counter(), busy, used.ru_utime + used.ru_stime


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


FOR_GOOD = {  # errors of what a device or its driver cannot do
    getattr(pynvml, f"NVML_ERROR_{name}", None)
    for name in ("NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "NO_PERMISSION", "ARGUMENT_VERSION_MISMATCH", "DEPRECATED")
}


def _utilisation(device: Any) -> Reading:
    rates = pynvml.nvmlDeviceGetUtilizationRates(device)
    return {"nvml_kernel_busy": rates.gpu / PERCENT, "nvml_memory_busy": rates.memory / PERCENT}


def _processes(device: Any) -> Reading:
    """Return how many processes compute there besides this one, which is among them: it has its model there.

    In a container the numbers of processes are the host's, so this one is not looked for by its own.
    """
    there = len(pynvml.nvmlDeviceGetComputeRunningProcesses(device))
    return {"nvml_foreign_processes": max(0, there - 1)}


WAYS: Mapping[str, Callable[[Any], Reading]] = {
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
    """One device. Making one raises `pynvml.NVMLError` (or ImportError) where there is no library or no such device."""

    def __init__(self, bus_id: str | None = None, index: int = 0) -> None:
        pynvml.nvmlInit()
        try:
            self.handle = (
                pynvml.nvmlDeviceGetHandleByPciBusId(bus_id) if bus_id else pynvml.nvmlDeviceGetHandleByIndex(index)
            )
        except pynvml.NVMLError:
            pynvml.nvmlShutdown()
            raise
        self._ways, self.gpm = dict(WAYS), None
        with contextlib.suppress(pynvml.NVMLError, AttributeError):  # an old driver, or an old binding
            if pynvml.nvmlGpmQueryDeviceSupport(self.handle).isSupportedDevice:
                self.gpm = _Gpm(self.handle)
                self._ways["gpm"] = self.gpm.read

    def read(self) -> Reading:
        """Return what the device says now. Shares are 0 to 1, clocks MHz, power watts, energy joules since boot."""
        found: Reading = {}
        for way, ask in list(self._ways.items()):
            try:
                found.update(ask(self.handle))
            except pynvml.NVMLError as error:
                if error.value in FOR_GOOD:
                    del self._ways[way]
        return found

    def close(self) -> None:
        """Give the library back."""
        with contextlib.suppress(pynvml.NVMLError):
            if self.gpm is not None:
                self.gpm.close()
            pynvml.nvmlShutdown()


class _Gpm:
    """Activity between two samples of the device's performance counters."""

    def __init__(self, device: Any) -> None:
        self._last, self._next = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        pynvml.nvmlGpmSampleGet(device, self._last)
        self._asked = pynvml.c_nvmlGpmMetricsGet_t()
        self._asked.version, self._asked.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(GPM)
        for place, metric in enumerate(GPM.values()):
            self._asked.metrics[place].metricId = getattr(pynvml, metric)

    def read(self, device: Any) -> Reading:
        """Return the shares since the last reading."""
        pynvml.nvmlGpmSampleGet(device, self._next)
        self._asked.sample1, self._asked.sample2 = self._last, self._next
        pynvml.nvmlGpmMetricsGet(self._asked)
        self._last, self._next = self._next, self._last
        got = zip(GPM, self._asked.metrics, strict=False)
        return {column: metric.value / PERCENT for column, metric in got if metric.nvmlReturn == 0}

    def close(self) -> None:
        """Free both samples."""
        for sample in (self._last, self._next):
            pynvml.nvmlGpmSampleFree(sample)


class Sampler:
    """Reads `host` and, where there is one, `device` every `interval` seconds, but only while a sample is made."""

    def __init__(self, host: Any, device: Any = None, interval: float = 0.1) -> None:
        self.host, self.device, self.interval = host, device, interval
        self._reading = threading.Lock()
        self._running, self._ended = threading.Event(), threading.Event()
        self._seen = Seen()
        self._thread = threading.Thread(target=self._loop, name="telemetry", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def watch(self) -> Iterator[Seen]:
        """Read before, during and after the block; what was read is complete once the block is left.

        A reading that fails raises nothing: `Seen.problem` tells.
        """
        seen = Seen()
        self._read(seen)
        self._seen = seen
        self._running.set()
        try:
            yield seen
        finally:
            self._running.clear()
            self._read(seen)

    def close(self) -> None:
        """End the thread, and give the device's library back."""
        self._ended.set()
        self._running.set()
        self._thread.join()
        if self.device is not None:
            self.device.close()

    def _loop(self) -> None:
        while True:
            self._running.wait()
            seen = self._seen
            if self._ended.wait(self.interval):
                return
            with self._reading:
                if self._running.is_set() and seen is self._seen:  # asked here: the sample may have ended meanwhile
                    self._add(seen)

    def _read(self, seen: Seen) -> None:
        with self._reading:
            self._add(seen, slow=True)

    def _add(self, seen: Seen, slow: bool = False) -> None:
        """Add a reading; one that fails is empty, and `seen` says why: no sample and no thread ends of it."""
        try:
            found = self.host.read(slow)
            if self.device is not None:
                found |= self.device.read()
            seen.add(time.time(), found, self.host.core_share)
        except Exception as error:  # of libraries and drivers, each in its own way
            seen.problem = error_text(error)
            seen.add(time.time(), {})


def sampler_for(device: torch.device | None, interval: float) -> Sampler | None:
    """Return the sampler for a device, or the host alone; None where interval is 0, which switches telemetry off."""
    return Sampler(Host(), None if device is None else _nvml(device), interval) if interval > 0 else None


def _nvml(device: torch.device) -> Nvml | None:
    """Return the library's view of torch's device, found by its place on the bus.

    The two number devices differently.
    """
    if device.type != "cuda":
        return None

    with contextlib.suppress(Exception):  # no library, no right to ask it, an unknown device: there is no telemetry
        found = torch.cuda.get_device_properties(device)
        domain, bus, slot = found.pci_domain_id, found.pci_bus_id, found.pci_device_id  # type: ignore[attr-defined]
        return Nvml(f"{domain:08x}:{bus:02x}:{slot:02x}.0")
    return None


FOREIGN_SHARE = 0.10  # of the usable cores, above which other processes' work is told
TICKS = 20  # of the system's own clock of the processor; a shorter sample is told nothing of others' work
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
GIVE_UP = 3  # disturbed samples in a row, each after all its tries, after which remaking is given up


def noise_of(seen: Seen) -> str:
    """Return what disturbed a sample, parts separated by '; ', or ''.

    A clock that changes is no disturbance by itself: it follows the load. The driver's reason for slowing down is one.
    """
    others = int(max(seen.within("nvml_foreign_processes"), default=0))
    told = [f"{others} other {'process' if others == 1 else 'processes'} on the device"] if others else []
    bits = [int(value) for value in seen.within("nvml_clock_events")]
    if words := [word for bit, word in THROTTLES.items() if any(value & bit for value in bits)]:
        told.append(f"the device was slowed down: {', '.join(words)}")
    share = seen.mean("host_foreign_share") or 0.0
    if share > FOREIGN_SHARE and seen.span >= TICKS * TICK_S:  # in a shorter one it would be rounding
        told.append(f"other processes took {share:.0%} of the processor")
    return "; ".join(told)


class Tries:
    """How often a disturbed sample may be made again. most: None is twice on a GPU, and never elsewhere."""

    def __init__(self, most: int | None, on_gpu: bool) -> None:
        self.most = (2 if on_gpu else 0) if most is None else most
        self.in_vain = 0

    def again(self, reason: str, made: int) -> bool:
        """Say whether a sample that has been made again `made` times already is to be made once more."""
        if not reason:
            self.in_vain = 0
        elif made >= self.most:
            self.in_vain += 1
        return bool(reason) and made < self.most and not self.given_up

    @property
    def given_up(self) -> bool:
        """Return True if remaking has not helped for so long that it is not tried any more."""
        return self.most > 0 and self.in_vain >= GIVE_UP


class MachineRecord:
    """Of one session of a run. Records nothing where `recording` switches telemetry off."""

    def __init__(
        self, recording: Recording, devices: Sequence[torch.device], run_dir: RunStore, warn: Callable[[str], None]
    ) -> None:
        one = devices[0] if len(devices) == 1 else None  # what one of several GPUs does would pass for what all do
        self.sampler = sampler_for(one, recording.telemetry)
        self.run_dir, self.warn = run_dir, warn
        self._told: set[str] = set()
        self.tries = Tries(recording.rerun_noisy, devices[0].type == "cuda")

    def watch(self) -> contextlib.AbstractContextManager[Seen | None]:
        """Read the machine while the block lasts; gives None where nothing is read."""
        return contextlib.nullcontext() if self.sampler is None else self.sampler.watch()

    def note(self, row: SampleRecord, seen: Seen | None) -> None:
        """Put what was read into the row, and write it down. `row.n_reruns` counts the tries before this one."""
        if seen is None:
            return
        row.n_reruns = row.n_reruns or 0
        disturbed = noise_of(seen)
        row.noise_reason = disturbed or (None if seen.problem else "")  # what was not read may have been a disturbance
        if seen.problem:
            self._tell_once(f"telemetry is incomplete, readings failed: {seen.problem}")
        for name, value in seen.summary(row.tokens or 0).items():
            setattr(row, name, value)
        line = Readings(
            *row.key,
            attempt=row.n_reruns,
            started=seen.times[0],
            noise_reason=disturbed,
            columns=seen.as_columns(),
        )
        if problem := self.run_dir.append_beside(TELEMETRY, line.as_dict()):
            self._tell_once(f"telemetry is incomplete: {problem}")

    def _tell_once(self, text: str) -> None:
        """Warn of what costs readings, and no sample: not even where the warning cannot be written down."""
        if text not in self._told:
            self._told.add(text)
            with contextlib.suppress(UserError):
                self.warn(text)

    def again(self, row: SampleRecord, stateful: bool) -> bool:
        """Say whether to make the sample again. One of a method that remembers prompts never is made again.

        It would answer from memory.
        """
        if row.noise_reason is None or stateful:
            return False
        before = self.tries.given_up
        if self.tries.again(row.noise_reason, row.n_reruns or 0):
            return True
        if self.tries.given_up and not before:
            self.warn(f"samples stay disturbed ({row.noise_reason}): they are not made again any more")
        return False

    def close(self) -> None:
        """End the thread that reads."""
        if self.sampler is not None:
            self.sampler.close()

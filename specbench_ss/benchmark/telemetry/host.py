"""Readings of the processor and of this process, through psutil and the operating system's own counters."""

from __future__ import annotations

import os
import resource
import time
from typing import Any

import psutil

Reading = dict[str, float]


class Host:
    """This machine's processor, as this process may use it.

    cores: those that it may run on. Shares are over the time since the last reading.
    """

    def __init__(self) -> None:
        self._psutil: Any = psutil
        self._process = psutil.Process()
        affinity = getattr(os, "sched_getaffinity", None)
        self.cores: list[int] = sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))
        self.core_share: list[float] = []
        self._before = self._times()
        self._frequency = self._has_frequency()

    def read(self, slow: bool = False) -> Reading:
        """Return what was used since the last reading. Shares are of the usable cores together, 0 to 1.

        host_cpu_share: by this process; host_foreign_share: by everything else. core_share: busy share of each core.
        slow: whether to read what takes milliseconds too, which is the frequency.
        """
        found = self._shares()
        used = resource.getrusage(resource.RUSAGE_SELF)
        found["host_rss_bytes"] = self._process.memory_info().rss
        found["host_page_faults"] = used.ru_minflt + used.ru_majflt
        if slow and self._frequency:
            found["host_mhz"] = self._psutil.cpu_freq().current
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
        all_cores = self._psutil.cpu_times(percpu=True)
        chosen = [all_cores[core] for core in self.cores if core < len(all_cores)] or all_cores
        busy = [sum(core) - core.idle - getattr(core, "iowait", 0.0) - _counted_twice(core) for core in chosen]
        used = resource.getrusage(resource.RUSAGE_SELF)
        return time.perf_counter(), busy, used.ru_utime + used.ru_stime

    def _has_frequency(self) -> bool:
        try:
            found = self._psutil.cpu_freq()
        except Exception:  # not every system tells, and each fails in its own way
            return False
        return found is not None and found.current > 0


def _counted_twice(core: Any) -> float:
    """Guests' time, which Linux counts as the user's as well."""
    return float(getattr(core, "guest", 0.0) + getattr(core, "guest_nice", 0.0))

"""A thread that reads the machine while a sample is made, and one reading before and one after it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from specbench_ss.benchmark.telemetry.host import Host
from specbench_ss.benchmark.telemetry.nvml import Nvml
from specbench_ss.benchmark.telemetry.seen import Seen
from specbench_ss.errors import error_text


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

"""Environment of a run: time, versions, processor, memory, GPU and code revision.

Reading it never fails: whatever cannot be found out is None.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pynvml
import torch

from specbench_ss.models.devices import processor_name


def now() -> str:
    """Return the current time in UTC, to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


PACKAGES = ("specbench_ss", "torch", "transformers", "tokenizers", "safetensors", "numpy", "scipy", "pandas")
CONDITIONS: dict[str, tuple[str, ...]] = {  # what must be the same for timings to compare, and where it stands
    "cpu": ("cpu",),
    "gpus": ("gpus",),
    "threads": ("threads",),
    "torch": ("packages", "torch"),
    "driver": ("driver",),
    "code revision": ("revision",),
}
AT_WORK = ("user", "nice", "system", "steal")  # of a processor's times: a host that takes it away is at work elsewhere
LOOK_S, AT_REST = 0.5, 0.2  # seconds; processors' worth of other work that is none
T = TypeVar("T")


def environment() -> dict[str, Any]:
    """Describe this machine as JSON-ready data, with memory in bytes, clocks in MHz and power limits in watts."""
    threads = {"intra_op": torch.get_num_threads(), "inter_op": torch.get_num_interop_threads()}
    cores = _or_none(lambda: psutil.cpu_count(logical=False))
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": {"model": processor_name(), "cores": cores, "available": _usable_cores()},
        "threads": threads,
        "memory_bytes": _or_none(lambda: int(psutil.virtual_memory().total)),
        "gpus": _or_none(_gpus) or [],
        "driver": _or_none(_driver),
        "cuda": torch.version.cuda,
        "revision": revision(),
    }


def machine_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Name the parts that differ between two environments in a way that makes their timings incomparable."""
    return [name for name, keys in CONDITIONS.items() if _stable(_at(old, keys)) != _stable(_at(new, keys))]


def changed_since(manifest: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Name the parts that differ between this machine now and any earlier session of a run."""
    earlier = [manifest.get("environment", {}), *(s["environment"] for s in _measuring(manifest))]
    changed = {name for old in earlier for name in machine_changes(old, here)}
    return [name for name in CONDITIONS if name in changed]


OF_TIMES = (  # what warnings say where times are not to be relied on: of a busy machine, of warm-up, of sessions
    UNSTABLE := "times will be unstable",
    "times had not settled",
    "times do not compare",
)


def is_of_times(warning: str) -> bool:
    """Say whether a warning of a run speaks of its times."""
    return any(said in warning for said in OF_TIMES)


def between_sessions(manifest: dict[str, Any]) -> list[str]:
    """Name the parts that differ between the sessions of a run, so that its times do not compare."""
    later = [machine_changes(manifest["environment"], s["environment"]) for s in _measuring(manifest)]
    return [name for name in CONDITIONS if any(name in changed for changed in later)]


def _measuring(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the sessions in which something was measured: others may have recorded drafts of what was there."""
    return [session for session in manifest.get("sessions", []) if session.get("measures", True)]


def busy() -> str:
    """Return 'the machine is busy (load 6.1 on 2 cores): times will be unstable'.

    The text is '' where the machine is not busy, or where the load is not known. A load is of the last minute, and of
    this process's own work too: where nothing else works now, it tells of nothing to come.
    """
    load, cores = _or_none(lambda: os.getloadavg()[0]), _usable_cores()
    if load is None or cores is None or load <= cores:
        return ""
    if (others := _or_none(_others_at_work)) is not None and others < AT_REST:
        return ""
    return f"the machine is busy (load {load:.1f} on {cores} core{'s' * (cores != 1)}): {UNSTABLE}"


def _others_at_work() -> float:
    """Return how many processors other processes keep busy, as seen in LOOK_S seconds."""

    def worked() -> float:
        everything, own = psutil.cpu_times()._asdict(), psutil.Process().cpu_times()
        return float(sum(everything.get(kind, 0.0) for kind in AT_WORK) - own.user - own.system)

    before, began = worked(), time.perf_counter()
    time.sleep(LOOK_S)
    return (worked() - before) / (time.perf_counter() - began)


def revision() -> dict[str, Any] | None:
    """Return the commit of the checkout that the code runs from and whether it has changes; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None or _git(folder, "ls-files", "--error-unmatch", __file__) is None:
        return None
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _at(part: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        part = part.get(key) if isinstance(part, dict) else None
    return part


def _stable(part: Any) -> Any:
    """Leave out what changes from minute to minute."""
    if isinstance(part, list):
        return [_stable(entry) for entry in part]
    return {k: v for k, v in part.items() if not k.endswith("_now")} if isinstance(part, dict) else part


def _or_none(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except Exception:  # a missing package, driver or file: unknown, not an error
        return None


def _version(package: str) -> str | None:
    return _or_none(lambda: metadata.version(package))


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    done = _or_none(lambda: subprocess.run(command, capture_output=True, text=True, timeout=10, check=True))
    return done.stdout.strip() if done else None


def _usable_cores() -> int | None:
    return _or_none(lambda: len(os.sched_getaffinity(0))) if sys.platform == "linux" else os.cpu_count()


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """Give NVIDIA's management library while the block lasts. Raises where there is no library."""
    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _driver() -> str:
    with _nvml() as nvml:
        return _text(nvml.nvmlSystemGetDriverVersion())


def _gpus() -> list[dict[str, Any]]:
    with _nvml() as nvml:
        return [_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount())]


def _gpu(nvml: Any, handle: Any) -> dict[str, Any]:
    return {
        "name": _text(nvml.nvmlDeviceGetName(handle)),
        "memory_bytes": _or_none(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)),
        "power_limit_w": _or_none(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
        "sm_clock_max_mhz": _or_none(lambda: int(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))),
        "sm_clock_mhz_now": _or_none(lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
    }


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)

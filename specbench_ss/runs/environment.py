"""Environment of a run: time, versions, processor, memory, GPU and code revision.

Reading it never fails: unknown values are None.
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
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pynvml
import torch

from specbench_ss.models.devices import IDLE_CORES, other_cpu_seconds, processor_name


def now() -> str:
    """Return the current time in UTC, to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


PACKAGES = ("specbench_ss", "torch", "transformers", "tokenizers", "safetensors", "numpy", "scipy", "pandas")
CONDITIONS: dict[str, tuple[str, ...]] = {  # must be equal for comparable timings: name -> path in the environment
    "cpu": ("cpu",),
    "gpus": ("gpus",),
    "threads": ("threads",),
    "torch": ("packages", "torch"),
    "driver": ("driver",),
    "code revision": ("revision",),
}
OBSERVE_S = 0.5  # for which the load of other processes is observed
T = TypeVar("T")


def environment() -> dict[str, Any]:
    """Return a description of this machine, JSON-ready; memory in bytes, clocks in MHz, power limits in watts."""
    threads = {"intra_op": torch.get_num_threads(), "inter_op": torch.get_num_interop_threads()}
    cores = _try(lambda: psutil.cpu_count(logical=False))
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": {"model": processor_name(), "cores": cores, "available": _usable_cores()},
        "threads": threads,
        "memory_bytes": _try(lambda: int(psutil.virtual_memory().total)),
        "gpus": _try(_gpus) or [],
        "driver": _try(_driver),
        "cuda": torch.version.cuda,
        "revision": revision(),
    }


def machine_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the names of the differences between two environments that make their timings incomparable."""
    return [name for name, keys in CONDITIONS.items() if _stable(_nested(old, keys)) != _stable(_nested(new, keys))]


def changed_since(manifest: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Return the names of the differences between this machine now and any earlier session of a run."""
    earlier = [manifest.get("environment", {}), *(s["environment"] for s in _measuring(manifest))]
    changed = {name for old in earlier for name in machine_changes(old, here)}
    return [name for name in CONDITIONS if name in changed]


TIMING_WARNINGS = (  # texts of warnings about unreliable times: of a busy machine, warm-up and sessions
    UNSTABLE := "times will be unstable",
    "times had not settled",
    "times do not compare",
)


def is_of_times(warning: str) -> bool:
    """Return True if a warning of a run concerns its times."""
    return any(text in warning for text in TIMING_WARNINGS)


def between_sessions(manifest: dict[str, Any]) -> list[str]:
    """Return the names of the differences between the sessions of a run that make its times incomparable."""
    later = [machine_changes(manifest["environment"], s["environment"]) for s in _measuring(manifest)]
    return [name for name in CONDITIONS if any(name in changed for changed in later)]


def _measuring(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the sessions with measurements; others may only have recorded drafts."""
    return [session for session in manifest.get("sessions", []) if session.get("measures", True)]


def busy() -> str:
    """Return 'the machine is busy (load 6.1 on 2 cores): times will be unstable', or ''.

    The load average is of the last minute and includes this process, so that other current load is checked too.
    """
    load, cores = _try(lambda: os.getloadavg()[0]), _usable_cores()
    if load is None or cores is None or load <= cores:
        return ""
    if (other_load := _try(_other_load)) is not None and other_load < IDLE_CORES:
        return ""
    return f"the machine is busy (load {load:.1f} on {cores} core{'s' * (cores != 1)}): {UNSTABLE}"


def _other_load() -> float:
    """Return the load of other processes in cores, observed for OBSERVE_S seconds."""
    before, began = other_cpu_seconds(), time.perf_counter()
    time.sleep(OBSERVE_S)
    return (other_cpu_seconds() - before) / (time.perf_counter() - began)


@cache  # the code of a process does not change
def revision() -> dict[str, Any] | None:
    """Return the commit of the code's checkout and whether it has changes; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None or _git(folder, "ls-files", "--error-unmatch", __file__) is None:
        return None
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _nested(value: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _stable(part: Any) -> Any:
    """Return the value without entries that change from minute to minute."""
    if isinstance(part, list):
        return [_stable(entry) for entry in part]
    return {k: v for k, v in part.items() if not k.endswith("_now")} if isinstance(part, dict) else part


def _try(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except Exception:  # a missing package, driver or file: unknown, not an error
        return None


@cache
def _version(package: str) -> str | None:
    return _try(lambda: metadata.version(package))


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    result = _try(lambda: subprocess.run(command, capture_output=True, text=True, timeout=10, check=True))
    return result.stdout.strip() if result else None


def _usable_cores() -> int | None:
    return _try(lambda: len(os.sched_getaffinity(0))) if sys.platform == "linux" else os.cpu_count()


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """Yield NVIDIA's management library within the block. Raises an error if there is none."""
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
        "memory_bytes": _try(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)),
        "power_limit_w": _try(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
        "sm_clock_max_mhz": _try(lambda: int(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))),
        "sm_clock_mhz_now": _try(lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
    }


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)

"""Limits of a device: memory bandwidth, GEMM FLOPS and launch time, measured once."""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from specbench_ss import storage, user_files
from specbench_ss.errors import UserError, os_errors
from specbench_ss.models.devices import processor_name
from specbench_ss.storage import cache_folder

GEMM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ON_CPU = {"read": 512 << 20, "side": 1024, "launches": 2000}  # bytes to read, matrix size, operators in sequence
ON_CUDA = {"read": 4 << 30, "side": 8192, "launches": 2000}
LONG_GEMM_S = 0.05  # after a GEMM this long no larger one is tried
LEAST_S, LEAST_TIMES = 0.3, 3  # minimum time and number of repeats of a measurement; the best one counts


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Limits of one device.

    read_bytes_per_s: from memory, beyond the last cache. flops_per_s: of large square GEMMs, by dtype (a multiply-add
    is two). launch_s: host time to launch the smallest operator. threads: of torch, None on a GPU. busy: other load on
    the machine during the measurement.
    """

    device: str
    threads: int | None
    torch: str
    made: str
    read_bytes_per_s: float
    flops_per_s: dict[str, float]
    launch_s: float
    busy: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the limits as JSON-ready data."""
        return asdict(self)


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the processor's name from the system."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return processor_name()


def known_limits(device: torch.device) -> MachineLimits | None:
    """Return the stored limits of this device and number of threads, or None."""
    try:
        return user_files.decoder(MachineLimits)(device_file(device).read_bytes())
    except (OSError, ValueError):
        return None


def calibrate(device: torch.device, dtypes: Sequence[torch.dtype] = GEMM_DTYPES, busy: str = "") -> MachineLimits:
    """Measure the limits of a device and store them. Raises UserError if memory is short or they cannot be written.

    busy: other load on the machine, stored with the limits.
    """
    try:
        limits = _measure(device, dtypes, busy)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise UserError(f"not enough free memory on {device} to measure its limits") from None
    file = device_file(device)
    with os_errors(f"cannot write {file}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        storage.write_json(file, limits.as_dict())
    return limits


def out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error; on a CPU torch has no class for it."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _measure(device: torch.device, dtypes: Sequence[torch.dtype], busy: str) -> MachineLimits:
    sizes = ON_CUDA if device.type == "cuda" else ON_CPU
    with torch.inference_mode():
        rates = {str(dtype).removeprefix("torch."): _peak_flops(device, dtype, sizes["side"]) for dtype in dtypes}
        return MachineLimits(
            device_name(device),
            _threads(device),
            torch.__version__,
            datetime.now(UTC).isoformat(timespec="seconds"),
            read_bandwidth(device, sizes["read"]),
            {name: rate for name, rate in rates.items() if rate},
            _launch_time(device, sizes["launches"]),
            busy,
        )


def read_bandwidth(device: torch.device, size: int) -> float:
    """Return bytes per second of reading `size` bytes once, the better of a sum and a matrix-vector product."""
    side = 4096
    matrix = torch.ones(size // 4 // side, side, device=device)
    vector = torch.ones(side, device=device)
    fastest = min(best_time(lambda: matrix.sum(), device), best_time(lambda: torch.mv(matrix, vector), device))
    return matrix.numel() * 4 / fastest


def _peak_flops(device: torch.device, dtype: torch.dtype, side: int) -> float | None:
    """Return the FLOPS of a GEMM of square matrices; None if the device does not support the dtype.

    side: of the largest ones; larger sizes are skipped once a GEMM takes long, as with an emulated dtype.
    """
    try:
        rates = []
        for size in (side // 8, side // 4, side // 2, side):
            a = torch.randn(size, size, device=device).to(dtype)
            rates.append(2 * size**3 / best_time(lambda a=a: a @ a, device))  # type: ignore[misc]
            if 2 * size**3 / rates[-1] > LONG_GEMM_S:
                break
        return max(rates)
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        return None  # the device does not support the dtype


def _launch_time(device: torch.device, times: int) -> float:
    """Return the host's seconds per operator, for the smallest operator in sequence."""
    one = torch.zeros(1, device=device)

    def row() -> None:
        for _ in range(times):
            one.add_(1)

    return best_time(row, device) / times


def best_time(work: Callable[[], Any], device: torch.device, least_s: float | None = None) -> float:
    """Return the shortest time of `work` in seconds, with the device idle before and after.

    least_s: total time of the repeats; LEAST_S by default.
    """

    def once() -> float:
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        return time.perf_counter() - started

    once()
    fastest, total, times = math.inf, 0.0, 0
    while times < LEAST_TIMES or total < (LEAST_S if least_s is None else least_s):
        elapsed = once()
        fastest, total, times = min(fastest, elapsed), total + elapsed, times + 1
    return fastest


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _threads(device: torch.device) -> int | None:
    return None if device.type == "cuda" else torch.get_num_threads()


def device_file(device: torch.device) -> Path:
    """Return the file with the limits of this device and number of threads."""
    name, threads = device_name(device), _threads(device)
    plain = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "device"
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    key = hashlib.sha256(f"{name}\0{threads}\0{usable if threads else ''}".encode()).hexdigest()[:8]
    return cache_folder() / "limits" / f"{plain}-{key}.json"

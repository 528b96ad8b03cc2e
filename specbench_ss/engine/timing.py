"""Clock of the parts of a decoding step, and CUDA settings on which times depend."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from specbench_ss.errors import UserError, first_line

CLEARLY = 1.25  # times as fast as the usual way another has to be, so that loading twice rarely takes two ways
Name = TypeVar("Name")


def now() -> float:
    """Return the time of the clock that answers are measured by, in seconds."""
    return time.perf_counter()


def clearly_fastest(ways: Mapping[Name, Callable[[], object]], tries: int = 7) -> Name:
    """Return the name of the fastest way where it is clearly faster than the first one, else that of the first.

    They are tried in turns, and of each the shortest time counts.
    """
    taken = dict.fromkeys(ways, math.inf)
    for _ in range(tries):
        for name, way in ways.items():
            began = now()
            way()
            taken[name] = min(taken[name], now() - began)
    first, best = next(iter(taken)), min(taken, key=lambda name: taken[name])
    return best if taken[first] >= CLEARLY * taken[best] else first


def check_device(*devices: torch.device) -> None:
    """Raises UserError where a device no longer works: whatever is asked of it next would fail too."""
    for device in devices:
        if device.type == "cuda":
            try:
                torch.cuda.synchronize(device)
            except RuntimeError as error:
                raise UserError(f"{device} no longer works: {first_line(error)}") from error


class Clock:
    """Marks within one step. On CUDA marks are events, read after the step's one synchronisation.

    others: further devices that layers lie on. Marks are events of the first alone: drafting ends there, and so does
    verification, whose LM head waits for the rows of all layers. A step's end waits for the others too, which may then
    still move the keys that stay.
    """

    def __init__(self, device: torch.device, *others: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.device, self.devices = device, (device, *others)
        self.marks: list[Any] = []
        self.started = 0.0

    def start(self) -> None:
        """Begin a span, with the device idle."""
        self.sync()
        self.marks.clear()
        self.started = time.perf_counter()
        self.mark()

    def mark(self) -> None:
        """The boundary between two parts."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def stop(self) -> tuple[float, list[float]]:
        """(seconds since start, seconds of each part between marks), with the device idle."""
        self.sync()
        total = time.perf_counter() - self.started
        pairs = zip(self.marks, self.marks[1:], strict=False)
        if self.cuda:
            return total, [a.elapsed_time(b) / 1e3 for a, b in pairs]
        return total, [b - a for a, b in pairs]

    def sync(self) -> None:
        """Wait for every device."""
        if self.cuda:
            for device in self.devices:
                torch.cuda.synchronize(device)


def settle_cuda() -> None:
    """Switch off cuDNN's attention, TF32 and sums in reduced precision, whatever the environment says.

    cuDNN makes a plan for every new number of keys, which in eager decoding is one a step. It is the first choice of
    torch's attention on Hopper.
    """
    matmul = torch.backends.cuda.matmul
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False


def cuda_settings() -> dict[str, str]:
    """Return each CUDA setting, on or off; omit those that torch cannot read."""
    backends = torch.backends
    asked: dict[str, Callable[[], object]] = {
        "cuDNN attention": backends.cuda.cudnn_sdp_enabled,
        "TF32 products": lambda: torch.get_float32_matmul_precision() != "highest",
        "TF32 convolutions": lambda: backends.cudnn.allow_tf32,
        "bfloat16 reduced-precision reduction": lambda: backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "float16 reduced-precision reduction": lambda: backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    }
    found = {}
    for name, ask in asked.items():
        try:
            found[name] = "on" if ask() else "off"
        except RuntimeError:  # torch's older and newer names for a setting were mixed
            continue
    return found

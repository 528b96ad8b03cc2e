"""Clock of the parts of a decoding step, and the CUDA settings that affect times."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, time
from typing import Any

import torch

from specbench_ss.errors import UserError, first_line

now, unix_time = perf_counter, time  # bound before a plugin is imported, which may replace those of the module `time`


def check_device(*devices: torch.device) -> None:
    """Raise UserError if a device no longer works, since every later call on it would fail too."""
    for device in devices:
        if device.type == "cuda":
            try:
                torch.cuda.synchronize(device)
            except RuntimeError as error:
                raise UserError(f"{device} no longer works: {first_line(error)}") from error


class Clock:
    """Clock of one step; on CUDA its marks are events, read after the step's one synchronisation.

    others: further devices with layers. Marks are events of the first device, where drafting and verification end (its
    LM head waits for all layers). The end of a step waits for all devices, which may still compact their KV cache.
    """

    def __init__(self, device: torch.device, *others: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.device, self.devices = device, (device, *others)
        self.marks: list[Any] = []
        self.started = 0.0

    def start(self) -> None:
        """Start the step, with the device idle."""
        self.sync()
        self.marks.clear()
        self.started = now()
        self.mark()

    def mark(self) -> None:
        """Mark the boundary between two parts."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self.marks.append(event)
        else:
            self.marks.append(now())

    def stop(self) -> tuple[float, list[float]]:
        """Return (seconds since start, seconds of each part between marks), with the device idle."""
        self.sync()
        total = now() - self.started
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
    """Switch off cuDNN attention, TF32 and reduced-precision sums, regardless of the environment.

    cuDNN builds a plan for every new number of keys, one per step in eager decoding, and is torch's first choice on
    Hopper.
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
    getters: dict[str, Callable[[], object]] = {
        "cuDNN attention": backends.cuda.cudnn_sdp_enabled,
        "TF32 products": lambda: torch.get_float32_matmul_precision() != "highest",
        "TF32 convolutions": lambda: backends.cudnn.allow_tf32,
        "bfloat16 reduced-precision reduction": lambda: backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "float16 reduced-precision reduction": lambda: backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    }
    settings = {}
    for name, get in getters.items():
        try:
            settings[name] = "on" if get() else "off"
        except RuntimeError:  # torch's older and newer names for a setting were mixed
            continue
    return settings

"""Settings of torch's CUDA backend on which times and rounding depend."""

from __future__ import annotations

from collections.abc import Callable

import torch


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

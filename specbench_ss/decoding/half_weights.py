"""Matrices of weights rounded to float16 numbers, for decoding on a CPU that computes in float32 with them."""

from __future__ import annotations

from typing import Any

import torch

from specbench_ss.errors import UserError

LARGEST = torch.finfo(torch.float16).max


@torch.no_grad()
def round_matrices(model: Any, name: str) -> None:
    """Round every matrix of a float32 model, in its own memory, to the nearest float16 numbers; they stay float32.

    So whatever computes with the weights, in whatever order, computes with the same ones. Vectors, as of norms and
    biases, stay as they are. Raises UserError, before anything is changed, for a number that float16 does not hold.
    """
    matrices = {named: p for named, p in model.named_parameters() if p.ndim > 1 and p.numel()}
    other = next((p for p in matrices.values() if p.dtype != torch.float32 or p.device.type != "cpu"), None)
    if other is not None:
        raise UserError(f"{name!r} is {other.dtype} on {other.device}: weights of float32 on a CPU are rounded")
    for named, p in matrices.items():
        if p.abs().max() > LARGEST:
            raise UserError(
                f"{name!r} has weights that float16 does not hold ({named} has numbers beyond {LARGEST:,.0f}): "
                "use --dtype float32"
            )
    for p in matrices.values():
        p.copy_(p.half())

"""Products of a few rows with a matrix of weights: on a CPU, in float32, by oneDNN with the weights in its own order.

A pass over a draft has 2 to 32 rows. torch gives such a product to a library that reorders the matrix each time, which
takes as long as several rows. Reordered once, 8 rows take about 1.6 times as long as one, and not 2.2 times. The copy
doubles the memory of the weights, so it is made only where the machine has plenty.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_ROWS, MOST_ROWS = 2, 32  # with fewer or more, the other library is as fast
LARGE = 1_500_000  # weights, from where a single row gains too
SHARE = 4  # of the machine's memory the weights may take one part in so many
HINT = 8  # rows that the order of the weights is chosen for


class Product:
    """x [.., in] -> x weight^T + bias [.., out], for inference. weight: [out, in]."""

    __slots__ = ("bias", "least", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, pack: bool = False) -> None:
        self.weight, self.bias = weight, bias
        self.packed = _packed(weight) if pack else None
        self.least = 1 if weight.numel() >= LARGE else LEAST_ROWS  # rows, from where the second copy is used

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        if self.packed is None or not self.least <= x.shape[:-1].numel() <= MOST_ROWS:
            return F.linear(x, self.weight, self.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


def may_pack(weight: Tensor, weights_bytes: int) -> bool:
    """Say whether products with weights like this one gain by a second copy of them, and there is room for it.

    weights_bytes: of all weights of the model.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return False
    return SHARE * weights_bytes <= _memory() and _works()


def _packed(weight: Tensor) -> Tensor:
    made: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), HINT)
    return made


def _memory() -> int:
    """Return the bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _works() -> bool:
    """Say whether this build of torch has the operators, and they give what F.linear gives. They are not its API."""
    x, weight = (torch.arange(n * 16, dtype=torch.float32).sin().view(n, 16) for n in (2, 24))
    try:
        with torch.inference_mode():
            made: Any = torch.ops.mkldnn._linear_pointwise(x, _packed(weight), None, "none", [], "")
        return bool(torch.allclose(made, F.linear(x, weight), atol=1e-4))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False

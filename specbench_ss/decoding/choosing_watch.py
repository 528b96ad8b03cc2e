"""Sees NaN and infinity in whatever tokens are chosen from, whoever chooses. Slow: for answers that nobody times."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CHOOSING = {"topk", "argmax", "max", "sort", "multinomial", "_softmax", "_log_softmax", "logsumexp"}  # of torch


class ChoosingWatch(TorchDispatchMode):
    """Sees whether any tensor that tokens are chosen from holds NaN or infinity. -inf is allowed: it means never."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the first argument of an operation that chooses, and let it go on."""
        if func.overloadpacket.__name__ in CHOOSING and args[0].is_floating_point():
            self.found = self.found or bool(unusable(args[0]).any())
        return func(*args, **(kwargs or {}))


def unusable(x: Tensor) -> Tensor:
    """Return a bool tensor: where x is NaN or +infinity."""
    return x.isnan() | (x == math.inf)

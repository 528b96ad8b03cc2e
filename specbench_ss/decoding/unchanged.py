"""Whether a target is still the model that it was. A method that changes it changes what it is compared with, too."""

from __future__ import annotations

from torch import Tensor

from specbench_ss.decoding.finite import own_logits
from specbench_ss.decoding.target import Target
from specbench_ss.errors import UserError

CLOSE = 1e-3  # of the largest logit: what kernels of a device may choose differently from call to call


def difference(target: Target, before: Tensor) -> float:
    """Return the largest change of a logit, where it exceeds rounding; 0 where nothing has changed, NaN where one is.

    before: what `own_logits` gave. On a CPU the same pass gives the same bits.
    """
    off = float((own_logits(target) - before).abs().max())
    allowed = 0.0 if target.device.type == "cpu" else CLOSE * (1 + float(before.abs().max()))
    return 0.0 if off <= allowed else off


def check_unchanged(target: Target, before: Tensor, method: str) -> None:
    """Raise UserError where the target is another model than before this method was loaded."""
    off = difference(target, before)
    if off:
        raise UserError(
            f"method {method!r} changes the target itself while it loads: logits after a short prompt are off by "
            f"{off:.2g}. All methods would decode with the changed model. A method that changes the model works on a "
            "copy, and `reference_for` names the plain decoding that it is compared with"
        )

"""Checks of a target: numbers that are not finite, and weights that a method changed.

An argmax over NaN is a token, the same one everywhere: a broken model would be fast, and identical to itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError

ROUNDING = 0.02  # by which a sum over a vocabulary in half precision may miss 1
PROBE = 8  # tokens of the prompt that a model answers when it is loaded


class NotFinite(UserError):  # noqa: N818
    """A model gives NaN or infinity where it should give numbers."""


def check_logits(seen: Sequence[tuple[Tensor, Sequence[int]]], dtype: torch.dtype) -> None:
    """Raise NotFinite where the largest logit of an accepted node was not finite, as it is with NaN in its row.

    seen: of every step, the largest logit of every node [n], and the path that was accepted. One synchronisation.
    """
    if not seen:
        return
    values = iter(torch.cat([largest for largest, _ in seen]).tolist())
    for largest, path in seen:
        of_step = [next(values) for _ in range(len(largest))]
        if not all(math.isfinite(of_step[node]) for node in path):
            raise NotFinite(f"the target's logits are not finite: {why(dtype)}")


def check_probs(p: float) -> None:
    """Raise NotFinite where a probability of the target is NaN, as all of a row are where one of its logits is."""
    if not math.isfinite(p):
        raise NotFinite(f"the target's logits are not finite: {why(torch.float32)}")


def check_draft_probs(q: float, total: float = 1.0, least: float = 0.0) -> None:
    """Raise NotFinite where a probability that a candidate was drawn with is not finite, or its row is none of them.

    total, least: the row's sum, which half precision may miss by a little, and its smallest entry.
    """
    if not (math.isfinite(q) and math.isfinite(total)):
        raise NotFinite("the draft's probabilities are not finite: the drafter gives NaN or infinity")
    if least < 0 or abs(total - 1) > ROUNDING:
        raise NotFinite(
            f"draft_probs hold no distribution: a row sums to {total:.4g}, its smallest entry is {least:.4g}; "
            "verification by them would not be exact"
        )


def why(dtype: torch.dtype) -> str:
    """Return what may be the cause, in words."""
    small = "; float16 holds no number above 65,504: try bfloat16 or float32" if dtype == torch.float16 else ""
    return f"its weights or states hold NaN or infinity{small}"


def own_logits(target: Target) -> Tensor:
    """Return the target's float32 logits [V] after a short prompt. One forward pass.

    The modules compute them, as in training: in inference mode layers may use a reordered copy of the weights, and
    that copy would not show that a weight has changed.
    """
    ids = torch.arange(min(PROBE, target.vocab_size, target.context_length), device=target.device)[None]
    with torch.inference_mode(False), torch.no_grad():
        return target.prefill(ids, target.new_cache(ids.shape[1])).logits[0, -1].float()


def check_target(target: Target) -> None:
    """Raise NotFinite where the logits after a short prompt are not finite. One forward pass."""
    if not math.isfinite(float(own_logits(target).max())):  # NaN where any is
        raise NotFinite(
            f"model {target.name!r} cannot be used: its logits after a short prompt are not finite: {why(target.dtype)}"
        )


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
            "copy, and `baseline_for` names the autoregressive decoding that it is compared with"
        )

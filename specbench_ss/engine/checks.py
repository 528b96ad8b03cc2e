"""Checks of a target: non-finite numbers, and weights that a method changed.

argmax over NaN returns a valid token id, so a broken model would look fast and lossless.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError

SUM_TOLERANCE = 0.02  # tolerance of a sum over a vocabulary in half precision
PROBE_TOKENS = 8  # prompt length of the check at load time


class NotFinite(UserError):  # noqa: N818
    """Logits or probabilities of a model are NaN or infinite."""


def check_logits(steps: Sequence[tuple[Tensor, Sequence[int]]], dtype: torch.dtype) -> None:
    """Raise NotFinite if the largest logit of an accepted node is not finite (NaN if its row has any).

    steps: the largest logit of every node [n] and the accepted path, of each step. One synchronisation.
    """
    if not steps:
        return
    values = iter(torch.cat([max_logits for max_logits, _ in steps]).tolist())
    for max_logits, path in steps:
        step_values = [next(values) for _ in range(len(max_logits))]
        if not all(math.isfinite(step_values[node]) for node in path):
            raise NotFinite(f"the target's logits are not finite: {why(dtype)}")


def check_probs(p: float) -> None:
    """Raise NotFinite for a target probability of NaN; one non-finite logit makes its whole row NaN."""
    if not math.isfinite(p):
        raise NotFinite(f"the target's logits are not finite: {why(torch.float32)}")


def check_draft_probs(q: float, total: float = 1.0, least: float = 0.0) -> None:
    """Raise NotFinite if a draft probability is not finite or its row is not a distribution.

    total, least: the row's sum, within half-precision rounding of 1, and its smallest entry.
    """
    if not (math.isfinite(q) and math.isfinite(total)):
        raise NotFinite("the draft's probabilities are not finite: the drafter gives NaN or infinity")
    if least < 0 or abs(total - 1) > SUM_TOLERANCE:
        raise NotFinite(
            f"draft_probs are not a distribution: a row has sum {total:.4g} and minimum {least:.4g}; "
            "normalise them, or verification is not exact"
        )


def why(dtype: torch.dtype) -> str:
    """Return the likely cause, for an error message."""
    hint = "; float16 holds no number above 65,504: try bfloat16 or float32" if dtype == torch.float16 else ""
    return f"its weights or states hold NaN or infinity{hint}"


def own_logits(target: Target) -> Tensor:
    """Return the target's float32 logits [V] after a short prompt, from one forward pass.

    Runs in training mode: in inference mode layers may use a prepacked copy, which hides a changed weight.
    """
    ids = torch.arange(min(PROBE_TOKENS, target.vocab_size, target.context_length), device=target.device)[None]
    with torch.inference_mode(False), torch.no_grad():
        return target.prefill(ids, target.new_cache(ids.shape[1])).logits[0, -1].float()


def check_target(target: Target) -> None:
    """Raise NotFinite if the logits after a short prompt are not finite. One forward pass."""
    if not math.isfinite(float(own_logits(target).max())):  # NaN where any is
        raise NotFinite(
            f"model {target.name!r} cannot be used: its logits after a short prompt are not finite: {why(target.dtype)}"
        )


CLOSE = 1e-3  # tolerance as a share of the largest logit: GPU kernels may differ from call to call


def difference(target: Target, before: Tensor) -> float:
    """Return the largest change of a logit; 0 within rounding, NaN if a logit is NaN.

    before: an earlier result of `own_logits`. On a CPU the same pass gives the same bits.
    """
    change = float((own_logits(target) - before).abs().max())
    tolerance = 0.0 if target.device.type == "cpu" else CLOSE * (1 + float(before.abs().max()))
    return 0.0 if change <= tolerance else change


def check_unchanged(target: Target, before: Tensor, method: str) -> None:
    """Raise UserError if loading this method changed the target."""
    change = difference(target, before)
    if change:
        raise UserError(
            f"method {method!r} changes the target (logits by {change:.2g}); "
            "change a copy and name its AR baseline in `baseline_for`"
        )

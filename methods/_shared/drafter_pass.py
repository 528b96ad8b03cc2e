"""A pass through a drafter's own layers, made as its target's steps are: replayed, or with rows of other requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_ss.engine.kv_cache import Cache
    from specbench_ss.engine.target import Target

SEE_DIFFERENTLY = "layers of the drafter that do not all see the same"


def pass_drafter(
    target: Target,
    drafter: torch.nn.Module,
    run: Callable[..., Tensor],
    rows: Sequence[Tensor],
    cache: Cache,
    masks: Sequence[Tensor | None],
    rotary: tuple[Tensor, Tensor],
) -> Tensor:
    """Return what `run(*rows, cache, masks, rotary)` does of rows [1, n, ..] behind those in the cache: [1, n, h].

    drafter: what `run` computes with, and nothing else beside what it is given. masks: additive [1, 1, n, past + n],
    one a layer, None = nothing to hide, or a prompt's rows in order. rotary: cos, sin [1, 1 or n, head_dim].
    """
    if target.passes is None:
        return run(*rows, cache, masks, rotary)
    mask, n, past = masks[0], rows[0].shape[1], cache.get_seq_length()
    if any(other is not mask for other in masks):
        target.passes.decline(SEE_DIFFERENTLY, 0, cache)
        return run(*rows, cache, masks, rotary)
    if mask is None and n > 1 and past:
        mask = rows[0].new_zeros(1, 1, n, past + n)

    def layers(x: Tensor, cache: Any, mask: Tensor | None, rotary: Any) -> tuple[Tensor, ...]:
        return (run(*x.split([part.shape[-1] for part in rows], -1), cache, [mask] * len(masks), rotary),)

    cos, sin = (part.expand(-1, n, -1) for part in rotary)
    (out,) = target.through(drafter, layers, torch.cat(tuple(rows), -1), 0, cache, mask, (cos, sin))
    return out

"""What an attention layer is given of several requests at a time: each one's rows see its own keys alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from specbench_ss.decoding.placement import Movable, moved

Fold = Callable[[Tensor | None, int, int, Any, int], Tensor | None]


class Parts(Movable):
    """A tensor, or None, of each request. sizes: how long each one's rows are along dimension `dim`, 0 or 1, of states.

    dim 1: rows [1, q, h] one after the other. dim 0: a batch [B, q, h].
    """

    def __init__(self, of: Sequence[Any], sizes: Sequence[int], dim: int) -> None:
        self.of, self.sizes, self.dim = list(of), list(sizes), dim

    def on(self, device: torch.device) -> Parts:
        """Return the same on a device."""
        return Parts(moved(self.of, device), self.sizes, self.dim)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Heads' rows [B, heads, q, d] of all requests -> those of each."""
        return cast("tuple[Tensor, ...]", x.split(self.sizes, 2 if self.dim else 0))

    def attended(
        self, attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor], query: Tensor, value: Parts, mask: Any
    ) -> Tensor:
        """These being keys: what each one's rows [B, heads, q, d] see of its own, [B, q, heads, d] of all."""
        masks = mask.of if isinstance(mask, Parts) else [mask] * len(self.of)
        each = zip(self.split(query), self.of, value.of, masks, strict=True)
        return torch.cat([attend(*one) for one in each], self.dim)


class PartsCache:
    """The caches of several requests as layers see them."""

    is_compileable = False

    def __init__(self, caches: Sequence[Any], sizes: Sequence[int], dim: int) -> None:
        self.caches, self.sizes, self.dim = list(caches), list(sizes), dim

    def get_seq_length(self, layer: int = 0) -> tuple[int, ...]:
        """Rows of each in a layer."""
        return tuple(cache.get_seq_length(layer) for cache in self.caches)

    def update(self, k: Tensor, v: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Parts, Parts]:
        """Write each one's k, v [B, kv_heads, q, head_dim] into its own cache; return all keys and values of each."""
        own = Parts([], self.sizes, self.dim)
        each = zip(self.caches, own.split(k), own.split(v), strict=True)
        keys, values = zip(*(cache.update(a, b, layer) for cache, a, b in each), strict=True)
        return Parts(keys, self.sizes, self.dim), Parts(values, self.sizes, self.dim)

    def windowed(self, fold: Fold, mask: Parts, window: int, rows: int, layer: int) -> Parts:
        """The mask of each with a sliding window folded in. fold: `Target.windowed`."""
        lengths = self.sizes if self.dim else [rows] * len(self.sizes)
        each = zip(mask.of, lengths, self.caches, strict=True)
        folded = [fold(one, window, q, cache, layer) for one, q, cache in each]
        return Parts(folded, self.sizes, self.dim)

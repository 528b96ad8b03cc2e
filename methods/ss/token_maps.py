"""What a root or a parent says, mapped to logits: for streams whose logits were made before the token was known."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_ss.decoding.products import Product
    from specbench_ss.decoding.target import Target
    from specbench_ss.methods.ss.streams import Streams


class TokenMaps:
    """W times the maps of `Streams.told`, [V, rank] each, made when they are needed, once for all that share them."""

    def __init__(self, target: Target, streams: Streams) -> None:
        self.target, self.streams = target, streams

    @cached_property
    def root(self) -> Product:
        """Of the root, for all streams."""
        return self._made(self.streams.root_up)

    @cached_property
    def parent(self) -> Product:
        """Of a parent, for the stream of its children."""
        return self._made(self.streams.parent_up)

    def _made(self, up: Tensor) -> Product:
        from specbench_ss.decoding.products import Product  # which loads torch, and methods are listed without it

        target = self.target
        with torch.no_grad():
            weight = target.unembed @ up
            return Product(weight.half().float() if target.rounded else weight, None, target.packs)

    def known(self, logits: Tensor, root: Tensor) -> Tensor:
        """Logits [gamma, V] of streams that know no token yet, with what their root int64 [] says; [gamma, V]."""
        c, streams = self.streams.config, self.streams
        if c.root_rank:
            logits = logits + self.root(streams.root_rows(self.target, root)[None])
        if c.parent_rank:  # of the first level the root is the parent
            first = logits[:1] + self.parent(streams.parent_rows(self.target, root)[None])
            logits = torch.cat((first, logits[1:]))
        return logits

    def changes(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """What parents [m] change in the logits of tokens [s] as their children: [m, s]."""
        return self.streams.parent_rows(self.target, parents) @ self.parent.weight[tokens].mT

    def ready(self) -> list[Tensor]:
        """Matrices that `known` multiplies by, from now on there: no step has to make them."""
        c = self.streams.config
        return [*([self.root.weight] if c.root_rank else []), *([self.parent.weight] if c.parent_rank else [])]

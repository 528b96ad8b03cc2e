"""What a root or a parent says, mapped to logits: for streams whose logits were made before the token was known."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from specbench_ss.decoding.products import Product
    from specbench_ss.decoding.target import Target
    from specbench_ss.methods.ss.streams import Streams


CHUNK = 4096  # tokens whose embeddings are normed at a time


class TokenMaps:
    """What `Streams.told` adds, as two tables for each map, made when they are needed, once for all that share them.

    One has what each token says, [V, rank], and the other, W times the map, what that changes in the logits of each.
    """

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

    @cached_property
    def root_said(self) -> Tensor:
        """What each token says as a root, [V, root_rank]."""
        return self._said(self.streams.root_rows)

    @cached_property
    def parent_said(self) -> Tensor:
        """What each token says as a parent, [V, parent_rank]."""
        return self._said(self.streams.parent_rows)

    def _said(self, rows: Callable[[Target, Tensor], Tensor]) -> Tensor:
        count = len(self.target.model.get_input_embeddings().weight)
        every = torch.arange(count, device=self.target.device)
        with torch.no_grad():
            return torch.cat([rows(self.target, tokens) for tokens in every.split(CHUNK)])

    def _made(self, up: Tensor) -> Product:
        from specbench_ss.decoding.products import Product  # which loads torch, and methods are listed without it

        target = self.target
        with torch.no_grad():
            weight = target.unembed @ up
            return Product(weight.half().float() if target.rounded else weight, None, target.packs)

    def known(self, logits: Tensor, root: Tensor) -> Tensor:
        """Logits [gamma, V] of streams that know no token yet, with what their root int64 [] says; [gamma, V]."""
        c = self.streams.config
        if c.root_rank:
            logits = logits + self.root(said_by(self.root_said, root))
        if c.parent_rank:  # of the first level the root is the parent
            first = logits[:1] + self.parent(said_by(self.parent_said, root))
            logits = torch.cat((first, logits[1:]))
        return logits

    def changes(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """What parents [.., m] change in the logits of tokens [.., s] as their children: [.., m, s]."""
        return self.parent_said[parents] @ self.parent.weight[tokens].mT

    def ready(self) -> list[Tensor]:
        """Matrices that `known` multiplies by, from now on there, as the tables are: no step has to make them."""
        c, made = self.streams.config, []
        if c.root_rank:
            made, _ = [self.root.weight], self.root_said
        if c.parent_rank:
            made, _ = [*made, self.parent.weight], self.parent_said
        return made


def said_by(table: Tensor, token: Tensor) -> Tensor:
    """The row [1, rank] of a token int64 []; to index by a number without dimensions would wait for the device."""
    return table.index_select(0, token[None])

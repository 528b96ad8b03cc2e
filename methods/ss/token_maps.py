"""What a root or a parent says, mapped to logits: for streams whose logits were made before the token was known."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from specbench_ss.engine.cpu_kernels import Product
    from specbench_ss.engine.target import Target
    from specbench_ss.methods.ss.streams import Streams


CHUNK = 4096  # tokens whose embeddings are normed at a time


class TokenMap:
    """One map of `Streams.told` as two tables, made when they are needed: what each token says, and what that changes.

    up [h, rank]: to states. rows: what tokens say, before it is mapped.
    """

    def __init__(self, target: Target, up: Tensor, rows: Callable[[Target, Tensor], Tensor]) -> None:
        self.target, self.up, self.rows = target, up, rows

    @cached_property
    def said(self) -> Tensor:
        """What each token says, [V, rank]."""
        count = len(self.target.model.get_input_embeddings().weight)
        every = torch.arange(count, device=self.target.device)
        with torch.no_grad():
            return torch.cat([self.rows(self.target, tokens) for tokens in every.split(CHUNK)])

    @cached_property
    def product(self) -> Product:
        """By W times the map, [V, rank]: what it changes in the logits of each token."""
        from specbench_ss.engine.cpu_kernels import Product

        target = self.target
        with torch.no_grad():
            weight = target.unembed @ self.up
            return Product(weight.half().float() if target.rounded else weight, None, target.packs)

    def of(self, token: Tensor) -> Tensor:
        """What a token int64 [] changes in all logits, [1, V]. To index by it would wait for the device."""
        return self.product(self.said.index_select(0, token[None]))


class TokenMaps:
    """What roots and parents change in logits, made once for all decoders that share these. None: not learnt."""

    def __init__(self, target: Target, streams: Streams) -> None:
        c = streams.config
        self.root = TokenMap(target, streams.root_up, streams.root_rows) if c.root_rank else None
        self.parent = TokenMap(target, streams.parent_up, streams.parent_rows) if c.parent_rank else None

    def known(self, logits: Tensor, root: Tensor) -> Tensor:
        """Logits [gamma, V] of streams that know no token yet, with what their root int64 [] says; [gamma, V]."""
        if self.root is not None:
            logits = logits + self.root.of(root)
        if self.parent is not None:  # of the first level the root is the parent
            logits = torch.cat((logits[:1] + self.parent.of(root), logits[1:]))
        return logits

    def changes(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """What parents [.., m] change in the logits of tokens [.., s] as their children: [.., m, s]."""
        assert self.parent is not None
        return self.parent.said[parents] @ self.parent.product.weight[tokens].mT

    def prepare(self) -> None:
        """Make all tables now, so that no step has to."""
        for one in self._learnt():
            one.said, one.product  # noqa: B018 - made by being asked for

    def multiplied(self) -> list[Tensor]:
        """Matrices that `known` multiplies by."""
        return [one.product.weight for one in self._learnt()]

    def _learnt(self) -> list[TokenMap]:
        return [one for one in (self.root, self.parent) if one is not None]

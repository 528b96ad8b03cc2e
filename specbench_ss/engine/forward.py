"""A forward pass behind the cached rows, in three forms: eager, in a CUDA graph, and with those of other requests.

`Target.run_pass` gives one of them to a function, which states its query tokens, mask and positions in the same way for
all: the number of cached rows is on the host in an eager pass and on the device in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from specbench_ss.engine.batch_runner import run_together
from specbench_ss.engine.cuda_graphs import Context, StaticPass

Rotary = Any  # result of `Target.rotary` for the layers: cos and sin, `generic_model.LayerInputs`, or None
Layers = Callable[..., Tensor]  # (*inputs, cache, mask, rotary) -> [1, n, ..]


class ForwardPass:
    """A pass of n query tokens behind the cached rows.

    target: the `Target`. past: number of cached rows; on the host, or int64 [1] on the device. on_host: the function
    may read values of tensors.
    """

    target: Any
    past: Any
    on_host: bool
    is_prompt = False  # True if nothing is cached

    def positions(self, depths: Tensor) -> Tensor:
        """Return the positions [1, n] of nodes of these depths [n]: how many tokens they are behind the cached ones."""
        positions: Tensor = (depths + self.past)[None]
        return positions

    def mask(self, visible: Tensor, context: Context | None = None) -> Tensor | None:
        """Return the additive mask of visible [q, m], m rows behind the cached ones; None if it would mask nothing.

        context: maps the number of cached rows and their positions [keys] to the visible ones, bool [q, keys]; None =
        all of them.
        """
        raise NotImplementedError

    def causal_mask(self, n: int) -> Tensor | None:
        """Return the additive mask of n successive tokens; None for a prompt, which layers mask themselves."""
        if self.is_prompt:
            return None
        return self.mask(torch.ones(n, n, dtype=torch.bool, device=self.target.device).tril())

    def rotary(self, positions: Tensor) -> Rotary:
        """Return the position inputs of the target's layers at positions [1, n]."""
        raise NotImplementedError

    def rows(self, n: int, first: int = 0) -> Any:
        """Return the cache for layers that write n rows; n and `first` as of `layers`."""
        raise NotImplementedError

    def commit(self, n: int) -> None:
        """Keep the last n rows, so that the next ones follow."""
        raise NotImplementedError

    def run(
        self, x: Tensor, lo: int, hi: int, mask: Tensor | None, rotary: Rotary, wanted: tuple[int, ...] = ()
    ) -> tuple[Tensor, ...]:
        """Run x [1, n, h] through the target's layers lo..hi-1; return the result and the inputs of wanted layers."""
        out: tuple[Tensor, ...] = self.target.run(x, lo, hi, self.rows(x.shape[1]), mask, rotary, wanted)
        return out

    def layers(
        self,
        name: Hashable,
        layers: Layers,
        inputs: Sequence[Tensor],
        mask: Tensor | None,
        rotary: Rotary,
        first: int = 0,
        pad: bool = True,
    ) -> Tensor:
        """Return layers(*inputs, cache, mask, rotary) [1, n, ..] of a method's own layers over this cache.

        Args:
            name: the only other thing that `layers` depends on.
            inputs: [1, n, ..] each.
            mask: additive [1, 1, n, keys]; None = causal for a prompt, else everything is visible.
            rotary: cos, sin [1, 1 or n, head_dim], or None.
            first: where the rows begin behind the cached ones, if `commit` was called for those before them.
            pad: concurrent requests may differ in n.
        """
        return layers(*inputs, self.rows(inputs[0].shape[1], first), mask, rotary)


class EagerPass(ForwardPass):
    """Eager forward pass. cache: KV cache, or None. longest: largest position, on the host."""

    on_host = True

    def __init__(self, target: Any, cache: Any, longest: int) -> None:
        self.target, self.cache, self.longest = target, cache, longest
        self.past = 0 if cache is None else cache.get_seq_length()
        self.is_prompt = not self.past

    def mask(self, visible: Tensor, context: Context | None = None) -> Tensor | None:
        if visible.shape == (1, 1) and context is None:
            return None
        past = self.past
        if context is not None:
            past, visible = 0, torch.cat((context(past, torch.arange(past, device=visible.device)), visible), 1)
        mask: Tensor = self.target.block_mask(visible, past)
        return mask

    def rotary(self, positions: Tensor) -> Rotary:
        return self.target.rotary(positions, self.longest)

    def rows(self, n: int, first: int = 0) -> Any:
        return self.cache

    def commit(self, n: int) -> None:
        self.cache.commit(n)


class BatchPass(EagerPass):
    """A pass of one of several concurrent requests, whose layers run on the query tokens of all."""

    def run(
        self, x: Tensor, lo: int, hi: int, mask: Tensor | None, rotary: Rotary, wanted: tuple[int, ...] = ()
    ) -> tuple[Tensor, ...]:
        if lo == hi:
            return super().run(x, lo, hi, mask, rotary, wanted)

        def layers(x: Tensor, cache: Any, mask: Any, rotary: Any) -> tuple[Tensor, ...]:
            out: tuple[Tensor, ...] = self.target.run(x, lo, hi, cache, mask, rotary, wanted)
            return out

        return run_together((id(self.target), lo, hi, wanted), layers, x, self.cache, mask, rotary)

    def layers(
        self,
        name: Hashable,
        layers: Layers,
        inputs: Sequence[Tensor],
        mask: Tensor | None,
        rotary: Rotary,
        first: int = 0,
        pad: bool = True,
    ) -> Tensor:
        n, widths = inputs[0].shape[1], [part.shape[-1] for part in inputs]
        if mask is None and n > 1 and self.past:
            mask = inputs[0].new_zeros(1, 1, n, self.past + n)

        def joined(x: Tensor, *others: Any) -> tuple[Tensor]:
            return (layers(*x.split(widths, -1), *others),)

        x, rotary = torch.cat(tuple(inputs), -1), rotary and tuple(part.expand(-1, n, -1) for part in rotary)
        return run_together((id(self.target), name), joined, x, self.cache, mask, rotary, pad)[0]


class GraphPass(ForwardPass):
    """A pass inside a CUDA graph."""

    on_host = False

    def __init__(self, target: Any, static_pass: StaticPass) -> None:
        self.target, self.static_pass, self.past = target, static_pass, static_pass.past

    def mask(self, visible: Tensor, context: Context | None = None) -> Tensor:
        return self.static_pass.mask(visible, self.target.dtype, context)

    def rotary(self, positions: Tensor) -> Rotary:
        return self.target.rotary(positions, 0)  # each size of their table has its own graphs

    def rows(self, n: int, first: int = 0) -> Any:
        return self.static_pass.rows(n, first)

    def commit(self, n: int) -> None:
        pass  # `first` of `layers` states where the next rows begin


def ancestor_context(visible: Tensor) -> Context | None:
    """Return the context of nodes that see these of the last m cached rows, bool [q, m], and all rows before them."""
    m = visible.shape[1]

    def context(past: Any, keys: Tensor) -> Tensor:
        offsets = keys - (past - m)
        seen: Tensor = visible[:, offsets.clamp(0, m - 1)] | (offsets < 0)
        return seen

    return context if m else None

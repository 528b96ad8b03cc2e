"""Slots of a drafter with one layer: its KV cache, passes over tree levels, and EAGLE-2's dynamic tree.

There is a slot for every position before the root's, computed from the target's hidden state; slots of drafted nodes
follow for one step and are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.forward import ForwardPass, ancestor_context
from specbench_ss.engine.kv_cache import Cache, row_numbers
from specbench_ss.engine.tree import DraftTree, TreeTensors
from specbench_ss.methods._shared.drafting import FeatureDecoder
from specbench_ss.methods._shared.tree_growth import best, grow


class Slots:
    """KV cache and passes of a decoder's drafter.

    newest: [1, 1, h], output of the last permanent slot, which gives the root's children.
    """

    def __init__(self, decoder: FeatureDecoder) -> None:
        self.target, self.drafter, self.rotary = decoder.target, decoder.drafter, decoder.rotary
        self.vocabulary, self.head_rows = decoder.vocabulary, decoder.head_rows
        self.cache, self.newest = Cache(1, 0), torch.empty(0)

    def logits(self, states: Tensor, index: int = 0) -> Tensor:
        """Return logits [.., draft vocabulary] of output states [.., h]. index: of the layer they come from."""
        logits: Tensor = self.drafter.logits(states, self.target, index, self.head_rows)
        return logits

    # -- slots of true hidden states ----------------------------------------------------------------------------

    def extend(self, state: DecodeState, tokens: Tensor, features: Sequence[Tensor]) -> Tensor:
        """Add permanent slots: tokens [n], each the one after its hidden states [1, n, h_t]. Return [1, n, h]."""
        n, dims = len(tokens), ((0,), *[(1,)] * len(features))
        (out,) = self.target.run_pass((self, "extend"), self._slots, self.cache, (tokens, *features), dims, n)
        self.cache.commit(n)
        self.newest = out[:, -1:]
        state.num_draft_forwards += 1
        return out

    def _slots(self, current: ForwardPass, tokens: Tensor, *features: Tensor) -> tuple[Tensor]:
        """Return the drafter's output [1, n, h] for tokens [n] and hidden states [1, n, h_t]."""
        n, fused = len(tokens), self.drafter.fuse(features)
        rotary = self.rotary(current.positions(torch.arange(n, device=fused.device)), fused.dtype)
        return (self._run(current, tokens, fused, current.causal_mask(n), rotary, 0),)

    def _run(
        self,
        current: ForwardPass,
        tokens: Tensor,
        states: Tensor,
        mask: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        first: int,
    ) -> Tensor:
        """Run the drafter, which has one layer and one mask, on slots `first` rows behind the cached ones."""
        embedded = self.drafter.embed(tokens[None], self.target)
        return current.layers(self.drafter, self.drafter, (embedded, states), mask, rotary, first)

    # -- slots of drafted nodes ---------------------------------------------------------------------------------

    def rotary_ahead(self, current: ForwardPass, levels: int) -> tuple[Tensor, Tensor]:
        """Return cos, sin [1, levels, head_dim] of drafted nodes; all nodes of a level have the same position."""
        depths = torch.arange(levels, device=self.target.device)
        return self.rotary(current.positions(depths), self.newest.dtype)

    def descend(
        self,
        current: ForwardPass,
        tokens: Tensor,
        states: Tensor,
        visible: Tensor,
        rotary: tuple[Tensor, Tensor],
        level: int,
    ) -> Tensor:
        """Return the states [1, k, h] of one level's nodes from their tokens [k] and parents' states [1, k, h].

        visible: bool [k, drafted slots so far + k]. level: 0 for the root's children.
        """
        cos, sin = rotary
        at_level = cos[:, level : level + 1], sin[:, level : level + 1]
        first = visible.shape[1] - len(tokens)
        out = self._run(current, tokens, states, current.mask(visible), at_level, first)
        current.commit(len(tokens))
        return out

    def draft_level(self, tokens: Tensor, states: Tensor, visible: Tensor, level: int) -> Tensor:
        """Return the states of one level's nodes as `descend` does, from a pass of its own, and keep their slots.

        For nodes that are chosen on the host. visible: the same for all nodes of this level at every step.
        """
        level_pass, k = partial(self._level_pass, visible, level), len(tokens)
        (out,) = self.target.run_pass((self, level, k), level_pass, self.cache, (tokens, states), rows=k)
        self.cache.commit(k)
        return out.clone()  # an input of the next pass, which may have this name

    def _level_pass(
        self, visible: Tensor, level: int, current: ForwardPass, tokens: Tensor, states: Tensor
    ) -> tuple[Tensor]:
        """Return the states [1, k, h] of nodes whose ancestors are the last cached rows."""
        earlier = visible.shape[1] - len(tokens)
        depth = row_numbers(tokens.device, level, level + 1) - earlier
        mask = current.mask(visible[:, earlier:], ancestor_context(visible[:, :earlier]))
        return (self._run(current, tokens, states, mask, self.rotary(current.positions(depth), states.dtype), 0),)

    def drop_drafted(self, state: DecodeState, passes: int) -> None:
        """Drop the slots of drafted nodes, after this number of the drafter's passes."""
        self.cache.compact(state.position, ())
        state.num_draft_forwards += passes


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a dynamic tree. drafted: nodes without the root; depth: levels after the first."""

    drafted: int
    depth: int
    top_k: int

    @property
    def slots(self) -> int:
        """Return the slots of drafted nodes in a step."""
        return self.depth * self.top_k


class DynamicTree:
    """EAGLE-2's tree over a drafter's slots: each level expands the nodes of the greatest path probability."""

    def __init__(self, slots: Slots, size: Size) -> None:
        self.slots, self.size, self.rows = slots, size, max(1, size.slots)
        self._drafted = TreeTensors()

    def draft(self, state: DecodeState) -> DraftTree:
        """Expand nodes by path probability, level by level (EAGLE-2 sec. 4.1); keep the best nodes (sec. 4.2)."""
        slots, inputs = self.slots, (state.root, self.slots.newest)
        tensors: Any = slots.target.run_pass((self, "grow"), self._grow, slots.cache, inputs, rows=self.rows)
        slots.drop_drafted(state, self.size.depth)
        return self._drafted.tree(tensors)

    def _grow(self, current: ForwardPass, root: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of the tree from the root [1] and the newest slot's output [1, 1, h]."""
        size, slots = self.size, self.slots
        root_logits, rotary = slots.logits(states)[0, 0], slots.rotary_ahead(current, max(1, size.depth))

        def expand(tokens: Tensor, visible: Tensor, parent_rows: Tensor, level: int) -> Tensor:
            nonlocal states  # [1, rows, h] of the last level's expanded nodes, at first the root's
            states = slots.descend(current, tokens, states[:, parent_rows], visible, rotary, level - 1)
            return slots.logits(states)[0]

        choose = slots.vocabulary.select(best(size.top_k))
        tree = grow(root, root_logits, choose, expand, size.depth + 1, size.drafted)
        return self._drafted.tensors(tree)

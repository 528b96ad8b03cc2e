"""Trees of the draft model: k candidates for each of a level's k best nodes (as SpecInfer expands, EAGLE-2 selects)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench_ss.engine.decoder import State
from specbench_ss.engine.sampling import Sampling
from specbench_ss.engine.tree import DraftTree
from specbench_ss.methods._shared.tree_growth import best, draw, grow
from specbench_ss.methods.sd.draft import Draft

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specbench_ss.methods._shared.tree_growth import Choose


def draft_tree(
    draft: Draft, logits: Tensor, depth: int, k: int, nodes: int, drawn: Sampling | None, state: State
) -> DraftTree:
    """A tree under state.root, after whose logits [V]. drawn: the distribution to draw from, None = the best tokens.

    Of drawn candidates all stay in the tree: what is given children depends on what is verified alone.
    """
    choose = best(k) if drawn is None else drawing(k, drawn, state.rng)

    def expand(tokens: Tensor, visible: Tensor, above: Tensor, level: int) -> Tensor:
        return draft.feed_level(tokens, visible, level)

    return grow(state.root, logits, choose, expand, depth, nodes if drawn is None else 0)


def drawing(k: int, sampling: Sampling, rng: torch.Generator) -> Choose:
    """k tokens of each row, drawn without replacement."""

    def choose(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = sampling.probs(logits)
        tokens = draw(q, rng, k)
        return tokens, q.gather(-1, tokens).log(), q

    return choose

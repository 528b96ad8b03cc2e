"""What a method computes with the model's matrices besides verifying its nodes, for counting what steps cost."""

from __future__ import annotations

from dataclasses import dataclass

from specbench_ss.decoding.model_shape import read_by_a_pass
from specbench_ss.decoding.products import entries
from specbench_ss.decoding.target import Target


@dataclass(frozen=True, slots=True)
class OwnWork:
    """Entries of matrices that rows of the method's own are multiplied by in the pass that verifies.

    What drafting computes is left out, the LM head above all, which most drafters use again: it is counted of none.
    step: in each step, whatever it verifies. node: for each row that reaches the last layer, the root's included.
    dropped: for each drafted node that does not reach it, in the layers below.
    """

    step: float = 0.0
    node: float = 0.0
    dropped: float = 0.0

    def as_dict(self) -> dict[str, float]:
        """Return JSON-ready data."""
        return {"step": self.step, "node": self.node, "dropped": self.dropped}


def of_attention(target: Target, layers: slice = slice(None)) -> int:
    """Return the entries of the attention matrices of these layers of a model that is taken apart."""
    blocks = target.family.blocks[layers]
    return sum(entries(w) for block in blocks for w in block.attention.parameters() if w.ndim == 2)


def of_layers(target: Target, layers: slice = slice(None)) -> int:
    """Return the entries of all matrices of these layers, which are alike."""
    every = sum(entries(w) for w in read_by_a_pass(target.model) if w.ndim == 2) - of_head(target)
    return every * len(range(target.n_layers)[layers]) // target.n_layers


def of_head(target: Target) -> int:
    """Return the entries of the LM head."""
    return entries(target.family.head.weight)

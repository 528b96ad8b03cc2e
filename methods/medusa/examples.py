"""Medusa with random heads: what the laws are tried on."""

from __future__ import annotations

from collections.abc import Callable

from specbench_ss.methods.medusa import Medusa, MedusaOptions
from specbench_ss.methods.medusa.heads import MedusaHeads
from specbench_ss.methods.medusa.trees import PUBLISHED, tree_of
from specbench_ss.target import Target
from specbench_ss.testing.tiny import randomise

ACCURACIES = [[0.5 / (rank + 1) for rank in range(6)] for _ in range(3)]


def random_medusa(
    target: Target, heads: int = 3, own_unembed: bool = True, options: MedusaOptions | None = None
) -> Medusa:
    """Random heads on the published tree, as deep as there are heads; with options on the tree that they ask for."""
    module = MedusaHeads(heads, 1, target.hidden_size, target.vocab_size, own_unembed)
    randomise(module, 1)
    if options is None:
        choices = [c for c in PUBLISHED if len(c) <= heads and max(c) < target.vocab_size]
        return Medusa(target, MedusaOptions(), module, tree_of(choices))
    config = {"accuracies": ACCURACIES[:heads], "nodes": 5}
    return Medusa(target, options, module, tree_of(Medusa.choices(options, config, heads)), config)


def shapes(target: Target) -> dict[str, Callable[[], Medusa]]:
    """Trees by accuracy and as published; heads of their own, and those that share the base's."""
    return {
        "auto": lambda: random_medusa(target, options=MedusaOptions()),
        "published": lambda: random_medusa(target),
        "shared-head": lambda: random_medusa(target, 4, own_unembed=False),
    }

"""Medusa with random heads, on the target and on a model of its own: what the laws are tried on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.target import Target
from specbench_ss.methods._shared.heads_decoder import TreeHeads
from specbench_ss.methods._shared.static_trees import PUBLISHED, Choice, tree_of
from specbench_ss.methods.medusa.heads import MedusaHeads
from specbench_ss.methods.medusa.options import MedusaOptions
from specbench_ss.models.tiny import randomise

ACCURACIES = [[0.5 / (rank + 1) for rank in range(6)] for _ in range(4)]
M = TypeVar("M", bound=TreeHeads)


def example_choices(target: Target, heads: int) -> list[Choice]:
    """Of the published tree what a small vocabulary and few heads can draft."""
    return [c for c in PUBLISHED if len(c) <= heads and max(c) < target.vocab_size]


def random_medusa(
    method: type[M],
    target: Target,
    heads: int = 3,
    own_unembed: bool = True,
    options: MedusaOptions | None = None,
    layers: int = 1,
) -> M:
    """Random heads on the published tree, as deep as there are heads; with options on the tree that they ask for."""
    module = MedusaHeads(heads, layers, target.hidden_size, target.vocab_size, own_unembed)
    randomise(module, 1)
    if options is None:
        return method(target, MedusaOptions(), module, tree_of(example_choices(target, heads)))
    config = {"accuracies": ACCURACIES[:heads], "nodes": 5}
    return method(target, options, module, tree_of(method.choices(options, config, heads)), config)


def shapes(method: type[TreeHeads], target: Target) -> Mapping[str, Callable[[], Decoder]]:
    """Trees by accuracy and as published; heads of their own, and those that share the base's; every rule."""

    def made(heads: int = 3, own: bool = True, layers: int = 1, **options: Any) -> Callable[[], Decoder]:
        chosen = MedusaOptions(**options) if options else None
        return lambda: random_medusa(method, target, heads, own, chosen, layers)

    return {
        "auto": made(tree="auto"),
        "published": made(),
        "shared-head": made(4, own=False, layers=2),
        "few-nodes": made(2, own=False, nodes=2),
        "one-head": made(1),
        "typical": made(accept="typical"),
        "nucleus": made(accept="nucleus"),
    }

"""Hydra with random heads: what the laws are tried on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.target import Target
from specbench_ss.methods._shared.heads_decoder import TreeHeads
from specbench_ss.methods._shared.small_llama import llama_layer
from specbench_ss.methods._shared.static_trees import tree_of
from specbench_ss.methods.hydra.heads import HydraHeads
from specbench_ss.methods.hydra.options import HydraOptions
from specbench_ss.methods.medusa.examples import ACCURACIES, example_choices
from specbench_ss.models.tiny import randomise

H = TypeVar("H", bound=TreeHeads)


def random_hydra(
    method: type[H],
    target: Target,
    heads: int = 3,
    layers: int = 1,
    prefix: bool = True,
    own_unembed: bool = True,
    offset: int = 0,
    options: HydraOptions | None = None,
) -> H:
    """Random heads on the published tree, as deep as there are heads; with options on the tree that they ask for."""
    layer = llama_layer(target) if prefix else None
    module = HydraHeads(heads, layers, target.hidden_size, target.vocab_size, layer, own_unembed)
    randomise(module, 1)
    config: dict[str, Any] = {"hidden_state_offset": offset}
    if options is None:
        return method(target, HydraOptions(), module, tree_of(example_choices(target, heads)), config)
    config |= {"accuracies": ACCURACIES[:heads], "nodes": 5}
    return method(target, options, module, tree_of(method.choices(options, config, heads)), config)


def shapes(method: type[TreeHeads], target: Target) -> Mapping[str, Callable[[], Decoder]]:
    """With the prefix layer and without, own LM heads and the base's, an earlier state, and a rule that is lossy."""
    auto, typical = HydraOptions(), HydraOptions(accept="typical")
    return {
        "hydra++": lambda: random_hydra(method, target, 4, layers=2),
        "hydra": lambda: random_hydra(method, target, 4, prefix=False),
        "auto": lambda: random_hydra(method, target, options=auto),
        "one-head": lambda: random_hydra(method, target, 1),
        "earlier-state": lambda: random_hydra(method, target, 2, prefix=False, offset=1),
        "shared-head": lambda: random_hydra(method, target, own_unembed=False, offset=1),
        "typical": lambda: random_hydra(method, target, options=typical),
    }

"""Drafters of other papers as shapes on the meta device: EAGLE-1 (Li et al. 2024), Hydra (Ankner et al. 2024).

They serve only to count parameters and FLOPs; they draft nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from specbench_ss.engine.target import Target
from specbench_ss.methods._shared.static_trees import PUBLISHED
from specbench_ss.methods.hydra.heads import HydraHeads
from specbench_ss.reports.paper.meta_device import CONTEXT, HEADS, META, Overhead, count, flops, meta_state
from specbench_ss.reports.paper.paper_models import on_meta

EAGLE_ROWS = (1, 4, 8, 8, 3)  # nodes expanded at each depth of EAGLE's static 25-node tree


def layer_flops(target: Target, rows: int) -> int:
    """Return the FLOPs of one decoder layer of the base over this many rows, through the base's own driver."""
    state = meta_state(target)
    positions = torch.zeros(1, rows, dtype=torch.long, device=META)
    mask = target.block_mask(torch.ones(rows, rows, dtype=torch.bool, device=META), CONTEXT)
    x = torch.empty(1, rows, target.hidden_size, device=META)
    return flops(lambda: target.run(x, 0, 1, state.cache, mask, target.rotary(positions, CONTEXT)))


class Eagle(nn.Module):
    """EAGLE-1's drafter: a fusion layer and one decoder layer of the base's shape, without its first norm."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.layer = on_meta(model, num_hidden_layers=1).get_decoder().layers[0]
        del self.layer.input_layernorm
        hidden = self.layer.post_attention_layernorm.weight.shape[0]
        with META:
            self.fuse = nn.Linear(2 * hidden, hidden, bias=False)


def eagle(target: Target, model: str) -> Overhead:
    """Return the costs of five passes of the layer over the static tree, each with the base's LM head."""
    drafter = Eagle(model)
    total, chain = (
        sum(layer_flops(target, rows) + flops(_fusion_and_head(target, drafter, rows)) for rows in tree)
        for tree in (EAGLE_ROWS, (1,) * len(EAGLE_ROWS))
    )
    return Overhead(count(drafter), len(EAGLE_ROWS), total, chain)


def _fusion_and_head(target: Target, drafter: Eagle, rows: int) -> Callable[[], Tensor]:
    x = torch.empty(rows, drafter.fuse.in_features, device=META)
    return lambda: target.logits(drafter.fuse(x))


def meta_hydra(hidden: int, vocab: int, plus: bool) -> HydraHeads:
    """Return four Hydra heads, of four blocks each with `plus`."""
    with META:
        return HydraHeads(HEADS, 4 if plus else 1, hidden, vocab, tied=True)


def hydra(target: Target, model: str, plus: bool) -> Overhead:
    """Return the costs of four heads, one after the other, on Medusa's published tree.

    plus: Hydra++, which has four blocks a head and a prefix layer.
    """
    heads = meta_hydra(target.hidden_size, target.vocab_size, plus)
    prefix = layer_flops(target, 1) if plus else 0  # runs once a draft, on the newest state
    total, chain = (
        prefix + sum(flops(_of_head(heads, head, rows)) for head, rows in enumerate(tree))
        for tree in (_expanded(), (1,) * HEADS)
    )
    parameters = count(heads) + (count(Eagle(model).layer) if plus else 0)
    return Overhead(parameters, HEADS, total, chain)


def _of_head(heads: HydraHeads, head: int, rows: int) -> Callable[[], Tensor]:
    hidden = heads.hydra_mlp[head].get_parameter("0.linear.weight").shape[0]
    x, path = torch.empty(1, hidden, device=META), torch.empty(rows, head + 1, hidden, device=META)
    return lambda: heads.logits(head, x, path, lambda states: states)


def _expanded() -> Iterator[int]:
    """Yield the number of nodes with children at each depth of the published tree, on which each head has to run."""
    for depth in range(HEADS):
        yield len({choice[:depth] for choice in PUBLISHED if len(choice) > depth})

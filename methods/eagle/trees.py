"""EAGLE's static tree as a plan of passes. Knows no drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specbench_ss.engine.tree import TreeShape, indices
from specbench_ss.methods._shared.static_trees import Choice, MedusaTree, from_branches

if TYPE_CHECKING:
    from torch import Tensor

MOST_DEPTH = 64  # levels that may be drafted in a step, a pass of the drafter each

# the 25 nodes published with EAGLE, as branches: prefix -> ranks
PUBLISHED: tuple[Choice, ...] = from_branches({
    (): 4, (0,): 3, (1,): 2, (2,): 2, (3,): 1, (0, 0): 3, (0, 1): 2, (0, 2): 2, (1, 0): 1, (0, 0, 0): 3,
    (0, 0, 0, 0): 2,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Level:
    """A level of the static tree: m nodes, of which the k with children are passed through the drafter.

    parent int64 [m]: the row of the pass before that a node hangs on; rank, place int64 [m]: its rank among the
    candidates of that row, and its number among its siblings. inner int64 [k]: the nodes passed on; carry int64 [k]:
    their parents; visible bool [k, rows so far]: their ancestors and themselves among all rows passed.
    """

    parent: Tensor
    rank: Tensor
    place: Tensor
    inner: Tensor
    carry: Tensor
    visible: Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """A static tree, level by level. nodes int64 [passed]: what node each row is that logits come from, root first."""

    shape: TreeShape
    width: int
    siblings: int  # the most children of a node
    levels: tuple[Level, ...]
    nodes: Tensor


def plan_of(tree: MedusaTree, device: torch.device) -> Plan:
    """What to pass when."""
    shape, children = tree.shape, tree.shape.children()
    ancestors = shape.ancestors()
    passed: list[int] = []  # of all levels, in order
    above, levels = [0], []
    for depth in range(1, shape.depth + 1):
        level = [i for i, d in enumerate(shape.depths) if d == depth]
        row = {node: i for i, node in enumerate(above)}
        parents = [row[shape.parents[i]] for i in level]
        places = [children[shape.parents[i]].index(i) for i in level]
        inner = [n for n, i in enumerate(level) if children[i]]
        above = [level[n] for n in inner]
        passed += above
        visible = ancestors[above][:, passed] if above else torch.zeros(0, len(passed), dtype=torch.bool)
        ranks, carry = [tree.ranks[i - 1] for i in level], [parents[n] for n in inner]
        parent, rank, place, passed_on, carried = (indices(x, device) for x in (parents, ranks, places, inner, carry))
        levels.append(Level(parent, rank, place, passed_on, carried, visible.to(device)))
    most = max(map(len, children))
    return Plan(shape, tree.width, most, tuple(levels), indices([0, *passed], device))

"""From stream logits to a draft tree, and from early-exit logits to a pruned one. Knows trees, not models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from specbench_ss.decoding.tree import DraftTree, TreeShape, indices, shape_of
from specbench_ss.methods._shared.tree_growth import draw

if TYPE_CHECKING:
    from torch import Tensor

# breaks ties between a node and its parent when a transition has probability one: the parent wins
DEPTH_PENALTY = 1e-4
IMPOSSIBLE = -100.0  # at least: sums must stay finite and tell parents from children


@dataclass(frozen=True, slots=True)
class FullTree:
    """The Cartesian tree (ACL sec. 2.2): every token of level g under every token of level g - 1.

    shape: 1 + sum_g k^g nodes. slots int64 [nodes - 1]: level * k + rank of each drafted node, into flattened top-k.
    path bool [nodes - 1, gamma * k]: which slots lie on the path to each node, itself included.
    """

    shape: TreeShape
    slots: Tensor
    path: Tensor
    depths: Tensor


@lru_cache(maxsize=64)
def full_tree(gamma: int, k: int, device: torch.device) -> FullTree:
    """The tree for gamma streams with k candidates each."""
    parents, slots, on_path = [-1], [0], [0]
    level = [0]
    for g in range(gamma):
        following = []
        for node in level:
            for rank in range(k):
                following.append(len(parents))
                parents.append(node)
                slots.append(g * k + rank)
                on_path.append(on_path[node] | 1 << (g * k + rank))
        level = following
    shape = shape_of(tuple(parents))
    path = torch.tensor([[bool(bits >> s & 1) for s in range(gamma * k)] for bits in on_path[1:]], dtype=torch.float32)
    depths = torch.tensor(shape.depths[1:], dtype=torch.float32)
    return FullTree(shape, torch.tensor(slots[1:], device=device), path.to(device), depths.to(device))


def draft_tree(root: Tensor, logits: Tensor, k: int, n_draft: int) -> DraftTree:
    """Stream logits [gamma, V] -> tree: all of the Cartesian tree, or its n_draft best nodes by joint probability.

    n_draft counts drafted nodes; 0 = all.
    """
    top = logits.topk(k, dim=-1)
    tree = full_tree(logits.shape[0], k, logits.device)
    tokens = torch.cat((root, top.indices.flatten()[tree.slots]))
    drafted = DraftTree(tokens, tree.shape)
    if not 0 < n_draft < len(tree.slots):
        return drafted
    # in half precision, differences between nodes would drown in the rounding of the sums
    log_p = logits.log_softmax(-1, dtype=torch.float32).gather(-1, top.indices)  # [gamma, k]
    joint = tree.path @ log_p.flatten() - DEPTH_PENALTY * tree.depths  # [nodes - 1]
    best = joint.topk(n_draft).indices.sort().values + 1
    return drafted.select([0, *best.tolist()])


@lru_cache(maxsize=256)
def sibling_slots(shape: TreeShape, k: int) -> tuple[int, ...]:
    """Return for each drafted node level * k + its place among its siblings."""
    slots = [0] * len(shape.parents)
    for parent, children in enumerate(shape.children()):
        for place, child in enumerate(children):
            slots[child] = shape.depths[parent] * k + place
    return tuple(slots[1:])


def drawn_tree(root: Tensor, probs: Tensor, k: int, n_draft: int, rng: torch.Generator) -> DraftTree:
    """Distributions of the streams [gamma, V] -> a tree of `draft_tree`'s shape, its tokens drawn from them (eq. 9).

    A stream's k candidates are drawn once, without replacement, for all nodes of its level: a path meets each of them
    at most once, and levels are independent. The shape follows from the distributions alone, and siblings have the
    first draws: were nodes chosen by what was drawn, they would no longer be distributed as q.
    """
    tree = draft_tree(root, probs.clamp_min(torch.finfo(probs.dtype).tiny).log(), k, n_draft)
    drawn = draw(probs, rng, k).flatten()  # [gamma * k]
    tokens = torch.cat((root, drawn[indices(sibling_slots(tree.shape, k), probs.device)]))
    levels = indices(tree.shape.depths, probs.device)  # of a node: its children are of that stream; the last has none
    return DraftTree(tokens, tree.shape, torch.cat((probs, torch.zeros_like(probs[:1])))[levels])


def prune(
    tree: DraftTree, inner: list[int], exit_logits: Tensor, visible: Tensor, n_keep: int, threshold: float
) -> list[int]:
    """ACL sec. 2.3: the nodes that stay, ascending, ancestor-closed, root included, at most n_keep.

    exit_logits [len(inner), V]: early-exit logits of the nodes with children. A node's transition probability is its
    parent's softmax at its token; below the threshold it goes with its whole subtree; then the best by path probability
    stay.
    """
    keep = min(n_keep, len(tree)) - 1
    if keep == 0:
        return [0]
    row = {node: i for i, node in enumerate(inner)}
    parents = torch.tensor([row[p] for p in tree.shape.parents[1:]], device=tree.tokens.device)
    log_p = exit_logits.log_softmax(-1, dtype=torch.float32)[parents, tree.tokens[1:]]  # [n - 1]
    paths = visible[1:, 1:].float()
    score = paths @ log_p.clamp_min(IMPOSSIBLE) - DEPTH_PENALTY * visible[1:].sum(-1)  # [n - 1]
    if threshold > 0:
        refused = (log_p < math.log(threshold)).float()
        score = score.masked_fill(paths @ refused > 0, -torch.inf)  # itself or a node above it is refused
    best = score.topk(keep)
    stays = (best.values > -torch.inf).tolist()
    return [0, *sorted(i + 1 for i, stay in zip(best.indices.tolist(), stays, strict=True) if stay)]

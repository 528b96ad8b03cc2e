"""Draft trees grown level by level: the best nodes of a level are expanded (EAGLE-2, Li et al. 2024b).

A level has k parents with k candidates each; a node's score is the log-probability of its path under the draft model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specbench_ss.engine.sampling import exponential_race, sample_categorical
from specbench_ss.engine.tree import DraftTree

# tokens [k], visible rows of the tree [k, level * k] bool, index of the parent's row in the last level [k], level from
# 1 -> logits [k, V]
Expand = Callable[[Tensor, Tensor, Tensor, int], Tensor]
# logits [m, V] -> tokens [m, k], their log-probabilities [m, k], the distribution they are sampled from [m, V] or None
Choose = Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]
MIN_LOG_PROB = -100.0  # lower bound: sums must stay finite and distinguish parents from children


def best(k: int) -> Choose:
    """Return a rule that takes the k most probable tokens."""

    def choose(logits: Tensor) -> tuple[Tensor, Tensor, None]:
        top = logits.topk(k, dim=-1)
        return top.indices, top.values.float() - logits.float().logsumexp(-1, keepdim=True), None

    return choose


def grow(root: Tensor, logits: Tensor, choose: Choose, expand: Expand, depth: int, nodes: int) -> DraftTree:
    """Grow a tree under root [1] by depth - 1 calls of `expand`; keep its best `nodes` (0 = all).

    logits [V]: of the root's children. Nodes are in order of depth. The tag of a node is the row of `expand` that gave
    it children (rows are counted across levels), -1 for none. There is no synchronization with the device. Sampled
    candidates stay exact only with nodes = 0.
    """
    tokens, log_p, q = choose(logits[None])  # [1, k]
    k, device = tokens.shape[1], tokens.device
    visible = torch.zeros(1, 0, dtype=torch.bool, device=device)  # [parents of the last level, parents before]
    origin = torch.zeros(k, dtype=torch.long, device=device)  # [nodes of the last level]: index of the parent
    levels, parents, scores = [tokens.flatten()], [origin], [log_p.flatten().clamp(MIN_LOG_PROB, 0)]
    q_rows, expanded = [] if q is None else [q], []
    first = 1  # index of the last level's first node
    for level in range(1, depth):
        chosen = scores[-1].topk(k).indices  # nodes of the level that get children
        parent_rows, diagonal = origin[chosen], torch.eye(len(chosen), dtype=torch.bool, device=device)
        visible = torch.cat((visible[parent_rows], diagonal), 1)  # [m, parents so far]
        tokens, log_p, q = choose(expand(levels[-1][chosen], visible, parent_rows, level))  # [m, k]
        expanded.append(first + chosen)
        parents.append(expanded[-1].repeat_interleave(k))
        scores.append((scores[-1][chosen, None] + log_p.clamp(MIN_LOG_PROB, 0)).flatten())
        first += len(levels[-1])
        levels.append(tokens.flatten())
        origin = torch.arange(len(chosen), device=device).repeat_interleave(k)
        if q is not None:
            q_rows.append(q)
    return best_nodes(root, levels, parents, scores, nodes, expanded, q_rows)


def best_nodes(
    root: Tensor,
    tokens: Sequence[Tensor],
    parents: Sequence[Tensor],
    scores: Sequence[Tensor],
    nodes: int,
    expanded: Sequence[Tensor] | None = None,
    q_rows: Sequence[Tensor] = (),
) -> DraftTree:
    """Return a tree of the best `nodes` of all levels (0 = all). Node 0 is the root [1], node i the i-th token.

    tokens, parents, scores [n_g]: one tensor per level; no child scores above its parent. expanded: the nodes that got
    children, in order, which gives the node tags. q_rows: the distributions of their children, the root's first.
    """
    flat, parent_idx = torch.cat((root, *tokens)), torch.cat((torch.zeros_like(root), *parents))
    total, chosen = len(flat), torch.arange(len(flat), device=root.device)
    tags = None if expanded is None else torch.full_like(chosen, -1)
    if tags is not None and expanded:
        inner = torch.cat(tuple(expanded))
        tags.index_copy_(0, inner, torch.arange(len(inner), device=root.device))
    if 0 < nodes < total - 1:
        # no child scores above its parent, and a stable sort takes the parent first
        order = torch.cat(tuple(scores)).sort(descending=True, stable=True).indices
        chosen = with_root(order[:nodes].sort().values)
        new = torch.full_like(flat, -1).index_copy_(0, chosen, torch.arange(len(chosen), device=root.device))
        flat, parent_idx = flat[chosen], new[parent_idx[chosen]]
        tags = None if tags is None else tags[chosen]
    probs = _probs(q_rows, tags) if tags is not None and q_rows else None
    return DraftTree.from_device_parents(flat, parent_idx, min(len(tokens), len(chosen) - 1), probs, tags)


def _probs(q_rows: Sequence[Tensor], tags: Tensor) -> Tensor:
    """Return the distribution [n, V] of each node's children, zeros for leaves."""
    inner = tags >= 0
    inner[0] = True
    return torch.cat(tuple(q_rows))[tags + 1] * inner[:, None]  # the root's, then one per tag


def with_root(drafted: Tensor) -> Tensor:
    """Convert indices of drafted nodes [m], without the root, to indices of tree nodes [m + 1], the root first."""
    return torch.nn.functional.pad(drafted + 1, (1, 0))


def draw(q: Tensor, rng: torch.Generator, count: int = 1) -> Tensor:
    """Sample `count` tokens [.., count] from q [.., V] without replacement, in the order of sampling.

    It is an exponential race without device synchronization. If q has fewer tokens, the first one fills the rest:
    verification never accepts it twice.
    """
    if count == 1:
        return sample_categorical(q, rng)
    first = exponential_race(q, rng).topk(count, dim=-1).indices
    return torch.where(q.gather(-1, first) > 0, first, first[..., :1])

"""Draft trees grown level by level by a model: the best nodes of a level get children (EAGLE-2, Li et al. 2024b).

A level has k parents with k candidates each; a node's score is its path's probability to the drafting model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specbench_ss.engine.sampling import exponential_race, sample_categorical
from specbench_ss.engine.tree import DraftTree

# tokens [k], what of the tree each sees [k, level * k] bool, the place of its parent's row among the last level's [k],
# level from 1 -> logits [k, V]
Expand = Callable[[Tensor, Tensor, Tensor, int], Tensor]
# logits [m, V] -> tokens [m, k], their log-probabilities [m, k], the distribution they are drawn from [m, V] or None
Choose = Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]
IMPOSSIBLE = -100.0  # at least: sums must stay finite and tell parents from children


def best(k: int) -> Choose:
    """The k most probable tokens."""

    def choose(logits: Tensor) -> tuple[Tensor, Tensor, None]:
        top = logits.topk(k, dim=-1)
        return top.indices, top.values.float() - logits.float().logsumexp(-1, keepdim=True), None

    return choose


def grow(root: Tensor, logits: Tensor, choose: Choose, expand: Expand, depth: int, nodes: int) -> DraftTree:
    """A tree under root [1], whose children's logits [V] are given; at most `nodes` of it, the best (0 = all).

    depth - 1 calls of `expand`; nothing is waited for. Drawn candidates stay exact only with nodes = 0. Nodes are in
    order of depth. What is noted of a node is the row of `expand` that gave it children, -1 where none did; rows count
    through the levels.
    """
    tokens, log_p, q = choose(logits[None])  # [1, k]
    k, device = tokens.shape[1], tokens.device
    # what the last level's parents see of the tree: here the root, nothing
    visible = torch.zeros(1, 0, dtype=torch.bool, device=device)
    origin = torch.zeros(k, dtype=torch.long, device=device)  # of the last level's nodes: their place among its parents
    levels, parents, scores = [tokens.flatten()], [origin], [log_p.flatten().clamp(IMPOSSIBLE, 0)]
    drawn, expanded = [] if q is None else [q], []
    first = 1  # index of the last level's first node
    for level in range(1, depth):
        chosen = scores[-1].topk(k).indices  # those of the level that get children
        above, own = origin[chosen], torch.eye(len(chosen), dtype=torch.bool, device=device)
        visible = torch.cat((visible[above], own), 1)  # [m, parents so far]
        tokens, log_p, q = choose(expand(levels[-1][chosen], visible, above, level))  # [m, k]
        expanded.append(first + chosen)
        parents.append(expanded[-1].repeat_interleave(k))
        scores.append((scores[-1][chosen, None] + log_p.clamp(IMPOSSIBLE, 0)).flatten())
        first += len(levels[-1])
        levels.append(tokens.flatten())
        origin = torch.arange(len(chosen), device=device).repeat_interleave(k)
        if q is not None:
            drawn.append(q)
    return best_nodes(root, levels, parents, scores, nodes, expanded, drawn)


def best_nodes(
    root: Tensor,
    tokens: Sequence[Tensor],
    parents: Sequence[Tensor],
    scores: Sequence[Tensor],
    nodes: int,
    expanded: Sequence[Tensor] | None = None,
    drawn: Sequence[Tensor] = (),
) -> DraftTree:
    """The `nodes` best of all levels' nodes as a tree, 0 = all of them. Node 0 is the root [1], node i the i-th token.

    Of each level [n_g]: tokens, the parents' nodes, scores, of which no child's is above its parent's. expanded: the
    nodes that got children, in their order, which is noted; drawn: what these were drawn from, the root's first.
    """
    flat, above = torch.cat((root, *tokens)), torch.cat((torch.zeros_like(root), *parents))
    total, kept = len(flat), torch.arange(len(flat), device=root.device)
    rows = None if expanded is None else torch.full_like(kept, -1)
    if rows is not None and expanded:
        inner = torch.cat(tuple(expanded))
        rows.index_copy_(0, inner, torch.arange(len(inner), device=root.device))
    if 0 < nodes < total - 1:
        # no child scores more than its parent, and of equals the first is taken: that is the parent
        order = torch.cat(tuple(scores)).sort(descending=True, stable=True).indices
        kept = with_root(order[:nodes].sort().values)
        new = torch.full_like(flat, -1).index_copy_(0, kept, torch.arange(len(kept), device=root.device))
        flat, above = flat[kept], new[above[kept]]
        rows = None if rows is None else rows[kept]
    probs = _probs(drawn, rows) if rows is not None and drawn else None
    return DraftTree.from_device_parents(flat, above, min(len(tokens), len(kept) - 1), probs, rows)


def _probs(drawn: Sequence[Tensor], rows: Tensor) -> Tensor:
    """[n, V]: what each node's children were drawn from; of a node without any, zeros. rows: as noted."""
    has = rows >= 0
    has[0] = True
    return torch.cat(tuple(drawn))[rows + 1] * has[:, None]  # the root's, then one for each row


def with_root(drafted: Tensor) -> Tensor:
    """Numbers of drafted nodes [m], counted from 0 without the root -> of a tree's nodes [m + 1], the root's first."""
    return torch.nn.functional.pad(drafted + 1, (1, 0))


def draw(q: Tensor, rng: torch.Generator, count: int = 1) -> Tensor:
    """`count` tokens [.., count] in the order in which they are drawn from q [.., V], without replacement.

    An exponential race, for which the device is not waited for.
    Where q has fewer tokens than that, the first one stands for those missing: verification never accepts it twice.
    """
    if count == 1:
        return sample_categorical(q, rng)
    first = exponential_race(q, rng).topk(count, dim=-1).indices
    return torch.where(q.gather(-1, first) > 0, first, first[..., :1])

"""Draft trees of Speculative Streaming: drafted from streams, pruned by early exit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from specbench_ss.engine.tree import DeviceTopology, DraftTree, TreeTopology, topology_of
from specbench_ss.methods._shared.tree_growth import MIN_LOG_PROB, best_nodes, draw, with_root

# parents [m], tokens [s] -> logit corrections of the tokens as their children, [m, s]
Corrections = Callable[[Tensor, Tensor], Tensor]

# breaks ties between a node and its parent for transitions of probability one: the parent wins
DEPTH_PENALTY = 1e-4
SHORTLIST = 32  # tokens of a level whose probabilities are corrected by their parent


@dataclass(frozen=True, slots=True)
class FullTree:
    """The Cartesian tree (EMNLP sec. 2.2): every token of level g under every token of level g - 1.

    topology: 1 + sum_g k^g nodes. slots int64 [nodes - 1]: level * k + rank of each drafted node, into flattened top-k.
    path bool [nodes - 1, gamma * k]: slots on the path to each node, itself included. depths: of the drafted nodes.
    parents, visibility: of all nodes, as of a `DraftTree`.
    """

    topology: TreeTopology
    slots: Tensor
    path: Tensor
    depths: Tensor
    parents: Tensor
    visibility: tuple[Tensor, Tensor]


@cache  # kept, since graphs read its tensors
def full_tree(gamma: int, k: int, device: torch.device) -> FullTree:
    """Return the tree for gamma streams with k candidates each."""
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
    topology = topology_of(tuple(parents))
    path = torch.tensor([[bool(bits >> s & 1) for s in range(gamma * k)] for bits in on_path[1:]], dtype=torch.float32)
    depths = torch.tensor(topology.depths[1:], dtype=torch.float32)
    on_device = DraftTree(torch.zeros(len(parents), dtype=torch.long, device=device), topology)
    own = on_device.parents(), on_device.visibility()
    return FullTree(topology, torch.tensor(slots[1:], device=device), path.to(device), depths.to(device), *own)


def draft_tree(root: Tensor, logits: Tensor, k: int, n_draft: int) -> DraftTree:
    """Return the Cartesian tree of stream logits [gamma, V], or its n_draft best nodes by joint probability.

    n_draft counts drafted nodes; 0 = all.
    """
    top = logits.topk(k, dim=-1)
    tree = full_tree(logits.shape[0], k, logits.device)
    tokens = torch.cat((root, top.indices.flatten()[tree.slots]))
    if not 0 < n_draft < len(tree.slots):
        return DraftTree(tokens, tree.topology)
    topology = DeviceTopology(tree.parents, tree.topology.depth)
    drafted = DraftTree(tokens, topology, None, tree.visibility)
    # in half precision, rounding of the sums exceeds differences between nodes
    log_p = logits.log_softmax(-1, dtype=torch.float32).gather(-1, top.indices)  # [gamma, k]
    joint = tree.path @ log_p.flatten() - DEPTH_PENALTY * tree.depths  # [nodes - 1]
    best = joint.topk(n_draft).indices.sort().values
    chosen = drafted.gather_nodes(with_root(best))
    return replace(chosen, topology=DeviceTopology(chosen.parents(), chosen.topology.deepest))  # of no other tree


def conditioned_tree(root: Tensor, logits: Tensor, corrections: Corrections, k: int, n_draft: int) -> DraftTree:
    """Return the n_draft best nodes (0 = all) of a tree from stream logits [gamma, V] and parent corrections.

    It is an extension of the papers, where all nodes of a level have the same children. The first level's logits are
    conditioned on the root already. For other levels, a shortlist of unconditioned tokens is corrected by each parent;
    the mass of other tokens is unchanged. A node has at most k children.
    """
    short = logits.log_softmax(-1, dtype=torch.float32).topk(min(max(SHORTLIST, k), logits.shape[-1]), dim=-1)
    log_p = short.values  # [gamma, s]
    beyond = torch.log1p(-log_p.logsumexp(-1).exp().clamp_max(1 - 1e-6))  # [gamma], log of the mass of other tokens
    tokens, scores = [short.indices[0, :k]], [log_p[0, :k].clamp(MIN_LOG_PROB, 0)]
    parents, start = [torch.zeros_like(tokens[0])], 1  # start: the last level's first node
    for listed, unconditioned, rest in zip(short.indices[1:], log_p[1:], beyond[1:], strict=True):
        # at most n_draft nodes of a level are drafted, so no more need children
        chosen = scores[-1].topk(min(n_draft or len(scores[-1]), len(scores[-1]))).indices  # [m]
        corrected = unconditioned + corrections(tokens[-1][chosen], listed).float()  # [m, s]
        top = corrected.topk(k, dim=-1)
        norm = torch.logaddexp(corrected.logsumexp(-1, keepdim=True), rest)
        parents.append((start + chosen)[:, None].expand(-1, k).flatten())
        start += len(scores[-1])
        scores.append((scores[-1][chosen, None] + (top.values - norm).clamp(MIN_LOG_PROB, 0)).flatten())
        tokens.append(listed[top.indices].flatten())
    return best_nodes(root, tokens, parents, scores, n_draft)


def sampled_tree(root: Tensor, probs: Tensor, k: int, n_draft: int, rng: torch.Generator) -> DraftTree:
    """Return a tree with the shape of `draft_tree` and tokens sampled from the streams' probs [gamma, V] (eq. 9).

    A stream's k candidates are sampled once, without replacement, for all nodes of its level: a path has each at
    most once, and levels are independent. The shape depends only on the distributions and siblings take the first
    samples: a selection by sampled tokens would change the distribution q.
    """
    tree = draft_tree(root, probs.clamp_min(torch.finfo(probs.dtype).tiny).log(), k, n_draft)
    sampled = draw(probs, rng, k).flatten()  # [gamma * k]
    levels = tree.visibility()[1]  # [n], the stream of a node's children; the last has none
    parents = tree.parents()[1:]
    siblings = (parents[:, None] == parents).tril(-1).sum(-1)  # index among siblings
    tokens = torch.cat((root, sampled[(levels[1:] - 1) * k + siblings]))
    q = torch.cat((probs, torch.zeros_like(probs[:1])))[levels]
    return DraftTree(tokens, tree.topology, q, tree.visibility_cache)


def nodes_to_score(tree: DraftTree, leaves: bool = False) -> tuple[Tensor, Tensor]:
    """Return nodes whose early exits are needed, int64 [m], and each drafted node's parent as index into them, [n - 1].

    Leaves are left out on a CPU only, unless asked for: elsewhere that would synchronize with the device.
    """
    parents = tree.parents()[1:]
    if leaves or parents.device.type != "cpu":
        return torch.arange(len(tree), device=parents.device), parents
    inner, parent_idx = parents.unique(return_inverse=True)
    return inner, parent_idx


def prune(tree: DraftTree, parents: Tensor, exit_logits: Tensor, n_keep: int, threshold: float) -> Tensor:
    """Return the kept nodes (EMNLP sec. 2.3), int64 [<= n_keep], ascending, ancestor-closed, root included.

    exit_logits [m, V]: early-exit logits of nodes; parents [n - 1]: row of each drafted node's parent in them. A node's
    transition probability is its parent's softmax at its token; below the threshold its subtree is pruned. Then the
    best nodes by path probability are kept. With threshold 0 the number of kept nodes is constant.
    """
    keep, visible = min(n_keep, len(tree)) - 1, tree.visibility()[0]
    log_p = exit_logits.log_softmax(-1, dtype=torch.float32)[parents, tree.tokens[1:]]  # [n - 1]
    paths = visible[1:, 1:].float()
    score = paths @ log_p.clamp_min(MIN_LOG_PROB) - DEPTH_PENALTY * visible[1:].sum(-1)  # [n - 1]
    if threshold > 0:
        rejected = (log_p < math.log(threshold)).float()
        score = score.masked_fill(paths @ rejected > 0, -torch.inf)  # the node or an ancestor is below the threshold
    best = score.topk(keep)
    nodes = best.indices if threshold == 0 else best.indices[best.values > -torch.inf]
    return with_root(nodes.sort().values)

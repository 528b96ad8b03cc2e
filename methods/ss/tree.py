"""Draft trees of Speculative Streaming: drafted from streams, pruned by early exit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from specbench_ss.engine.tree import DraftTree, TreeTopology, topology_of
from specbench_ss.methods._shared.tree_growth import IMPOSSIBLE, best_nodes, draw, with_root

# tokens [.., m], tokens [.., s] -> what the former change in the logits of the latter as their children, [.., m, s]
Changes = Callable[[Tensor, Tensor], Tensor]

# breaks ties between a node and its parent when a transition has probability one: the parent wins
DEPTH_PENALTY = 1e-4
SHORTLIST = 32  # tokens of a level whose probabilities as children are told apart by their parent


@dataclass(frozen=True, slots=True)
class FullTree:
    """The Cartesian tree (ACL sec. 2.2): every token of level g under every token of level g - 1.

    shape: 1 + sum_g k^g nodes. slots int64 [nodes - 1]: level * k + rank of each drafted node, into flattened top-k.
    path bool [nodes - 1, gamma * k]: which slots lie on the path to each node, itself included.
    """

    shape: TreeTopology
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
    shape = topology_of(tuple(parents))
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
    best = joint.topk(n_draft).indices.sort().values
    return drafted.gather_nodes(with_root(best))


def conditioned_tree(root: Tensor, logits: Tensor, changes: Changes, k: int, n_draft: int) -> DraftTree:
    """Stream logits [gamma, V] -> the n_draft best nodes (0 = all) of a tree in which children depend on their parent.

    Not in the papers, where every node of a level has the same children with the same probabilities. The first level's
    logits know their parent, the root. Of the others a shortlist is taken from what streams guess without it, and its
    logits are changed by each parent; the mass of the tokens beyond stays what it was. A node has at most k children.
    """
    logits = logits.float()
    short, whole = logits.topk(min(max(SHORTLIST, k), logits.shape[-1]), dim=-1), logits.logsumexp(-1)
    firsts = (short.values[0, :k] - whole[0]).clamp(IMPOSSIBLE, 0)
    listed, below = short.indices, _children(short.values, whole, changes(short.indices[:-1], short.indices[1:]), k)
    # of each level's nodes: place in its shortlist, log-probability of the path, parent in the tree
    places, scores = [torch.arange(k, device=root.device)], [firsts]
    parents, start = [torch.zeros_like(places[0])], 1  # start: the last level's first node
    for values, children in zip(*below, strict=True):  # [s, k] each
        # of a level no more than n_draft nodes are drafted, so no more need children
        chosen = scores[-1].topk(min(n_draft or len(scores[-1]), len(scores[-1]))).indices
        at = places[-1][chosen]
        parents.append((start + chosen)[:, None].expand(-1, k).flatten())
        start += len(scores[-1])
        scores.append((scores[-1][chosen, None] + values[at]).flatten())
        places.append(children[at].flatten())
    tokens = [row[place] for row, place in zip(listed, places, strict=True)]
    return best_nodes(root, tokens, parents, scores, n_draft)


def _children(guesses: Tensor, whole: Tensor, changed: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the k best children of every listed token of a level, and their places in the next list.

    guesses [gamma, s]: logits of the listed tokens; whole [gamma]: the log of all mass; changed [gamma - 1, s, s]: what
    tokens of a list change in the logits of the next. Both of shape [gamma - 1, s, k].
    """
    share = (guesses.logsumexp(-1) - whole).exp()  # [gamma], of the shortlist
    rest = whole + torch.log1p(-share.clamp_max(1 - 1e-6))  # log of the mass beyond
    known = guesses[1:, None] + changed.float()
    top = known.topk(k, dim=-1)
    norm = torch.logaddexp(known.logsumexp(-1), rest[1:, None])
    return (top.values - norm[..., None]).clamp(IMPOSSIBLE, 0), top.indices


def drawn_tree(root: Tensor, probs: Tensor, k: int, n_draft: int, rng: torch.Generator) -> DraftTree:
    """Distributions of the streams [gamma, V] -> a tree of `draft_tree`'s shape, its tokens drawn from them (eq. 9).

    A stream's k candidates are drawn once, without replacement, for all nodes of its level: a path meets each of them
    at most once, and levels are independent. The shape follows from the distributions alone, and siblings have the
    first draws: were nodes chosen by what was drawn, they would no longer be distributed as q.
    """
    tree = draft_tree(root, probs.clamp_min(torch.finfo(probs.dtype).tiny).log(), k, n_draft)
    drawn = draw(probs, rng, k).flatten()  # [gamma * k]
    levels = tree.visibility()[1]  # of a node: its children are of that stream; the last has none
    parents = tree.parents()[1:]
    places = (parents[:, None] == parents).tril(-1).sum(-1)  # among siblings
    tokens = torch.cat((root, drawn[(levels[1:] - 1) * k + places]))
    q = torch.cat((probs, torch.zeros_like(probs[:1])))[levels]
    return DraftTree(tokens, tree.topology, q, tree.visibility_cache)


def nodes_to_score(tree: DraftTree) -> tuple[Tensor, Tensor]:
    """Nodes whose early exits are asked for, int64 [m]; for each drafted node its parent's place among them, [n - 1].

    Leaves have no transition to judge. Which nodes those are is asked on a CPU alone: elsewhere it would be waited for.
    """
    parents = tree.parents()[1:]
    if parents.device.type != "cpu":
        return torch.arange(len(tree), device=parents.device), parents
    inner, places = parents.unique(return_inverse=True)
    return inner, places


def prune(tree: DraftTree, parents: Tensor, exit_logits: Tensor, n_keep: int, threshold: float) -> Tensor:
    """ACL sec. 2.3: the nodes that stay, int64 [<= n_keep], ascending, ancestor-closed, root included.

    exit_logits [m, V]: early-exit logits of nodes; parents [n - 1]: which row of them is of each drafted node's parent.
    A node's transition probability is its parent's softmax at its token; below the threshold it goes with its whole
    subtree; then the best by path probability stay. How many stay is known beforehand where the threshold is 0.
    """
    keep, visible = min(n_keep, len(tree)) - 1, tree.visibility()[0]
    log_p = exit_logits.log_softmax(-1, dtype=torch.float32)[parents, tree.tokens[1:]]  # [n - 1]
    paths = visible[1:, 1:].float()
    score = paths @ log_p.clamp_min(IMPOSSIBLE) - DEPTH_PENALTY * visible[1:].sum(-1)  # [n - 1]
    if threshold > 0:
        refused = (log_p < math.log(threshold)).float()
        score = score.masked_fill(paths @ refused > 0, -torch.inf)  # itself or a node above it is refused
    best = score.topk(keep)
    stay = best.indices if threshold == 0 else best.indices[best.values > -torch.inf]
    return with_root(stay.sort().values)

"""Published acceptance rules that change the output distribution (lossy).

Each uses the target's probs [n, V] of a verified tree at T > 0; at T=0 all are greedy and lossless. The change is
measured in tests/methods/test_scorecard.py. Exact verification is in `specbench_ss/engine/verify.py`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from specbench_ss.engine.checks import check_probs
from specbench_ss.engine.sampling import SamplingParams, sample_categorical
from specbench_ss.engine.tree import DraftTree, TreeTopology
from specbench_ss.engine.verify import VerifyResult, verify_greedy


def accept_typical(
    logits: Tensor, tree: DraftTree, sampling: SamplingParams, epsilon: float = 0.09, alpha: float = 0.3
) -> VerifyResult:
    """Verify by Medusa's typical acceptance (sec. 2.3.1), fast form: no token is sampled.

    A candidate is accepted if p(x) > min(epsilon, alpha exp(-H(p))). The longest accepted path wins, the likeliest
    among equally long ones. The next token is the argmax after it.
    """
    if sampling.greedy:
        return verify_greedy(logits, tree)
    p = sampling.probs(logits)
    threshold = (alpha * (-torch.special.entr(p).sum(-1)).exp()).clamp_max(epsilon)  # [n]
    parents, (visible, depths) = tree.parents(), tree.visibility()
    p_x = p[parents, tree.tokens]  # [n]
    p_x[0] = 1  # the root is accepted already
    rejected = p_x <= threshold[parents]
    rejected[0] = False
    accepted = ~(visible & rejected).any(-1)
    depth = torch.where(accepted, depths, -1)
    likelihood = (visible * p_x.log().clamp_min(-1e4)).sum(-1)
    node = torch.where(depth == depth.max(), likelihood, -torch.inf).argmax()
    return _verify_result(tree, p, node, p[node].argmax()[None])


def accept_per_path(logits: Tensor, tree: DraftTree, sampling: SamplingParams, rng: torch.Generator) -> VerifyResult:
    """Verify each path from root to leaf on its own: the rule of Medusa's nucleus sampling and of REST.

    A token is sampled at every position of every path and compared, so a node shared by n paths has n chances,
    1 - (1 - p)^n. The first path with most matches wins; the next token is sampled from p after it.
    """
    if sampling.greedy:
        return verify_greedy(logits, tree)
    p = sampling.probs(logits)
    paths, real = _paths(tree.topology, p.device)  # [L, D]
    p_x = p[tree.parents(), tree.tokens]  # [n]
    equal = torch.rand(paths.shape, generator=rng, device=p.device) < p_x[paths]  # the sampled token is x with p(x)
    matches = (equal & real).int().cumprod(-1).sum(-1)  # [L]
    best = matches.argmax()
    path = torch.cat((paths.new_zeros(1), paths[best]))
    node = path[matches[best]]
    return _verify_result(tree, p, node, sample_categorical(p[node], rng))


def accept_resampled(
    logits: Tensor, tree: DraftTree, q: Tensor, sampling: SamplingParams, rng: torch.Generator
) -> VerifyResult:
    """Verify by SPACE's rule: accept x with min(1, p(x)/q(x)), then sample the next token from p, not (p - q)+.

    q [n]: the drafter's probability of each node's token; the root's is unused. Children are tried in order.
    """
    if sampling.greedy:
        return verify_greedy(logits, tree)
    p = sampling.probs(logits)
    u = torch.rand(len(tree), generator=rng, device=p.device)
    accepted = (u * q < p[tree.parents(), tree.tokens]).tolist()
    node, children = 0, tree.topology.children()
    while (child := next((c for c in children[node] if accepted[c]), None)) is not None:
        node = child
    last = torch.tensor(node, device=p.device)
    return _verify_result(tree, p, last, sample_categorical(p[node], rng))


def _verify_result(tree: DraftTree, p: Tensor, last: Tensor, following: Tensor) -> VerifyResult:
    """Return the path to a node [] and the token after it [1], in one host synchronisation. p [n, V]: the target's."""
    *numbers, any_p = torch.cat((tree.tokens, last[None], following, p[last, :1].double())).tolist()
    check_probs(any_p)  # a row with a NaN has only NaN
    *drafted, node, token = map(int, numbers)
    path = [node]
    while path[-1]:
        path.append(tree.topology.parents[path[-1]])
    path.reverse()
    return VerifyResult(path, [drafted[i] for i in path[1:]] + [token], following, drafted[0], checked=True)


@lru_cache(maxsize=256)
def _paths(topology: TreeTopology, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return paths from the root's children to every leaf: nodes int64 [L, D], and bool [L, D], False for padding."""
    inner = set(topology.parents)
    paths = []
    for leaf in (i for i in range(len(topology.parents)) if i not in inner):
        path = [leaf] if leaf else []
        while path and topology.parents[path[0]] > 0:
            path.insert(0, topology.parents[path[0]])
        paths.append(path)
    nodes = torch.zeros(len(paths), topology.depth, dtype=torch.long)
    real = torch.zeros(nodes.shape, dtype=torch.bool)
    for i, path in enumerate(paths):
        nodes[i, : len(path)] = torch.tensor(path, dtype=torch.long)
        real[i, : len(path)] = True
    return nodes.to(device), real.to(device)

"""Published acceptance rules that change the distribution: options marked lossy, so that they can be compared.

Each takes the target's probs [n, V] of a verified tree, T > 0; at T=0 all are greedy and change nothing. What they
change is measured in tests/methods/test_scorecard.py. Exact verification is in `specbench_ss/engine/verify.py`.
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
    """Medusa's typical acceptance (sec. 2.3.1), fast form: nothing is drawn.

    A candidate is accepted where p(x) > min(epsilon, alpha exp(-H(p))); the longest path wins, of equally long ones
    the likeliest; the next token is the argmax after it.
    """
    if sampling.greedy:
        return verify_greedy(logits, tree)
    p = sampling.probs(logits)
    threshold = (alpha * (-torch.special.entr(p).sum(-1)).exp()).clamp_max(epsilon)  # [n]
    parents, (visible, depths) = tree.parents(), tree.visibility()
    p_x = p[parents, tree.tokens]  # [n]
    p_x[0] = 1  # the root is decided
    refused = p_x <= threshold[parents]
    refused[0] = False
    reached = ~(visible & refused).any(-1)
    depth = torch.where(reached, depths, -1)
    likelihood = (visible * p_x.log().clamp_min(-1e4)).sum(-1)
    node = torch.where(depth == depth.max(), likelihood, -torch.inf).argmax()
    return _verdict(tree, p, node, p[node].argmax()[None])


def accept_per_path(logits: Tensor, tree: DraftTree, sampling: SamplingParams, rng: torch.Generator) -> VerifyResult:
    """The rule of Medusa's nucleus sampling and of REST: each path from root to leaf is a row, judged by itself.

    At every position of every row a token is drawn and compared, so a node that n rows share has n chances,
    1 - (1 - p)^n; the row with most matches wins, the first of equals; the next token is drawn from p after it.
    """
    if sampling.greedy:
        return verify_greedy(logits, tree)
    p = sampling.probs(logits)
    rows, real = _rows(tree.topology, p.device)  # [L, D]
    p_x = p[tree.parents(), tree.tokens]  # [n]
    drawn = torch.rand(rows.shape, generator=rng, device=p.device) < p_x[rows]  # a drawn token is x with p(x)
    matches = (drawn & real).int().cumprod(-1).sum(-1)  # [L]
    row = matches.argmax()
    path = torch.cat((rows.new_zeros(1), rows[row]))
    node = path[matches[row]]
    return _verdict(tree, p, node, sample_categorical(p[node], rng))


def accept_resampled(
    logits: Tensor, tree: DraftTree, q: Tensor, sampling: SamplingParams, rng: torch.Generator
) -> VerifyResult:
    """SPACE's rule: a candidate x is accepted with min(1, p(x)/q(x)); the next token is drawn from p, not (p - q)+.

    q [n]: the probability that the drafter gave each node's token; the root's is not read. Children in order.
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
    return _verdict(tree, p, last, sample_categorical(p[node], rng))


def _verdict(tree: DraftTree, p: Tensor, last: Tensor, following: Tensor) -> VerifyResult:
    """The path to a node [] and the token after it [1], by one host synchronisation. p [n, V]: the target's."""
    *numbers, any_p = torch.cat((tree.tokens, last[None], following, p[last, :1].double())).tolist()
    check_probs(any_p)  # of a row with NaN every probability is
    *drafted, node, token = map(int, numbers)
    path = [node]
    while path[-1]:
        path.append(tree.topology.parents[path[-1]])
    path.reverse()
    return VerifyResult(path, [drafted[i] for i in path[1:]] + [token], following, drafted[0], checked=True)


@lru_cache(maxsize=256)
def _rows(shape: TreeTopology, device: torch.device) -> tuple[Tensor, Tensor]:
    """Paths from under the root to every leaf: nodes int64 [L, D], and bool [L, D] which of them are; made once."""
    inner = set(shape.parents)
    paths = []
    for leaf in (i for i in range(len(shape.parents)) if i not in inner):
        path = [leaf] if leaf else []
        while path and shape.parents[path[0]] > 0:
            path.insert(0, shape.parents[path[0]])
        paths.append(path)
    rows = torch.zeros(len(paths), shape.depth, dtype=torch.long)
    real = torch.zeros(rows.shape, dtype=torch.bool)
    for i, path in enumerate(paths):
        rows[i, : len(path)] = torch.tensor(path, dtype=torch.long)
        real[i, : len(path)] = True
    return rows.to(device), real.to(device)

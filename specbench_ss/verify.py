"""Verification of a draft tree: greedy, or exact rejection sampling (ACL appendix F, eq. 9; Leviathan et al.).

A walk along parent pointers: no paths are listed, none is padded. The result keeps the target's distribution:
the tokens it yields are distributed as the target's own, whatever the draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specbench_ss.sampling import Sampling
from specbench_ss.tree import DraftTree


@dataclass(slots=True)
class Verdict:
    """path: accepted nodes from the root (always path[0] == 0). tokens: their drafted tokens, then the next one.

    next_token is int64 [1] on the device: the correction (or bonus) token, root of the next tree.
    """

    path: list[int]
    tokens: list[int]
    next_token: Tensor

    @property
    def accepted(self) -> int:
        """How many drafted tokens were accepted."""
        return len(self.path) - 1


def verify(logits: Tensor, tree: DraftTree, sampling: Sampling, rng: torch.Generator) -> Verdict:
    """logits [n, V] of the tree's nodes -> what is accepted."""
    if sampling.greedy:
        return verify_greedy(logits, tree)
    return verify_sampled(sampling.probs(logits), tree, rng)


def verify_greedy(logits: Tensor, tree: DraftTree) -> Verdict:
    """T=0: a drafted node is accepted when it is the argmax at its parent."""
    choice = logits.argmax(-1)  # [n]
    drafted, chosen = torch.stack((tree.tokens, choice)).tolist()  # the step's one host synchronisation
    path, node = [0], 0
    children = tree.shape.children()
    while True:
        match = next((c for c in children[node] if drafted[c] == chosen[node]), None)
        if match is None:
            break
        path.append(match)
        node = match
    return Verdict(path, [drafted[i] for i in path[1:]] + [chosen[node]], choice[node : node + 1])


def verify_sampled(probs: Tensor, tree: DraftTree, rng: torch.Generator) -> Verdict:
    """T>0: probs [n, V] are the target's, after temperature, top-k and top-p.

    Children are tried in order. Deterministic candidate x: accept with p(x), else p(x) := 0, renormalised.
    Candidate drawn from q: accept with min(1, p/q), else p := (p - q)+ renormalised, and q(x) := 0 renormalised,
    since siblings are drawn without replacement. If none is left, draw from what remains of p.
    """
    drafted = tree.tokens.tolist()
    children = tree.shape.children()
    path, node = [0], 0
    while True:
        child, p = _try_children(probs[node], node, children[node], drafted, tree.draft_probs, rng)
        if child is None:
            token = torch.multinomial(p, 1, generator=rng)
            return Verdict(path, [drafted[i] for i in path[1:]] + [int(token)], token)
        path.append(child)
        node = child


def _try_children(
    p: Tensor, node: int, children: list[int], drafted: list[int], draft_probs: Tensor | None, rng: torch.Generator
) -> tuple[int | None, Tensor]:
    """The accepted child, or None and what is left of p."""
    q = None if draft_probs is None or not children else draft_probs[node]
    for child in children:
        x = drafted[child]
        u = float(torch.rand((), generator=rng, device=p.device))
        if q is None:
            if u < float(p[x]):
                return child, p
            p = p.clone()
            p[x] = 0
        else:
            if u * float(q[x]) < float(p[x]):
                return child, p
            p = (p - q).clamp_min(0)
            q = q.clone()
            q[x] = 0
            q = q / q.sum().clamp_min(torch.finfo(q.dtype).tiny)
        left = p.sum()
        if float(left) <= 0:  # p was all on this candidate; only rounding let u pass it
            return child, p
        p = p / left
    return None, p

"""Verification of a draft tree: greedy, or exact rejection sampling (ACL appendix F, eq. 9; Leviathan et al.).

A walk along parent pointers: no paths are listed, none is padded. The result keeps the target's distribution: the
tokens it yields are distributed as the target's own, whatever the draft.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from specbench_ss.engine.checks import check_draft_probs, check_probs
from specbench_ss.engine.sampling import SamplingParams, sample_categorical
from specbench_ss.engine.tree import DraftTree, copy_to_host, indices


@dataclass(slots=True)
class VerifyResult:
    """path: accepted nodes from the root (always path[0] == 0). tokens: their drafted tokens, then the next one.

    next_token is int64 [1] on the device: the correction (or bonus) token, root of the next tree. root: the token of
    the tree's node 0, where the rule brought it to the host: the loop then checks that it is the one that was decided.
    largest: the largest logit of every node, [n] on the device, which the loop looks at when the answer is complete:
    an argmax over NaN is a token too. Where it is left out, the loop finds it. checked: the rule has found by itself
    that the rows of its path are finite, so that there is nothing to look at.
    """

    path: list[int]
    tokens: list[int]
    next_token: Tensor
    root: int | None = None
    largest: Tensor | None = None
    checked: bool = False

    @property
    def accepted(self) -> int:
        """How many drafted tokens were accepted."""
        return len(self.path) - 1


def verify(logits: Tensor, tree: DraftTree, sampling: SamplingParams, rng: torch.Generator) -> VerifyResult:
    """logits [n, V] of the tree's nodes -> what is accepted. Raises NotFinite where p is NaN, at T > 0."""
    if sampling.greedy:
        return verify_greedy(logits, tree)
    # on a CPU a synchronisation costs nothing, and a filtered row much: of most nodes none is needed
    on_cpu = logits.device.type == "cpu"
    return verify_sampled(LazyTargetProbs(logits, sampling) if on_cpu else sampling.probs(logits), tree, rng)


@dataclass(frozen=True, slots=True)
class LazyTargetProbs:
    """The target's distribution at the nodes that a walk reaches, from logits [n, V]."""

    logits: Tensor
    sampling: SamplingParams

    def __getitem__(self, node: int) -> Tensor:
        return self.sampling.probs(self.logits[node])


def verify_greedy(logits: Tensor, tree: DraftTree) -> VerifyResult:
    """T=0: a drafted node is accepted when it is the argmax at its parent."""
    largest, choice = logits.max(-1)  # [n] each; NaN is larger than any number
    drafted, chosen = copy_to_host(tree.topology, tree.tokens, choice)  # the step's one host synchronisation
    path, node = [0], 0
    children = tree.topology.children()
    while True:
        match = next((c for c in children[node] if drafted[c] == chosen[node]), None)
        if match is None:
            break
        path.append(match)
        node = match
    tokens = [drafted[i] for i in path[1:]] + [chosen[node]]
    return VerifyResult(path, tokens, choice[node : node + 1], drafted[0], largest)


def verify_sampled(probs: Tensor | LazyTargetProbs, tree: DraftTree, rng: torch.Generator) -> VerifyResult:
    """T>0: probs [n, V] are the target's, after temperature, top-k and top-p.

    Children are tried in order. Deterministic candidate x: accept with p(x), else p(x) := 0, renormalised.
    Candidate drawn from q: accept with min(1, p/q), else p := (p - q)+ renormalised, and q(x) := 0 renormalised,
    since siblings are drawn without replacement. If none is left, draw from what remains of p.

    One host synchronisation brings what the walk needs of every node, with a token drawn from each node's row. That is
    the next token, unless it was refused as a candidate or the candidates were drawn from q: then another is drawn,
    for a second synchronisation. There is one more for each drawn candidate after a refused sibling, and one for each
    node that is looked at when it is `LazyTargetProbs`.
    """
    edges, children = _edges(probs, tree, rng), tree.topology.children()
    path, node = [0], 0
    while True:
        p = probs[node]
        if isinstance(probs, LazyTargetProbs):
            edges.look(p, node, children[node])
        check_probs(edges.any[node])
        if tree.draft_probs is None:
            child, refused = _deterministic(children[node], edges)
            left = p if child is not None or edges.stands(node, refused) else _without(p, refused)
        else:
            if children[node]:
                check_draft_probs(edges.q[children[node][0]], edges.total[node], edges.least[node])
            child, left = _drawn(p, tree.draft_probs[node], children[node], edges)
        if child is None:
            ahead = edges.ahead if left is p else None
            token = sample_categorical(left, rng) if ahead is None else ahead[node : node + 1]
            following = int(token) if ahead is None else edges.next_tokens[node]
            tokens = [*(edges.tokens[i] for i in path[1:]), following]
            return VerifyResult(path, tokens, token, edges.tokens[0], checked=True)
        path.append(child)
        node = child


@dataclass(frozen=True, slots=True)
class _Edges:
    """On the host, for each node: its token x, a uniform draw u, and p(x) and q(x) at its parent.

    any: one probability of the node's own row, NaN where its logits are not finite. total, least: sum and smallest
    entry of the node's own row of q, which its children were drawn from. next_tokens: drawn from the node's own row.
    ahead: the same [n] on the device; None where rows are looked at when they are reached, and nothing is drawn ahead.
    """

    tokens: list[int]
    u: list[float]
    q: list[float]
    p: list[float]
    any: list[float]
    total: list[float]
    least: list[float]
    next_tokens: list[int]
    ahead: Tensor | None

    def stands(self, node: int, refused: Collection[int]) -> bool:
        """Return True if the pre-drawn token of the node was not refused."""
        return not refused or (self.ahead is not None and self.next_tokens[node] not in refused)

    def look(self, p: Tensor, node: int, children: list[int]) -> None:
        """p(x) of these nodes, from their parent's row p [V]."""
        self.any[node], *probs = p[[0, *(self.tokens[c] for c in children)]].tolist()
        for child, p_x in zip(children, probs, strict=True):
            self.p[child] = p_x


def _edges(probs: Tensor | LazyTargetProbs, tree: DraftTree, rng: torch.Generator) -> _Edges:
    u = torch.rand(len(tree), generator=rng, device=tree.tokens.device)
    at = (tree.parents(), tree.tokens)
    q = torch.ones_like(u) if tree.draft_probs is None else tree.draft_probs[at].float()
    none = torch.zeros_like(u)
    total, least = (none, none) if tree.draft_probs is None else (tree.draft_probs.sum(-1), tree.draft_probs.amin(-1))
    if isinstance(probs, LazyTargetProbs):
        p, own, ahead = none, none, None
    else:
        p, own, ahead = probs[at], probs[:, 0], sample_categorical(probs, rng)[:, 0]
    given = (tree.tokens, u, q, p, own, total, least, none if ahead is None else ahead)
    tokens, *numbers, drawn = copy_to_host(tree.topology, *(x.double() for x in given))
    us, qs, ps, owns, totals, leasts = numbers
    return _Edges([int(x) for x in tokens], us, qs, ps, owns, totals, leasts, [int(x) for x in drawn], ahead)


def _deterministic(children: list[int], edges: _Edges) -> tuple[int | None, dict[int, float]]:
    """Return the accepted child or None, and the tokens refused before it with their p(x)."""
    refused: dict[int, float] = {}
    left = 1.0
    for child in children:
        x, p_x = edges.tokens[child], edges.p[child]
        if x in refused:  # p(x) is zero by now
            continue
        if edges.u[child] * max(left, 0.0) < p_x:
            return child, refused
        left -= p_x
        refused[x] = p_x
    return None, refused


def _without(p: Tensor, refused: dict[int, float]) -> Tensor:
    """p with these tokens at zero; where that leaves nothing, only rounding refused the likeliest: it stays."""
    left = p.index_fill(0, indices(list(refused), p.device), 0)
    left[max(refused, key=lambda x: refused[x])] += left.sum() <= 0
    return left


def _drawn(p: Tensor, q: Tensor, children: list[int], edges: _Edges) -> tuple[int | None, Tensor]:
    """Return the accepted child, or None and the rest of p [V]; children are drawn from q [V] without replacement."""
    for i, child in enumerate(children):
        x = edges.tokens[child]
        p_x, q_x = (edges.p[child], edges.q[child]) if i == 0 else torch.stack((p[x], q[x])).tolist()
        check_draft_probs(q_x)
        if edges.u[child] * q_x < p_x:
            return child, p
        left = (p - q).clamp_min(0)
        left[x] += left.sum() <= 0  # p is q, up to rounding: it covers all that it should
        p = left / left.sum()
        q = q.clone()
        q[x] = 0
        q = q / q.sum().clamp_min(torch.finfo(q.dtype).tiny)
    return None, p


@dataclass(frozen=True, slots=True)
class Offer:
    """Drafted tokens that were offered for one token of an answer.

    tokens: of the candidates, in order of proposal. q: the draft probability that the first was drawn with; None where
    the candidates were chosen, not drawn.
    """

    tokens: tuple[int, ...] = ()
    q: float | None = None


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates for successive tokens of an answer, on the device.

    counts: of candidates for each token. tokens: int64 [sum of counts]. q: draft probability of the first candidate of
    each token that has any; None where the candidates were chosen, not drawn.
    """

    counts: list[int]
    tokens: Tensor | None = None
    q: Tensor | None = None


def candidates(tree: DraftTree, path: Sequence[int]) -> Candidates:
    """Return the candidates behind each node of an accepted path, without waiting for the device."""
    children = tree.topology.children()
    own = [children[node] for node in path]
    counts, firsts = [len(nodes) for nodes in own], [nodes[0] for nodes in own if nodes]
    if not firsts:
        return Candidates(counts)
    tokens = tree.tokens[indices([node for nodes in own for node in nodes], tree.tokens.device)]  # copied
    if (q := tree.draft_probs) is None:
        return Candidates(counts, tokens)
    nodes = indices([node for node, count in zip(path, counts, strict=True) if count], q.device)
    first = tree.tokens[indices(firsts, tree.tokens.device)].to(q.device)
    return Candidates(counts, tokens, q[nodes, first])


def offers(steps: Sequence[Candidates]) -> list[Offer]:
    """Return what was drafted for each token; waits for the device twice at most."""
    tokens, q = (iter(_on_host([getattr(step, name) for step in steps])) for name in ("tokens", "q"))
    return [
        Offer(tuple(islice(tokens, n)), next(q) if n and step.q is not None else None)
        for step in steps
        for n in step.counts
    ]


def _on_host(parts: Sequence[Tensor | None]) -> list[Any]:
    """Return the numbers of all these tensors, in one transfer."""
    given = [part for part in parts if part is not None]
    return torch.cat(given).tolist() if given else []

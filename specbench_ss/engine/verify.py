"""Verification of a draft tree: greedy, or exact rejection sampling (EMNLP appendix F, eq. 9; Leviathan et al.).

A sampled chain may also be accepted as a block (Sun et al., "Block Verification Accelerates Speculative Decoding",
arXiv:2403.10444), which accepts no fewer tokens in expectation.

The walk follows child pointers, so that paths are neither listed nor padded. The accepted tokens follow exactly the
target's distribution for every draft.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from specbench_ss.engine.checks import NotFinite, check_draft_probs, check_probs
from specbench_ss.engine.sampling import BLOCK, SamplingParams, sample_categorical
from specbench_ss.engine.tree import DraftTree, copy_to_host, indices


@dataclass(slots=True)
class VerifyResult:
    """Result of the verification of one draft tree.

    Attributes:
        path: accepted nodes from the root (path[0] == 0).
        tokens: the drafted tokens of the path, then the next one.
        next_token: int64 [1] on the device, the correction or bonus token: root of the next tree.
        root: token of node 0 if the rule copied it to the host; the loop compares it with the decided one.
        max_logits: largest logit of each node, [n] on the device, for the NaN check after decoding (argmax over NaN is
            a valid token id); the loop computes them if omitted.
        checked: the rule has already checked that the rows of the path are finite.
    """

    path: list[int]
    tokens: list[int]
    next_token: Tensor
    root: int | None = None
    max_logits: Tensor | None = None
    checked: bool = False

    @property
    def accepted(self) -> int:
        """Return the number of accepted draft tokens."""
        return len(self.path) - 1


def verify(logits: Tensor, tree: DraftTree, sampling: SamplingParams, rng: torch.Generator) -> VerifyResult:
    """Return the accepted path from the nodes' logits [n, V]. Raises NotFinite for NaN in p, at T > 0."""
    if sampling.greedy:
        return verify_greedy(logits, tree)
    if verifies_as_block(tree, sampling):
        return verify_block(sampling.probs(logits), tree, rng)
    # on a CPU synchronisation is free and filtering a row is slow: filter only the rows that the walk reaches
    on_cpu = logits.device.type == "cpu"
    return verify_sampled(LazyTargetProbs(logits, sampling) if on_cpu else sampling.probs(logits), tree, rng)


def verifies_as_block(tree: DraftTree, sampling: SamplingParams) -> bool:
    """Return True if this draft is accepted as a block: a chain of several tokens sampled from q.

    A deterministic chain gains nothing: the output begins with it as often as p allows, by either rule.
    """
    if sampling.verification != BLOCK or sampling.greedy or tree.draft_probs is None:
        return False  # without a look at a topology that is on the device
    most = min(len(tree.draft_probs), tree.topology.deepest)
    return 2 < len(tree) <= most + 1 and tree.topology.depth == len(tree) - 1


@dataclass(frozen=True, slots=True)
class LazyTargetProbs:
    """Target distribution of the nodes that the walk reaches, computed on access from logits [n, V]."""

    logits: Tensor
    sampling: SamplingParams

    def __getitem__(self, node: int) -> Tensor:
        return self.sampling.probs(self.logits[node])


def verify_greedy(logits: Tensor, tree: DraftTree) -> VerifyResult:
    """Accept a drafted node if it is the argmax at its parent (T = 0)."""
    max_logits, choice = logits.max(-1)  # [n] each; NaN is larger than any number
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
    return VerifyResult(path, tokens, choice[node : node + 1], drafted[0], max_logits)


def verify_sampled(probs: Tensor | LazyTargetProbs, tree: DraftTree, rng: torch.Generator) -> VerifyResult:
    """Accept a path by rejection sampling (T > 0); probs [n, V] are p after temperature, top-k and top-p.

    Children are tried in order. Deterministic candidate x: accept with p(x), else p(x) := 0, renormalised.
    Candidate sampled from q: accept with min(1, p/q), else p := (p - q)+ renormalised, and q(x) := 0 renormalised,
    since siblings are sampled without replacement. If none is left, sample from what remains of p.

    Host synchronisations:

    - one copies each node's numbers, with a token sampled from its row, which is the next token in most cases;
    - one samples another next token, if that one was rejected as a candidate or the candidates were sampled from q;
    - one for each sampled candidate after a rejected sibling;
    - one for each node that `LazyTargetProbs` computes.
    """
    nodes, children = _node_data(probs, tree, rng), tree.topology.children()
    path, node = [0], 0
    while True:
        p = probs[node]
        if isinstance(probs, LazyTargetProbs):
            nodes.set_target_probs(p, node, children[node])
        check_probs(nodes.row_prob[node])
        q = tree.children_probs(node)
        if q is None:
            child, rejected = _accept_deterministic(children[node], nodes)
            rest = p if child is not None or nodes.keeps_next_token(node, rejected) else _mask_tokens(p, rejected)
        else:
            if children[node]:
                check_draft_probs(nodes.q[children[node][0]], nodes.q_sum[node], nodes.q_min[node])
            child, rest = _accept_sampled(p, q, children[node], nodes)
        if child is None:
            next_on_device = nodes.next_on_device if rest is p else None
            token = sample_categorical(rest, rng) if next_on_device is None else next_on_device[node : node + 1]
            next_id = int(token) if next_on_device is None else nodes.next_tokens[node]
            tokens = [*(nodes.tokens[i] for i in path[1:]), next_id]
            return VerifyResult(path, tokens, token, nodes.tokens[0], checked=True)
        path.append(child)
        node = child


def block_acceptance(p: Tensor, q: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
    """Return h_1..h_g of a block of g drafted tokens [g], and the weights of the next token [g + 1, V], in float64.

    h_i: probability of accepting the first i tokens unless more are accepted. After t of g tokens the next one has
    weights (P_t p_t - q_t)+, after all p_g (algorithm 2 of Sun et al.). P_i = min(1, P_{i-1} p(x_i) / q(x_i)) is taken
    from the sums S_i of log(p / q): log P_i = S_i - max_{k <= i} S_k.

    p: [g + 1, V], row i after i drafted tokens. q: [g, V], row i that token i + 1 was sampled from.
    """
    p, q, g = p.double(), q.double(), len(drafted)
    at = torch.arange(g, device=drafted.device), drafted
    sums = torch.cat((p.new_zeros(1), (p[at] / q[at]).log().cumsum(0)))
    prefix = (sums - sums.cummax(0).values).exp()  # [g + 1]
    rest = torch.cat(((prefix[:g, None] * p[:g] - q).clamp_min(0), p[g:]))
    mass, inner = rest[1:g].sum(-1), prefix[1:g]
    total = mass + 1 - inner
    return torch.cat((torch.where(total > 0, mass / total, 1.0), prefix[g:])), rest


def verify_block(p: Tensor, tree: DraftTree, rng: torch.Generator) -> VerifyResult:
    """Accept the longest prefix of a chain whose uniform number allows it (T > 0); p [n, V] of the nodes.

    Every length i is tried with its probability h_i; the walk does not end at the first refusal. One host
    synchronisation.
    """
    assert tree.draft_probs is not None
    g, q = len(tree) - 1, tree.draft_probs[: len(tree) - 1]
    h, rest = block_acceptance(p, q, tree.tokens[1:])
    u = torch.rand(g, generator=rng, device=p.device, dtype=torch.float64)
    accepted = (torch.arange(1, g + 1, device=p.device) * (u < h)).amax(0, keepdim=True)  # [1]
    weights, last = rest.index_select(0, accepted), p.index_select(0, accepted)
    weights = torch.where(weights.sum() > 0, weights, last.double())  # no weight: p equals q up to rounding
    token = sample_categorical(weights, rng)[:, 0]
    drafted = q[torch.arange(g, device=q.device), tree.tokens[1:]].amin()
    checked = torch.stack((p[:, 0].sum(), q.sum(-1).amax(), q.sum(-1).amin(), q.amin(), drafted))
    numbers = (x.double() for x in (tree.tokens, accepted, token, checked))
    tokens, (n,), (next_id,), (row, most, least, smallest, least_drafted) = copy_to_host(tree.topology, *numbers)
    check_probs(row)
    check_draft_probs(most, most, smallest)
    check_draft_probs(least, least)
    if least_drafted <= 0:
        raise NotFinite("draft_probs give a drafted token probability 0, so it was not sampled from them")
    path, ids = list(range(int(n) + 1)), [int(x) for x in tokens]
    return VerifyResult(path, [*ids[1 : int(n) + 1], int(next_id)], token, ids[0], checked=True)


@dataclass(frozen=True, slots=True)
class _NodeData:
    """Numbers of each node on the host: token x, uniform number u, and p(x) and q(x) at the node's parent.

    row_prob: one probability of the node's row, NaN if its logits are not finite. q_sum, q_min: sum and minimum of the
    node's row of q, if it has one. next_tokens: sampled from the node's row. next_on_device: the same [n] on the
    device; None for `LazyTargetProbs`.
    """

    tokens: list[int]
    u: list[float]
    q: list[float]
    p: list[float]
    row_prob: list[float]
    q_sum: list[float]
    q_min: list[float]
    next_tokens: list[int]
    next_on_device: Tensor | None

    def keeps_next_token(self, node: int, rejected: Collection[int]) -> bool:
        """Return True if the token sampled from the node's row was not rejected."""
        return not rejected or (self.next_on_device is not None and self.next_tokens[node] not in rejected)

    def set_target_probs(self, p: Tensor, node: int, children: list[int]) -> None:
        """Set p(x) of these children from their parent's row p [V]."""
        self.row_prob[node], *probs = p[[0, *(self.tokens[c] for c in children)]].tolist()
        for child, p_x in zip(children, probs, strict=True):
            self.p[child] = p_x


def _node_data(probs: Tensor | LazyTargetProbs, tree: DraftTree, rng: torch.Generator) -> _NodeData:
    u = torch.rand(len(tree), generator=rng, device=tree.tokens.device)
    edge, q = (tree.parents(), tree.tokens), tree.token_probs()
    q = torch.ones_like(u) if q is None else q
    zeros = torch.zeros_like(u)
    q_sum, q_min = (zeros, zeros) if tree.draft_probs is None else (tree.draft_probs.sum(-1), tree.draft_probs.amin(-1))
    if isinstance(probs, LazyTargetProbs):
        p, row_prob, next_on_device = zeros, zeros, None
    else:
        p, row_prob, next_on_device = probs[edge], probs[:, 0], sample_categorical(probs, rng)[:, 0]
    columns = (tree.tokens, u, q, p, row_prob, q_sum, q_min, zeros if next_on_device is None else next_on_device)
    tokens, *numbers, next_tokens = copy_to_host(tree.topology, *(x.double() for x in columns))
    us, qs, ps, row_probs, q_sums, q_mins = numbers
    return _NodeData(
        [int(x) for x in tokens], us, qs, ps, row_probs, q_sums, q_mins, [int(x) for x in next_tokens], next_on_device
    )


def _accept_deterministic(children: list[int], nodes: _NodeData) -> tuple[int | None, dict[int, float]]:
    """Return the accepted child or None, and the tokens rejected before it with their p(x)."""
    rejected: dict[int, float] = {}
    mass = 1.0
    for child in children:
        x, p_x = nodes.tokens[child], nodes.p[child]
        if x in rejected:  # p(x) is already zero
            continue
        if nodes.u[child] * max(mass, 0.0) < p_x:
            return child, rejected
        mass -= p_x
        rejected[x] = p_x
    return None, rejected


def _mask_tokens(p: Tensor, rejected: dict[int, float]) -> Tensor:
    """Return p with these tokens at zero; if nothing remains (rounding), keep the likeliest one."""
    rest = p.index_fill(0, indices(list(rejected), p.device), 0)
    rest[max(rejected, key=lambda x: rejected[x])] += rest.sum() <= 0
    return rest


def _accept_sampled(p: Tensor, q: Tensor, children: list[int], nodes: _NodeData) -> tuple[int | None, Tensor]:
    """Return the accepted child, or None and the rest of p [V]; children were sampled from q without replacement."""
    for i, child in enumerate(children):
        x = nodes.tokens[child]
        p_x, q_x = (nodes.p[child], nodes.q[child]) if i == 0 else torch.stack((p[x], q[x])).tolist()
        check_draft_probs(q_x)
        if nodes.u[child] * q_x < p_x:
            return child, p
        rest = (p - q).clamp_min(0)
        rest[x] += rest.sum() <= 0  # p equals q up to rounding
        p = rest / rest.sum()
        q = q.clone()
        q[x] = 0
        q = q / q.sum().clamp_min(torch.finfo(q.dtype).tiny)
    return None, p


@dataclass(frozen=True, slots=True)
class Offer:
    """Candidates that were offered for one output token.

    tokens: in order of proposal. q: draft probability of the first one; None for deterministic candidates.
    """

    tokens: tuple[int, ...] = ()
    q: float | None = None


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates of successive output tokens, on the device.

    counts: number of candidates of each token. tokens: int64 [sum of counts]. q: draft probability of the first
    candidate of each of the leading tokens with sampled candidates; None if all are deterministic.
    """

    counts: list[int]
    tokens: Tensor | None = None
    q: Tensor | None = None


def candidates(tree: DraftTree, path: Sequence[int], sampling: SamplingParams) -> Candidates:
    """Return the candidates at each node of an accepted path, without a synchronisation.

    Empty for block verification, which has no acceptance of single tokens.
    """
    if verifies_as_block(tree, sampling):
        return Candidates([0] * len(path))
    children = tree.topology.children()
    offered = [children[node] for node in path]
    counts, firsts = [len(nodes) for nodes in offered], [nodes[0] for nodes in offered if nodes]
    if not firsts:
        return Candidates(counts)
    tokens = tree.tokens[indices([node for nodes in offered for node in nodes], tree.tokens.device)]  # copied
    if (q := tree.draft_probs) is None:
        return Candidates(counts, tokens)
    sampled = [node for node, count in zip(path, counts, strict=True) if count and node < len(q)]
    first = tree.tokens[indices(firsts[: len(sampled)], tree.tokens.device)].to(q.device)
    return Candidates(counts, tokens, q[indices(sampled, q.device), first])


def offers(steps: Sequence[Candidates]) -> list[Offer]:
    """Return the candidates of each token; at most two host synchronisations."""
    tokens, q = (iter(_on_host([getattr(step, name) for step in steps])) for name in ("tokens", "q"))
    result = list[Offer]()
    for step in steps:
        sampled = iter(range(0 if step.q is None else len(step.q)))
        for n in step.counts:
            drafted = tuple(islice(tokens, n))
            result.append(Offer(drafted, next(q) if n and next(sampled, None) is not None else None))
    return result


def _on_host(parts: Sequence[Tensor | None]) -> list[Any]:
    """Copy all numbers of these tensors to the host in one transfer."""
    present = [part for part in parts if part is not None]
    return torch.cat(present).tolist() if present else []

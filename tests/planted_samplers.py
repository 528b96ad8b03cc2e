"""Biased acceptance rules and decoders that use them, and a small model and drafter for tests of runs.

The decoders are for the conformance kit, which gives them models of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.verify import VerifyResult, verify, verify_greedy
from specbench_ss.models.tiny import tiny_model

WORDS, LENGTH = 61, 4
Rule = Callable[[Tensor, DraftTree, SamplingParams, torch.Generator], VerifyResult]


def bigram_target() -> Target:
    """Return a tiny Llama without attention, whose distributions are as peaked as those of a language model."""
    model = tiny_model("llama", seed=3, vocab=WORDS, layers=1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
        model.lm_head.weight.mul_(2.5)
    return Target(model, None, "bigram")


class Drafting(Decoder):
    """Draft a chain that is drawn from a noisy copy of the model's own table of next tokens."""

    name, summary = "drafting", "drafts from a table"

    def __init__(self, target: Target, rule: Rule = verify) -> None:
        super().__init__(target)
        noise = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(1))
        own = torch.stack([target.next_logits([token]) for token in range(WORDS)])
        self.table, self.rule = own + noise, rule

    def max_tokens_per_step(self) -> int:
        """Return the rows of the root and its chain."""
        return 1 + LENGTH

    def propose(self, state: DecodeState) -> DraftTree:
        """Return a chain of tokens drawn from the table."""
        rows, drafted, last = [], list[Tensor](), state.root
        for _ in range(LENGTH):
            rows.append(state.sampling.probs(self.table[last]))
            last = torch.multinomial(rows[-1], 1, generator=state.rng)[0]
            drafted.append(last)
        return DraftTree.chain(state.root, torch.cat(drafted), torch.cat([*rows, torch.zeros(1, WORDS)]))

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        """Return what the rule accepts."""
        return self.rule(output.logits[0], tree, state.sampling, state.rng)


def everything(logits: Tensor, tree: DraftTree, sampling: SamplingParams, rng: torch.Generator) -> VerifyResult:
    """Accept the whole draft."""
    return _accepted(len(tree) - 1, sampling.probs(logits[-1]), tree, rng)


def best_of(n: int, logits: Tensor, tree: DraftTree, sampling: SamplingParams, rng: torch.Generator) -> VerifyResult:
    """Verify n times and keep the longest block."""
    return max((verify(logits, tree, sampling, rng) for _ in range(n)), key=lambda verdict: verdict.accepted)


best_of_two = partial(best_of, 2)


def doubled(logits: Tensor, tree: DraftTree, sampling: SamplingParams, rng: torch.Generator) -> VerifyResult:
    """Accept with probability min(1, 2 p / q)."""
    assert tree.draft_probs is not None
    p, q, x = sampling.probs(logits), tree.draft_probs, tree.tokens[1:].tolist()
    for n, token in enumerate(x):
        if float(torch.rand((), generator=rng)) * float(q[n, token]) >= 2 * float(p[n, token]):
            left = (p[n] - q[n]).clamp_min(0)
            return _accepted(n, left if left.sum() > 0 else p[n], tree, rng)
    return _accepted(len(x), p[-1], tree, rng)


def greedy(logits: Tensor, tree: DraftTree, sampling: SamplingParams, rng: torch.Generator) -> VerifyResult:
    """Accept as at temperature 0."""
    return verify_greedy(logits, tree)


def unseen(logits: Tensor, tree: DraftTree, sampling: SamplingParams, rng: torch.Generator) -> VerifyResult:
    """Accept the first drafted token unseen."""
    q = None if tree.draft_probs is None else tree.draft_probs[1:]
    rest = DraftTree.chain(tree.tokens[1:2], tree.tokens[2:], q)
    found = verify(logits[1:], rest, sampling, rng)
    path = [0, *(node + 1 for node in found.path)]
    return VerifyResult(path, [int(tree.tokens[1]), *found.tokens], found.next_token, checked=True)


def warm_bonus(logits: Tensor, tree: DraftTree, sampling: SamplingParams, rng: torch.Generator) -> VerifyResult:
    """Draw the token after a wholly accepted draft at temperature 1, without filters."""
    found = verify(logits, tree, sampling, rng)
    whole = found.accepted == len(tree) - 1
    return _accepted(found.accepted, SamplingParams(1.0).probs(logits[-1]), tree, rng) if whole else found


RULES: dict[str, Rule] = {
    "everything": everything,
    "best_of_two": best_of_two,
    "doubled": doubled,
    "greedy": greedy,
    "unseen": unseen,
    "warm_bonus": warm_bonus,
}


def _accepted(n: int, p: Tensor, tree: DraftTree, rng: torch.Generator) -> VerifyResult:
    """Return the verdict that accepts n tokens of a chain and draws the next one from p."""
    token = torch.multinomial(p, 1, generator=rng)
    return VerifyResult([*range(n + 1)], [*tree.tokens[1 : n + 1].tolist(), int(token)], token, checked=True)


CHAIN = 6  # tokens of a drafted chain


class Chain(Decoder):
    """Drafts a chain by arithmetic; exact."""

    name, summary = "chain", "drafts a chain by arithmetic"

    def max_tokens_per_step(self) -> int:
        return CHAIN + 1

    def propose(self, state: DecodeState) -> DraftTree:
        words = [(state.ids[-1] * 3 + i) % self.target.vocab_size for i in range(CHAIN)]
        return DraftTree.chain(state.root, torch.tensor(words))


class Drawn(Chain):
    """Draws a chain from a flat distribution that leans to some tokens; exact."""

    def q(self) -> Tensor:
        v = self.target.vocab_size
        return torch.linspace(1, 3, v) / torch.linspace(1, 3, v).sum()

    def propose(self, state: DecodeState) -> DraftTree:
        drawn = torch.multinomial(self.q(), CHAIN, replacement=True, generator=state.rng)
        return DraftTree.chain(state.root, drawn, self.q().expand(CHAIN + 1, -1))


class Lookup(Chain):
    """Drafts what followed the last token where it was seen before, if that is recent: seldom; exact."""

    def propose(self, state: DecodeState) -> DraftTree:
        found = [i for i in range(len(state.ids) - 1) if state.ids[i] == state.root]
        if not found or sum(state.ids[-2:]) % 5:
            return DraftTree.root_only(state.root)
        return DraftTree.chain(state.root, torch.tensor(state.ids[found[-1] + 1 :][:CHAIN]))


class BestOfTwo(Chain):
    """Verifies twice and keeps the longer block."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        return best_of_two(output.logits[0], tree, state.sampling, state.rng)


class BestOfFive(Chain):
    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        return best_of(5, output.logits[0], tree, state.sampling, state.rng)


class BestOfTwoDrawn(BestOfTwo, Drawn):
    """As `BestOfTwo`, of sampled drafts."""


class BestOfTwoLookups(BestOfTwo, Lookup):
    """As `BestOfTwo`, of drafts that are seldom there."""


class BestOfFiveLookups(BestOfFive, Lookup):
    pass


class Raised(Chain):
    """Accepts with probability 0.98 where 0.85 is right, at one depth."""

    depth = 0

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        if not state.sampling.greedy and len(tree) > self.depth + 1:
            p = state.sampling.probs(output.logits[0, self.depth])
            token = int(tree.tokens[self.depth + 1])
            if float(p[token]) > 0.5:
                rest = p.clone()
                rest[token] = 0
                p = 0.02 * rest / rest.sum().clamp_min(1e-9)
                p[token] = 0.98
                row = state.sampling.temperature * p.clamp_min(1e-30).log()
                output = replace(
                    output, logits=output.logits.index_copy(1, torch.tensor([self.depth]), row[None, None])
                )
        return super().accept(state, tree, output)


class RaisedInTheMiddle(Raised):
    depth = 2


class RaisedAtTheEnd(Raised):
    depth = CHAIN - 1


class Lowered(Raised):
    """Accepts with probability 0.7 where 0.85 is right."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        verdict = Chain.accept(self, state, tree, output)
        if state.sampling.greedy or verdict.accepted == 0 or float(torch.rand((), generator=state.rng)) > 0.18:
            return verdict
        others = state.sampling.probs(output.logits[0, 0])
        others[tree.tokens[1]] = 0
        if float(others.sum()) == 0:
            return verdict
        token = torch.multinomial(others, 1, generator=state.rng)
        return VerifyResult([0], [int(token)], token)


class AcceptsTwice(Drawn):
    """Accepts with min(1, 2 p / q)."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        if state.sampling.greedy:
            return super().accept(state, tree, output)
        return doubled(output.logits[0], tree, state.sampling, state.rng)


class KeepsTheRefused(Chain):
    """Draws the token after a refusal from p, the refused token included."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        verdict = super().accept(state, tree, output)
        if state.sampling.greedy or verdict.accepted == tree.topology.depth:
            return verdict
        token = torch.multinomial(state.sampling.probs(output.logits[0, verdict.path[-1]]), 1, generator=state.rng)
        return VerifyResult(verdict.path, [*verdict.tokens[:-1], int(token)], token)


class UnseenOfManyWords(Chain):
    """Accepts the first drafted token without looking at it where there are over 2,000 words."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        if state.sampling.greedy or self.target.vocab_size <= 2000:
            return super().accept(state, tree, output)
        return unseen(output.logits[0], tree, state.sampling, state.rng)


class LastUnseen(Chain):
    """Accepts the last token of a chain with the one before it."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        verdict = super().accept(state, tree, output)
        if state.sampling.greedy or verdict.accepted < CHAIN - 1:
            return verdict
        return everything(output.logits[0], tree, state.sampling, state.rng)


class GreedyBelow(Chain):
    """Takes the most probable token below T = 0.7."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        if state.sampling.temperature < 0.7:
            return verify_greedy(output.logits[0], tree)
        return super().accept(state, tree, output)


class SharpBelow(Chain):
    """Makes the pass's logits sharper below T = 0.7."""

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        output = super().forward(state, tree)
        if 0 < state.sampling.temperature < 0.7:
            output.logits = output.logits * 2
        return output


class NoTemperature(Chain):
    """Leaves the temperature out of acceptance."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        sampling = state.sampling if state.sampling.greedy else replace(state.sampling, temperature=1.0)
        return verify(output.logits[0], tree, sampling, state.rng)


class NoFilters(Chain):
    """Leaves top-k and top-p out of acceptance."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        return verify(output.logits[0], tree, replace(state.sampling, top_k=0, top_p=1.0), state.rng)


class Typical(Chain):
    """Accepts what is probable enough, as Medusa's typical acceptance does, and calls itself lossless."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        if state.sampling.greedy:
            return super().accept(state, tree, output)
        p, path = state.sampling.probs(output.logits[0]), [0]
        while len(path) < len(tree) and float(p[path[-1], tree.tokens[path[-1] + 1]]) > 0.3:
            path.append(path[-1] + 1)
        token = torch.multinomial(p[path[-1]], 1, generator=state.rng)
        return VerifyResult(path, [*tree.tokens[path[1:]].tolist(), int(token)], token)


class SharperDraws(Drawn):
    """Draws from a sharper distribution than draft_probs states."""

    def propose(self, state: DecodeState) -> DraftTree:
        sharp = self.q() ** 3
        drawn = torch.multinomial(sharp, CHAIN, replacement=True, generator=state.rng)
        return DraftTree.chain(state.root, drawn, self.q().expand(CHAIN + 1, -1))


EXACT: tuple[type[Decoder], ...] = (Chain, Drawn, Lookup)
PLANTED: tuple[type[Decoder], ...] = (
    BestOfTwo, BestOfFive, BestOfTwoDrawn, BestOfTwoLookups, BestOfFiveLookups, Raised, RaisedInTheMiddle,
    RaisedAtTheEnd, Lowered, AcceptsTwice, KeepsTheRefused, UnseenOfManyWords, LastUnseen, GreedyBelow, SharpBelow,
    NoTemperature, NoFilters, Typical, SharperDraws,
)  # fmt: skip

"""Decoders whose tokens are not distributed as the target's at T>0: each one is a fault that the kit has to find."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specbench_ss.decoding.decoder import Decoder, State
from specbench_ss.decoding.target import Output
from specbench_ss.decoding.tree import DraftTree
from specbench_ss.decoding.verify import Verdict, verify, verify_greedy

LENGTH = 6  # of drafted chains


class Chain(Decoder):
    """Drafts a chain by arithmetic; exact."""

    name, summary = "chain", "drafts a chain by arithmetic"

    def max_rows(self) -> int:
        return LENGTH + 1

    def propose(self, state: State) -> DraftTree:
        words = [(state.ids[-1] * 3 + i) % self.target.vocab_size for i in range(LENGTH)]
        return DraftTree.chain(state.root, torch.tensor(words))


class Drawn(Chain):
    """Draws a chain from a flat distribution that leans to some tokens; exact."""

    def q(self) -> Tensor:
        v = self.target.vocab_size
        return torch.linspace(1, 3, v) / torch.linspace(1, 3, v).sum()

    def propose(self, state: State) -> DraftTree:
        drawn = torch.multinomial(self.q(), LENGTH, replacement=True, generator=state.rng)
        return DraftTree.chain(state.root, drawn, self.q().expand(LENGTH + 1, -1))


class Lookup(Chain):
    """Drafts what followed the last token where it was seen before, if that is recent: seldom; exact."""

    def propose(self, state: State) -> DraftTree:
        found = [i for i in range(len(state.ids) - 1) if state.ids[i] == state.root]
        if not found or sum(state.ids[-2:]) % 5:
            return DraftTree.root_only(state.root)
        return DraftTree.chain(state.root, torch.tensor(state.ids[found[-1] + 1 :][:LENGTH]))


class BestOfTwo(Chain):
    """Verifies twice and keeps the longer block."""

    tries = 2

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
        if state.sampling.greedy:
            return super().accept(state, tree, output)
        return max((super(BestOfTwo, self).accept(state, tree, output) for _ in range(self.tries)), key=_length)


def _length(verdict: Verdict) -> int:
    return len(verdict.path)


class BestOfFive(BestOfTwo):
    tries = 5


class BestOfTwoDrawn(BestOfTwo, Drawn):
    """As `BestOfTwo`, of sampled drafts."""


class BestOfTwoLookups(BestOfTwo, Lookup):
    """As `BestOfTwo`, of drafts that are seldom there."""


class BestOfFiveLookups(BestOfFive, Lookup):
    pass


class Raised(Chain):
    """Accepts with probability 0.98 where 0.85 is right, at one depth."""

    depth = 0

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
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
    depth = LENGTH - 1


class Lowered(Raised):
    """Accepts with probability 0.7 where 0.85 is right."""

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
        verdict = Chain.accept(self, state, tree, output)
        if state.sampling.greedy or verdict.accepted == 0 or float(torch.rand((), generator=state.rng)) > 0.18:
            return verdict
        others = state.sampling.probs(output.logits[0, 0])
        others[tree.tokens[1]] = 0
        if float(others.sum()) == 0:
            return verdict
        token = torch.multinomial(others, 1, generator=state.rng)
        return Verdict([0], [int(token)], token)


class AcceptsTwice(Drawn):
    """Accepts with min(1, 2 p / q)."""

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
        if state.sampling.greedy or tree.draft_probs is None:
            return super().accept(state, tree, output)
        p, path = state.sampling.probs(output.logits[0]), [0]
        for child in range(1, len(tree)):
            token = int(tree.tokens[child])
            if float(torch.rand((), generator=state.rng)) * float(tree.draft_probs[child - 1, token]) >= 2 * float(
                p[child - 1, token]
            ):
                left = (p[child - 1] - tree.draft_probs[child - 1]).clamp_min(0)
                return self.ended(path, tree, left if float(left.sum()) > 0 else p[child - 1], state)
            path.append(child)
        return self.ended(path, tree, p[-1], state)

    def ended(self, path: list[int], tree: DraftTree, p: Tensor, state: State) -> Verdict:
        token = torch.multinomial(p, 1, generator=state.rng)
        return Verdict(path, [*tree.tokens[path[1:]].tolist(), int(token)], token)


class KeepsTheRefused(Chain):
    """Draws the token after a refusal from p, the refused token included."""

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
        verdict = super().accept(state, tree, output)
        if state.sampling.greedy or verdict.accepted == tree.shape.depth:
            return verdict
        token = torch.multinomial(state.sampling.probs(output.logits[0, verdict.path[-1]]), 1, generator=state.rng)
        return Verdict(verdict.path, [*verdict.tokens[:-1], int(token)], token)


class UnseenOfManyWords(Chain):
    """Accepts drafts without looking at them where there are over 2,000 words."""

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
        if state.sampling.greedy or self.target.vocab_size <= 2000:
            return super().accept(state, tree, output)
        token = torch.multinomial(state.sampling.probs(output.logits[0, 1]), 1, generator=state.rng)
        return Verdict([0, 1], [int(tree.tokens[1]), int(token)], token)


class LastUnseen(Chain):
    """Accepts the last token of a chain with the one before it."""

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
        verdict = super().accept(state, tree, output)
        if state.sampling.greedy or verdict.accepted < LENGTH - 1:
            return verdict
        token = torch.multinomial(state.sampling.probs(output.logits[0, -1]), 1, generator=state.rng)
        return Verdict(list(range(LENGTH + 1)), [*tree.tokens[1:].tolist(), int(token)], token)


class GreedyBelow(Chain):
    """Takes the most probable token below T = 0.7."""

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
        if state.sampling.temperature < 0.7:
            return verify_greedy(output.logits[0], tree)
        return super().accept(state, tree, output)


class SharpBelow(Chain):
    """Makes the pass's logits sharper below T = 0.7."""

    def forward(self, state: State, tree: DraftTree) -> Output:
        output = super().forward(state, tree)
        if 0 < state.sampling.temperature < 0.7:
            output.logits = output.logits * 2
        return output


class NoTemperature(Chain):
    """Leaves the temperature out of acceptance."""

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
        sampling = state.sampling if state.sampling.greedy else replace(state.sampling, temperature=1.0)
        return verify(output.logits[0], tree, sampling, state.rng)


class NoFilters(Chain):
    """Leaves top-k and top-p out of acceptance."""

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
        return verify(output.logits[0], tree, replace(state.sampling, top_k=0, top_p=1.0), state.rng)


class Typical(Chain):
    """Accepts what is probable enough, as Medusa's typical acceptance does, and calls itself lossless."""

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
        if state.sampling.greedy:
            return super().accept(state, tree, output)
        p, path = state.sampling.probs(output.logits[0]), [0]
        while len(path) < len(tree) and float(p[path[-1], tree.tokens[path[-1] + 1]]) > 0.3:
            path.append(path[-1] + 1)
        token = torch.multinomial(p[path[-1]], 1, generator=state.rng)
        return Verdict(path, [*tree.tokens[path[1:]].tolist(), int(token)], token)


class SharperDraws(Drawn):
    """Draws from a sharper distribution than draft_probs says."""

    def propose(self, state: State) -> DraftTree:
        sharp = self.q() ** 3
        drawn = torch.multinomial(sharp, LENGTH, replacement=True, generator=state.rng)
        return DraftTree.chain(state.root, drawn, self.q().expand(LENGTH + 1, -1))


EXACT: tuple[type[Decoder], ...] = (Chain, Drawn, Lookup)
PLANTED: tuple[type[Decoder], ...] = (
    BestOfTwo, BestOfFive, BestOfTwoDrawn, BestOfTwoLookups, BestOfFiveLookups, Raised, RaisedInTheMiddle,
    RaisedAtTheEnd, Lowered, AcceptsTwice, KeepsTheRefused, UnseenOfManyWords, LastUnseen, GreedyBelow, SharpBelow,
    NoTemperature, NoFilters, Typical, SharperDraws,
)  # fmt: skip

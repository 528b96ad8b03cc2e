"""The law of blocks: acceptance is exact at every depth of a draft.

Drafts of random weights are seldom accepted, so the acceptance rule is given logits under which drafted tokens are
likely, and is called many times for each verified draft, with another seed each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from specbench_ss.decoding.decoder import Decoder, State
from specbench_ss.decoding.loop import Limits
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.decoding.target import Output
from specbench_ss.decoding.tree import DraftTree
from specbench_ss.decoding.verify import Verdict
from specbench_ss.testing.exactness import ENOUGH, Decision, Tallies, siblings
from specbench_ss.testing.law import Case, Law, Subject, Untested
from specbench_ss.testing.laws_greedy import REPEATING, not_exact
from specbench_ss.testing.laws_sampling import confirmed, position, samplings
from specbench_ss.testing.watched_decoder import Watched

LENGTH = 16
LIKELY = 0.85  # probability of what was drafted
REPEATS, MORE = 40, 240  # verdicts on each draft; if drafts or tokens deep in them are seldom
MOST = 6000  # verdicts in all; at LIKELY a depth of 14 is then reached often enough
SAMPLED = 3  # times as many for sampled drafts, in which a rule that accepts too much shows less
LEAST_ANSWERS, MOST_ANSWERS = 3, 24


class Designed(Watched):
    """Accepts as the wrapped decoder does, but from logits that make the drafted tokens likely."""

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
        """Return the wrapped decoder's verdict on the changed logits."""
        output.logits = designed(output.logits[0], tree, state.sampling)[None]
        self.steps[-1].logits = output.logits[0].clone()
        return super().accept(state, tree, output)


class Repeated(Designed):
    """As `Designed`, and calls `accept` many times for each draft, tallying what it decides."""

    def __init__(self, inner: Decoder, tallies: Tallies, seed: int, repeats: int) -> None:
        super().__init__(inner)
        self.tallies, self.seed, self.repeats = tallies, seed, repeats
        self.verdicts, self.sampled = 0, False

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
        """Tally repeated verdicts, then return the one that counts."""
        logits = designed(output.logits[0], tree, state.sampling)
        children = tree.shape.children()
        probs = state.sampling.probs(logits)
        known = dict[int, Decision]()
        self.sampled = self.sampled or tree.draft_probs is not None
        for _ in range(self.repeats if len(tree) > 1 else REPEATS // 10):
            self.verdicts += 1
            rng = torch.Generator().manual_seed(self.seed * MOST * 10 + self.verdicts)
            drawn = redrawn(tree, rng)
            again, given = replace(state, ids=[*state.ids], rng=rng), replace(output, logits=logits.clone()[None])
            verdict = self.inner.accept(again, drawn, given)
            for depth, (node, token) in enumerate(zip(verdict.path, verdict.tokens, strict=True)):
                drafted = children[node]
                if node not in known:
                    known[node] = Decision(probs[node], favoured(tree, node, drafted, probs[node]))
                self.tallies.add(position(depth, drafted), known[node], token)
        return super().accept(state, tree, output)


def favoured(tree: DraftTree, node: int, children: list[int], p: Tensor) -> list[int]:
    """Return the tokens that a rule which accepts too much would give too often after this node."""
    if not children or tree.draft_probs is None:
        return [int(token) for token in tree.tokens[children].tolist()]
    return [int(token) for token in (tree.draft_probs[node] > p).nonzero()[:, 0].tolist()]


def redrawn(tree: DraftTree, rng: torch.Generator) -> DraftTree:
    """Return the tree with other sampled tokens, drawn from the same draft_probs; a deterministic tree as it is.

    Exactness of sampled drafts holds on average over what is drawn.
    """
    if tree.draft_probs is None or len(tree) == 1:
        return tree
    tokens = tree.tokens.clone()
    for node, children in enumerate(tree.shape.children()):
        if children:
            tokens[children] = torch.tensor(siblings(tree.draft_probs[node], len(children), rng))
    return replace(tree, tokens=tokens)


def designed(logits: Tensor, tree: DraftTree, sampling: Sampling) -> Tensor:
    """Return logits [n, V] of which the temperature makes a stated mixture; nodes without children keep theirs.

    LIKELY is the share of the drafted tokens, or of the distribution that they were drawn from. The rest goes to what
    is not drafted, by the model's own probabilities; for sampled drafts most of it goes to the token that is drafted
    least, so that one of seven is refused and not fewer.
    """
    wanted = torch.zeros_like(logits, dtype=torch.float32)
    parents = tree.parents()[1:]
    own = logits.float().softmax(-1)
    if tree.draft_probs is None:
        n = torch.arange(1, len(tree), dtype=torch.float32)
        wanted.index_put_((parents, tree.tokens[1:]), 1 / (1.0 + n), accumulate=True)
        rest = own.masked_fill(wanted > 0, 0)
    else:
        wanted[parents] = tree.draft_probs[parents].float()
        least = torch.zeros_like(own).scatter_(1, wanted.argmin(-1, keepdim=True), 1.0)
        rest = 0.8 * least + 0.2 * own
    drafted, undrafted = wanted.sum(-1, keepdim=True), rest.sum(-1, keepdim=True)
    tiny = torch.finfo(torch.float32).tiny
    rest = torch.where(undrafted > 0, rest / undrafted.clamp_min(tiny), own)
    mixed = LIKELY * wanted / drafted.clamp_min(tiny) + (1 - LIKELY) * rest
    temperature = sampling.temperature or 1.0
    return torch.where(drafted > 0, temperature * mixed.clamp_min(tiny).log(), logits.float()).to(logits.dtype)


def long(subject: Subject) -> Iterator[Case]:
    """Yield requests for answers of many blocks."""
    yield Case(REPEATING, LENGTH)
    yield from (replace(case, max_new_tokens=LENGTH) for case in samplings(subject))


def blocks(subject: Subject, case: Case) -> str:
    """At T>0, test what is accepted at every depth; at T=0, test the argmax."""
    if case.sampling.greedy:
        return greediness(subject, case)
    return confirmed(subject, lambda seed: of_verdicts(subject, case, seed))


def greediness(subject: Subject, case: Case) -> str:
    """Test that at T=0 every token is the most probable one in the logits that the rule was given."""
    trace = subject.answer(Designed(subject.decoder()), case.prompt, Limits(case.max_new_tokens), case.sampling)
    if subject.one.max_rows() != 1 and not any(seen.tree and len(seen.tree) > 1 for seen in trace.steps):
        raise Untested("nothing was drafted at T=0")
    for seen in trace.steps:
        assert seen.verdict is not None
        for node, token in zip(seen.verdict.path, seen.verdict.tokens, strict=True):
            row = seen.logits[node]
            if float(row[token]) < float(row.max()):
                return f"after {seen.ids}, node {node} of the draft: {token}, the logits have {int(row.argmax())} first"
    return ""


def enough(subject: Subject, tallies: Tallies) -> bool:
    """Return whether acceptance was tested; a method whose passes have one row has none."""
    return tallies.tested_acceptance or subject.one.max_rows() == 1


def of_verdicts(subject: Subject, case: Case, first: int) -> Tallies:
    """Tally verdicts on the drafts of some answers, until every position of a draft was decided often enough."""
    decoder, tallies, verdicts = subject.decoder(), Tallies(first), 0
    for answer in range(MOST_ANSWERS):
        watched = Repeated(decoder, tallies, first + answer, REPEATS if answer < LEAST_ANSWERS else MORE)
        sampling = replace(case.sampling, seed=first + answer)
        subject.answer(watched, case.prompt, Limits(case.max_new_tokens), sampling)
        verdicts += watched.verdicts
        wanted = ENOUGH * SAMPLED if watched.sampled else ENOUGH
        if verdicts >= MOST or (
            answer + 1 >= LEAST_ANSWERS and enough(subject, tallies) and not tallies.scarce(wanted)
        ):
            break
    if not enough(subject, tallies):
        raise Untested("too few decisions on drafted tokens to test acceptance")
    if scarce := tallies.scarce():
        others = f" and {len(scarce) - 1} more positions" if len(scarce) > 1 else ""
        subject.untested[f"too few tokens at {scarce[0]}{others}"] = None
    return tallies


LAWS = (
    Law("blocks", "acceptance is exact at every depth of a draft, and so is the token after it (at T=0 the argmax)",
        long, blocks, not_exact, on=("small", "long")),
)  # fmt: skip

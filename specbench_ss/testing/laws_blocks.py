"""The law of blocks: every token of a block follows the pass's distribution there, however deep in the draft.

Random drafts are seldom accepted, so the acceptance rule is shown a model that finds the drafted tokens likely. A block
ends where a token was not drafted. So each token, given those before it and that the block goes on, has that model's
distribution, and its place in the cumulative one is uniform (the probability integral transform; Rosenblatt 1952).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specbench_ss.decoding.decoder import State
from specbench_ss.decoding.loop import Limits
from specbench_ss.decoding.target import Output
from specbench_ss.decoding.tree import DraftTree
from specbench_ss.decoding.verify import Verdict
from specbench_ss.testing.law import Case, Law, Subject
from specbench_ss.testing.laws_greedy import REPEATING, not_exact
from specbench_ss.testing.laws_sampling import ENOUGH, Stages, samplings, staged
from specbench_ss.testing.watched_decoder import Seen, Watched

LENGTH = 16
STAGES: Stages = ((40, 0.04), (150, 0.003), (600, 1e-5))  # as in `sampled`
LIKELY = 0.85  # probability of what was drafted
BINS = 10


class Likely(Watched):
    """Accepts as the wrapped decoder does, but from logits that make the drafted tokens likely."""

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
        """Return the wrapped decoder's verdict on the changed logits."""
        output.logits = likely(output.logits[0], tree)[None]
        self.steps[-1].logits = output.logits[0].clone()
        return super().accept(state, tree, output)


def likely(logits: Tensor, tree: DraftTree) -> Tensor:
    """Return logits [n, V] of a mixture with the drafted tokens; nodes without children keep theirs.

    Drawn candidates are mixed with the distribution that they were drawn from, since the mixture must not depend on the
    draw.
    """
    n = torch.arange(len(tree))
    wanted = torch.zeros_like(logits, dtype=torch.float32)
    parents = tree.parents()[1:]
    if tree.draft_probs is None:
        wanted.index_put_((parents, tree.tokens[1:]), 1 / (1.0 + n[1:]), accumulate=True)
    else:
        wanted[parents] = tree.draft_probs[parents].float()
    drafted = wanted.sum(-1, keepdim=True)
    own = logits.float().softmax(-1)
    mixed = LIKELY * wanted / drafted.clamp_min(torch.finfo(torch.float32).tiny) + (1 - LIKELY) * own
    return torch.where(drafted > 0, mixed.log(), logits.float()).to(logits.dtype)


def long(subject: Subject) -> Iterator[Case]:
    """Yield requests for answers of many blocks."""
    yield Case(REPEATING, LENGTH)
    yield from (replace(case, max_new_tokens=LENGTH) for case in samplings(subject))


def blocks(subject: Subject, case: Case) -> str:
    """At T>0, test the places in the cumulative distribution by chi-square for every depth; at T=0, test the argmax."""
    if case.sampling.greedy:
        return greediness(subject, case)
    return staged(subject, STAGES, lambda seeds: depths(subject, case, seeds))


def greediness(subject: Subject, case: Case) -> str:
    """Test that at T=0 every token is the most probable one in the logits that the rule was shown."""
    trace = subject.answer(Likely(subject.decoder()), case.prompt, Limits(case.max_new_tokens), case.sampling)
    for seen in trace.steps:
        assert seen.verdict is not None
        for node, token in zip(seen.verdict.path, seen.verdict.tokens, strict=True):
            row = seen.logits[node]
            if float(row[token]) < float(row.max()):
                return f"after {seen.ids}, node {node} of the draft: {token}, the pass shows {int(row.argmax())} first"
    return ""


def depths(subject: Subject, case: Case, seeds: range) -> dict[str, float]:
    """Return p-values by depth, over one answer for each seed, each times the number of depths (Bonferroni)."""
    from scipy.stats import chisquare

    decoder, places = subject.decoder(), defaultdict[str, list[float]](list)
    for seed in seeds:
        watched, rng = Likely(decoder), np.random.default_rng(seed)
        trace = subject.answer(watched, case.prompt, Limits(case.max_new_tokens), replace(case.sampling, seed=seed))
        for seen in trace.steps:
            for where, place in of_block(case, seen, rng):
                if place is None:
                    return {f"{where}, after {seen.ids}: a token to which the pass gives no probability": 0.0}
                places[where].append(place)
    found, tested = {"nothing": 1.0}, {where: v for where, v in places.items() if len(v) >= ENOUGH * BINS}
    for where, values in tested.items():
        p = float(chisquare(np.histogram(values, BINS, (0, 1))[0]).pvalue)
        found[f"{where}: {len(values)} tokens are not distributed as the pass says"] = min(1.0, p * len(tested))
    return found


def of_block(case: Case, seen: Seen, rng: np.random.Generator) -> Iterator[tuple[str, float | None]]:
    """Yield where in the draft each token was decided and its place in the distribution there.

    The place is None for a token of probability 0.
    """
    assert seen.tree is not None and seen.verdict is not None
    path, children = seen.verdict.path, seen.tree.shape.children()
    probs = case.sampling.probs(seen.logits[path]).double()  # [k, V]
    tokens = torch.tensor(seen.verdict.tokens)[:, None]
    p = probs.gather(1, tokens)
    above = (probs * (probs > p)).sum(1, keepdim=True)  # the more probable first; of those alike the first
    above += (probs * ((probs == p) & (torch.arange(probs.shape[1]) < tokens))).sum(1, keepdim=True)
    for depth, (node, chance, before) in enumerate(zip(path, p[:, 0].tolist(), above[:, 0].tolist(), strict=True)):
        where = f"at depth {depth} of the draft" if children[node] else "after all of a draft"
        yield where, (before + rng.random() * chance if chance > 0 else None)


LAWS = (
    Law("blocks", "every token of a block is what the pass says (at T>0 in distribution), however deep it lies", long,
        blocks, not_exact, on=("small",)),
)  # fmt: skip

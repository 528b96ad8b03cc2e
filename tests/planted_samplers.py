"""A small model whose next token depends on the last one alone, a drafter for it, and biased acceptance rules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specbench_ss.decoding.decoder import Decoder, State
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.decoding.target import Output, Target
from specbench_ss.decoding.tree import DraftTree
from specbench_ss.decoding.verify import Verdict, verify, verify_greedy
from specbench_ss.testing.tiny import tiny_model

WORDS, LENGTH = 61, 4
Rule = Callable[[Tensor, DraftTree, Sampling, torch.Generator], Verdict]


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

    def max_rows(self) -> int:
        """Return the rows of the root and its chain."""
        return 1 + LENGTH

    def propose(self, state: State) -> DraftTree:
        """Return a chain of tokens drawn from the table."""
        rows, drafted, last = [], list[Tensor](), state.root
        for _ in range(LENGTH):
            rows.append(state.sampling.probs(self.table[last]))
            last = torch.multinomial(rows[-1], 1, generator=state.rng)[0]
            drafted.append(last)
        return DraftTree.chain(state.root, torch.cat(drafted), torch.cat([*rows, torch.zeros(1, WORDS)]))

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
        """Return what the rule accepts."""
        return self.rule(output.logits[0], tree, state.sampling, state.rng)


def everything(logits: Tensor, tree: DraftTree, sampling: Sampling, rng: torch.Generator) -> Verdict:
    """Accept the whole draft."""
    return _accepted(len(tree) - 1, sampling.probs(logits[-1]), tree, rng)


def best_of_two(logits: Tensor, tree: DraftTree, sampling: Sampling, rng: torch.Generator) -> Verdict:
    """Verify twice and keep the longer block."""
    return max((verify(logits, tree, sampling, rng) for _ in range(2)), key=lambda verdict: verdict.accepted)


def doubled(logits: Tensor, tree: DraftTree, sampling: Sampling, rng: torch.Generator) -> Verdict:
    """Accept with probability min(1, 2 p / q)."""
    assert tree.draft_probs is not None
    p, q, x = sampling.probs(logits), tree.draft_probs, tree.tokens[1:].tolist()
    for n, token in enumerate(x):
        if float(torch.rand((), generator=rng)) * float(q[n, token]) >= 2 * float(p[n, token]):
            left = (p[n] - q[n]).clamp_min(0)
            return _accepted(n, left if left.sum() > 0 else p[n], tree, rng)
    return _accepted(len(x), p[-1], tree, rng)


def greedy(logits: Tensor, tree: DraftTree, sampling: Sampling, rng: torch.Generator) -> Verdict:
    """Accept as at temperature 0."""
    return verify_greedy(logits, tree)


def unseen(logits: Tensor, tree: DraftTree, sampling: Sampling, rng: torch.Generator) -> Verdict:
    """Accept the first drafted token unseen."""
    assert tree.draft_probs is not None
    rest = DraftTree.chain(tree.tokens[1:2], tree.tokens[2:], tree.draft_probs[1:])
    found = verify(logits[1:], rest, sampling, rng)
    path = [0, *(node + 1 for node in found.path)]
    return Verdict(path, [int(tree.tokens[1]), *found.tokens], found.next_token, checked=True)


def warm_bonus(logits: Tensor, tree: DraftTree, sampling: Sampling, rng: torch.Generator) -> Verdict:
    """Draw the token after a wholly accepted draft at temperature 1, without filters."""
    found = verify(logits, tree, sampling, rng)
    whole = found.accepted == len(tree) - 1
    return _accepted(found.accepted, Sampling(1.0).probs(logits[-1]), tree, rng) if whole else found


RULES: dict[str, Rule] = {
    "everything": everything,
    "best_of_two": best_of_two,
    "doubled": doubled,
    "greedy": greedy,
    "unseen": unseen,
    "warm_bonus": warm_bonus,
}


def _accepted(n: int, p: Tensor, tree: DraftTree, rng: torch.Generator) -> Verdict:
    """Return the verdict that accepts n tokens of a chain and draws the next one from p."""
    token = torch.multinomial(p, 1, generator=rng)
    return Verdict([*range(n + 1)], [*tree.tokens[1 : n + 1].tolist(), int(token)], token, checked=True)

"""Candidates of `ss` that are drawn from the streams' distributions (eq. 9): the shape, the draws, the exact output."""

from __future__ import annotations

from collections import Counter

import torch
from scipy.stats import chisquare

from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.verify import verify_sampled
from specbench_ss.methods.ss.config import SSOptions
from specbench_ss.methods.ss.decode import TWO_LAYERS
from specbench_ss.methods.ss.tree import draft_tree, sampled_tree
from specbench_ss.models.tiny import tiny_target
from tests.methods.decoders import streaming
from tests.methods.exactness import p_value
from tests.tiny import thorough

ROOT = torch.tensor([4])


def rows(n: int, words: int, seed: int) -> torch.Tensor:
    return (2 * torch.randn(n, words, generator=torch.Generator().manual_seed(seed))).softmax(-1)


def test_nodes_are_those_of_the_best_tokens_and_siblings_have_the_first_draws() -> None:
    probs, rng = rows(3, 30, 1), torch.Generator().manual_seed(7)
    best = draft_tree(ROOT, probs.log(), 4, 12)
    for _ in range(20):
        tree = sampled_tree(ROOT, probs, 4, 12, rng)
        assert tree.topology is best.topology or tree.topology.parents == best.topology.parents
        assert tree.draft_probs is not None
        tokens = tree.tokens.tolist()
        for level in range(3):
            q = tree.draft_probs[[i for i, d in enumerate(tree.topology.depths) if d == level]]
            assert torch.equal(q, probs[level].expand_as(q))
            families = [
                [tokens[c] for c in cs]
                for i, cs in enumerate(tree.topology.children())
                if tree.topology.depths[i] == level
            ]
            longest = max(families, key=len)
            assert len(set(longest)) == len(longest)
            assert all(family == longest[: len(family)] for family in families), "one set of draws a level"


def test_where_few_tokens_are_possible_the_first_stands_for_those_missing() -> None:
    probs = torch.zeros(2, 6)
    probs[:, 3] = 1
    tree = sampled_tree(ROOT, probs, 3, 0, torch.Generator().manual_seed(0))
    assert set(tree.tokens[1:].tolist()) == {3}


@thorough
def test_what_comes_out_is_distributed_as_the_targets_own() -> None:
    words, n, rng = 5, 6000, torch.Generator().manual_seed(3)
    q, first, after = rows(2, words, 11), rows(1, words, 12)[0], rows(words, words, 13)
    seen: Counter[tuple[int, int]] = Counter()
    for _ in range(n):
        tree = sampled_tree(ROOT, q, 3, 6, rng)
        probs = torch.stack(
            [first if d == 0 else after[t] for t, d in zip(tree.tokens.tolist(), tree.topology.depths, strict=True)]
        )
        tokens = verify_sampled(probs, tree, rng).tokens
        if len(tokens) == 1:
            tokens.append(int(torch.multinomial(after[tokens[0]], 1, generator=rng)))
        seen[tokens[0], tokens[1]] += 1
    pairs = [(a, b) for a in range(words) for b in range(words)]
    expected = [float(first[a] * after[a, b]) * n for a, b in pairs]
    scale = n / sum(expected)
    assert chisquare([seen[pair] for pair in pairs], [e * scale for e in expected]).pvalue > 1e-4


@thorough
def test_a_choice_by_what_was_drawn_would_be_seen() -> None:
    """The test above can fail: siblings are kept by the target's probability of the token that was drawn."""
    words, n, rng = 5, 6000, torch.Generator().manual_seed(3)
    q, first = rows(1, words, 11), rows(1, words, 12)[0]
    seen: Counter[int] = Counter()
    for _ in range(n):
        tree = sampled_tree(ROOT, q, 2, 0, rng)
        kept = max((1, 2), key=lambda node: float(first[tree.tokens[node]]))
        seen[verify_sampled(first.expand(2, -1), tree.subtree([0, kept]), rng).tokens[0]] += 1
    expected = first.double() / first.double().sum() * n
    assert chisquare([seen[x] for x in range(words)], expected.tolist()).pvalue < 1e-4


@thorough
def test_answers_are_exact_and_the_tree_is_not_pruned() -> None:
    target = tiny_target("llama")
    decoder = streaming(target, TWO_LAYERS, SSOptions(k=3, n_draft=8, n_keep=2, sample="on"))
    assert decoder.max_tokens_per_step() == 9 * (1 + TWO_LAYERS.gamma)
    assert p_value(decoder, [3, 1, 4], SamplingParams(temperature=0.9), n=400) > 1e-4

"""Rejection sampling on trees is exact: enumerated over many draws, for deterministic and for sampled candidates."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from specbench_ss.tree import DraftTree
from specbench_ss.verify import verify_greedy, verify_sampled

P = torch.tensor([0.05, 0.5, 0.2, 0.25])


def agrees(counts: Counter[int], p: torch.Tensor) -> bool:
    n = sum(counts.values())
    return bool(chisquare([counts[i] for i in range(len(p))], (p * n).tolist()).pvalue > 1e-3)


@pytest.mark.parametrize("candidates", [[1], [0, 3], [2, 1, 0], [3, 3], [0, 1, 2, 3]])
def test_deterministic_candidates_leave_the_distribution_alone(candidates: list[int]) -> None:
    tree = DraftTree.of(torch.tensor([0, *candidates]), [-1] + [0] * len(candidates))
    probs = P.expand(len(tree), 4)
    counts = Counter(verify_sampled(probs, tree, torch.Generator().manual_seed(i)).tokens[0] for i in range(4000))
    assert agrees(counts, P)


def test_sampled_siblings_without_replacement_leave_the_distribution_alone() -> None:
    q = torch.tensor([0.4, 0.1, 0.1, 0.4])
    counts: Counter[int] = Counter()
    for i in range(4000):
        rng = torch.Generator().manual_seed(i)
        drawn = torch.multinomial(q, 2, replacement=False, generator=rng)
        tree = DraftTree(
            torch.cat((torch.tensor([0]), drawn)), DraftTree.of(torch.zeros(3), [-1, 0, 0]).shape, q.expand(3, 4)
        )
        counts[verify_sampled(P.expand(3, 4), tree, rng).tokens[0]] += 1
    assert agrees(counts, P)


def test_second_token_of_a_path_follows_its_own_distribution() -> None:
    rows = torch.tensor([[0.0, 1.0, 0.0], [0.2, 0.3, 0.5], [1.0, 0.0, 0.0]])
    tree = DraftTree.of(torch.tensor([0, 1, 2]), [-1, 0, 1])
    counts = Counter(verify_sampled(rows, tree, torch.Generator().manual_seed(i)).tokens[1] for i in range(4000))
    assert agrees(counts, rows[1])


def test_greedy_walks_the_parents_and_never_a_padded_path() -> None:
    # token 0 is what careless padding would match
    logits = torch.eye(4)[[1, 0, 3, 2, 0]]
    tree = DraftTree.of(torch.tensor([9, 2, 1, 3, 0]), [-1, 0, 0, 2, 3])
    verdict = verify_greedy(logits, tree)
    assert (verdict.path, verdict.tokens) == ([0, 2, 3], [1, 3, 2])
    assert verdict.next_token.tolist() == [2]


def test_a_certain_candidate_survives_rounding() -> None:
    tree = DraftTree.of(torch.tensor([0, 1]), [-1, 0])
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    assert all(verify_sampled(p, tree, torch.Generator().manual_seed(i)).accepted == 1 for i in range(200))

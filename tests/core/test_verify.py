"""Rejection sampling on trees is exact: enumerated over many draws, for deterministic and for sampled candidates."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from specbench_ss.decoding.sampling import Sampling
from specbench_ss.decoding.tree import DraftTree, shape_of
from specbench_ss.decoding.verify import Reached, verify_greedy, verify_sampled

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


@pytest.mark.parametrize("siblings", [1, 2, 3])
def test_sampled_siblings_without_replacement_leave_the_distribution_alone(siblings: int) -> None:
    q = torch.tensor([0.4, 0.1, 0.1, 0.4])
    counts: Counter[int] = Counter()
    for i in range(4000):
        rng = torch.Generator().manual_seed(i)
        drawn = torch.multinomial(q, siblings, replacement=False, generator=rng)
        shape = shape_of((-1, *[0] * siblings))
        tree = DraftTree(torch.cat((torch.tensor([0]), drawn)), shape, q.expand(siblings + 1, 4))
        counts[verify_sampled(P.expand(siblings + 1, 4), tree, rng).tokens[0]] += 1
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


@pytest.mark.parametrize("q", [None, torch.tensor([[0.0, 1.0], [0.5, 0.5]])])
def test_only_rounding_refuses_a_candidate_that_has_all_the_mass(
    q: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = 1 - 2**-24  # of what float32 draws from [0, 1), and what a softmax may leave of one
    monkeypatch.setattr(torch, "rand", lambda n, **_: torch.full((n,), largest))
    p = torch.tensor([[0.0, largest], [0.5, 0.5]])
    tree = DraftTree(torch.tensor([0, 1]), shape_of((-1, 0)), q)
    assert verify_sampled(p, tree, torch.Generator().manual_seed(0)).tokens[0] == 1


def test_no_candidate_of_probability_zero_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda n, **_: torch.full((n,), 0.999))
    p = torch.tensor([[0.6, 0.4 + 3e-8, 0.0, 3e-8]] * 5)  # sums to a little more than one
    for drafted in ([0, 1, 2], [0, 1, 3, 2]):  # refused one and all: what stays is the likeliest, not the last
        tree = DraftTree.of(torch.tensor([0, *drafted]), [-1] + [0] * len(drafted))
        assert verify_sampled(p[: len(tree)], tree, torch.Generator().manual_seed(0)).tokens[0] in (1, 3)
    p = torch.tensor([[1 - 2**-24, 5e-8, 0.0, 0.0]] * 4)
    monkeypatch.setattr(torch, "rand", lambda n, **_: torch.full((n,), 1 - 2**-24))
    tree = DraftTree.of(torch.tensor([0, 0, 1, 2]), [-1, 0, 0, 0])
    assert verify_sampled(p, tree, torch.Generator().manual_seed(0)).tokens[0] == 0


@pytest.mark.parametrize("sampling", [Sampling(0.8), Sampling(1.3, top_p=0.7), Sampling(1.0, top_k=3)])
@pytest.mark.parametrize("drawn", [False, True])
def test_nodes_looked_at_when_they_are_reached_give_the_same_verdict(sampling: Sampling, drawn: bool) -> None:
    """As on a CPU; elsewhere all nodes are filtered at once."""
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(7, 11, generator=rng).softmax(-1) if drawn else None
    for seed in range(60):
        logits, tokens = 2 * torch.randn(7, 11, generator=rng), torch.randint(0, 11, (7,), generator=rng)
        tree = DraftTree(tokens, shape_of((-1, 0, 0, 1, 1, 2, 3)), q)
        all_at_once, reached = (
            verify_sampled(probs, tree, torch.Generator().manual_seed(seed))
            for probs in (sampling.probs(logits), Reached(logits, sampling))
        )
        assert (all_at_once.path, all_at_once.tokens) == (reached.path, reached.tokens)

"""Rejection sampling on trees is exact: enumerated over many draws, for deterministic and for sampled candidates."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch.utils._python_dispatch import TorchDispatchMode

from specbench_ss.engine.sampling import SamplingParams, sample_categorical
from specbench_ss.engine.tree import DraftTree, topology_of
from specbench_ss.engine.verify import LazyTargetProbs, verify_greedy, verify_sampled
from tests.tiny import few, thorough

P = torch.tensor([0.05, 0.5, 0.2, 0.25])


def agrees(counts: Counter[int], p: torch.Tensor) -> bool:
    n = sum(counts.values())
    return bool(chisquare([counts[i] for i in range(len(p))], (p * n).tolist()).pvalue > 1e-3)


@few(2)
@pytest.mark.parametrize("candidates", [[1], [0, 3], [2, 1, 0], [3, 3], [0, 1, 2, 3]])
def test_deterministic_candidates_leave_the_distribution_alone(candidates: list[int]) -> None:
    tree = DraftTree.from_parents(torch.tensor([0, *candidates]), [-1] + [0] * len(candidates))
    probs = P.expand(len(tree), 4)
    counts = Counter(verify_sampled(probs, tree, torch.Generator().manual_seed(i)).tokens[0] for i in range(4000))
    assert agrees(counts, P)


@few(1)
@pytest.mark.parametrize("siblings", [1, 2, 3])
def test_sampled_siblings_without_replacement_leave_the_distribution_alone(siblings: int) -> None:
    q = torch.tensor([0.4, 0.1, 0.1, 0.4])
    counts: Counter[int] = Counter()
    for i in range(4000):
        rng = torch.Generator().manual_seed(i)
        drawn = torch.multinomial(q, siblings, replacement=False, generator=rng)
        shape = topology_of((-1, *[0] * siblings))
        tree = DraftTree(torch.cat((torch.tensor([0]), drawn)), shape, q.expand(siblings + 1, 4))
        counts[verify_sampled(P.expand(siblings + 1, 4), tree, rng).tokens[0]] += 1
    assert agrees(counts, P)


@thorough
def test_second_token_of_a_path_follows_its_own_distribution() -> None:
    rows = torch.tensor([[0.0, 1.0, 0.0], [0.2, 0.3, 0.5], [1.0, 0.0, 0.0]])
    tree = DraftTree.from_parents(torch.tensor([0, 1, 2]), [-1, 0, 1])
    counts = Counter(verify_sampled(rows, tree, torch.Generator().manual_seed(i)).tokens[1] for i in range(4000))
    assert agrees(counts, rows[1])


def test_greedy_walks_the_parents_and_never_a_padded_path() -> None:
    # token 0 is what careless padding would match
    logits = torch.eye(4)[[1, 0, 3, 2, 0]]
    tree = DraftTree.from_parents(torch.tensor([9, 2, 1, 3, 0]), [-1, 0, 0, 2, 3])
    verdict = verify_greedy(logits, tree)
    assert (verdict.path, verdict.tokens) == ([0, 2, 3], [1, 3, 2])
    assert verdict.next_token.tolist() == [2]


def always(number: float) -> Any:
    """Return a stand-in for torch.rand that draws this number."""
    return lambda size, **_: torch.full((size,) if isinstance(size, int) else size, number)


@pytest.mark.parametrize("q", [None, torch.tensor([[0.0, 1.0], [0.5, 0.5]])])
def test_only_rounding_refuses_a_candidate_that_has_all_the_mass(
    q: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = 1 - 2**-24  # of what float32 draws from [0, 1), and what a softmax may leave of one
    monkeypatch.setattr(torch, "rand", always(largest))
    p = torch.tensor([[0.0, largest], [0.5, 0.5]])
    tree = DraftTree(torch.tensor([0, 1]), topology_of((-1, 0)), q)
    assert verify_sampled(p, tree, torch.Generator().manual_seed(0)).tokens[0] == 1


def test_no_candidate_of_probability_zero_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", always(0.999))
    p = torch.tensor([[0.6, 0.4 + 3e-8, 0.0, 3e-8]] * 5)  # sums to a little more than one
    for drafted in ([0, 1, 2], [0, 1, 3, 2]):  # refused one and all: what stays is the likeliest, not the last
        tree = DraftTree.from_parents(torch.tensor([0, *drafted]), [-1] + [0] * len(drafted))
        assert verify_sampled(p[: len(tree)], tree, torch.Generator().manual_seed(0)).tokens[0] in (1, 3)
    p = torch.tensor([[1 - 2**-24, 5e-8, 0.0, 0.0]] * 4)
    monkeypatch.setattr(torch, "rand", always(1 - 2**-24))
    tree = DraftTree.from_parents(torch.tensor([0, 0, 1, 2]), [-1, 0, 0, 0])
    assert verify_sampled(p, tree, torch.Generator().manual_seed(0)).tokens[0] == 0


@pytest.mark.parametrize(
    "sampling", [SamplingParams(0.8), SamplingParams(1.3, top_p=0.7), SamplingParams(1.0, top_k=3)]
)
@pytest.mark.parametrize("drawn", [False, True])
def test_nodes_looked_at_when_they_are_reached_give_the_same_path(sampling: SamplingParams, drawn: bool) -> None:
    """As on a CPU; elsewhere all nodes are filtered at once, and the next token is drawn before the walk."""
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(7, 11, generator=rng).softmax(-1) if drawn else None
    for seed in range(60):
        logits, tokens = 2 * torch.randn(7, 11, generator=rng), torch.randint(0, 11, (7,), generator=rng)
        tree = DraftTree(tokens, topology_of((-1, 0, 0, 1, 1, 2, 3)), q)
        all_at_once, reached = (
            verify_sampled(probs, tree, torch.Generator().manual_seed(seed))
            for probs in (sampling.probs(logits), LazyTargetProbs(logits, sampling))
        )
        assert (all_at_once.path, all_at_once.tokens[:-1]) == (reached.path, reached.tokens[:-1])
        assert all_at_once.next_token.tolist() == all_at_once.tokens[-1:]


class Looks(TorchDispatchMode):
    """Counts transfers to the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("_local_scalar_dense", "multinomial")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("candidates", "most"), [([], 0), ([0], 0), ([2], 1)])
def test_the_next_token_comes_with_the_walk_unless_it_was_refused(candidates: list[int], most: int) -> None:
    """The first transfer is a list of numbers, which is not counted here; token 0 is all that p allows."""
    p = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0]])[: 1 + len(candidates)]
    tree = DraftTree.from_parents(torch.tensor([3, *candidates]), [-1] + [0] * len(candidates))
    with Looks() as looks:
        verdict = verify_sampled(p, tree, torch.Generator().manual_seed(0))
    assert looks.count <= most and verdict.tokens[0] == 0


# -- draws -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 7.5])
def test_tokens_are_drawn_from_the_distribution(scale: float) -> None:
    """Rows need not be normalised; what has no probability never comes, be it the first, the last or most of a row."""
    rows = torch.tensor([[0.0, 0.5, 0.3, 0.15, 0.05, 0.0], [0.0, 0.0, 0.0, 1e-3, 0.999, 0.0], [1 / 6] * 6])
    rng = torch.Generator().manual_seed(11)
    drawn = sample_categorical(scale * rows.repeat(40_000, 1, 1), rng)
    assert drawn.shape == (40_000, 3, 1)
    for i, row in enumerate(rows):
        counts, there, expected = drawn[:, i, 0].bincount(minlength=6), row > 0, row.double() / row.double().sum()
        assert not counts[~there].any()
        assert chisquare(counts[there].tolist(), (expected[there] * 40_000).tolist()).pvalue > 1e-3


@thorough
def test_rare_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_should() -> None:
    """Half of the mass lies on one token, half on 50,000 others of 1e-5 each."""
    p = torch.cat((torch.tensor([0.5]), torch.full((50_000,), 1e-5)))
    rng = torch.Generator().manual_seed(3)
    drawn = torch.cat([sample_categorical(p.expand(200, -1), rng) for _ in range(20)])
    rare = int((drawn > 0).sum())
    assert chisquare([rare, 4000 - rare], [2000, 2000]).pvalue > 1e-3
    halves = int((drawn > 25_000).sum())
    assert chisquare([halves, rare - halves], [rare / 2, rare / 2]).pvalue > 1e-3


def test_a_row_with_nan_gives_some_token_of_the_vocabulary() -> None:
    """Verification reports it; on CUDA a number beyond the vocabulary would end the process."""
    p = torch.full((2, 5), torch.nan)
    drawn = sample_categorical(p, torch.Generator().manual_seed(0))
    assert drawn.min() >= 0 and drawn.max() < 5

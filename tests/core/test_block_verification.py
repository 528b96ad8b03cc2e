"""Block verification (Sun et al., arXiv:2403.10444): exact, and never fewer accepted tokens than token by token."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare

from specbench_ss.engine.checks import NotFinite
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.tree import DraftTree, topology_of
from specbench_ss.engine.verify import block_acceptance, verifies_as_block, verify, verify_block
from tests.tiny import few

V = 3
BLOCK = SamplingParams(1.0, verification="block")
Model = dict[tuple[int, ...], torch.Tensor]  # distribution of the next token by the tokens before it


def random_model(depth: int, seed: int, sharp: float = 1.0) -> Model:
    rng = torch.Generator().manual_seed(seed)
    return {
        prefix: (sharp * torch.randn(V, generator=rng, dtype=torch.float64)).softmax(-1)
        for length in range(depth + 1)
        for prefix in itertools.product(range(V), repeat=length)
    }


def drafts(p: Model, q: Model, g: int) -> Iterator[tuple[tuple[int, ...], float, torch.Tensor, torch.Tensor]]:
    """Yield every draft with its probability, the rows of p and those of q."""
    for draft in itertools.product(range(V), repeat=g):
        rows = [q[draft[:i]] for i in range(g)]
        chance = float(torch.stack([row[x] for row, x in zip(rows, draft, strict=True)]).prod())
        yield draft, chance, torch.stack([p[draft[:i]] for i in range(g + 1)]), torch.stack(rows)


def lengths(h: torch.Tensor) -> list[float]:
    """Return the probability that so many tokens are accepted: the largest i whose trial succeeds."""
    tail = [float((1 - h[i:]).prod()) for i in range(len(h) + 1)]
    return [tail[0], *(float(h[i]) * tail[i + 1] for i in range(len(h)))]


@pytest.mark.parametrize("g", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_joint_distribution_of_the_output_is_the_target_s(g: int, seed: int) -> None:
    """Enumerated over all drafts and accepted lengths; tokens after the step are the target's own."""
    p, q = random_model(g + 1, seed), random_model(g, 100 + seed)
    joint = torch.zeros((V,) * (g + 1), dtype=torch.float64)
    for draft, chance, p_rows, q_rows in drafts(p, q, g):
        h, rest = block_acceptance(p_rows, q_rows, torch.tensor(draft))
        for t, share in enumerate(lengths(h)):
            if share < 1e-15:
                continue
            for token, weight in enumerate((rest[t] / rest[t].sum()).tolist()):
                for after in itertools.product(range(V), repeat=g - t):
                    output = (*draft[:t], token, *after)
                    own = [float(p[output[:i]][output[i]]) for i in range(t + 1, g + 1)]
                    joint[output] += chance * share * weight * math.prod(own)
    for output in itertools.product(range(V), repeat=g + 1):
        wanted = float(torch.stack([p[output[:i]][output[i]] for i in range(g + 1)]).prod())
        assert float(joint[output]) == pytest.approx(wanted, abs=1e-12)


def accepted_tokens(p: Model, q: Model, g: int) -> tuple[float, float]:
    """Return the expected number of accepted tokens, token by token and as a block."""
    by_token = by_block = 0.0
    for draft, chance, p_rows, q_rows in drafts(p, q, g):
        h, _ = block_acceptance(p_rows, q_rows, torch.tensor(draft))
        ratios = [min(1.0, float(p_rows[i][x] / q_rows[i][x])) for i, x in enumerate(draft)]
        by_token += chance * sum(math.prod(ratios[: i + 1]) for i in range(g))
        by_block += chance * sum(t * share for t, share in enumerate(lengths(h)))
    return by_token, by_block


@pytest.mark.parametrize("g", [1, 2, 4])
def test_a_block_accepts_no_fewer_tokens(g: int) -> None:
    gains = []
    for seed in range(6):
        by_token, by_block = accepted_tokens(random_model(g, seed, 2.0), random_model(g, 50 + seed, 2.0), g)
        assert by_block >= by_token - 1e-9
        gains.append(by_block - by_token)
    assert max(gains) < 1e-9 if g == 1 else max(gains) > 0.01


def test_the_example_of_the_paper() -> None:
    """Two words, p(A) = 1/3, q(A) = 2/3 at every position, two drafted tokens: 10/9 and 11/9 are accepted."""
    global V
    before, V = V, 2
    try:
        models = [
            {
                prefix: torch.tensor([a, 1 - a]).double()
                for n in range(3)
                for prefix in itertools.product((0, 1), repeat=n)
            }
            for a in (1 / 3, 2 / 3)
        ]
        assert accepted_tokens(models[0], models[1], 2) == (pytest.approx(10 / 9), pytest.approx(11 / 9))
    finally:
        V = before


@few(1)
@pytest.mark.parametrize("seed", [0, 1])
def test_sampled_outputs_follow_the_target(seed: int) -> None:
    """`verify` itself, with drafts from q: the first two tokens over many draws."""
    p, q = random_model(4, seed), random_model(3, 10 + seed)
    counts = Counter[tuple[int, int]]()
    n, chooser = 6000, random.Random(seed)
    for i in range(n):
        rng, draft = torch.Generator().manual_seed(i + 10_000 * seed), list[int]()
        for _ in range(3):
            draft += random.Random(chooser.random()).choices(range(V), q[tuple(draft)].tolist())
        rows = torch.stack([q[tuple(draft[:k])] for k in range(4)]).float()
        tree = DraftTree.chain(torch.tensor([0]), torch.tensor(draft), rows)
        logits = torch.stack([p[tuple(draft[:k])] for k in range(4)]).log().float()
        verdict = verify(logits, tree, BLOCK, rng)
        assert verdict.path == list(range(len(verdict.tokens))) and int(verdict.next_token) == verdict.tokens[-1]
        output = [*verdict.tokens, *chooser.choices(range(V), p[tuple(verdict.tokens)].tolist())][:2]
        counts[output[0], output[1]] += 1
    pairs = list(itertools.product(range(V), repeat=2))
    wanted = [n * float(p[()][a] * p[a,][b]) for a, b in pairs]
    assert chisquare([counts[pair] for pair in pairs], wanted).pvalue > 1e-3


def test_other_drafts_are_verified_token_by_token() -> None:
    q = torch.full((3, V), 1 / V)
    chain = DraftTree.chain(torch.tensor([0]), torch.tensor([1, 2]), q)
    assert verifies_as_block(chain, BLOCK)
    assert not verifies_as_block(chain, replace(BLOCK, temperature=0.0))
    assert not verifies_as_block(chain, SamplingParams(1.0))
    assert not verifies_as_block(DraftTree.chain(torch.tensor([0]), torch.tensor([1, 2])), BLOCK)
    assert not verifies_as_block(DraftTree(torch.tensor([0, 1, 2]), topology_of((-1, 0, 0)), q), BLOCK)


def test_a_drafter_equal_to_the_target_is_always_accepted() -> None:
    p = torch.tensor([0.2, 0.5, 0.3]).expand(4, V)
    tree = DraftTree.chain(torch.tensor([0]), torch.tensor([1, 0, 2]), p)
    for seed in range(50):
        assert verify_block(p, tree, torch.Generator().manual_seed(seed)).accepted == 3


def test_a_token_that_the_target_excludes_ends_the_block() -> None:
    p, q = torch.tensor([[0.0, 0.4, 0.6]]).expand(3, V), torch.full((3, V), 1 / V)
    tree = DraftTree.chain(torch.tensor([0]), torch.tensor([0, 1]), q)
    for seed in range(50):
        verdict = verify_block(p, tree, torch.Generator().manual_seed(seed))
        assert verdict.accepted == 0 and verdict.tokens[-1] != 0


@pytest.mark.parametrize(("where", "message"), [("p", "logits"), ("q", "draft")])
def test_numbers_that_are_not_finite_are_named(where: str, message: str) -> None:
    rows = {name: torch.full((3, V), 1 / V) for name in "pq"}
    rows[where][1] = float("nan")
    tree = DraftTree.chain(torch.tensor([0]), torch.tensor([1, 2]), rows["q"])
    with pytest.raises(NotFinite, match=message):
        verify_block(rows["p"], tree, torch.Generator())


def test_the_shape_of_a_draft_is_read_for_blocks_alone() -> None:
    """It may be on the device, where a look at it waits."""

    class Shape:
        def __getattr__(self, name: str) -> None:
            raise AssertionError(name)

    for probs, sampling in ((torch.zeros(3, V), SamplingParams(1.0)), (None, BLOCK)):
        tree = SimpleNamespace(draft_probs=probs, topology=Shape())
        assert not verifies_as_block(tree, sampling)  # type: ignore[arg-type]


def test_a_token_that_the_draft_excludes_is_an_error() -> None:
    q = torch.tensor([[0.0, 0.4, 0.6]]).expand(3, V)
    tree = DraftTree.chain(torch.tensor([0]), torch.tensor([0, 1]), q)
    with pytest.raises(NotFinite, match="draft_probs"):
        verify_block(torch.full((3, V), 1 / V), tree, torch.Generator())

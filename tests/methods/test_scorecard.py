"""Acceptance rules that keep the target's distribution: one step on a small vocabulary, enumerated exactly.

A rule draws numbers from 0 to 1 and compares them with probabilities. Where all of these are multiples of 1/K, the
middles of K equal cells stand for all that can be drawn; what is drawn from a distribution is that distribution.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from specbench_ss.engine import verify as verifying
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.tree import DraftTree, topology_of
from specbench_ss.engine.verify import VerifyResult, verify, verify_sampled
from specbench_ss.methods._shared import lossy_acceptance
from specbench_ss.methods._shared.lossy_acceptance import accept_per_path, accept_resampled, accept_typical
from tests.tiny import thorough

ROOT = 3
T1 = SamplingParams(1.0)
# the target: what follows a token. All the numbers, and what is left of them after a refusal, fit cells of 1/24
P = torch.tensor([[0.25, 0.5, 0.25, 0.0], [0.5, 0.0, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25], [0.5, 0.25, 0.0, 0.25]])
K = 24
Joint = dict[tuple[int, int], float]
Rule = Callable[[DraftTree], VerifyResult]


def logits_of(tree: DraftTree) -> Tensor:
    """The target's, of all nodes: its next token depends on the last one alone."""
    return P[tree.tokens].log()


def true_joint() -> Joint:
    """Of the next two tokens."""
    return {(x, y): float(P[ROOT, x] * P[x, y]) for x in range(4) for y in range(4) if P[ROOT, x] * P[x, y]}


def one_step(rule: Rule, tree: DraftTree, cells: int = K) -> Joint:
    """Exactly: the next two tokens when one step of the rule is followed by autoregressive decoding."""
    joint: Joint = defaultdict(float)
    sizes: list[int] = []
    following: list[Tensor] = []
    ahead: list[Tensor] = []  # rows of all nodes, from which tokens are drawn before the walk
    given: list[float] = []

    def rand(*shape: object, **_: object) -> Tensor:
        """The root's draw, where there is one, is never read: it is not enumerated."""
        wanted = tuple(shape[0]) if isinstance(shape[0], (tuple, torch.Size)) else shape
        count = int(torch.Size(wanted).numel())  # type: ignore[arg-type]
        spare = int(len(wanted) == 1)
        sizes[:] = [count - spare]
        drawn = [0.0] * spare + (given or [0.5] * (count - spare))
        return torch.tensor(drawn).view(wanted)  # type: ignore[arg-type]

    def sample(p: Tensor, rng: torch.Generator) -> Tensor:
        (ahead if p.ndim > 1 else following).append(p / p.sum(-1, keepdim=True))
        return torch.zeros(*p.shape[:-1], 1, dtype=torch.long)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", rand)
        for module in (verifying, lossy_acceptance):
            patch.setattr(module, "sample_categorical", sample)
        rule(tree)
        draws = list(product([(i + 0.5) / cells for i in range(cells)], repeat=sizes[0])) if sizes else [()]
        for chosen in draws:
            given[:] = list(chosen)
            following.clear()
            ahead.clear()
            verdict = rule(tree)
            accepted = verdict.tokens[:-1]
            last = torch.eye(4)[verdict.tokens[-1]]
            if following or ahead:
                last = following[0] if following else ahead[0][verdict.path[-1]]
            for tokens, mass in _continued(accepted, last):
                joint[tokens] += mass / len(draws)
    return joint


def _continued(accepted: Sequence[int], last: Tensor) -> Iterator[tuple[tuple[int, int], float]]:
    """Two tokens: those accepted, the one drawn from `last`, and what the target states after them."""
    if len(accepted) >= 2:
        yield (accepted[0], accepted[1]), 1.0
        return
    for x in range(4):
        if accepted:
            yield (accepted[0], x), float(last[x])
        else:
            for y in range(4):
                yield (x, y), float(last[x] * P[x, y])


def distance(found: Joint, expected: Joint | None = None) -> float:
    """Total variation."""
    expected = true_joint() if expected is None else expected
    return sum(abs(found.get(t, 0.0) - expected.get(t, 0.0)) for t in {*found, *expected}) / 2


def chain(*tokens: int) -> DraftTree:
    return DraftTree.chain(torch.tensor([ROOT]), torch.tensor(tokens))


BRANCHES = DraftTree.from_parents(torch.tensor([ROOT, 0, 1, 2]), (-1, 0, 1, 1))  # one node under two paths
SIBLINGS = DraftTree.from_parents(torch.tensor([ROOT, 1, 0]), (-1, 0, 0))


def exact(tree: DraftTree) -> VerifyResult:
    return verify(logits_of(tree), tree, T1, torch.Generator())


def rows(tree: DraftTree) -> VerifyResult:
    return accept_per_path(logits_of(tree), tree, T1, torch.Generator())


def typical(tree: DraftTree) -> VerifyResult:
    return accept_typical(logits_of(tree), tree, T1)


@thorough
def test_deterministic_candidates_are_exact() -> None:
    """q = 1 at the candidate: accept with p(x), else leave x out."""
    for tree in (chain(0), chain(1, 0), chain(2, 1), SIBLINGS):
        assert distance(one_step(exact, tree)) < 1e-6
    assert distance(one_step(exact, BRANCHES, cells=12)) < 1e-6


def test_drawing_a_token_and_comparing_is_exact_on_one_chain() -> None:
    """Keep a drafted token if it equals the sampled one, as transformers does without draft probabilities."""

    def match(tree: DraftTree, at_nodes: Sequence[int]) -> list[int]:
        """The tokens of a step, where a token has been drawn at every node."""
        drafted, node, tokens = tree.tokens.tolist(), 0, [at_nodes[0]]
        while node + 1 < len(drafted) and drafted[node + 1] == tokens[-1]:
            node += 1
            tokens.append(at_nodes[node])
        return tokens

    for tree in (chain(0), chain(1, 0), chain(0, 1)):
        found: Joint = defaultdict(float)
        for at_nodes in product(range(4), repeat=len(tree)):
            mass = float(torch.stack([P[t, x] for t, x in zip(tree.tokens.tolist(), at_nodes, strict=True)]).prod())
            *accepted, last = match(tree, at_nodes)
            for tokens, p in _continued(accepted, torch.eye(4)[last]):
                found[tokens] += mass * p
        assert distance(found) < 1e-6


def drawn(q: Tensor, count: int, without_replacement: bool = True) -> Iterator[tuple[DraftTree, float]]:
    """Trees of `count` siblings drawn from q, with their probabilities."""
    for tokens in product(range(4), repeat=count):
        left, mass = q.clone(), 1.0
        for x in tokens:
            if left[x] == 0:
                mass = 0.0
                break
            mass *= float(left[x] / left.sum())
            if without_replacement:
                left[x] = 0
        if mass:
            probs = torch.zeros(1 + count, 4)
            probs[0] = q
            yield DraftTree(torch.tensor([ROOT, *tokens]), topology_of((-1, *[0] * count)), probs), mass


def mixture(rule: Rule, trees: Iterator[tuple[DraftTree, float]]) -> Joint:
    found: Joint = defaultdict(float)
    for tree, mass in trees:
        for tokens, p in one_step(rule, tree).items():
            found[tokens] += mass * p
    return found


Q = torch.tensor([0.25, 0.5, 0.25, 0.0])


@thorough
def test_leviathan_and_drawing_without_replacement_are_exact() -> None:
    """min(1, p/q) and (p - q)+; EAGLE-1's siblings, each drawn from what the ones before it left of q."""

    def rule(tree: DraftTree) -> VerifyResult:
        return verify_sampled(T1.probs(logits_of(tree)), tree, torch.Generator())

    assert distance(mixture(rule, drawn(Q, 1))) < 1e-6
    assert distance(mixture(rule, drawn(Q, 2))) < 1e-6
    assert (
        distance(mixture(rule, drawn(Q, 2, without_replacement=False))) > 0.01
    )  # reported otherwise than they were drawn


def test_rows_are_biased_where_they_share_a_node() -> None:
    """A node in n rows is accepted with 1 - (1 - p)^n; a chain alone is accepted as it should, its successor is not."""
    found = one_step(rows, BRANCHES, cells=4)
    first = sum(p for (x, _), p in found.items() if x == 0)
    p = float(P[ROOT, 0])
    accepted = 1 - (1 - p) ** 2
    assert abs(first - (accepted + (1 - accepted) * p)) < 1e-6  # after a refusal it is drawn from p again
    assert distance(found) > 0.2


def test_typical_acceptance_is_biased() -> None:
    """It draws nothing: what comes is one certain continuation."""
    found = one_step(typical, chain(1))
    assert {t[0] for t, p in found.items() if p} == {1}  # p(1) = 1/4 is above min(0.09, 0.3 exp(-H))
    assert distance(found) > 0.5
    strict = accept_typical(logits_of(chain(1)), chain(1), T1, epsilon=0.3, alpha=1.0)
    assert strict.tokens == [0]  # exp(-H) = exp(-1.04) = 0.35, so the threshold is 0.3: the argmax instead
    assert accept_typical(logits_of(chain(1)), chain(1), T1, epsilon=0.3, alpha=0.5).tokens[0] == 1
    # the entropy is the parent's: 0.8 exp(-1.04) = 0.28 refuses p(2|0) = 1/4, where node 2's own 0.2 would not
    assert accept_typical(logits_of(chain(0, 2)), chain(0, 2), T1, epsilon=1.0, alpha=0.8).path == [0, 1]


def test_drawing_again_from_p_is_biased() -> None:
    """SPACE: the candidate is the drafter's best, with probability 1/2, and stands where p has 1/4."""

    def rule(tree: DraftTree) -> VerifyResult:
        return accept_resampled(logits_of(tree), tree, torch.tensor([1.0, 0.5]), T1, torch.Generator())

    found = one_step(rule, chain(1))
    first = sum(p for (x, _), p in found.items() if x == 1)
    assert abs(first - (0.5 + 0.5 * 0.25)) < 1e-6  # accepted with 1/2, and drawn again with 1/4
    assert distance(found) == pytest.approx(0.375, abs=1e-6)


def test_without_a_temperature_all_rules_are_greedy() -> None:
    greedy = SamplingParams()
    for tree in (BRANCHES, SIBLINGS, chain(0, 1), DraftTree.root_only(torch.tensor([ROOT]))):
        logits, rng = logits_of(tree), torch.Generator()
        expected = verify(logits, tree, greedy, rng)
        q = torch.ones(len(tree))
        for found in (
            accept_typical(logits, tree, greedy),
            accept_per_path(logits, tree, greedy, rng),
            accept_resampled(logits, tree, q, greedy, rng),
        ):
            assert (found.path, found.tokens) == (expected.path, expected.tokens)


def test_the_longest_path_wins_and_of_equals_the_likeliest() -> None:
    """Of typical acceptance, on a tree with a long unlikely path and two short ones."""
    tree = DraftTree.from_parents(torch.tensor([ROOT, 1, 0, 2, 0]), (-1, 0, 0, 1, 2))  # 1-2 and 0-0
    verdict = accept_typical(logits_of(tree), tree, T1, epsilon=0.2, alpha=1.0)
    # p(1) p(2|1) = 1/16; p(0) p(0|0) = 1/8: both are accepted whole
    assert verdict.path == [0, 2, 4] and verdict.tokens == [0, 0, 1]
    only = accept_typical(logits_of(tree)[:4], DraftTree.from_parents(tree.tokens[:4], (-1, 0, 0, 1)), T1, 0.2, 1.0)
    assert only.path == [0, 1, 3]

"""Token Recycling: a static draft tree filled from the target's last top-k of each token. Lossless.

The matrix of successors is a tensor on the device; a level of the tree is one gather. docs/methods/recycling.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import MOST_NODES, DraftTree, indices
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.heads import Choice, StaticTree, by_likelihood, from_branches, read_tree, tree_of
from specbench_ss.options import Bounded, for_device, option

# the 80 nodes published (template 2.2.2), as branches: prefix -> ranks
PUBLISHED: tuple[Choice, ...] = from_branches({
    (): 8,
    (0,): 8, (1,): 4, (2,): 3, (3,): 2, (4,): 1, (5,): 1, (6,): 1, (7,): 1,
    (0, 0): 8, (0, 1): 3, (0, 2): 2, (0, 3): 1, (0, 4): 1, (0, 5): 1, (0, 6): 1, (0, 7): 1,
    (1, 0): 2, (1, 1): 1, (2, 0): 1, (3, 0): 1, (4, 0): 1, (5, 0): 1,
    (0, 0, 0): 5, (0, 0, 1): 2, (0, 0, 2): 1, (0, 0, 3): 1, (0, 0, 4): 1,
    (0, 1, 0): 1, (0, 2, 0): 1, (1, 0, 0): 1, (2, 0, 0): 1, (3, 0, 0): 1,
    (0, 0, 0, 0): 3, (0, 0, 0, 1): 1, (0, 0, 0, 2): 1, (0, 0, 1, 0): 1, (0, 1, 0, 0): 1, (1, 0, 0, 0): 1,
    (0, 0, 0, 0, 0): 2, (0, 0, 0, 1, 0): 1,
})  # fmt: skip
WIDTH = 8
FILL, UNSEEN = 0, -1  # without a stored successor: the token that the published code drafts; no token


@dataclass(frozen=True, slots=True)
class RecyclingOptions(Bounded):
    """Options of `recycling`; defaults as published, except that prompts share no successors, and for a CPU."""

    owner: ClassVar[str] = "recycling"
    k: Annotated[int, Ge(1), Le(MOST_NODES)] = option(WIDTH, "Number of successors stored for each token.")
    nodes: Annotated[int, Ge(1), Le(len(PUBLISHED))] | None = option(
        len(PUBLISHED), "Number of drafted nodes: the best ones of the published tree.", cpu=3
    )
    tree: str = option(
        "",
        "JSON file with a draft tree, a list of lists of ranks; `nodes` is then ignored. Empty: the published tree.",
    )
    prompt: bool = option(False, "Initialize the successors from the bigrams of the prompt.")
    known_only: bool = option(
        False,
        "Omit nodes without a stored token instead of drafting token 0, as published. Steps are cheaper, "
        "but fewer successors are updated.",
    )
    keep: bool = option(False, "Keep the successors across prompts, as published.")


class Recycling(Decoder):
    """successors[t]: the target's top-k after token t at its last verification, accepted or not."""

    name = "recycling"
    summary = "Token Recycling: a static tree from the top-k that each token had last, no training"
    paper = "Luo et al. 2024, arXiv:2408.08696"
    Options = RecyclingOptions
    node_options = ("nodes", "tree")

    def __init__(self, target: Target, options: Any = None) -> None:
        super().__init__(target, for_device(options or RecyclingOptions(), target.device_type))
        self.stateful = self.options.keep
        self.tree = chosen_tree(self.options)
        self.levels = gathers(self.tree, target.device)
        self.width = min(self.options.k, target.vocab_size)
        self.missing = UNSEEN if self.options.known_only else FILL
        rows = target.vocab_size + 1  # the last row is for unseen tokens (index -1)
        self.successors = torch.full((rows, self.options.k), self.missing, device=target.device)

    def reset_history(self) -> None:
        self.successors.fill_(self.missing)

    @classmethod
    def check(cls, options: Any, base: ModelInfo) -> None:
        chosen_tree(for_device(options, base.device_type))

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        shapes = {
            "default": RecyclingOptions(),
            "small": RecyclingOptions(nodes=6, prompt=True),
            "chain": RecyclingOptions(k=1),
            "known-only": RecyclingOptions(known_only=True),
            "keep": RecyclingOptions(nodes=20, keep=True),
        }
        return {label: partial(cls, target, options) for label, options in shapes.items()}

    def metadata(self) -> dict[str, Any]:
        return asdict(self.options) | self.tree.metadata()

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        """Return the tree's size and the switches `prompt` and `known_only`."""
        sizes = {} if self.options.tree else {"nodes": (3, 5, 8, 12, 18, 27, 40, 60, 80)}
        return {**sizes, "prompt": (False, True), "known_only": (False, True)}

    def max_tokens_per_step(self) -> int:
        return len(self.tree.topology.parents)

    def on_prefill(self, state: DecodeState) -> None:
        """Reset the successors, then set those in the prompt if requested."""
        if not self.options.keep:
            self.reset_history()
        if self.options.prompt:
            tokens, successors = bigrams(state.ids, self.options.k, self.missing)
            self.successors[torch.tensor(tokens, dtype=torch.long)] = torch.tensor(successors).to(self.successors)

    def propose(self, state: DecodeState) -> DraftTree:
        """Fill the tree level by level. `known_only` removes nodes without a token, which waits for the device."""
        tokens = state.root
        for parents, ranks in self.levels:
            tokens = torch.cat((tokens, self.successors[tokens[parents], ranks]))
        tree = DraftTree(tokens, self.tree.topology)
        if not self.options.known_only:
            return tree
        filled = (tokens != UNSEEN).tolist()
        return tree if all(filled) else tree.subtree([i for i, has_token in enumerate(filled) if has_token])

    def update(self, state: DecodeState, result: VerifyResult, output: Output) -> None:
        """Set the successors of every node's token to its top-k; of nodes with the same token, the last one's."""
        assert output.tree is not None
        tokens = output.tree.tokens
        top = output.logits[0].topk(self.width).indices  # [n, width]
        order = torch.arange(len(tokens), device=tokens.device)
        last = order.expand(len(tokens), -1).masked_fill(tokens[:, None] != tokens, 0).amax(1)  # [n]
        self.successors[tokens, : self.width] = top[last]  # equal indices write equal rows: order does not matter


def chosen_tree(options: RecyclingOptions) -> StaticTree:
    """Return the tree that the options request. Raise UserError for a file without a tree, or a rank beyond k."""
    if not options.tree:
        return tree_of([c for c in template()[: options.nodes] if max(c) < options.k])
    tree = tree_of(read_tree(Path(options.tree), MOST_NODES, "recycling"), "recycling")
    if tree.width > options.k:
        raise UserError(
            f"recycling: the tree {options.tree} needs {tree.width} successors of a token, but k is {options.k}"
        )
    return tree


def template() -> list[Choice]:
    """Return the published nodes, the best first: rank r counts 1 / (r + 1)."""
    return by_likelihood(PUBLISHED)


def gathers(tree: StaticTree, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return parents and ranks of the nodes of each level below the root, int64, on the device."""
    drafted = zip(tree.topology.depths[1:], tree.topology.parents[1:], tree.ranks, strict=True)
    levels = []
    for _, nodes in groupby(drafted, key=lambda node: node[0]):
        _, parents, ranks = zip(*nodes, strict=True)
        levels.append((indices(parents, device), indices(ranks, device)))
    return levels


def bigrams(ids: Sequence[int], k: int, missing: int) -> tuple[list[int], list[list[int]]]:
    """Return tokens with successors, and their last k different ones [n][k], newest first, padded with `missing`."""
    successors_of: dict[int, dict[int, None]] = {}
    for token, following in zip(ids, ids[1:], strict=False):
        successors = successors_of.setdefault(token, {})
        successors.pop(following, None)
        successors[following] = None
    rows = [list(reversed(successors))[:k] for successors in successors_of.values()]
    return list(successors_of), [row + [missing] * (k - len(row)) for row in rows]

"""EAGLE: a static tree, drafted level by level. Li et al. 2024 (ICML), sec. 4."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Le

from specbench_ss.engine.decoder import Decoder, State
from specbench_ss.engine.target import FINAL, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.methods._shared.static_trees import (
    MedusaTree,
    asked_tree,
    check_tree,
    read_accuracies,
    read_measured,
    tree_of,
)
from specbench_ss.methods._shared.tree_growth import draw
from specbench_ss.methods.eagle.common import FeatureDrafting
from specbench_ss.methods.eagle.trees import MOST_DEPTH, PUBLISHED, Plan, plan_of
from specbench_ss.options import Bounded

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_ss.methods.eagle.drafter import Drafter

NODES = (4, 6, 8, 10, 15, 20, 25, 31, 48)  # of auto trees, worth trying; 25 is the published size


@dataclass(frozen=True, slots=True)
class EagleOptions(Bounded):
    """Options of `eagle`. Raises UserError for values beyond their bounds."""

    owner: ClassVar[str] = "eagle"
    weights: str = field(
        default="", metadata={"help": "Folder or file with the drafter. Empty: the one that came with the model."}
    )
    tree: str = field(
        default="auto",
        metadata={
            "help": "Draft tree. auto: built from the measured accuracies that came with the drafter, else the "
            "published one. published: that one. Else a JSON file with a tree or with measured accuracies."
        },
    )
    nodes: int = field(
        default=0, metadata={"help": "How many nodes an auto tree has. 0: as the drafter's folder advises."}
    )
    depth: Annotated[int, Ge(0), Le(MOST_DEPTH)] = field(
        default=0, metadata={"help": "How many levels are drafted at most. 0: as many as the tree has."}
    )
    sample: Literal["on", "off"] = field(
        default="off",
        metadata={"help": "Where tokens are sampled: draw candidates from the draft's distribution, as published."},
    )


class Eagle(FeatureDrafting):
    """Every level of the tree is one pass of the drafter; which node hangs on which is fixed."""

    name = "eagle"
    companion = "eagle"
    summary = "EAGLE: one layer drafts features, static tree"
    paper = "Li et al. 2024, arXiv:2401.15077"
    Options = EagleOptions
    advisable = ("nodes",)

    def __init__(
        self,
        target: Target,
        options: EagleOptions,
        drafter: Drafter,
        config: dict[str, Any],
        layers: Sequence[int] = (FINAL,),
    ) -> None:
        self.tree = self.settle(options, config, target.vocab_size)
        self.plan: Plan = plan_of(self.tree, target.device)
        super().__init__(target, options, drafter, config, layers)

    @classmethod
    def settle(cls, options: EagleOptions, config: dict[str, Any], vocab: int) -> MedusaTree:
        """The tree."""
        depth = options.depth or MOST_DEPTH
        tree = tree_of(asked_tree(options.tree, options.nodes, config, depth, cls.name, PUBLISHED, "levels"), cls.name)
        check_tree(tree, depth, vocab, cls.name)
        return tree

    @classmethod
    def examples(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Random weights on the published tree and on a deep one, and with drawn candidates."""
        from specbench_ss.methods.eagle.new_weights import random_eagle

        def make(accuracies: list[list[float]], **options: Any) -> Callable[[], Decoder]:
            return lambda: cls(
                target, EagleOptions(**options), random_eagle(target), {"accuracies": accuracies, "nodes": 9}
            )

        fair = [[0.4 / (r + 1) for r in range(min(4, target.vocab_size))] for _ in range(5)]
        chain = [[0.9]] * 7
        return {
            "published": make(fair, tree="published"),
            "auto": make(fair),
            "chain": make(chain, nodes=7),
            "sampled": make(fair, tree="published", sample="on"),
        }

    def described(self) -> dict[str, Any]:
        """The tree as it is drafted, and the drafter."""
        return super().described() | self.tree.described() | {"sample": self.options.sample}

    def tunable(self) -> Mapping[str, Sequence[Any]]:
        """The size of the tree, where accuracies to build it from are known, and its depth."""
        given = self.options.tree
        if given not in ("auto", "published"):
            return {"nodes": NODES} if Path(given).is_file() and read_measured(Path(given), self.name) else {}
        accuracies = read_accuracies(self.config, self.name) if given == "auto" else []
        deepest = len(accuracies) or max(map(len, PUBLISHED))
        return {**({"nodes": NODES} if accuracies else {}), "depth": range(1, deepest + 1)}

    def max_rows(self) -> int:
        """The tree, root included."""
        return len(self.plan.shape.parents)

    @property
    def drafted_rows(self) -> int:
        """Nodes with children."""
        return len(self.plan.nodes) - 1

    def propose(self, state: State) -> DraftTree:
        """Candidates of a level from the states of the level above, placed on the tree."""
        drawn = self.options.sample == "on" and not state.sampling.greedy
        rotary = self.rotary_ahead(state, len(self.plan.levels))
        states, tokens, qs = self.newest, [state.root], []
        for depth, level in enumerate(self.plan.levels):
            logits = self.drafter.logits(states, self.target)[0]  # [rows, V]
            if drawn:
                qs.append(state.sampling.probs(logits))
                candidates, at = draw(qs[-1], state.rng, self.plan.siblings), level.place
            else:
                candidates, at = logits.topk(self.plan.width).indices, level.rank
            tokens.append(candidates[level.parent, at])
            if len(level.inner):
                states = self.descend(
                    state, tokens[-1][level.inner], states[:, level.carry], level.visible, rotary, depth
                )
        self.forget_drafted(state)
        return DraftTree(torch.cat(tokens), self.plan.shape, self._probs(qs) if drawn else None)

    def _probs(self, qs: list[Tensor]) -> Tensor:
        """q [n, V] at the nodes with children; leaves have none to draw."""
        q = torch.cat(qs)
        return q.new_zeros(len(self.plan.shape.parents), q.shape[-1]).index_copy_(0, self.plan.nodes, q)

"""What Medusa, Medusa-2 and Hydra share: heads that draft a fixed sparse tree, and the rules to accept it by.

Knows no kind of head: a method says how its heads are read from files and how they fill the tree.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch

from specbench_ss.engine.architectures import Outline
from specbench_ss.engine.decoder import Decoder, State
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.verify import Verdict
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.heads_options import HeadsOptions
from specbench_ss.methods._shared.lossy_acceptance import accept_rows, accept_typical
from specbench_ss.methods._shared.static_trees import (
    Choice,
    MedusaTree,
    asked_tree,
    check_tree,
    read_accuracies,
    read_measured,
    tree_of,
)
from specbench_ss.methods._shared.tree_advice import with_advice
from specbench_ss.models.checkpoint import check_base, drafter_folder, drafter_here, learnt, read_shapes, read_tensors
from specbench_ss.models.load import hash_weights

if TYPE_CHECKING:
    from torch import Tensor

    Read = Callable[..., dict[str, Tensor]]  # `read_tensors` or `read_shapes`

NODES = (4, 6, 8, 10, 15, 20, 31, 48, 63)  # of auto trees, worth trying; 63 is the published size


class Heads(Protocol):
    """Any kind of heads."""

    @property
    def count(self) -> int:
        """How many."""


class TreeHeads(Decoder):
    """Heads on a fixed tree, drafted from the last state. At T=0 every rule of acceptance is greedy."""

    Options: ClassVar[type[Any]] = HeadsOptions
    advisable: ClassVar[tuple[str, ...]] = ("nodes", "heads")

    def __init__(
        self,
        target: Target,
        options: Any,
        heads: Any,
        tree: MedusaTree,
        config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(target, options)
        self.config = config or {}  # what came with the heads
        self.learnt = learnt(self.config)
        check_tree(tree, heads.count, target.vocab_size, self.name)
        self.heads = target.adopt(heads, self.name)
        self.tree, self.depth = tree, tree.depth
        self.lossless = options.accept == "exact"

    # -- loading ------------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def read(cls, path: Path, base: Outline, read: Read) -> tuple[Any, dict[str, Any]]:
        """The heads of a file or folder, and their config. Raises UserError where they do not fit the base."""

    @classmethod
    def outline_of(cls, base: Outline, path: Path) -> Outline:
        """The model that heads of this folder draft for, by its configuration."""
        return base

    @classmethod
    def model_of(cls, target: Target, path: Path) -> Target:
        """That model."""
        return target

    @classmethod
    def check(cls, options: Any, base: Outline) -> None:
        """The heads' file and shapes, and the tree."""
        base.check_square(cls.name)
        path = drafter_here(options.weights, cls.name, base)
        if path is None:
            return
        base = cls.outline_of(base, path)
        with torch.device("meta"):
            heads, config = cls.read(path, base, read_shapes)
        options, _ = with_advice(cls, options, config, base, path)
        check_tree(tree_of(cls.choices(options, config, heads.count), cls.name), heads.count, base.vocab_size, cls.name)

    @classmethod
    def load(cls, target: Target, options: Any) -> Self:
        """Heads from the folder or file that the user named, or those that came with the model."""
        target.check_square(cls.name)
        path = drafter_folder(options.weights, cls.name, target)
        own = cls.model_of(target, path)
        heads, config = cls.read(path, own, read_tensors)
        check_base(config, target, cls.name)
        options, advised = with_advice(cls, options, config, target, path)
        found = cls(own, options, heads, tree_of(cls.choices(options, config, heads.count), cls.name), config)
        found.advised = advised
        return found

    def variant(self, options: Any) -> Self:
        """The same heads on another tree."""
        options, _ = with_advice(self, options, self.config, self.target, Path("config.json"))
        tree = tree_of(self.choices(options, self.config, self.heads.count), self.name)
        other = type(self)(self.target, options, self.heads, tree, self.config)
        other.heads_hash = self.heads_hash
        return other

    @classmethod
    def choices(cls, options: HeadsOptions, config: dict[str, Any], count: int) -> list[Choice]:
        """The tree that the options ask for, no deeper than the `count` heads, or those of them that are used."""
        if not -1 <= options.heads <= count:
            raise UserError(f"{cls.name}: heads must be 1 to {count}, or 0 for all, not {options.heads}")
        heads = options.heads if options.heads > 0 else count
        return asked_tree(options.tree, options.nodes, config, heads, cls.name)

    # -- what the harness asks ----------------------------------------------------------------------------------

    def tunable(self) -> Mapping[str, Sequence[Any]]:
        """The size of the tree, where accuracies to build it from are known, and its depth."""
        given, heads = self.options.tree, {"heads": range(1, self.heads.count + 1)}
        if given not in ("auto", "published"):
            return {"nodes": NODES, **heads} if Path(given).is_file() and read_measured(Path(given), self.name) else {}
        known = given == "auto" and read_accuracies(self.config, self.name)
        return {"nodes": NODES, **heads} if known else heads

    @cached_property
    def heads_hash(self) -> str:
        """Of the heads' weights; large heads take a while."""
        return hash_weights(self.heads)

    def described(self) -> dict[str, Any]:
        """The tree as it is drafted, the heads, and the rule of acceptance where it is not the exact one."""
        o = self.options
        rule = {} if o.accept == "exact" else {"accept": o.accept}
        return {
            **self.tree.described(),
            "heads_hash": self.heads_hash,
            **rule,
            **({"epsilon": o.epsilon, "alpha": o.alpha} if o.accept == "typical" else {}),
        }

    def max_rows(self) -> int:
        """The tree, root included."""
        return len(self.tree.shape.parents)

    def accept(self, state: State, tree: DraftTree, output: Output) -> Verdict:
        """As the options say."""
        o, logits = self.options, output.logits[0]
        if o.accept == "typical":
            return accept_typical(logits, tree, state.sampling, o.epsilon, o.alpha)
        if o.accept == "nucleus":
            return accept_rows(logits, tree, state.sampling, state.rng)
        return super().accept(state, tree, output)

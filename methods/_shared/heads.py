"""Drafting heads on static trees (Medusa, Hydra): options, trees from accuracies, acceptance rules.

A tree is a list of choices; choice (1, 0) is: the second-best token of head 0, then the best of head 1.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

import torch
from annotated_types import Gt
from torch import Tensor

from specbench_ss import user_files
from specbench_ss.engine.architectures import Outline
from specbench_ss.engine.decoder import Decoder, State
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import MOST_NODES, DraftTree, TreeShape, shape_of
from specbench_ss.engine.verify import Verdict
from specbench_ss.errors import UserError, os_reason
from specbench_ss.methods._shared.lossy_acceptance import accept_rows, accept_typical
from specbench_ss.models.checkpoint import (
    KEY,
    check_base,
    drafter_folder,
    drafter_here,
    learnt,
    read_advice,
    read_shapes,
    read_tensors,
)
from specbench_ss.models.load import hash_weights
from specbench_ss.options import Bounded
from specbench_ss.user_files import check_ends


@dataclass(frozen=True, slots=True)
class HeadsOptions(Bounded):
    """Which heads draft, on which tree, and which drafted tokens are accepted."""

    weights: str = field(
        default="", metadata={"help": "Folder or file with the heads. Empty: those that came with the model."}
    )
    tree: str = field(
        default="auto",
        metadata={
            "help": "Draft tree. auto: built from the measured accuracies that came with the heads, else the "
            "published one. published: that one. Else a JSON file with a tree, or with accuracies from "
            "`ssbench train NAME --measure`."
        },
    )
    nodes: int = field(
        default=0, metadata={"help": "How many nodes an auto tree has. 0: as the heads' folder advises."}
    )
    heads: int = field(
        default=-1,
        metadata={
            "help": "How many of the heads are used, the first ones. 0: all. -1: as the heads' folder advises, "
            "else all."
        },
    )
    accept: Literal["exact", "typical", "nucleus"] = field(
        default="exact",
        metadata={
            "help": "Rule by which drafted tokens are accepted where tokens are sampled. typical (Medusa sec. 2.3.1) "
            "and nucleus (every path is judged by itself) are lossy."
        },
    )
    epsilon: Annotated[float, Gt(0)] = field(
        default=0.09,
        metadata={
            "help": "With accept=typical: a drafted token of probability p is accepted where p is above the smaller of "
            "epsilon and alpha * exp(-H), H the entropy of the model's distribution."
        },
    )
    alpha: Annotated[float, Gt(0)] = field(
        default=0.3, metadata={"help": "With accept=typical: the factor before exp(-H); see epsilon."}
    )


Choice = tuple[int, ...]
MOST_BYTES = 1 << 22  # of a file with a tree; the published one takes some hundred

# the 63 nodes published for 7B models (FasterDecoding/Medusa, medusa_choices.py), as branches: prefix -> ranks
_PUBLISHED: dict[Choice, int] = {
    (): 10, (0,): 10, (0, 0): 10, (1,): 7, (2,): 3, (3,): 2, (4,): 1, (5,): 1, (6,): 1, (7,): 1, (8,): 1, (9,): 1,
    (0, 1): 3, (0, 2): 2, (0, 3): 1, (0, 4): 1, (0, 5): 1, (0, 6): 1, (0, 7): 1, (1, 0): 2, (2, 0): 1, (0, 0, 0): 2,
}  # fmt: skip


def from_branches(branches: dict[Choice, int]) -> tuple[Choice, ...]:
    """The choices of a tree from how many best tokens follow each prefix."""
    choices = ((*prefix, rank) for prefix, width in branches.items() for rank in range(width))
    return tuple(sorted(choices, key=lambda c: (len(c), c)))


PUBLISHED = from_branches(_PUBLISHED)


@dataclass(frozen=True, slots=True)
class MedusaTree:
    """shape of the tree; for each drafted node its head and its rank in that head's top-k."""

    shape: TreeShape
    heads: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def width(self) -> int:
        """How many candidates are needed of every head."""
        return max(self.ranks) + 1

    @property
    def depth(self) -> int:
        """How many heads it needs."""
        return max(self.heads) + 1

    def described(self) -> dict[str, Any]:
        """What results say of it, JSON-ready."""
        form = [list(pair) for pair in zip(self.shape.parents[1:], self.ranks, strict=True)]
        digest = hashlib.sha256(json.dumps(form).encode()).hexdigest()[:16]
        return {"tree_nodes": len(self.ranks), "depth": self.depth, "tree_hash": digest}


def check_tree(tree: MedusaTree, heads: int, vocab: int, method: str = "medusa") -> None:
    """Raises UserError where the tree wants more heads or candidates than there are."""
    if tree.depth > heads:
        raise UserError(f"{method}: the tree is {tree.depth} deep, there are {heads} heads")
    if tree.width > vocab:
        raise UserError(f"{method}: the tree wants {tree.width} candidates of a vocabulary of {vocab}")


def tree_of(choices: Sequence[Choice], method: str = "draft tree") -> MedusaTree:
    """Choices -> tree. Raises UserError where a choice lacks its prefix, or there are none or too many."""
    ordered = sorted(set(choices), key=lambda c: (len(c), c))
    if not ordered:
        raise UserError(f"{method}: a tree needs at least one choice")
    if len(ordered) > MOST_NODES:
        raise UserError(f"{method}: a tree has at most {MOST_NODES} nodes, not {len(ordered)}")
    index: dict[Choice, int] = {(): 0}
    parents = [-1]
    for choice in ordered:
        if not choice or min(choice) < 0 or choice[:-1] not in index:
            raise UserError(f"{method}: choice {list(choice)} has no parent in the tree")
        index[choice] = len(parents)
        parents.append(index[choice[:-1]])
    return MedusaTree(shape_of(tuple(parents)), tuple(len(c) - 1 for c in ordered), tuple(c[-1] for c in ordered))


def best_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> list[Choice]:
    """The `nodes` choices with the greatest expected acceptance: accuracies[head][rank], heads independent."""
    best: list[Choice] = []
    heap: list[tuple[float, Choice]] = [(-p, (rank,)) for rank, p in enumerate(accuracies[0])]
    heapq.heapify(heap)
    while heap and len(best) < nodes:
        score, choice = heapq.heappop(heap)
        best.append(choice)
        if len(choice) < len(accuracies):
            for rank, p in enumerate(accuracies[len(choice)]):
                heapq.heappush(heap, (score * p, (*choice, rank)))
    return best


def read_accuracies(config: dict[str, Any], method: str = "medusa", where: str = "config.json") -> list[list[float]]:
    """accuracies[head][rank] of a drafter's config; [] where it has none. Raises UserError for anything else."""
    table = config.get("accuracies") or []
    if not isinstance(table, list) or not all(_are_shares(row) for row in table):
        raise UserError(f"{method}: 'accuracies' in {where} must be a list for each level of numbers from 0 to 1")
    return [[float(x) for x in row] for row in table]


def read_nodes(config: dict[str, Any], method: str = "medusa", published: int = 63, where: str = "config.json") -> int:
    """How many nodes a drafter's config advises, `published` where it says nothing. Raises UserError otherwise."""
    nodes = config.get("nodes", published)
    if not isinstance(nodes, int) or isinstance(nodes, bool) or not 1 <= nodes <= MOST_NODES:
        raise UserError(f"{method}: 'nodes' in {where} must be a whole number from 1 to {MOST_NODES}, not {nodes!r}")
    return nodes


def _are_shares(row: Any) -> bool:
    numbers = isinstance(row, list) and all(isinstance(x, (int, float)) and 0 <= x <= 1 for x in row)
    return numbers and bool(row)


def read_measured(path: Path, method: str) -> dict[str, Any]:
    """The JSON object with measured `accuracies` in a file; {} where it holds something else, as a tree."""
    content = _read_json(path, method)
    return content if isinstance(content, dict) and content.get("accuracies") else {}


def asked_tree(
    tree: str,
    nodes: int,
    config: dict[str, Any],
    deepest: int,
    method: str,
    published: Sequence[Choice] = PUBLISHED,
    unit: str = "heads",
) -> list[Choice]:
    """The tree that a method's options ask for, no deeper than `deepest`.

    tree: auto (off the drafter's config, else published), published, or a JSON file with a tree or with accuracies.
    nodes: of one built from accuracies, 0 = as measured ones advise. Raises UserError that names the method.
    """
    if nodes < 0:
        raise UserError(f"{method}: nodes must be at least 1, or 0 for the drafter's own, not {nodes}")
    if nodes > MOST_NODES:
        raise UserError(f"{method}: nodes must be at most {MOST_NODES}, not {nodes}")
    measured, where = config if tree == "auto" else {}, "config.json"
    if tree not in ("auto", "published"):
        measured, where = read_measured(Path(tree), method), tree
        if not measured:
            return read_tree(Path(tree), deepest, method, unit)
    accuracies = read_accuracies(measured, method, where)
    if accuracies:
        return best_tree(accuracies[:deepest], nodes or read_nodes(measured, method, len(published), where))
    return [c for c in published if len(c) <= deepest]


def read_tree(path: Path, heads: int, method: str, unit: str = "heads") -> list[Choice]:
    """Choices from a JSON file: a list of lists of ranks.

    Raises UserError where it is not that, and where a choice is deeper than there are heads to be used.
    """
    try:
        choices = user_files.convert(_read_json(path, method), list[Choice])
    except ValueError as problem:
        form = "a list of choices, each a list of ranks from 0, as in [[0], [0, 0], [1]]"
        raise UserError(f"{method}: cannot read tree {path}: {problem}; a tree is {form}") from None
    deepest = max(map(len, choices), default=0)
    if deepest > heads:
        raise UserError(f"{method}: the tree {path} is {deepest} deep, there are {heads} {unit} to draft with")
    return choices


def _read_json(path: Path, method: str) -> Any:
    check_ends(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes, too many for a tree")
        return user_files.parse(path.read_bytes())
    except OSError as error:
        raise UserError(f"{method}: cannot read tree {path}: {os_reason(error)}") from None
    except ValueError as problem:
        raise UserError(f"{method}: cannot read tree {path}: {problem}") from None


def with_advice(
    method: Any, options: Any, config: Mapping[str, Any], base: Outline, path: Path, others: Collection[str] = ()
) -> tuple[Any, dict[str, Any]]:
    """Return the options with the folder's advice in place of defaults, and what was taken.

    A tree that the user states is drafted as it is. Raises UserError for options that the folder may not advise.

    method: a class with `name`, `Options` and `advisable`. others: options of other methods that use the same folder.
    """
    file = path / "config.json" if path.is_dir() else path
    advice = read_advice(config.get(KEY), method.Options, method.advisable, method.name, file, others)
    if getattr(options, "tree", "auto") != "auto":
        return options, {}
    return advice.settle(options, base.device_type)


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

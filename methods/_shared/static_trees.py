"""Medusa's sparse trees: the published one, and those built from measured accuracies (Medusa sec. 2.3.3).

A tree is a list of choices; choice (1, 0) is: the second-best token of head 0, then the best of head 1.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench_ss import user_files
from specbench_ss.engine.tree import MOST_NODES, TreeShape, shape_of
from specbench_ss.errors import UserError, os_reason
from specbench_ss.user_files import check_ends

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

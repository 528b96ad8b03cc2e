"""Draft trees: tokens with parent pointers; mask, depths and children derived from the topology.

Node 0 is the root: the token already decided by the target, which is not a draft. Parents come before children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TreeTopology:
    """The topology of a draft tree: parents[0] == -1, parents[i] < i."""

    parents: tuple[int, ...]
    depths: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise ValueError("node 0 must be the root, with parent -1")
        depths = [0]
        for i, p in enumerate(self.parents[1:], start=1):
            if not 0 <= p < i:
                raise ValueError(f"node {i} has parent {p}: parents come before children")
            depths.append(depths[p] + 1)
        object.__setattr__(self, "depths", tuple(depths))

    @property
    def depth(self) -> int:
        """Edges from the root to the deepest node."""
        return max(self.depths)

    @property
    def deepest(self) -> int:
        """How deep it is at most: here exactly."""
        return self.depth

    def on_host(self) -> TreeTopology:
        """Return itself."""
        return self

    def children(self) -> list[list[int]]:
        """Children of every node, in order of proposal."""
        lists: list[list[int]] = [[] for _ in self.parents]
        for i, p in enumerate(self.parents[1:], start=1):
            lists[p].append(i)
        return lists

    def ancestors(self) -> Tensor:
        """Bool [n, n]: entry (i, j) says that node j is node i or one of its ancestors."""
        seen = np.eye(len(self.parents), dtype=bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            seen[node] |= seen[parent]
        return torch.from_numpy(seen)


@lru_cache(maxsize=4096)
def topology_of(parents: tuple[int, ...]) -> TreeTopology:
    """The shape for these parents; made once for each distinct topology."""
    return TreeTopology(parents)


class DeviceTopology:
    """The topology of a tree whose nodes were chosen on the device.

    above: int64 [n], the parent of every node, the root's own 0. deepest: a bound that the host knows. chosen_from: the
    shape that these nodes were chosen from, which is then brought to the host with this one. Whoever asks for what the
    host does not know waits for the device; verification brings it along (`told`). noted: int64 [n], a number of each
    node that the method wants on the host with the parents, as `notes`; None where it wants none.
    """

    __slots__ = ("_known", "_notes", "parent_idx", "chosen_from", "deepest", "device_tags")

    def __init__(
        self, parent_idx: Tensor, deepest: int, chosen_from: AnyTopology | None = None, node_tags: Tensor | None = None
    ) -> None:
        self.parent_idx, self.deepest, self.chosen_from, self.device_tags = parent_idx, deepest, chosen_from, node_tags
        self._known: TreeTopology | None = None
        self._notes: list[int] = []

    def on_host(self) -> TreeTopology:
        """Return the shape as the host knows it; waits for the device where it does not yet."""
        if self._known is None:
            copy_to_host(self)
        assert self._known is not None
        return self._known

    def pending_topologies(self) -> list[DeviceTopology]:
        """Return itself and what it was chosen from, without those that the host knows."""
        before = self.chosen_from.pending_topologies() if isinstance(self.chosen_from, DeviceTopology) else []
        return before if self._known is not None else [self, *before]

    def pending_values(self) -> Tensor:
        """What is brought to the host: `above`, and `noted` where there is something, int64 [n] or [2 n]."""
        return self.parent_idx if self.device_tags is None else torch.cat((self.parent_idx, self.device_tags))

    def set_host_values(self, numbers: Sequence[float]) -> None:
        """Say to the host what `untold` is."""
        whole, n = [int(x) for x in numbers], len(self.parent_idx)
        self._known, self._notes = topology_of((-1, *whole[1:n])), whole[n:]

    @property
    def node_tags(self) -> list[int]:
        """What was noted of the nodes; waits for the device where the host does not know it."""
        self.on_host()
        return self._notes

    @property
    def parents(self) -> tuple[int, ...]:
        """As of `TreeTopology`; waits for the device where the host does not know them."""
        return self.on_host().parents

    @property
    def depths(self) -> tuple[int, ...]:
        """As of `TreeTopology`; waits for the device where the host does not know them."""
        return self.on_host().depths

    @property
    def depth(self) -> int:
        """As of `TreeTopology`; waits for the device where the host does not know it."""
        return self.on_host().depth

    def children(self) -> list[list[int]]:
        """As of `TreeTopology`; waits for the device where the host does not know them."""
        return self.on_host().children()

    def ancestors(self) -> Tensor:
        """As of `TreeTopology`, on the device: waits for nothing."""
        return ancestors_of(self.parent_idx, self.deepest)


AnyTopology = TreeTopology | DeviceTopology


def copy_to_host(shape: AnyTopology, *rows: Tensor) -> list[list[Any]]:
    """Bring these rows, each [n_i], to the host in one transfer, and with them what it does not know of the shape."""
    unread = shape.pending_topologies() if isinstance(shape, DeviceTopology) else []
    parts = [*rows, *(one.pending_values() for one in unread)]
    if not parts:
        return []
    lists = [part.tolist() for part in torch.cat(parts).cpu().split([len(part) for part in parts])]
    for one, numbers in zip(unread, lists[len(rows) :], strict=True):
        one.set_host_values(numbers)
    return lists[: len(rows)]


def ancestors_of(parent_idx: Tensor, deepest: int) -> Tensor:
    """Bool [n, n], as `TreeShape.ancestors`, from the parent of every node [n] and a bound on the depth: on the device.

    Each product doubles how far up a node sees.
    """
    n = len(parent_idx)
    nodes = torch.arange(n, device=parent_idx.device)
    seen = (nodes[:, None] == nodes) | (parent_idx[:, None] == nodes)
    far = 1
    while far < deepest:
        seen = (seen.float() @ seen.float()) > 0
        far *= 2
    return seen


MOST_NODES = 4096  # that a method may draft in a step; far more than has ever paid


@lru_cache(maxsize=256)
def visibility(shape: TreeTopology, device: torch.device) -> tuple[Tensor, Tensor]:
    """(ancestor mask bool [n, n], depths int64 [n]) on the device; made once for each of the shapes in use."""
    return to_device_async(shape.ancestors(), device), indices(shape.depths, device)


@lru_cache(maxsize=256)
def parents_on(shape: TreeTopology, device: torch.device) -> Tensor:
    """int64 [n], the root's own 0; made once for each of the shapes in use."""
    return indices((0, *shape.parents[1:]), device)


def indices(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 [n] on the device, without waiting for it."""
    return to_device_async(torch.tensor(values, dtype=torch.long), device)


def to_token_tensor(tokens: Sequence[Tensor | int]) -> Tensor:
    """int64 [n] from a list of tokens, on the device of the first one where that is a tensor, else on the CPU."""
    if not tokens:
        raise ValueError("a tree has at least its root")
    first = tokens[0] if isinstance(tokens[0], torch.Tensor) else torch.tensor(index(tokens[0]))
    return torch.cat((first.reshape(1), indices([index(token) for token in tokens[1:]], first.device)))


def to_device_async(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, without waiting for it."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


@dataclass(frozen=True, slots=True)
class DraftTree:
    """tokens: int64 [n] on the target's device, root first. draft_probs: q for sampled candidates.

    shape: the topology, which may be known to the device alone (`DeviceTopology`); then `seen` is given.
    draft_probs [n, V] is the distribution that node i's *children* were drawn from; None = candidates are
    deterministic (top-k), which verification then treats exactly as such.
    """

    tokens: Tensor
    topology: AnyTopology
    draft_probs: Tensor | None = None
    seen: tuple[Tensor, Tensor] | None = None  # what `visibility` gives, where it is known already

    @classmethod
    def root_only(cls, root: Tensor) -> DraftTree:
        """No draft: the step is a plain autoregressive one. root: int64 [1]."""
        return cls(root, topology_of((-1,)))

    @classmethod
    def chain(
        cls, root: Tensor, drafted: Tensor | Sequence[Tensor | int], draft_probs: Tensor | None = None
    ) -> DraftTree:
        """Return a single path. root: int64 [1]. drafted: int64 [k], or a list of tokens, as `of` takes it."""
        if not isinstance(drafted, torch.Tensor):
            return cls.from_parents([root, *drafted], range(-1, len(drafted)), draft_probs)
        return cls(torch.cat((root, drafted)), topology_of(tuple(range(-1, drafted.shape[0]))), draft_probs)

    @classmethod
    def from_parents(
        cls, tokens: Tensor | Sequence[Tensor | int], parents: Tensor | Sequence[int], draft_probs: Tensor | None = None
    ) -> DraftTree:
        """A tree of n nodes from the token of each, root first, and the number of each one's parent, -1 for the root.

        tokens: int64 [n], or a list that begins with `state.root`, on whose device the others go:
        `DraftTree.from_parents([state.root, 5, 9, 7], [-1, 0, 0, 1])` drafts 5 and 9 after the root, and 7 after
        5. A list of
        plain numbers makes a tree on the CPU. draft_probs: [n, V], see above. Raises ValueError where they fit no tree.
        """
        numbers = tuple(map(index, parents.tolist() if isinstance(parents, torch.Tensor) else parents))
        nodes = tokens if isinstance(tokens, torch.Tensor) else to_token_tensor(tokens)
        if nodes.ndim != 1 or nodes.is_floating_point() or nodes.dtype == torch.bool:
            raise ValueError(f"tokens of a tree are whole numbers [n], not {nodes.dtype} {list(nodes.shape)}")
        if len(numbers) != len(nodes):
            raise ValueError(f"a tree of {len(nodes)} tokens, the root among them, has {len(numbers)} parents")
        return cls(nodes.long(), topology_of(numbers), draft_probs)

    @classmethod
    def from_device_parents(
        cls,
        tokens: Tensor,
        parent_idx: Tensor,
        deepest: int,
        draft_probs: Tensor | None = None,
        node_tags: Tensor | None = None,
    ) -> DraftTree:
        """A tree whose nodes were chosen on the device: nothing is waited for.

        tokens int64 [n], root first; above int64 [n]: the parent of each, the root's own 0, every one before its
        children; deepest: how deep it is at most; noted: as of `DeviceTopology`.
        """
        shape = DeviceTopology(parent_idx, deepest, node_tags=node_tags)
        visible = shape.ancestors()
        return cls(tokens, shape, draft_probs, (visible, visible.sum(-1) - 1))

    def __len__(self) -> int:
        return self.tokens.shape[0] if isinstance(self.topology, DeviceTopology) else len(self.topology.parents)

    def visibility(self) -> tuple[Tensor, Tensor]:
        """(ancestor mask bool [n, n], depths int64 [n]) on the tokens' device."""
        return self.seen or visibility(self.topology.on_host(), self.tokens.device)

    def parents(self) -> Tensor:
        """int64 [n] on the tokens' device; the root's own is 0."""
        shape = self.topology
        return shape.parent_idx if isinstance(shape, DeviceTopology) else parents_on(shape, self.tokens.device)

    def gather_nodes(self, nodes: Tensor) -> DraftTree:
        """The sub-tree of these nodes, int64 [m] on the tokens' device: ascending, ancestor-closed, root included.

        As `select`, and nothing is waited for: the host knows m alone.
        """
        visible, depths = self.visibility()
        # a parent that is left out is -1, which the host refuses when it is told
        new = torch.full_like(self.tokens, -1).index_copy_(0, nodes, torch.arange(len(nodes), device=nodes.device))
        shape = DeviceTopology(new[self.parents()[nodes]], min(self.topology.deepest, len(nodes) - 1), self.topology)
        q = None if self.draft_probs is None else self.draft_probs[nodes]
        return DraftTree(self.tokens[nodes], shape, q, (visible[nodes[:, None], nodes], depths[nodes]))

    def subtree(self, keep: Sequence[int], index: Tensor | None = None) -> DraftTree:
        """The sub-tree of these nodes (ascending, ancestor-closed, root included). index: keep on the device.

        Sampled candidates stay exact only where the choice does not depend on what was drawn.
        """
        new = {old: i for i, old in enumerate(keep)}
        parents = tuple(-1 if i == 0 else new[self.topology.parents[i]] for i in keep)
        index = indices(keep, self.tokens.device) if index is None else index
        q = None if self.draft_probs is None else self.draft_probs[index]
        visible, depths = self.visibility()
        return DraftTree(self.tokens[index], topology_of(parents), q, (visible[index[:, None], index], depths[index]))

"""Draft trees: tokens with parent pointers, and the mask, depths and children of the topology.

Node 0 is the root: the token that the target has already decided, which is not a draft. Parents come before children.
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
    """Topology of a draft tree: parents[0] == -1, parents[i] < i."""

    parents: tuple[int, ...]
    depths: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", tuple(map(index, self.parents)))
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
        """Return the number of edges from the root to the deepest node."""
        return max(self.depths)

    @property
    def deepest(self) -> int:
        """Return an upper bound of the depth, which is exact here."""
        return self.depth

    def on_host(self) -> TreeTopology:
        """Return itself."""
        return self

    def children(self) -> list[list[int]]:
        """Return the children of every node, in order of proposal."""
        lists: list[list[int]] = [[] for _ in self.parents]
        for i, p in enumerate(self.parents[1:], start=1):
            lists[p].append(i)
        return lists

    def ancestors(self) -> Tensor:
        """Return bool [n, n]: entry (i, j) is True if node j is node i or one of its ancestors."""
        visible = np.eye(len(self.parents), dtype=bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            visible[node] |= visible[parent]
        return torch.from_numpy(visible)


@lru_cache(maxsize=4096)
def topology_of(parents: tuple[int, ...]) -> TreeTopology:
    """Return the topology of these parents; cached."""
    return TreeTopology(parents)


class DeviceTopology:
    """Topology of a tree whose nodes were chosen on the device.

    Host-side properties synchronise with the device; `verify` copies them for free (`copy_to_host`).

    Attributes:
        parent_idx: int64 [n], the parent of each node; the root's is 0.
        deepest: upper bound of the depth, on the host.
        source: topology that these nodes were chosen from; it is copied to the host with this one.
        device_tags: int64 [n], one number per node that the method wants on the host (`node_tags`), or None.
    """

    __slots__ = ("_host", "_host_tags", "parent_idx", "source", "deepest", "device_tags")

    def __init__(
        self, parent_idx: Tensor, deepest: int, source: AnyTopology | None = None, node_tags: Tensor | None = None
    ) -> None:
        self.parent_idx, self.deepest, self.source, self.device_tags = parent_idx, deepest, source, node_tags
        self._host: TreeTopology | None = None
        self._host_tags: list[int] = []

    def on_host(self) -> TreeTopology:
        """Return the topology on the host; synchronises with the device on first use."""
        if self._host is None:
            copy_to_host(self)
        assert self._host is not None
        return self._host

    def pending_topologies(self) -> list[DeviceTopology]:
        """Return this topology and its sources, without those that are on the host."""
        before = self.source.pending_topologies() if isinstance(self.source, DeviceTopology) else []
        return before if self._host is not None else [self, *before]

    def pending_values(self) -> Tensor:
        """Return the values to copy to the host: `parent_idx` and any tags, int64 [n] or [2 n]."""
        return self.parent_idx if self.device_tags is None else torch.cat((self.parent_idx, self.device_tags))

    def set_host_values(self, numbers: Sequence[float]) -> None:
        """Store the values of `pending_values` on the host."""
        values, n = [int(x) for x in numbers], len(self.parent_idx)
        self._host, self._host_tags = topology_of((-1, *values[1:n])), values[n:]

    @property
    def node_tags(self) -> list[int]:
        """Return the tags of the nodes; may synchronise with the device."""
        self.on_host()
        return self._host_tags

    @property
    def parents(self) -> tuple[int, ...]:
        """Return `TreeTopology.parents`; may synchronise with the device."""
        return self.on_host().parents

    @property
    def depths(self) -> tuple[int, ...]:
        """Return `TreeTopology.depths`; may synchronise with the device."""
        return self.on_host().depths

    @property
    def depth(self) -> int:
        """Return `TreeTopology.depth`; may synchronise with the device."""
        return self.on_host().depth

    def children(self) -> list[list[int]]:
        """Return `TreeTopology.children`; may synchronise with the device."""
        return self.on_host().children()

    def ancestors(self) -> Tensor:
        """Return `TreeTopology.ancestors` on the device, without a synchronisation."""
        return ancestors_of(self.parent_idx, self.deepest)


AnyTopology = TreeTopology | DeviceTopology


def copy_to_host(topology: AnyTopology, *rows: Tensor) -> list[list[Any]]:
    """Copy these tensors, each [n_i], and the pending values of the topology to the host in one transfer."""
    pending = topology.pending_topologies() if isinstance(topology, DeviceTopology) else []
    parts = [*rows, *(one.pending_values() for one in pending)]
    if not parts:
        return []
    lists = [part.tolist() for part in torch.cat(parts).cpu().split([len(part) for part in parts])]
    for one, numbers in zip(pending, lists[len(rows) :], strict=True):
        one.set_host_values(numbers)
    return lists[: len(rows)]


def ancestors_of(parent_idx: Tensor, deepest: int) -> Tensor:
    """Return the ancestor mask bool [n, n] on the device, from each node's parent [n] and a bound of the depth.

    Each matrix product doubles the number of levels that are covered.
    """
    n = len(parent_idx)
    nodes = torch.arange(n, device=parent_idx.device)
    visible = (nodes[:, None] == nodes) | (parent_idx[:, None] == nodes)
    reach = 1
    while reach < deepest:
        visible = (visible.float() @ visible.float()) > 0
        reach *= 2
    return visible


MOST_NODES = 4096  # draft nodes per step, far above any useful number


@lru_cache(maxsize=256)
def visibility(topology: TreeTopology, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (ancestor mask bool [n, n], depths int64 [n]) on the device; cached."""
    return to_device_async(topology.ancestors(), device), indices(topology.depths, device)


@lru_cache(maxsize=256)
def parents_on(topology: TreeTopology, device: torch.device) -> Tensor:
    """Return the parents, int64 [n], on the device, the root's as 0; cached."""
    return indices((0, *topology.parents[1:]), device)


def indices(values: Sequence[int], device: torch.device) -> Tensor:
    """Return int64 [n] on the device, without a synchronisation."""
    return to_device_async(torch.tensor(values, dtype=torch.long), device)


def to_token_tensor(tokens: Sequence[Tensor | int]) -> Tensor:
    """Return int64 [n] of a list of tokens, on the device of the first one if it is a tensor, else on the CPU."""
    if not tokens:
        raise ValueError("a tree has at least its root")
    first = tokens[0] if isinstance(tokens[0], torch.Tensor) else torch.tensor(index(tokens[0]))
    return torch.cat((first.reshape(1), indices([index(token) for token in tokens[1:]], first.device)))


def to_device_async(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device, without a synchronisation."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A draft tree.

    Attributes:
        tokens: int64 [n] on the target's device, root first.
        topology: a `DeviceTopology` needs `visibility_cache`.
        draft_probs: [m, V], m <= n, the distribution q that node i's *children* were sampled from. Children of the
            other nodes, of all for None, are deterministic candidates (top-k), which verification treats as such.
        visibility_cache: result of `visibility`, if already computed.
    """

    tokens: Tensor
    topology: AnyTopology
    draft_probs: Tensor | None = None
    visibility_cache: tuple[Tensor, Tensor] | None = None

    @classmethod
    def root_only(cls, root: Tensor) -> DraftTree:
        """Return a tree without a draft (an autoregressive step). root: int64 [1]."""
        return cls(root, topology_of((-1,)))

    @classmethod
    def chain(
        cls, root: Tensor, drafted: Tensor | Sequence[Tensor | int], draft_probs: Tensor | None = None
    ) -> DraftTree:
        """Return a single path. root: int64 [1]. drafted: int64 [k], or a list of tokens as for `from_parents`."""
        if not isinstance(drafted, torch.Tensor):
            return cls.from_parents([root, *drafted], range(-1, len(drafted)), draft_probs)
        return cls(torch.cat((root, drafted)), topology_of(tuple(range(-1, drafted.shape[0]))), draft_probs)

    @classmethod
    def from_parents(
        cls, tokens: Tensor | Sequence[Tensor | int], parents: Tensor | Sequence[int], draft_probs: Tensor | None = None
    ) -> DraftTree:
        """Return a tree of n nodes.

        `DraftTree.from_parents([state.root, 5, 9, 7], [-1, 0, 0, 1])` drafts 5 and 9 after the root, and 7 after 5.

        Args:
            tokens: int64 [n], root first, or a list that begins with `state.root`, whose device is used; a list of
                plain numbers makes a tree on the CPU.
            parents: index of each node's parent, -1 for the root.
            draft_probs: [m, V], see above.

        Raises:
            ValueError: they do not form a tree.
        """
        numbers = tuple(map(index, parents.tolist() if isinstance(parents, torch.Tensor) else parents))
        nodes = tokens if isinstance(tokens, torch.Tensor) else to_token_tensor(tokens)
        if nodes.ndim != 1 or nodes.is_floating_point() or nodes.dtype == torch.bool:
            raise ValueError(f"tree tokens must be integers [n], not {nodes.dtype} {list(nodes.shape)}")
        if len(numbers) != len(nodes):
            raise ValueError(f"a tree of {len(nodes)} tokens (with the root) has {len(numbers)} parents")
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
        """Return a tree whose nodes were chosen on the device, without a synchronisation.

        Args:
            tokens: int64 [n], root first.
            parent_idx: int64 [n], the parent of each node, which comes before it; the root's is 0.
            deepest: upper bound of the depth.
            draft_probs: [m, V], see above.
            node_tags: as `DeviceTopology.device_tags`.
        """
        topology = DeviceTopology(parent_idx, deepest, node_tags=node_tags)
        visible = topology.ancestors()
        return cls(tokens, topology, draft_probs, (visible, visible.sum(-1) - 1))

    def __len__(self) -> int:
        return self.tokens.shape[0] if isinstance(self.topology, DeviceTopology) else len(self.topology.parents)

    def visibility(self) -> tuple[Tensor, Tensor]:
        """Return (ancestor mask bool [n, n], depths int64 [n]) on the tokens' device."""
        return self.visibility_cache or visibility(self.topology.on_host(), self.tokens.device)

    def parents(self) -> Tensor:
        """Return the parents, int64 [n], on the tokens' device; the root's is 0."""
        topology = self.topology
        return topology.parent_idx if isinstance(topology, DeviceTopology) else parents_on(topology, self.tokens.device)

    def children_probs(self, node: int) -> Tensor | None:
        """Return the distribution [V] that a node's children were sampled from; None for deterministic ones."""
        return None if self.draft_probs is None or node >= len(self.draft_probs) else self.draft_probs[node]

    def token_probs(self) -> Tensor | None:
        """Return q of each drafted token [n], 1 for deterministic ones, or None if all are; the root's is arbitrary."""
        if self.draft_probs is None:
            return None
        parents, m = self.parents(), len(self.draft_probs)
        q = self.draft_probs[parents.clamp_max(m - 1), self.tokens].float()
        return q if m == len(self) else torch.where(parents < m, q, 1.0)

    def gather_nodes(self, nodes: Tensor) -> DraftTree:
        """Return the sub-tree of nodes int64 [m] on the tokens' device: ascending, ancestor-closed, with the root.

        As `subtree`, without a synchronisation. Raises ValueError if only some nodes have sampled children.
        """
        if self.draft_probs is not None and len(self.draft_probs) < len(self):
            raise ValueError("a tree with sampled and deterministic candidates cannot be cut without its topology")
        visible, depths = self.visibility()
        # a missing parent becomes -1, which is rejected once the topology is copied to the host
        new = torch.full_like(self.tokens, -1).index_copy_(0, nodes, torch.arange(len(nodes), device=nodes.device))
        topology = DeviceTopology(new[self.parents()[nodes]], min(self.topology.deepest, len(nodes) - 1), self.topology)
        q = None if self.draft_probs is None else self.draft_probs[nodes]
        return DraftTree(self.tokens[nodes], topology, q, (visible[nodes[:, None], nodes], depths[nodes]))

    def subtree(self, keep: Sequence[int], index: Tensor | None = None) -> DraftTree:
        """Return the sub-tree of these nodes (ascending, ancestor-closed, with the root). index: keep on the device.

        Sampled candidates stay exact only if the choice does not depend on the sampled tokens.
        """
        new = {old: i for i, old in enumerate(keep)}
        parents = tuple(-1 if i == 0 else new[self.topology.parents[i]] for i in keep)
        index = indices(keep, self.tokens.device) if index is None else index
        sampled = 0 if self.draft_probs is None else sum(i < len(self.draft_probs) for i in keep)
        q = None if self.draft_probs is None else self.draft_probs[index[:sampled]]  # in order: these come first
        visible, depths = self.visibility()
        return DraftTree(self.tokens[index], topology_of(parents), q, (visible[index[:, None], index], depths[index]))


class TreeTensors:
    """Splits drafted trees of one form into tensors and joins them, since a CUDA graph returns tensors alone."""

    def __init__(self) -> None:
        # topology, or bound of the depth, of the captured tree: a replayed graph returns tensors only
        self.form: TreeTopology | int = 0

    def tensors(self, tree: DraftTree) -> tuple[Tensor, ...]:
        """Return its tokens; if its nodes were chosen on the device also mask, depths, parents and any tags."""
        topology = tree.topology
        if not isinstance(topology, DeviceTopology):
            self.form = topology
            return (tree.tokens,)
        self.form = topology.deepest
        tags = () if topology.device_tags is None else (topology.device_tags,)
        return (tree.tokens, *tree.visibility(), topology.parent_idx, *tags)

    def tree(self, tensors: Sequence[Tensor]) -> DraftTree:
        """Return the tree of these tensors."""
        if isinstance(self.form, TreeTopology):
            return DraftTree(tensors[0], self.form)
        tokens, visible, depths, parents, *tags = tensors
        topology = DeviceTopology(parents, self.form, node_tags=tags[0] if tags else None)
        return DraftTree(tokens, topology, None, (visible, depths))

"""The topology of draft trees: as the host knows it, and as only the device does, where nodes were chosen there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TreeShape:
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

    def on_host(self) -> TreeShape:
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
def shape_of(parents: tuple[int, ...]) -> TreeShape:
    """The shape for these parents; made once for each distinct topology."""
    return TreeShape(parents)


class DeviceShape:
    """The topology of a tree whose nodes were chosen on the device.

    above: int64 [n], the parent of every node, the root's own 0. deepest: a bound that the host knows. chosen_from: the
    shape that these nodes were chosen from, which is then brought to the host with this one. Whoever asks for what the
    host does not know waits for the device; verification brings it along (`told`). noted: int64 [n], a number of each
    node that the method wants on the host with the parents, as `notes`; None where it wants none.
    """

    __slots__ = ("_known", "_notes", "above", "chosen_from", "deepest", "noted")

    def __init__(
        self, above: Tensor, deepest: int, chosen_from: AnyShape | None = None, noted: Tensor | None = None
    ) -> None:
        self.above, self.deepest, self.chosen_from, self.noted = above, deepest, chosen_from, noted
        self._known: TreeShape | None = None
        self._notes: list[int] = []

    def on_host(self) -> TreeShape:
        """Return the shape as the host knows it; waits for the device where it does not yet."""
        if self._known is None:
            told(self)
        assert self._known is not None
        return self._known

    def unread(self) -> list[DeviceShape]:
        """Return itself and what it was chosen from, without those that the host knows."""
        before = self.chosen_from.unread() if isinstance(self.chosen_from, DeviceShape) else []
        return before if self._known is not None else [self, *before]

    def untold(self) -> Tensor:
        """What is brought to the host: `above`, and `noted` where there is something, int64 [n] or [2 n]."""
        return self.above if self.noted is None else torch.cat((self.above, self.noted))

    def tell(self, numbers: Sequence[float]) -> None:
        """Say to the host what `untold` is."""
        whole, n = [int(x) for x in numbers], len(self.above)
        self._known, self._notes = shape_of((-1, *whole[1:n])), whole[n:]

    @property
    def notes(self) -> list[int]:
        """What was noted of the nodes; waits for the device where the host does not know it."""
        self.on_host()
        return self._notes

    @property
    def parents(self) -> tuple[int, ...]:
        """As of `TreeShape`; waits for the device where the host does not know them."""
        return self.on_host().parents

    @property
    def depths(self) -> tuple[int, ...]:
        """As of `TreeShape`; waits for the device where the host does not know them."""
        return self.on_host().depths

    @property
    def depth(self) -> int:
        """As of `TreeShape`; waits for the device where the host does not know it."""
        return self.on_host().depth

    def children(self) -> list[list[int]]:
        """As of `TreeShape`; waits for the device where the host does not know them."""
        return self.on_host().children()

    def ancestors(self) -> Tensor:
        """As of `TreeShape`, on the device: waits for nothing."""
        return ancestors_of(self.above, self.deepest)


AnyShape = TreeShape | DeviceShape


def told(shape: AnyShape, *rows: Tensor) -> list[list[Any]]:
    """Bring these rows, each [n_i], to the host in one transfer, and with them what it does not know of the shape."""
    unread = shape.unread() if isinstance(shape, DeviceShape) else []
    parts = [*rows, *(one.untold() for one in unread)]
    if not parts:
        return []
    lists = [part.tolist() for part in torch.cat(parts).cpu().split([len(part) for part in parts])]
    for one, numbers in zip(unread, lists[len(rows) :], strict=True):
        one.tell(numbers)
    return lists[: len(rows)]


def ancestors_of(above: Tensor, deepest: int) -> Tensor:
    """Bool [n, n], as `TreeShape.ancestors`, from the parent of every node [n] and a bound on the depth: on the device.

    Each product doubles how far up a node sees.
    """
    n = len(above)
    nodes = torch.arange(n, device=above.device)
    seen = (nodes[:, None] == nodes) | (above[:, None] == nodes)
    far = 1
    while far < deepest:
        seen = (seen.float() @ seen.float()) > 0
        far *= 2
    return seen

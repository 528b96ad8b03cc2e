"""What each argument of a decoder layer is: told by giving the decoder other tokens, other positions, fewer of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specbench_ss.decoding.placement import Movable, moved
from specbench_ss.decoding.recording import CACHE, OwnDecoder
from specbench_ss.errors import UserError

ROWS, FEWER, SHIFT = 9, 6, 2  # of the passes that are compared
AT_FIRST, CHUNK = 4096, 512  # positions whose tables are made at once; those that are computed in one pass


@dataclass(frozen=True, slots=True)
class Place:
    """Stands in an argument where a layer is given a table's rows at the positions; None: the positions themselves."""

    table: int | None = None


@dataclass(slots=True)
class Arguments:
    """How one layer is called besides its states: what stays the same, and the names of what does not.

    placed: arguments that depend on positions, with a `Place` wherever they do.
    """

    fixed: dict[str, Any] = field(default_factory=dict)
    placed: dict[str, Any] = field(default_factory=dict)
    cache: str = ""
    mask: str = ""


def leaves(value: Any) -> list[Any]:
    """What is inside tuples, lists and dicts, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for one in value for leaf in leaves(one)] if isinstance(value, (tuple, list)) else [value]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same tuples, lists and dicts with every leaf changed, in order."""
    if isinstance(value, dict):
        return {name: mapped(one, change) for name, one in value.items()}
    return type(value)(mapped(one, change) for one in value) if isinstance(value, (tuple, list)) else change(value)


class Probes:
    """Four short passes of a decoder: some tokens, other tokens, the first tokens further on, fewer of them."""

    def __init__(self, own: OwnDecoder, vocab: int, device: torch.device) -> None:
        self.own = own
        self.ids = torch.arange(ROWS, device=device)[None] * 7 % vocab
        self.positions = torch.arange(ROWS, device=device)[None]
        self.first = own.record(self.ids, self.positions, real=True)
        self.others = own.record(self.ids.flip(1).add(1) % vocab, self.positions)
        self.further = own.record(self.ids, self.positions + SHIFT) if own.takes_positions else None
        self.fewer = own.record(self.ids[:, :FEWER], self.positions[:, :FEWER])
        self.tables: dict[int, tuple[int, str, int]] = {}  # id of a tensor -> layer, argument and leaf it was seen at

    def arguments(self, layer: int) -> Arguments:
        """What the layer's arguments are. Raises UserError for one that depends on more than positions."""
        found = Arguments()
        for name, value in self.first.calls[layer].given.items():
            if value is CACHE:
                found.cache = name
            elif self._is_mask(layer, name):
                found.mask = name
            else:
                self._sort(found, layer, name, value)
        if not found.cache:
            raise UserError("its layers are given no cache of keys and values")
        return found

    def _seen(self, layer: int, name: str) -> list[list[Any]]:
        """The argument's leaves in the four passes."""
        passes = [self.first, self.others, self.further or self.first, self.fewer]
        return [leaves(p.calls[layer].given.get(name)) for p in passes]

    def _is_mask(self, layer: int, name: str) -> bool:
        a, _, _, d = (found[0] for found in self._seen(layer, name))
        if a is None or d is None:
            return "attention_mask" in name and a is d and not name.startswith("encoder")
        is_tensor = isinstance(a, Tensor) and isinstance(d, Tensor)
        return is_tensor and a.ndim == 4 and a.shape[2:] == (ROWS, ROWS) and d.shape[2:] == (FEWER, FEWER)

    def _sort(self, found: Arguments, layer: int, name: str, value: Any) -> None:
        seen = list(zip(*self._seen(layer, name), strict=True))
        if all(_same(a, b) and _same(a, c) and _same(a, d) for a, b, c, d in seen):
            found.fixed[name] = value
            return
        numbers = iter(range(len(seen)))
        found.placed[name] = mapped(value, lambda _: self._placed(layer, name, seen, next(numbers)))

    def _placed(self, layer: int, name: str, seen: list[Any], leaf: int) -> Any:
        a, b, c, d = seen[leaf]
        if _same(a, b) and _same(a, c) and _same(a, d):
            return a
        if all(isinstance(one, Tensor) for one in (a, b, c, d)) and self.further is not None:
            if torch.equal(a, self.positions) and torch.equal(c, a + SHIFT) and _same(a, b):
                return Place()
            along = a.ndim > 1 and a.shape[:2] == (1, ROWS) and d.shape[:2] == (1, FEWER)
            if along and _same(a, b) and _same(a[:, SHIFT:], c[:, :-SHIFT]) and _same(a[:, :FEWER], d):
                self.tables.setdefault(id(a), (layer, name, leaf))
                return Place(id(a))
        raise UserError(f"its layers are given {name!r}, which depends on more than a token's position")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


class Places(Movable):
    """What depends on positions in one pass over q rows; all layers of the pass are given the same."""

    def __init__(self, values: list[dict[str, Any]]) -> None:
        self.values = values  # keyword arguments, of every kind of layer
        self._causal: Tensor | None = None

    def on(self, device: torch.device) -> Places:
        """Return the same on a device."""
        return Places(moved(self.values, device))

    def causal(self, x: Tensor, past: int) -> Tensor:
        """Additive [1, 1, q, past + q] that hides what is ahead, for attention that hides nothing by itself."""
        q = x.shape[1]
        if self._causal is None or self._causal.shape[2:] != (q, past + q):
            full = torch.full((q, past + q), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device)
            self._causal = full.triu_(past + 1)[None, None]
        return self._causal


class Tables:
    """What a decoder computes of positions alone, such as cos and sin, for positions 0..length-1; grown when needed."""

    def __init__(self, probes: Probes, kinds: list[dict[str, Any]], context: int) -> None:
        self.own, self.context, self.kinds = probes.own, context, kinds
        self.where = probes.tables
        self.rows: dict[int, Tensor] = {}  # table -> [length, ..]
        self.length = 0
        if self.where:
            self._grow(min(context, AT_FIRST), probes.ids.device)

    def at(self, positions: Tensor, longest: int | None) -> Places:
        """Arguments at positions [1 or B, q]; longest: host-side bound on them, if known."""
        need = self.context if longest is None else longest + 1
        if self.rows and need > self.length:
            self._grow(min(self.context, max(need, 2 * self.length)), positions.device)
        taken: dict[int | None, Tensor] = {table: rows[positions] for table, rows in self.rows.items()}
        taken[None] = positions

        def pick(leaf: Any) -> Any:
            return taken[leaf.table] if isinstance(leaf, Place) else leaf

        return Places([mapped(kind, pick) for kind in self.kinds])

    @torch.inference_mode(False)
    def _grow(self, length: int, device: torch.device) -> None:
        parts: dict[int, list[Tensor]] = {table: [rows] for table, rows in self.rows.items()}
        for start in range(self.length, length, CHUNK):
            positions = torch.arange(start, min(start + CHUNK, length), device=device)[None]
            seen = self.own.record(torch.zeros_like(positions), positions)
            for table, (layer, name, leaf) in self.where.items():
                parts.setdefault(table, []).append(leaves(seen.calls[layer].given[name])[leaf][0].clone())
        self.rows = {table: torch.cat(found) for table, found in parts.items()}
        self.length = length

"""What followed the newest tokens in a datastore, and the tree of its most frequent beginnings (REST sec. 3).

All on the host: some dozen probes of the suffix array, then numpy over the retrieved continuations.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specbench_ss.methods.rest.datastore import SEPARATOR, Chunk, Datastore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Found:
    """Continuations of the longest suffix that occurs: rows [m, length] in lexicographic order; matched: its tokens.

    A continuation that ends early goes on with SEPARATOR.
    """

    rows: Rows
    matched: int


def retrieve(store: Datastore, ids: Sequence[int], span: int, shortest: int, most: int, length: int) -> Found | None:
    """At most `most` continuations a chunk of the longest suffix of ids, `span` to `shortest` tokens; None: no hit.

    Of more occurrences, evenly spaced ones of the suffix array: the first ones would all begin alike.
    """
    matched, hits = 0, list[Chunk]()
    for chunk in store.chunks:
        n = longest_match(chunk, ids, min(span, len(ids)), max(shortest, matched))
        if n > matched:
            matched, hits = n, []
        if n:
            hits.append(chunk)
    if not matched:
        return None
    rows = np.concatenate([_continuations(chunk, list(ids[-matched:]), most, length) for chunk in hits])
    if len(hits) > 1:
        rows = rows[np.lexsort(rows.T[::-1])]
    return Found(rows, matched)


def longest_match(chunk: Chunk, ids: Sequence[int], longest: int, shortest: int) -> int:
    """How many of the last ids occur in the chunk, between these bounds; 0 where not even the shortest does.

    What occurs, its endings occur too: so the length is found by bisection.
    """
    lo, hi = shortest - 1, longest
    while lo < hi:
        n = shortest if lo < shortest else (lo + hi + 1) // 2
        if _occurs(chunk, list(ids[-n:])):
            lo = n
        else:
            hi = n - 1
    return lo if lo >= shortest else 0


def _key(chunk: Chunk, n: int) -> Callable[[int], list[int]]:
    """The first n tokens of a suffix."""
    tokens = chunk.tokens

    def key(start: int) -> list[int]:
        found: list[int] = tokens[start : start + n].tolist()
        return found

    return key


def _occurs(chunk: Chunk, pattern: list[int]) -> bool:
    key = _key(chunk, len(pattern))
    at = bisect_left(chunk.suffixes, pattern, key=key)
    return at < len(chunk.suffixes) and key(chunk.suffixes[at]) == pattern


def _continuations(chunk: Chunk, pattern: list[int], most: int, length: int) -> Rows:
    """int32 [m, length], what follows the pattern where it occurs."""
    key = _key(chunk, len(pattern))
    lo = bisect_left(chunk.suffixes, pattern, key=key)
    hi = bisect_right(chunk.suffixes, pattern, lo=lo, key=key)
    m = min(most, hi - lo)
    starts = chunk.suffixes[lo + np.arange(m) * (hi - lo) // m].astype(np.int64) + len(pattern)
    at = starts[:, None] + np.arange(length)  # [m, length]
    rows: Rows = chunk.tokens[np.minimum(at, len(chunk.tokens) - 1)].astype(np.int32)
    rows[at >= len(chunk.tokens)] = SEPARATOR
    rows[np.logical_or.accumulate(rows == SEPARATOR, axis=1)] = SEPARATOR
    return rows


@dataclass(frozen=True, slots=True)
class Prefixes:
    """A tree of k prefixes under a root: tokens [k], parents [k] (0 = the root, i + 1 = prefix i), depths [k] from 1.

    visible bool [k, k]: prefix j is prefix i or a beginning of it. Shallow ones first, then in order of their tokens.
    """

    tokens: Rows
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    visible: NDArray[np.bool_]


def best_prefixes(rows: Rows, most: int) -> Prefixes:
    """The `most` prefixes that begin most of the rows [m, length]; of equally frequent ones the shorter, then smaller.

    A prefix begins at least as many rows as any that goes on from it, and comes first: the choice is a tree. Rows are
    in lexicographic order, so the rows of a prefix are neighbours: it is known by its length and the first of them.
    """
    m, length = rows.shape
    new = np.ones((m, length), bool)  # row r is the first with its prefix of d + 1 tokens
    np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1, out=new[1:])
    first = np.maximum.accumulate(np.where(new, np.arange(m)[:, None], 0), axis=0)  # [m, length]
    places = np.flatnonzero(new.T)  # d * m + r of every prefix
    counts = np.diff(places, append=m * length)
    real = rows.T.reshape(-1)[places] != SEPARATOR
    places, counts = places[real], counts[real]
    chosen = np.sort(places[np.argsort(-counts, kind="stable")[:most]])
    d, r = np.divmod(chosen, m)
    before = (d - 1) * m + first[r, d - 1]  # of depth 0: nothing
    parents = np.where(d > 0, np.searchsorted(chosen, before) + 1, 0)
    visible = (first[r[:, None], d] == r) & (d <= d[:, None])
    return Prefixes(rows[r, d], parents, d + 1, visible)

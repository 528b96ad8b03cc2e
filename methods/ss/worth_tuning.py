"""Which sizes and forms of the draft tree are worth measuring. Knows counts of nodes, no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NODES = (4, 6, 8, 12, 16, 24, 32, 48, 64)  # drafted, or kept: one step is about a third more
CANDIDATES = (1, 2, 3, 4, 6)
MOST_NODES = 128  # of a tree drafted whole: larger ones have never paid at batch 1


def worth_trying(
    trained: int, gamma: int, k: int, n_draft: int, n_keep: int, pruned: bool, chain: bool
) -> dict[str, Sequence[Any]]:
    """Values of the options of `ss` around a configuration, as `Decoder.tunable` gives them.

    trained: streams there are. gamma, k, n_draft, n_keep: as resolved. pruned: prune=on. chain: mode=chain, where
    there is no tree to be cut.
    """
    gammas = range(1, trained + 1)
    if chain:
        return {"gamma": gammas}
    full = _size(gamma, k)
    nodes = 1 + (min(n_draft, full) or full)
    found: dict[str, Sequence[Any]] = {
        "n_draft": [n for n in NODES if n < full] + [0] * (full <= MOST_NODES),
        "gamma": gammas,
        "k": [n for n in CANDIDATES if n_draft or _size(gamma, n) <= MOST_NODES],
    }
    if nodes > min(n_keep, max(NODES)):  # else pruning finds nothing to do
        found["prune"] = ("off", "on")
    if pruned:
        found["n_keep"] = [n for n in NODES if n < nodes]
    return found


def _size(gamma: int, k: int) -> int:
    """Drafted nodes of the whole tree."""
    return sum(k**g for g in range(1, gamma + 1))

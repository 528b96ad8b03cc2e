"""Which rows a step of SPACE has: a chain of tokens, and a group of masks behind each. Knows shapes, no tensor.

Row j of a group stands where the token j places on will stand, sees all that the token sees, itself included, and rows
1..j of its own group: so rows and groups are a tree, and positions and visibility follow from it.
"""

from __future__ import annotations

from functools import lru_cache

from specbench_ss.engine.tree import TreeShape, shape_of

MASKS = 5  # as published


@lru_cache(maxsize=64)
def rows_of(nodes: int, masks: int) -> TreeShape:
    """A chain of `nodes` tokens, then the group of each: node 0's masks, node 1's, ..."""
    chain = range(-1, nodes - 1)
    first = (nodes + g * masks for g in range(nodes))
    groups = ((g, *range(start, start + masks - 1)) for g, start in enumerate(first))
    return shape_of((*chain, *(parent for group in groups for parent in group)))

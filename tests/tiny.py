"""What tests ask of tiny models; the models are the conformance kit's."""

from __future__ import annotations

from collections.abc import Sequence

from specbench_ss.testing.tiny import ARCHITECTURES as ARCHITECTURES
from specbench_ss.testing.tiny import tiny_model as tiny_model


def paths(parents: Sequence[int]) -> list[list[int]]:
    """The path root..node of every node of a tree."""
    found = [[0]]
    for i, p in enumerate(parents[1:], start=1):
        found.append([*found[p], i])
    return found

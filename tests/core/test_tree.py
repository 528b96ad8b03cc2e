"""Draft trees made from lists, and what is wrong with those that are none."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from specbench_ss import DraftTree


def test_a_tree_of_lists_is_that_of_tensors() -> None:
    root = torch.tensor([3])
    made = DraftTree.of([root, 5, 9, 7], [-1, 0, 0, 1])
    assert made.tokens.tolist() == [3, 5, 9, 7] and made.tokens.dtype == torch.long
    for tokens in ([3, 5, 9, 7], torch.tensor([3, 5, 9, 7])):
        other = DraftTree.of(tokens, torch.tensor([-1, 0, 0, 1]))
        assert torch.equal(other.tokens, made.tokens) and other.shape == made.shape


@pytest.mark.parametrize(
    ("tokens", "parents", "said"),
    [
        ([], [], "a tree has at least its root"),
        ([3, 5], [-1], "a tree of 2 tokens, the root among them, has 1 parents"),
        ([3, 5], [0, 0], "node 0 must be the root, with parent -1"),
        ([3, 5], [-1, 1], "node 1 has parent 1: parents come before children"),
        (torch.tensor([[3, 5]]), [-1, 0], "tokens of a tree are whole numbers [n], not torch.int64 [1, 2]"),
        (torch.tensor([3.0]), [-1], "tokens of a tree are whole numbers [n], not torch.float32 [1]"),
    ],
)
def test_a_tree_that_is_none_is_named(tokens: Any, parents: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        DraftTree.of(tokens, parents)

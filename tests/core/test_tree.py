"""Draft trees made from lists, and what is wrong with those that are none."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from specbench_ss import DraftTree
from specbench_ss.engine.tree import DeviceTopology, copy_to_host


def test_a_tree_of_lists_is_that_of_tensors() -> None:
    root = torch.tensor([3])
    made = DraftTree.from_parents([root, 5, 9, 7], [-1, 0, 0, 1])
    assert made.tokens.tolist() == [3, 5, 9, 7] and made.tokens.dtype == torch.long
    for tokens in ([3, 5, 9, 7], torch.tensor([3, 5, 9, 7])):
        other = DraftTree.from_parents(tokens, torch.tensor([-1, 0, 0, 1]))
        assert torch.equal(other.tokens, made.tokens) and other.topology == made.topology


def test_a_chain_of_a_list_is_that_of_a_tensor() -> None:
    root = torch.tensor([3])
    for drafted in ([5, 9], (torch.tensor(5), torch.tensor([9])), torch.tensor([5, 9])):
        made = DraftTree.chain(root, drafted)
        assert made.tokens.tolist() == [3, 5, 9] and made.tokens.dtype == torch.long
        assert made.topology.parents == (-1, 0, 1)
    assert len(DraftTree.chain(root, [])) == 1
    with pytest.raises(TypeError, match="integer"):
        DraftTree.chain(root, [5.5])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("tokens", "parents", "stated"),
    [
        ([], [], "a tree has at least its root"),
        ([3, 5], [-1], "a tree of 2 tokens (with the root) has 1 parents"),
        ([3, 5], [0, 0], "node 0 must be the root, with parent -1"),
        ([3, 5], [-1, 1], "node 1 has parent 1: parents come before children"),
        (torch.tensor([[3, 5]]), [-1, 0], "tree tokens must be integers [n], not torch.int64 [1, 2]"),
        (torch.tensor([3.0]), [-1], "tree tokens must be integers [n], not torch.float32 [1]"),
    ],
)
def test_a_tree_that_is_none_is_named(tokens: Any, parents: list[int], stated: str) -> None:
    with pytest.raises(ValueError, match=re.escape(stated)):
        DraftTree.from_parents(tokens, parents)


def test_nodes_chosen_on_the_device_make_the_tree_that_nodes_chosen_on_the_host_make() -> None:
    tree = DraftTree.from_parents([4, 5, 6, 7, 8, 9], [-1, 0, 0, 1, 1, 2])
    keep = [0, 1, 2, 4]
    chosen, selected = tree.gather_nodes(torch.tensor(keep)), tree.subtree(keep)
    assert len(chosen) == 4 and chosen.topology.deepest == 2
    assert chosen.tokens.tolist() == selected.tokens.tolist() == [4, 5, 6, 8]
    assert chosen.parents().tolist() == selected.parents().tolist()
    assert all(torch.equal(a, b) for a, b in zip(chosen.visibility(), selected.visibility(), strict=True))
    assert chosen.topology.parents == selected.topology.parents and chosen.topology.depth == selected.topology.depth
    again = chosen.gather_nodes(torch.tensor([0, 1]))
    copy_to_host(again.topology)  # and with it what these were chosen from
    assert isinstance(chosen.topology, DeviceTopology) and not chosen.topology.pending_topologies()


def test_a_grown_tree_is_seen_through_its_parents_alone() -> None:
    parents = [0, 0, 1, 2, 3, 0, 5]
    tree = DraftTree.from_device_parents(torch.arange(7), torch.tensor(parents), 4, node_tags=torch.arange(7) * 10)
    same = DraftTree.from_parents(list(range(7)), [-1, *parents[1:]])
    assert all(torch.equal(a, b) for a, b in zip(tree.visibility(), same.visibility(), strict=True))
    rows = copy_to_host(tree.topology, tree.tokens)
    assert rows == [list(range(7))] and isinstance(tree.topology, DeviceTopology)
    assert tree.topology.node_tags == [0, 10, 20, 30, 40, 50, 60] and tree.topology.parents == same.topology.parents

"""Drafts from one distribution for each place behind the root, all known at once. Knows no drafter's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specbench_ss.engine.tree import DraftTree, indices
from specbench_ss.methods._shared.static_trees import best_tree, tree_of
from specbench_ss.methods._shared.tree_growth import draw

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_ss.engine.decoder import State
    from specbench_ss.methods._shared.own_words import OwnWords
    from specbench_ss.methods._shared.place_options import PlaceOptions

NODES = (7, 15, 23, 31, 48, 63)  # of trees, worth trying


def drafts(state: State, logits: Tensor, options: PlaceOptions, drafter: OwnWords, vocab: int) -> DraftTree:
    """What the options ask for of logits [places, draft vocabulary]; vocab: the target's words."""
    if options.mode == "tree":
        return best_nodes(state.root, logits, options, drafter)
    if options.sample == "on" and not state.sampling.greedy:
        return drawn_chain(state, logits, drafter, vocab)
    return DraftTree.chain(state.root, drafter.token_ids(logits.argmax(-1)))


def best_nodes(root: Tensor, logits: Tensor, options: PlaceOptions, drafter: OwnWords) -> DraftTree:
    """The nodes of the greatest path probability, places taken as independent: Medusa's tree, made anew each step.

    One transfer: the places' best probabilities.
    """
    k = min(options.k, logits.shape[-1])
    top = logits.topk(k, dim=-1)  # [places, k]
    probs = (top.values.float() - logits.logsumexp(-1, keepdim=True).float()).exp()
    tree = tree_of(best_tree(probs.tolist(), options.nodes), options.owner)
    at = indices([place * k + rank for place, rank in zip(tree.heads, tree.ranks, strict=True)], logits.device)
    return DraftTree(torch.cat((root, drafter.token_ids(top.indices.flatten()[at]))), tree.shape)


def drawn_chain(state: State, logits: Tensor, drafter: OwnWords, vocab: int) -> DraftTree:
    """A chain drawn from q, the places' distributions after the request's temperature and filters."""
    q, words = state.sampling.probs(logits), drafter.words
    drafted = drafter.token_ids(draw(q, state.rng)[:, 0])
    rows = q.new_zeros(len(q) + 1, vocab)  # of the last node nothing is drawn
    rows[:-1, slice(None) if words is None else words] = q
    return DraftTree.chain(state.root, drafted, rows)


def described(options: PlaceOptions, words: int) -> dict[str, Any]:
    """What is verified, for the record; words: of the draft vocabulary."""
    tree = {"nodes": options.nodes, "k": min(options.k, words)} if options.mode == "tree" else {}
    return {"mode": options.mode, **tree, "sample": options.sample}


def rows(options: PlaceOptions, places: int) -> int:
    """The chain or the tree, root included."""
    return 1 + (options.nodes if options.mode == "tree" else places)

"""Medusa-1: extra heads on the last hidden state draft a fixed sparse tree; the base is untouched. Lossless."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench_ss.decoder import Decoder, State
from specbench_ss.errors import UserError
from specbench_ss.methods.checkpoint import (
    check_base,
    drafter_folder,
    drafter_here,
    read_config,
    read_shapes,
    read_tensors,
)
from specbench_ss.methods.medusa.heads import MedusaHeads, heads_from_tensors
from specbench_ss.methods.medusa.trees import (
    PUBLISHED,
    Choice,
    MedusaTree,
    best_tree,
    check_tree,
    read_accuracies,
    read_nodes,
    read_tree,
    tree_of,
)
from specbench_ss.models import hash_weights
from specbench_ss.outline import Outline
from specbench_ss.target import FINAL, Target
from specbench_ss.tree import MOST_NODES, DraftTree

NODES = (4, 6, 8, 10, 15, 20, 31, 48, 63)  # of auto trees, worth trying; 63 is the published size
WEIGHT_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors")


@dataclass(frozen=True, slots=True)
class MedusaOptions:
    """Options of `medusa`."""

    weights: str = field(default="", metadata={"help": "folder or file with the heads; empty = those of the model"})
    tree: str = field(
        default="auto",
        metadata={"help": "auto (from the heads' measured accuracies, else published), published, or a JSON file"},
    )
    nodes: int = field(default=0, metadata={"help": "drafted nodes of the auto tree; 0 = as the heads' config says"})
    heads: int = field(default=0, metadata={"help": "use only this many heads; 0 = all"})


class Medusa(Decoder):
    """Head i reads the state that chose the root and predicts the token i + 1 places after the root."""

    name = "medusa"
    summary = "Medusa-1 heads on the frozen base, sparse tree"
    paper = "Cai et al. 2024, arXiv:2401.10774"
    Options = MedusaOptions  # type: ignore[assignment]

    def __init__(
        self,
        target: Target,
        options: MedusaOptions,
        heads: MedusaHeads,
        tree: MedusaTree,
        config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(target, options)
        self.config = config or {}  # what came with the heads
        check_tree(tree, heads.count, target.vocab_size)
        self.heads = heads.to(target.device, target.dtype).eval().requires_grad_(False)
        self.tree, self.depth = tree, tree.depth
        flat = [h * tree.width + r for h, r in zip(tree.heads, tree.ranks, strict=True)]
        self.gather = torch.tensor(flat, device=target.device)
        self.unembed = target.unembed

    @classmethod
    def check(cls, options: Any, base: Outline) -> None:
        """The heads' file and shapes, and the tree."""
        path = drafter_here(options.weights, cls.name, base)
        if path is None:
            return
        file, config = heads_file(path)
        with torch.device("meta"):
            heads = read_heads(file, base, read_shapes)
        check_tree(tree_of(cls.choices(options, config, heads.count)), heads.count, base.vocab_size)

    @classmethod
    def load(cls, target: Target, options: Any) -> Medusa:
        """Heads from the folder or file that the user named, or those that came with the model."""
        file, config = heads_file(drafter_folder(options.weights, cls.name, target))
        check_base(config, target, "medusa")
        heads = read_heads(file, target, read_tensors)
        return cls(target, options, heads, tree_of(cls.choices(options, config, heads.count)), config)

    @classmethod
    def examples(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Random heads on every kind of tree."""
        from specbench_ss.methods.medusa.examples import shapes

        return shapes(target)

    def variant(self, options: Any) -> Medusa:
        """The same heads on another tree."""
        tree = tree_of(self.choices(options, self.config, self.heads.count))
        other = type(self)(self.target, options, self.heads, tree, self.config)
        other.heads_hash = self.heads_hash
        return other

    def tunable(self) -> Mapping[str, Sequence[Any]]:
        """The size of the tree, where accuracies to build it from are known, and its depth."""
        if self.options.tree not in ("auto", "published"):
            return {}
        sizes = {"nodes": NODES} if self.options.tree == "auto" and read_accuracies(self.config) else {}
        return {**sizes, "heads": range(1, self.heads.count + 1)}

    @cached_property
    def heads_hash(self) -> str:
        """Of the heads' weights; large heads take a while."""
        return hash_weights(self.heads)

    @staticmethod
    def choices(options: MedusaOptions, config: dict[str, Any], count: int) -> list[Choice]:
        """The tree that the options ask for, no deeper than the `count` heads, or those of them that are used."""
        if not 0 <= options.heads <= count:
            raise UserError(f"medusa: heads must be 1 to {count}, or 0 for all, not {options.heads}")
        heads = options.heads or count
        if options.nodes < 0:
            raise UserError(f"medusa: nodes must be at least 1, or 0 for the heads' own, not {options.nodes}")
        if options.nodes > MOST_NODES:
            raise UserError(f"medusa: nodes must be at most {MOST_NODES}, not {options.nodes}")
        accuracies = read_accuracies(config) if options.tree == "auto" else []
        if accuracies:
            chosen = best_tree(accuracies[:heads], options.nodes or read_nodes(config))
        elif options.tree in ("auto", "published"):
            chosen = [c for c in PUBLISHED if len(c) <= heads]
        else:
            return read_tree(Path(options.tree), heads)
        return chosen

    def described(self) -> dict[str, Any]:
        """The tree as it is drafted, and the heads."""
        tree = [list(pair) for pair in zip(self.tree.shape.parents[1:], self.tree.ranks, strict=True)]
        return {
            "tree_nodes": len(self.tree.ranks),
            "depth": self.depth,
            "tree_hash": hashlib.sha256(json.dumps(tree).encode()).hexdigest()[:16],
            "heads_hash": self.heads_hash,
        }

    def max_rows(self) -> int:
        """The tree, root included."""
        return len(self.tree.shape.parents)

    def propose(self, state: State) -> DraftTree:
        """Top tokens of every head, placed on the tree."""
        logits = self.heads(state.taps[FINAL][0], self.unembed, self.depth)  # [n, 1, V]
        candidates = logits[:, 0].topk(self.tree.width).indices.flatten()  # [n * width]
        return DraftTree(torch.cat((state.root, candidates[self.gather])), self.tree.shape)


def heads_file(path: Path) -> tuple[Path, dict[str, Any]]:
    """The weight file of a heads' folder and its config; a file stands for itself, without config."""
    if not path.is_dir():
        return path, {}
    file = next((path / name for name in WEIGHT_FILES if (path / name).is_file()), None)
    if file is None:
        raise UserError(f"medusa: no weights in {path}; looked for {', '.join(WEIGHT_FILES)}")
    return file, read_config(path)


def read_heads(file: Path, base: Outline, read: Callable[[Path], dict[str, Tensor]]) -> MedusaHeads:
    """Heads that fit the base. Raises UserError that names the file."""
    tensors = read(file)
    try:
        return heads_from_tensors(tensors, base.hidden_size, base.vocab_size)
    except UserError as error:
        raise UserError(f"{error} ({file})") from error

"""Medusa-1: extra heads on the last hidden state draft a fixed sparse tree; the base is untouched. Lossless."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specbench_ss.engine.architectures import Outline
from specbench_ss.engine.decoder import Decoder, State
from specbench_ss.engine.target import FINAL, Output, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.verify import Verdict
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.fine_tuned import holds_model
from specbench_ss.methods._shared.fused_head import MOST_FUSED
from specbench_ss.methods._shared.heads_decoder import TreeHeads
from specbench_ss.methods._shared.lora import ADAPTER
from specbench_ss.methods._shared.static_trees import MedusaTree
from specbench_ss.methods.medusa.files import read_heads
from specbench_ss.methods.medusa.options import MedusaOptions

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_ss.methods._shared.heads_decoder import Read
    from specbench_ss.methods.medusa.heads import MedusaHeads


class Medusa(TreeHeads):
    """Head i reads the state that chose the root and predicts the token i + 1 places after the root."""

    name = "medusa"
    summary = "Medusa-1 heads on the frozen base, sparse tree"
    paper = "Cai et al. 2024, arXiv:2401.10774"
    Options = MedusaOptions

    def __init__(
        self,
        target: Target,
        options: MedusaOptions,
        heads: MedusaHeads,
        tree: MedusaTree,
        config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(target, options, heads, tree, config)
        flat = [h * tree.width + r for h, r in zip(tree.heads, tree.ranks, strict=True)]
        self.gather = torch.tensor(flat, device=target.device)
        self._ahead: Tensor | None = None  # [heads, V], what the last pass made for this draft; None = nothing

    @classmethod
    def read(cls, path: Path, base: Outline, read: Read) -> tuple[MedusaHeads, dict[str, Any]]:
        """In any published layout. Those inside or beside another backbone are for that: it must be the base."""
        heads, config, whole = read_heads(path, base, read, cls.name)
        if (whole or (path / ADAPTER).is_file() or holds_model(path)) and not cls.accepts_whole(path, base):
            raise UserError(
                f"{cls.name}: {path} has a backbone of its own: decode with medusa2, or with it as the --model"
            )
        return heads, config

    @classmethod
    def accepts_whole(cls, path: Path, base: Outline) -> bool:
        """Whether heads that came inside a whole model are for this base."""
        downloaded = f"models--{base.name.replace('/', '--')}"  # how the hub's cache calls its folder
        return downloaded in path.parts if base.folder is None else base.folder.resolve() == path.resolve()

    @classmethod
    def examples(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Random heads on every kind of tree."""
        from specbench_ss.methods.medusa.examples import shapes

        return shapes(cls, target)

    def begin(self, state: State) -> None:
        """Nothing was drafted yet."""
        self._ahead = None

    def propose(self, state: State) -> DraftTree:
        """Top tokens of every head, placed on the tree."""
        if self._ahead is None:
            (tokens,) = self.target.called(self, self._drafted, state.root, state.taps[FINAL][0])
        else:
            tokens = self._chosen(state.root, self._ahead)
        return DraftTree(tokens, self.tree.shape)

    def _drafted(self, root: Tensor, final: Tensor) -> tuple[Tensor]:
        """The root [1] and the state that chose it [1, h] -> the tree's tokens [n]."""
        return (self._chosen(root, self.heads(final, self.target.logits, self.depth)[:, 0]),)

    def _chosen(self, root: Tensor, logits: Tensor) -> Tensor:
        """The root [1] and logits [heads, V] -> the tree's tokens [n]."""
        candidates = logits.topk(self.tree.width).indices.flatten()  # [heads * width]
        return torch.cat((root, candidates[self.gather]))

    def forward(self, state: State, tree: DraftTree) -> Output:
        """Verify; heads that share the LM head draft for every node in the same product, where rows are few."""
        if self.heads.unembed is not None or len(tree) * (1 + self.depth) > MOST_FUSED:
            return super().forward(state, tree)
        return self.target.forward_tree(tree, state.cache, self.taps, self._drafting)

    def _drafting(self, final: Tensor) -> Tensor:
        """What the heads make of final states [n, h]: rows for the LM head, [heads * n, h]."""
        states: Tensor = self.heads.states(final, self.depth)
        return states.flatten(0, 1)

    def observe(self, state: State, verdict: Verdict, output: Output) -> None:
        """Keep the draft's logits at the last accepted node, where the pass made them."""
        super().observe(state, verdict, output)
        made = output.extra
        self._ahead = None if made is None else made.unflatten(0, (self.depth, -1))[:, verdict.path[-1]]

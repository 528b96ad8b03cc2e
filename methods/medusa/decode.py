"""Medusa-1 and Medusa-2: extra heads on the last hidden state draft a fixed sparse tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.target import FINAL, Output, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.errors import UserError
from specbench_ss.methods._shared import fine_tuned
from specbench_ss.methods._shared.drafting import Read
from specbench_ss.methods._shared.heads import MOST_FUSED, HeadsOptions, MedusaTree, TreeHeads
from specbench_ss.methods.medusa.heads import MedusaHeads, read_heads
from specbench_ss.models.checkpoint import drafter_folder, drafter_here
from specbench_ss.options import option

ADAPTER = fine_tuned.ADAPTER


@dataclass(frozen=True, slots=True)
class MedusaOptions(HeadsOptions):
    """Options of `medusa` and `medusa2`."""


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
    def read(cls, options: Any, path: Path, base: ModelInfo, read: Read) -> tuple[MedusaHeads, dict[str, Any]]:
        """In any published layout. Those inside or beside another backbone are for that: it must be the base."""
        heads, config, whole = read_heads(path, base, read, cls.name)
        if (whole or (path / ADAPTER).is_file() or fine_tuned.holds_model(path)) and not cls.accepts_whole(path, base):
            raise UserError(
                f"{cls.name}: {path} has a backbone of its own: decode with medusa2, or with it as the --model"
            )
        return heads, config

    @classmethod
    def accepts_whole(cls, path: Path, base: ModelInfo) -> bool:
        """Whether heads that came inside a whole model are for this base."""
        downloaded = f"models--{base.name.replace('/', '--')}"  # how the hub's cache calls its folder
        return downloaded in path.parts if base.folder is None else base.folder.resolve() == path.resolve()

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Return random heads on trees by accuracy and as published, every rule, the base's LM head and their own."""

        def make(heads: int = 3, own: bool = True, layers: int = 1, **options: Any) -> Callable[[], Decoder]:
            return lambda: cls.random(target, heads, own, cls.Options(**options) if options else None, layers)

        return {
            "auto": make(tree="auto"),
            "published": make(),
            "shared-head": make(4, own=False, layers=2),
            "few-nodes": make(2, own=False, nodes=2),
            "one-head": make(1),
            "typical": make(accept="typical"),
            "nucleus": make(accept="nucleus"),
        }

    @classmethod
    def random(
        cls, target: Target, heads: int = 3, own_unembed: bool = True, options: Any = None, layers: int = 1
    ) -> Self:
        """Return random heads, as `example` has them."""
        module = MedusaHeads(heads, layers, target.hidden_size, target.vocab_size, own_unembed)
        return cls.example(target, module, {}, options)

    def on_prefill(self, state: DecodeState) -> None:
        """Nothing was drafted yet."""
        self._ahead = None

    def propose(self, state: DecodeState) -> DraftTree:
        """Top tokens of every head, placed on the tree."""
        if self._ahead is None:
            (tokens,) = self.target.run_graphed(self, self._drafted, state.root, state.hidden_states[FINAL][0])
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

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        """Verify; heads that share the LM head draft for every node in the same product, where rows are few."""
        if self.heads.unembed is not None or len(tree) * (1 + self.depth) > MOST_FUSED:
            return super().forward(state, tree)
        return self.target.forward_tree(tree, state.cache, self.aux_hidden_state_layers, self._drafting)

    def _drafting(self, final: Tensor) -> Tensor:
        """What the heads make of final states [n, h]: rows for the LM head, [heads * n, h]."""
        states: Tensor = self.heads.states(final, self.depth)
        return states.flatten(0, 1)

    def update(self, state: DecodeState, verdict: VerifyResult, output: Output) -> None:
        """Keep the draft's logits at the last accepted node, where the pass made them."""
        super().update(state, verdict, output)
        made = output.extra
        self._ahead = None if made is None else made.unflatten(0, (self.depth, -1))[:, verdict.path[-1]]


NAME = "medusa2"


@dataclass(frozen=True, slots=True)
class Medusa2AROptions:
    """Options of `medusa2-ar`: which model it is."""

    weights: str = option("", "Folder as for `medusa2`. Empty: the one that came with the model.")


class Medusa2(fine_tuned.FineTunedDecoder, Medusa):
    """Medusa in the backbone that was trained with the heads."""

    name = NAME
    summary = "Medusa-2: heads and backbone trained together; the model itself changes"
    own_reference = "medusa2-ar"
    model_options = Medusa2AROptions

    @classmethod
    def accepts_whole(cls, path: Path, base: ModelInfo) -> bool:
        """It decodes with that model."""
        return True

    @classmethod
    def outline_of(cls, base: ModelInfo, path: Path) -> ModelInfo:
        """The backbone by its configuration. Raises UserError where a folder holds none, or one of other words."""
        if (path / ADAPTER).is_file():
            fine_tuned.check_lora(path, NAME)
            return base
        if not fine_tuned.holds_model(path):
            raise UserError(f"{NAME}: {path} holds no backbone: neither {ADAPTER} nor the weights of a whole model")
        own = fine_tuned.outline_beside(path, base)
        if own.vocab_size != base.vocab_size:
            sizes = f"{own.vocab_size} words, {base.name!r} has {base.vocab_size}"
            raise UserError(f"{NAME}: the model in {path} has {sizes}")
        return own

    @classmethod
    def model_of(cls, target: Target, path: Path) -> Target:
        """The backbone; what does not fit raises UserError as in `outline_of`."""
        cls.outline_of(target, path)
        return (
            fine_tuned.merged_target(target, path, NAME)
            if (path / ADAPTER).is_file()
            else fine_tuned.target_beside(target, path)
        )

    @classmethod
    def check_own_model(cls, options: Any, base: ModelInfo) -> None:
        path = drafter_here(options.weights, NAME, base)
        if path is not None:
            cls.outline_of(base, path)

    @classmethod
    def own_model(cls, target: Target, options: Any) -> Target:
        return cls.model_of(target, drafter_folder(options.weights, NAME, target))

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        return super().test_instances(fine_tuned.fine_tuned(target))


class Medusa2Autoregressive(fine_tuned.FineTunedAutoregressive):
    """The backbone of a Medusa-2 checkpoint, one token a step."""

    name = "medusa2-ar"
    summary = "autoregressive decoding of the backbone of medusa2: its reference"
    Options = Medusa2AROptions
    of = Medusa2

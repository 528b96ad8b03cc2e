"""Medusa-1 and Medusa-2: extra heads on the last hidden state, with a static sparse tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.forward import ForwardPass
from specbench_ss.engine.target import FINAL, Output, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.errors import UserError
from specbench_ss.methods._shared import fine_tuned
from specbench_ss.methods._shared.drafting import Read
from specbench_ss.methods._shared.heads import MOST_FUSED, HeadsOptions, StaticTree, TreeHeads
from specbench_ss.methods._shared.target_copies import Copies
from specbench_ss.methods.medusa.heads import HEADS_FILES, MedusaHeads, read_heads, vllm_config_of, vllm_tensors
from specbench_ss.models.checkpoint import own_fields, write_tensors
from specbench_ss.options import option

ADAPTER = fine_tuned.ADAPTER


@dataclass(frozen=True, slots=True)
class MedusaOptions(HeadsOptions):
    """Options of `medusa` and `medusa2`."""


class Medusa(TreeHeads):
    """Head i predicts the token i + 1 positions after the root from the last hidden state before the root."""

    name = "medusa"
    summary = "Medusa-1 heads on the frozen base, sparse tree"
    paper = "Cai et al. 2024, arXiv:2401.10774"
    Options = MedusaOptions
    can_export: ClassVar[bool] = True
    weight_names = HEADS_FILES
    target_copies: ClassVar[Copies] = {r"lm_head\.weight": "LM head"}  # of vLLM's layout
    changes_model: ClassVar[bool] = False  # decodes with a backbone in the folder

    def __init__(
        self,
        target: Target,
        options: HeadsOptions,
        drafter: MedusaHeads,
        config: dict[str, Any] | None = None,
        tree: StaticTree | None = None,
    ) -> None:
        super().__init__(target, options, drafter, config, tree)
        flat = [h * self.tree.width + r for h, r in zip(self.tree.heads, self.tree.ranks, strict=True)]
        self.gather = torch.tensor(flat, device=target.device)
        self._next_logits: Tensor | None = None  # [heads, V], computed in the last pass for this draft

    @classmethod
    def read(cls, options: Any, path: Path, base: ModelInfo, read: Read) -> tuple[MedusaHeads, dict[str, Any]]:
        """Read any published layout. Raise UserError for heads whose folder has a backbone other than the base."""
        heads, config, backbone = read_heads(path, base, read, cls.name)
        if not cls.changes_model and (backbone or (path / ADAPTER).is_file()) and not is_folder_of(path, base):
            raise UserError(f"{cls.name}: {path} has its own backbone; use medusa2, or pass it as --model")
        return heads, config

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Return random heads on auto and published trees, with every rule, and every form of LM head."""

        def build(heads: int = 3, own_unembed: bool = True, layers: int = 1, **options: Any) -> Callable[[], Decoder]:
            return lambda: cls.random(target, heads, own_unembed, cls.Options(**options) if options else None, layers)

        part = str(target.vocab_size * 3 // 4)
        return {
            "auto": build(tree="auto"),
            "published": build(),
            "shared-head": build(4, own_unembed=False, layers=2),
            "few-nodes": build(2, own_unembed=False, nodes=2),
            "one-head": build(1),
            "typical": build(accept="typical"),
            "nucleus": build(accept="nucleus"),
            "draft-vocabulary": build(3, own_unembed=False, nodes=4, draft_vocab=part),
            "own-heads-draft-vocabulary": build(2, nodes=4, draft_vocab=part),
        }

    @classmethod
    def random(
        cls, target: Target, heads: int = 3, own_unembed: bool = True, options: Any = None, layers: int = 1
    ) -> Self:
        """Return random heads by `example`."""
        module = MedusaHeads(heads, layers, target.hidden_size, target.vocab_size, own_unembed)
        return cls.example(target, module, {}, options)

    def export(self, folder: Path) -> dict[str, Any]:
        if self.drafter.unembed is None and getattr(self.target.family.head, "bias", None) is not None:
            raise UserError(f"{self.name}: the LM head has a bias, which vLLM drops; train heads with --own-unembed")
        config = {**vllm_config_of(self.drafter, self.target), **own_fields(self.config)}
        write_tensors(folder, vllm_tensors(self.drafter, self.target.unembed), config)
        return {"method": "medusa", "num_speculative_tokens": self.drafter.count}

    def on_prefill(self, state: DecodeState) -> None:
        """Drop logits of the last request."""
        self._next_logits = None

    def propose(self, state: DecodeState) -> DraftTree:
        """Fill the tree with the top tokens of every head."""
        if self._next_logits is None:
            (tokens,) = self.target.run_pass((self,), self._draft, None, (state.root, state.hidden_states[FINAL][0]))
        else:
            tokens = self._fill_tree(state.root, self._next_logits)
        return DraftTree(tokens, self.tree.topology)

    def _draft(self, _: ForwardPass, root: Tensor, final: Tensor) -> tuple[Tensor]:
        """Return the tree's tokens [n] for the root [1] and the state before it [1, h]."""
        return (self._fill_tree(root, self.drafter(final, self.lm_head, self.depth, self.head_rows)[:, 0]),)

    def _fill_tree(self, root: Tensor, logits: Tensor) -> Tensor:
        """Return the tree's tokens [n] for the root [1] and logits [heads, draft vocabulary]."""
        candidates = logits.topk(self.tree.width).indices.flatten()  # [heads * width]
        return torch.cat((root, self.vocabulary.token_ids(candidates[self.gather])))

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        """Verify; for few tokens, heads that share the whole LM head compute their logits in the same matmul."""
        if self.drafter.unembed is not None or self.head_rows or len(tree) * (1 + self.depth) > MOST_FUSED:
            return super().forward(state, tree)
        return self.target.forward_tree(tree, state.cache, self.aux_hidden_state_layers, self._head_states)

    def _head_states(self, final: Tensor) -> Tensor:
        """Return the heads' inputs to the LM head [heads * n, h] for final states [n, h]."""
        states: Tensor = self.drafter.states(final, self.depth)
        return states.flatten(0, 1)

    def update(self, state: DecodeState, result: VerifyResult, output: Output) -> None:
        """Keep the heads' logits at the last accepted node if the pass computed them."""
        super().update(state, result, output)
        logits = output.extra
        self._next_logits = None if logits is None else logits.unflatten(0, (self.depth, -1))[:, result.path[-1]]


def is_folder_of(path: Path, base: ModelInfo) -> bool:
    """Return True if a folder with heads inside a whole model is the base's own."""
    downloaded = f"models--{base.name.replace('/', '--')}"  # folder name in the hub's cache
    return downloaded in path.parts if base.folder is None else base.folder.resolve() == path.resolve()


NAME = "medusa2"


@dataclass(frozen=True, slots=True)
class Medusa2AROptions:
    """Options of `medusa2-ar`."""

    weights: str = option("", "Folder as for `medusa2`. Empty: the one bundled with the model.")


class Medusa2(fine_tuned.FineTunedDecoder, Medusa):
    """Medusa-2: heads with the backbone that was trained with them."""

    name = NAME
    summary = "Medusa-2: heads and backbone trained together; the model itself changes"
    baseline_name = "medusa2-ar"
    baseline_options = Medusa2AROptions
    can_export = False
    target_copies = {}
    changes_model = True

    @classmethod
    def drafted_model_info(cls, base: ModelInfo, path: Path) -> ModelInfo:
        """Return the configuration of the backbone. Raise UserError if there is none or its vocabulary differs."""
        if (path / ADAPTER).is_file():
            fine_tuned.check_lora(path, NAME)
            return base
        if not fine_tuned.has_model_files(path):
            raise UserError(f"{NAME}: {path} has no backbone: neither {ADAPTER} nor the weights of a whole model")
        backbone = fine_tuned.read_model_info(path, base)
        if backbone.vocab_size != base.vocab_size:
            sizes = f"{backbone.vocab_size} words, {base.name!r} has {base.vocab_size}"
            raise UserError(f"{NAME}: the model in {path} has {sizes}")
        return backbone

    @classmethod
    def drafted_model(cls, target: Target, path: Path) -> Target:
        """Return the backbone. Raise UserError as `drafted_model_info` does."""
        cls.drafted_model_info(target, path)
        return (
            fine_tuned.merged_target(target, path, NAME)
            if (path / ADAPTER).is_file()
            else fine_tuned.load_target_like(target, path)
        )

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        return super().test_instances(fine_tuned.fine_tuned(target))


class Medusa2Autoregressive(fine_tuned.FineTunedAutoregressive):
    """Autoregressive decoding with the backbone of a Medusa-2 checkpoint."""

    name = "medusa2-ar"
    summary = "autoregressive decoding of the backbone of medusa2: its reference"
    Options = Medusa2AROptions
    method = Medusa2

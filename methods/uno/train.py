"""`ssbench train uno`: a LoRA that drafts in rows of noise (UNO, arXiv:2609.04010, sec. 2.5 of its training).

Blocks start at random anchors of the answers. The rows of a block hold noise, at the positions behind the anchor, and
attend to all true tokens up to the anchor and the noise before them, as in decoding; the true rows are the frozen
base's. The published training instead tiles each text with blocks of growing size, in which some tokens stay true.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Le
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specbench_ss.engine.kv_cache import PrefixCache
from specbench_ss.engine.target import Target
from specbench_ss.methods._shared.fine_tuned import ADAPTER, ADAPTER_CONFIG, DOWN, PREFIX, UP
from specbench_ss.methods.uno.lora import (
    MOST_BLOCK,
    RowLora,
    gated_blocks,
    new_lora,
    noise_table,
    noise_tokens,
)
from specbench_ss.models.checkpoint import public_name, write_config
from specbench_ss.options import Bounded, option
from specbench_ss.storage import ordinary_mode
from specbench_ss.training.batch import BaseStates, Batch
from specbench_ss.training.losses import MAX_LOGITS, LossKind, head_sums, loss_option, mean_loss
from specbench_ss.training.masks import additive, draft_positions, draft_visibility
from specbench_ss.training.trainer import DrafterTrainer


@dataclass(frozen=True, slots=True)
class UNOTraining(Bounded):
    """Options of `ssbench train uno`."""

    owner: ClassVar[str] = "uno"
    block: Annotated[int, Ge(2), Le(MOST_BLOCK)] = option(
        5, "Drafted tokens per step: the target's own, and one for each row of noise."
    )
    rank: Annotated[int, Ge(1), Le(1 << 14)] = option(16, "Rank of the LoRA.")
    scale: Annotated[float, Gt(0)] = option(16.0, "Factor of the LoRA, alpha / rank.")
    loss: LossKind = loss_option("tv")


class UNOTrainer(DrafterTrainer):
    """Trainer of UNO's LoRA on the frozen base."""

    name = "uno"
    summary = "UNO's LoRA, which drafts in rows of noise"
    method = "uno"
    Options = UNOTraining
    lr = 1e-4
    kv_from = 0
    module: RowLora

    def __init__(self, target: Target, options: Any = None, lr: float | None = None) -> None:
        target.require_layer_access(self.method)
        super().__init__(target, options, lr)
        self.ahead = self.options.block - 1
        self.module = new_lora(target, self.options.rank, self.options.scale).to(target.device)
        self.blocks = gated_blocks(target, self.module, first=0, trained=True)
        self.noise = noise_table(target.vocab_size, self.ahead, target.device)
        self.config = {"block": self.options.block}

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the mean loss over the rows of noise, and their accuracies; logits are of few anchors at once."""
        at, labels, g = batch.anchors.at, self.labels(batch), self.ahead
        anchors = max(1, MAX_LOGITS // (len(at) * g * self.target.vocab_size))
        tensors = self.final_states(states, batch.ids, at), states.ahead(at, g), labels
        parts = list(zip(*(tensor.split(anchors, 1) for tensor in tensors), strict=True))
        run: Any = partial(checkpoint, self._sums, use_reentrant=False) if len(parts) > 1 else self._sums
        losses, correct = (torch.stack(sums).sum(0) for sums in zip(*(run(*part) for part in parts), strict=True))
        return mean_loss((losses, correct), self.labels(batch.global_batch), [1 / g] * g)

    def _sums(self, x: Tensor, final: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return `head_sums` of states x and the base's states [B, a, block - 1, h] for the same tokens."""
        teacher = None
        if self.options.loss != "ce":
            with torch.no_grad():
                teacher = self.target.logits(final)
        return head_sums(self.target.logits(x), labels, teacher, self.options.loss)

    def final_states(self, states: BaseStates, ids: Tensor, at: Tensor) -> Tensor:
        """Return normed states [B, a, block - 1, h] of the rows of noise behind the anchors at [B, a]."""
        target, g, documents = self.target, self.ahead, states.documents
        places = at if documents is None else documents.position_ids.gather(1, at)
        steps = torch.arange(1, g + 1, device=at.device)
        positions = draft_positions(places, steps, target.context_length)  # [B, a * g]
        noise = noise_tokens(self.noise, places, ids.gather(1, at)).flatten(1)
        x = target.embed(noise, positions)
        cache, rotary, t = PrefixCache(states.kv), target.rotary(positions), ids.shape[1]
        windows = {block.window for block in self.blocks}
        masks = {w: additive(draft_visibility(at, steps, t, documents, w), x.dtype) for w in windows}
        for block in self.blocks:
            x = block(x, cache, masks[block.window], rotary)
        final: Tensor = target.family.norm(x).unflatten(1, (at.shape[1], g))
        return final

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """Write the LoRA as peft does, and config.json."""
        lora, rank = self.module, self.options.rank
        tensors = {}
        for name, down, up in zip(lora.names, lora.down, lora.up, strict=True):
            for key, value in ((DOWN, down), (UP, up)):
                tensors[PREFIX + name + key] = value.detach().to("cpu", torch.float16).contiguous()
        save_file(tensors, folder / ADAPTER)
        ordinary_mode(folder)
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": lora.scale * rank, "bias": "none",
            "target_modules": sorted({name.rpartition(".")[2] for name in lora.names}),
            "base_model_name_or_path": public_name(self.target), "inference_mode": True,
        }  # fmt: skip
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        write_config(folder, {**self.config, **about})

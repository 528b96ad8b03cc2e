"""`ssbench train draft`: a small model with the target's tokenizer.

It is trained on text, or distilled, by default by KL divergence, from the target's next-token distribution at answer
tokens (Hinton et al. 2015; DistillSpec, Zhou et al. 2024, with forward KL).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from torch import Tensor

from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.fine_tuned import lora_parameters, with_lora
from specbench_ss.methods._shared.small_llama import new_llama
from specbench_ss.options import Bounded, option
from specbench_ss.storage import ordinary_mode
from specbench_ss.training.batch import BaseStates, Batch
from specbench_ss.training.losses import distribution_losses, weighted_loss
from specbench_ss.training.trainer import DrafterTrainer, checkpointing_option


@dataclass(frozen=True, slots=True)
class DraftOptions(Bounded):
    """Options of `ssbench train draft`."""

    owner: ClassVar[str] = "draft"
    layers: Annotated[int, Ge(1), Le(128)] = option(2, "Number of decoder layers.")
    hidden: Annotated[int, Ge(1), Le(1 << 15)] = option(256, "Hidden size.")
    n_heads: Annotated[int, Ge(0), Le(1 << 12)] = option(0, "Number of attention heads. 0: heads of 64 dimensions.")
    ffn: Annotated[int, Ge(0), Le(1 << 17)] = option(0, "Width of the MLP. 0: 8/3 of the hidden size.")
    gamma: Annotated[int, Ge(1), Le(64)] = option(4, "Draft length of the estimated mean acceptance length.")
    distill: bool = option(
        False, "Train on the target's distributions and the text, or on the text alone.", "--distill/--from-scratch"
    )
    distill_share: Annotated[float, Gt(0), Le(1)] = option(
        0.9, "With --distill: fraction of the distillation loss in the total."
    )
    distill_loss: Literal["kl", "tv", "lk_alpha", "lk_lambda"] = option(
        "kl", "With --distill: loss against the target's distribution, as of other trainers' --loss."
    )
    prompt_weight: Annotated[float, Ge(0), Le(1)] = option(
        0.2, "Loss weight of prompt tokens relative to answer tokens."
    )
    gradient_checkpointing: bool = checkpointing_option()

    def check_together(self) -> None:
        """Raise UserError if the heads do not divide the hidden size."""
        if self.hidden % self.attention_heads or (self.hidden // self.attention_heads) % 2:
            raise UserError(f"draft: hidden {self.hidden} cannot be divided into {self.attention_heads} even heads")

    @property
    def attention_heads(self) -> int:
        """Return the number of heads."""
        return self.n_heads or max(1, self.hidden // 64)


def new_draft(target: Target, options: DraftOptions) -> Any:
    """Return an untrained float32 Llama with the target's vocabulary and special ids."""
    c, heads = target.config, options.attention_heads
    special = {"bos": c.bos_token_id, "eos": c.eos_token_id, "pad": c.pad_token_id}
    width = options.ffn or -(-options.hidden * 8 // 3 // 32) * 32
    model = new_llama(
        options.hidden, options.layers, heads, heads, width, target.vocab_size, target.context_length, special
    )
    model.set_attn_implementation("sdpa")
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


class DraftTrainer(DrafterTrainer):
    """Trainer of a small Llama on text, optionally with distillation from the target.

    All positions report the same accuracy, since each of a draft model's predictions is of a next token.
    """

    name = "draft"
    summary = "a small model for two-model speculative decoding, from scratch or distilled from the target"
    method = "sd"
    Options = DraftOptions
    lr = 1e-3
    module: Any

    def __init__(self, target: Target, options: Any = None, lr: float | None = None) -> None:
        super().__init__(target, options, lr)
        self.ahead, self.needs_base = self.options.gamma, self.options.distill
        self.module = new_draft(target, self.options)

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return weighted cross-entropy over next tokens plus the distillation loss at answer tokens."""
        logits = self._logits(batch)[:, :-1]  # [B, T - 1, V]
        answer, answers = _answered(batch), _answered(batch.global_batch).sum().clamp_min(1)
        text = weighted_loss(logits, batch.ids[:, 1:], self._weights(batch), self._weights(batch.global_batch))
        right = (logits.detach().argmax(-1) == batch.ids[:, 1:])[answer].sum() / answers
        share = self.options.distill_share if self.options.distill else 0.0
        loss = (1 - share) * text
        if share:
            loss = loss + share * self._divergence(logits[answer], states.final[:, :-1][answer]) / answers
        return loss, right.expand(self.ahead)

    def count_positions(self, batch: Batch) -> int:
        """Return the number of next tokens with a loss."""
        return int((self._weights(batch) > 0).sum())

    def _logits(self, batch: Batch) -> Tensor:
        d = batch.documents
        if d is None:
            out = self.module(input_ids=batch.ids, use_cache=False)
        else:
            mask = d.masks((None,), next(self.module.parameters()).dtype)[None]
            out = self.module(input_ids=batch.ids, attention_mask=mask, position_ids=d.position_ids, use_cache=False)
        logits: Tensor = out.logits
        return logits

    def _weights(self, batch: Batch) -> Tensor:
        """Return the loss weights of next tokens, [B, T - 1]."""
        weights = torch.where(_answered(batch), 1.0, self.options.prompt_weight)
        if batch.documents is not None:
            numbers = batch.documents.document_ids
            weights = weights * ((numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, 1:] >= 0))
        return weights

    def _divergence(self, logits: Tensor, final: Tensor) -> Tensor:
        """Return the distillation loss, summed over positions [n]: logits [n, V], the target's states [n, h]."""
        with torch.no_grad():
            teacher = F.log_softmax(self.target.logits(final).float(), -1)
        student, kind = F.log_softmax(logits.float(), -1), self.options.distill_loss
        if kind == "kl":  # in nats, with the entropy of p
            return F.kl_div(student, teacher, log_target=True, reduction="sum")
        return distribution_losses(student, teacher.exp(), kind).sum()

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """Write model and tokenizer in transformers' format; training info is in the model's config."""
        model: Any = copy.deepcopy(self.module).to("cpu", torch.float16)
        model.config.ssbench = about
        model.save_pretrained(folder)
        ordinary_mode(folder)
        self.target.tokenizer.save_pretrained(folder)


class TunedDraft(DraftTrainer):
    """Trainer of a LoRA in an existing draft, whose weights stay unchanged, on answer tokens only."""

    name = "draft-apps"

    def __init__(self, draft: Target, rank: int, lr: float) -> None:
        self.options, self.lr = DraftOptions(gamma=1, prompt_weight=0.0), lr
        self.ahead, self.needs_base = 1, False
        self.tuned = with_lora(draft, rank)
        self.module = self.tuned.model

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the parameter group of the LoRA."""
        return [{"params": lora_parameters(self.module), "lr": self.lr}]


def _answered(batch: Batch) -> Tensor:
    """Return a mask of answer tokens among next tokens, bool [B, T - 1]."""
    return batch.labels[:, :-1, 0] != -100

"""`ssbench train draft`: a small model of the target's tokenizer.

From text alone, or distilled: Kullback-Leibler divergence from the target's next-token distribution where the target
is to answer (Hinton et al. 2015; DistillSpec, Zhou et al. 2024, with forward KL).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

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
from specbench_ss.training.losses import weighted_loss
from specbench_ss.training.trainer import DrafterTrainer


@dataclass(frozen=True, slots=True)
class DraftOptions(Bounded):
    """Options of `ssbench train draft`."""

    owner: ClassVar[str] = "draft"
    layers: Annotated[int, Ge(1)] = option(2, "Number of decoder layers.")
    hidden: Annotated[int, Ge(1)] = option(256, "Hidden size.")
    n_heads: Annotated[int, Ge(0)] = option(0, "Number of attention heads. 0: as many as have 64 dimensions each.")
    ffn: Annotated[int, Ge(0)] = option(0, "Width of the MLP. 0: 8/3 of the hidden size.")
    gamma: Annotated[int, Ge(1)] = option(4, "Length of a draft for which tau is estimated while training.")
    distill: bool = field(
        default=False,
        metadata={
            "help": "Learn the target's distributions beside the text, or the text alone.",
            "flag": "--distill/--from-scratch",
        },
    )
    distill_share: Annotated[float, Gt(0), Le(1)] = option(
        0.9, "With --distill: share of the loss that the target's distributions have."
    )
    prompt_weight: Annotated[float, Ge(0), Le(1)] = option(
        0.2, "Weight of a prompt's tokens in the loss, where an answer's tokens have 1."
    )
    gradient_checkpointing: bool = field(
        default=False,
        metadata={
            "help": "Save memory by computing activations a second time in the backward pass.",
            "flag": "--gradient-checkpointing",
        },
    )

    def check_together(self) -> None:
        """Raise UserError where the heads do not divide the hidden size."""
        if self.hidden % self.attention_heads or (self.hidden // self.attention_heads) % 2:
            raise UserError(f"draft: hidden {self.hidden} cannot be divided into {self.attention_heads} even heads")

    @property
    def attention_heads(self) -> int:
        """Number of heads."""
        return self.n_heads or max(1, self.hidden // 64)


def new_draft(target: Target, options: DraftOptions) -> Any:
    """Return a fresh Llama over the target's vocabulary, in float32, with the target's special ids."""
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
    """A small Llama, trained from text alone or beside that from the target's distributions.

    The shares of right guesses are all the same one: a draft's j-th guess is a next token as its first is.
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
        """Return weighted cross-entropy over each text's next tokens, and KL from the target where it answers."""
        logits = self._logits(batch)[:, :-1]  # [B, T - 1, V]
        answer, answers = _answered(batch), _answered(batch.whole).sum().clamp_min(1)
        text = weighted_loss(logits, batch.ids[:, 1:], self._weights(batch), self._weights(batch.whole))
        right = (logits.detach().argmax(-1) == batch.ids[:, 1:])[answer].sum() / answers
        share = self.options.distill_share if self.options.distill else 0.0
        loss = (1 - share) * text
        if share:
            loss = loss + share * self._divergence(logits[answer], states.final[:, :-1][answer]) / answers
        return loss, right.expand(self.ahead)

    def _logits(self, batch: Batch) -> Tensor:
        d = batch.documents
        if d is None:
            out = self.module(input_ids=batch.ids, use_cache=False)
        else:
            mask = d.masks((None,), next(self.module.parameters()).dtype)[None]
            out = self.module(input_ids=batch.ids, attention_mask=mask, position_ids=d.places, use_cache=False)
        logits: Tensor = out.logits
        return logits

    def _weights(self, batch: Batch) -> Tensor:
        """Return the weight of the token that follows each, [B, T - 1]."""
        weights = torch.where(_answered(batch), 1.0, self.options.prompt_weight)
        if batch.documents is not None:
            numbers = batch.documents.numbers
            weights = weights * ((numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, 1:] >= 0))
        return weights

    def _divergence(self, logits: Tensor, final: Tensor) -> Tensor:
        """Return KL(target || draft) in nats, summed over positions [n]: logits [n, V], the target's states [n, h]."""
        with torch.no_grad():
            teacher = F.log_softmax(self.target.logits(final).float(), -1)
        student = F.log_softmax(logits.float(), -1)
        return F.kl_div(student, teacher, log_target=True, reduction="sum")

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """Write model and tokenizer, as any model has them; facts of the training are in the model's config."""
        model: Any = copy.deepcopy(self.module).to("cpu", torch.float16)
        model.config.ssbench = about
        model.save_pretrained(folder)
        ordinary_mode(folder)
        self.target.tokenizer.save_pretrained(folder)


class TunedDraft(DraftTrainer):
    """A LoRA in an existing draft, which learns next tokens of the answers alone. draft: its weights do not change."""

    name = "draft-apps"

    def __init__(self, draft: Target, rank: int, lr: float) -> None:
        self.options, self.lr = DraftOptions(gamma=1, prompt_weight=0.0), lr
        self.ahead, self.needs_base = 1, False
        self.tuned = with_lora(draft, rank)
        self.module = self.tuned.model

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the LoRA's matrices."""
        return [{"params": lora_parameters(self.module), "lr": self.lr}]


def _answered(batch: Batch) -> Tensor:
    """Return whether the next token is of an answer, bool [B, T - 1]."""
    return batch.labels[:, :-1, 0] != -100

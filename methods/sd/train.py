"""`ssbench train draft`: a small model of the target's tokenizer.

From text alone, or distilled: Kullback-Leibler divergence from the target's next-token distribution where the target
is to answer (Hinton et al. 2015; DistillSpec, Zhou et al. 2024, with forward KL).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from torch import Tensor

from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.fine_tuned import lora_parameters, with_lora
from specbench_ss.methods._shared.small_llama import new_llama
from specbench_ss.options import Bounded
from specbench_ss.storage import ordinary_mode
from specbench_ss.training.losses import weighted_loss
from specbench_ss.training.session import DrafterTrainer
from specbench_ss.training.trainee import BaseStates, Batch, Trainee

if TYPE_CHECKING:
    from specbench_ss.training.distributed import Trained


@dataclass(frozen=True, slots=True)
class DraftSize(Bounded):
    """Shape of a draft: a Llama. ffn 0: 8/3 of hidden, in steps of 32; heads 0: of 64 each."""

    owner: ClassVar[str] = "draft"
    layers: Annotated[int, Ge(1)] = 2
    hidden: Annotated[int, Ge(1)] = 256
    heads: Annotated[int, Ge(0)] = 0
    ffn: Annotated[int, Ge(0)] = 0

    def check_together(self) -> None:
        """Whether the heads divide the hidden size."""
        if self.hidden % self.attention_heads or (self.hidden // self.attention_heads) % 2:
            raise UserError(f"draft: hidden {self.hidden} cannot be divided into {self.attention_heads} even heads")

    @property
    def attention_heads(self) -> int:
        """The number of heads."""
        return self.heads or max(1, self.hidden // 64)

    @property
    def width(self) -> int:
        """Of the MLP."""
        return self.ffn or -(-self.hidden * 8 // 3 // 32) * 32


def new_draft(target: Target, size: DraftSize) -> Any:
    """A fresh Llama over the target's vocabulary, in float32, with the target's special ids."""
    c = target.config
    special = {"bos": c.bos_token_id, "eos": c.eos_token_id, "pad": c.pad_token_id}
    heads = size.attention_heads
    model = new_llama(
        size.hidden, size.layers, heads, heads, size.width, target.vocab_size, target.context_length, special
    )
    model.set_attn_implementation("sdpa")
    return model


class DraftTrainee(Trainee):
    """A model of its own. prompt_weight: of a prompt's tokens beside an answer's; distill: share of the KL loss.

    The shares of right guesses are all the same one: a draft's j-th guess is a next token as its first is.
    """

    name = "draft"

    def __init__(
        self, target: Target, size: DraftSize, lr: float, ahead: int, distill: float = 0.0, prompt_weight: float = 0.2
    ) -> None:
        self.target, self.size, self.lr, self.ahead = target, size, lr, ahead
        self.distill, self.prompt_weight = distill, prompt_weight
        self.needs_base = distill > 0
        self.module = new_draft(target, size)

    def about(self) -> dict[str, Any]:
        """The model's shape and the weights of the losses."""
        return {**asdict(self.size), "distill": self.distill, "prompt_weight": self.prompt_weight}

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Weighted cross-entropy over each text's next tokens, and KL from the target where it answers."""
        logits = self._logits(batch)[:, :-1]  # [B, T - 1, V]
        answer, answers = _answered(batch), _answered(batch.whole).sum().clamp_min(1)
        text = weighted_loss(logits, batch.ids[:, 1:], self._weights(batch), self._weights(batch.whole))
        share = (logits.detach().argmax(-1) == batch.ids[:, 1:])[answer].sum() / answers
        loss = (1 - self.distill) * text
        if self.distill:
            loss = loss + self.distill * self._divergence(logits[answer], states.final[:, :-1][answer]) / answers
        return loss, share.expand(self.ahead)

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
        """[B, T - 1]: of the token that follows each."""
        weights = torch.where(_answered(batch), 1.0, self.prompt_weight)
        if batch.documents is not None:
            numbers = batch.documents.numbers
            weights = weights * ((numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, 1:] >= 0))
        return weights

    def _divergence(self, logits: Tensor, final: Tensor) -> Tensor:
        """KL(target || draft) in nats, summed over positions [n]: logits [n, V], the target's states [n, h]."""
        with torch.no_grad():
            teacher = F.log_softmax(self.target.logits(final).float(), -1)
        student = F.log_softmax(logits.float(), -1)
        return F.kl_div(student, teacher, log_target=True, reduction="sum")


class TunedDraft(DraftTrainee):
    """A LoRA in a draft that has been trained before, which learns next tokens of the answers alone.

    draft: the model that drafts; its weights stay as they are. tuned: the draft with the LoRA.
    """

    name = "draft-apps"
    distill, needs_base, prompt_weight = 0.0, False, 0.0

    def __init__(self, draft: Target, rank: int, lr: float, ahead: int = 1) -> None:
        self.rank, self.lr, self.ahead = rank, lr, ahead
        self.tuned = with_lora(draft, rank)
        self.module = self.tuned.model

    def about(self) -> dict[str, Any]:
        """The LoRA's rank."""
        return {"rank": self.rank}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The LoRA's matrices."""
        return [{"params": lora_parameters(self.module), "lr": self.lr}]


def _answered(batch: Batch) -> Tensor:
    """Bool [B, T - 1]: the next token is of an answer."""
    return batch.labels[:, :-1, 0] != -100


@dataclass(frozen=True, slots=True)
class DraftOptions(Bounded):
    """Options of `ssbench train draft`. Raises UserError for values beyond their bounds."""

    owner: ClassVar[str] = "draft"
    layers: Annotated[int, Ge(1)] = field(default=2, metadata={"help": "Number of decoder layers."})
    hidden: Annotated[int, Ge(1)] = field(default=256, metadata={"help": "Hidden size."})
    n_heads: Annotated[int, Ge(0)] = field(
        default=0, metadata={"help": "Number of attention heads. 0: as many as have 64 dimensions each."}
    )
    ffn: Annotated[int, Ge(0)] = field(default=0, metadata={"help": "Width of the MLP. 0: 8/3 of the hidden size."})
    gamma: Annotated[int, Ge(1)] = field(
        default=4, metadata={"help": "Length of a draft for which tau is estimated while training."}
    )
    distill: bool = field(
        default=False,
        metadata={
            "help": "Learn the target's distributions beside the text, or the text alone.",
            "flag": "--distill/--from-scratch",
        },
    )
    distill_share: Annotated[float, Gt(0), Le(1)] = field(
        default=0.9, metadata={"help": "With --distill: share of the loss that the target's distributions have."}
    )
    prompt_weight: Annotated[float, Ge(0), Le(1)] = field(
        default=0.2, metadata={"help": "Weight of a prompt's tokens in the loss, where an answer's tokens have 1."}
    )
    gradient_checkpointing: bool = field(
        default=False,
        metadata={
            "help": "Save memory by computing activations a second time in the backward pass.",
            "flag": "--gradient-checkpointing",
        },
    )


class DraftTrainer(DrafterTrainer):
    """A small Llama."""

    name = "draft"
    summary = "a small model for two-model speculative decoding, from scratch or distilled from the target"
    method = "sd"
    lr = 1e-3
    Options = DraftOptions

    @property
    def ahead(self) -> int:
        """Tokens of a draft."""
        return int(self.options.gamma)

    def build(self, target: Target, lr: float) -> Trainee:
        """A fresh one."""

        o = self.options
        size = DraftSize(o.layers, o.hidden, o.n_heads, o.ffn)
        trainee = DraftTrainee(target, size, lr, o.gamma, o.distill_share if o.distill else 0.0, o.prompt_weight)
        if o.gradient_checkpointing:
            model: Any = trainee.module
            model.gradient_checkpointing_enable()
        return trainee

    def save(self, training: Trained, folder: Path, about: dict[str, Any]) -> None:
        """Model and tokenizer, as any model has them; what it was trained for is in the model's config."""
        import copy

        import torch

        model: Any = copy.deepcopy(training.trainee.module).to("cpu", torch.float16)
        model.config.ssbench = about
        model.save_pretrained(folder)
        ordinary_mode(folder)
        training.target.tokenizer.save_pretrained(folder)

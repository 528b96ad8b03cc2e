"""`ssbench train medusa` and `medusa2`: heads alone, or heads and backbone together (Medusa sec. 2.2).

At first the heads' loss is large and would distort the backbone, so lambda is warmed up from 0 and the heads have a
higher learning rate.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.fine_tuned import lora_parameters, save_lora, with_lora
from specbench_ss.methods.medusa.heads import HEADS_FILES, MedusaHeads
from specbench_ss.models.checkpoint import write_checkpoint
from specbench_ss.options import Bounded, option
from specbench_ss.training.batch import BaseStates, Batch, base_states, run_rows
from specbench_ss.training.losses import TOP, LossKind, LossWarmup, head_loss, loss_option, topk_predictions
from specbench_ss.training.masks import Documents
from specbench_ss.training.trainer import DrafterTrainer

DECAY = 0.8


def new_heads(target: Target, heads: int, own_unembed: bool = True) -> MedusaHeads:
    """Return heads that start as an identity block and the base's LM head."""
    new = MedusaHeads(heads, 1, target.hidden_size, target.vocab_size, own_unembed)
    if new.unembed is not None:
        new.unembed.data.copy_(target.unembed.expand_as(new.unembed))
    return new


def config_of(heads: MedusaHeads) -> dict[str, Any]:
    """Return the heads' shape with the keys of published configs."""
    return {"medusa_num_heads": heads.count, "medusa_num_layers": heads.weight.shape[1]}


def heads_loss(
    heads: MedusaHeads,
    x: Tensor,
    shared: Callable[[Tensor], Tensor],
    batch: Batch,
    teacher: Tensor | None = None,
    kind: LossKind = "kl",
) -> tuple[Tensor, Tensor]:
    """Return eq. 1-2 of Medusa on states x [B, A, h] at the anchors. shared: the LM head of the model itself.

    teacher: logits [B*A, n, V] of the base, for a loss `kind` with its distributions.
    """
    logits = heads(x.flatten(0, 1), shared).transpose(0, 1)  # [B*A, n, V]
    n = heads.count
    labels, whole = (b.anchors.labels[..., 1 : n + 1].flatten(0, 1) for b in (batch, batch.global_batch))
    return head_loss(logits, labels, [DECAY**i for i in range(n)], whole, teacher, kind)


def heads_accuracies(
    heads: MedusaHeads, states: BaseStates, batch: Batch, shared: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return top-k accuracy counts of each head: (hits [n, top], positions [n])."""
    logits: Tensor = heads(states.at(states.final, batch.anchors).flatten(0, 1), shared)  # [n, B*A, V]
    return topk_predictions(logits.topk(min(TOP, logits.shape[-1])).indices, batch.anchors)


@dataclass(frozen=True, slots=True)
class HeadsTraining(Bounded):
    """Options of all trainers of heads."""

    heads: Annotated[int, Ge(1), Le(64)] = option(4, "Number of heads: tokens drafted after the next one.")
    own_unembed: bool = option(True, "Give every head its own LM head instead of the model's.")


@dataclass(frozen=True, slots=True)
class MeasurableHeads(HeadsTraining):
    """Options of trainers that leave the base unchanged and can also measure existing heads."""

    measure: str = option(
        "",
        "Folder or file with heads. Measure their accuracies on the text, from which a draft tree can be "
        "built, instead of training.",
    )


@dataclass(frozen=True, slots=True)
class MedusaTraining(MeasurableHeads):
    """Options of `ssbench train medusa`."""

    owner: ClassVar[str] = "medusa"
    loss: LossKind = loss_option("ce")


class MedusaTrainer(DrafterTrainer):
    """Trainer of heads on the frozen base (Medusa-1); their accuracies give `medusa`'s tree."""

    name = "medusa"
    summary = "Medusa-1 heads on the frozen base"
    method = "medusa"
    weights_file = "medusa_lm_head.safetensors"
    ranked = True
    Options = MedusaTraining
    module: MedusaHeads
    lr = 1e-3

    def __init__(
        self, target: Target, options: Any = None, lr: float | None = None, heads: MedusaHeads | None = None
    ) -> None:
        super().__init__(target, options, lr)
        self.module = heads or new_heads(target, self.options.heads, self.options.own_unembed)
        self.config, self.ahead = config_of(self.module), self.module.count

    @classmethod
    def loaded(cls, target: Target, weights: str) -> Self:
        """Return a trainer of existing heads, loaded as by `medusa`."""
        from specbench_ss.methods.medusa.decode import Medusa, MedusaOptions

        return cls(target, heads=Medusa.load(target, MedusaOptions(weights, tree="published")).drafter)

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return eq. 1 over all heads, with the base's distributions unless loss=ce."""
        teacher, kind = None, self.options.loss
        if kind != "ce":
            with torch.no_grad():
                teacher = self.target.logits(states.ahead(batch.anchors.at, self.ahead).flatten(0, 1))
        x = states.at(states.final, batch.anchors)
        return heads_loss(self.module, x, self.target.logits, batch, teacher, kind)

    @torch.no_grad()
    def accuracies(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (hits [n, top], positions [n])."""
        return heads_accuracies(self.module, states, batch, self.target.logits)


@dataclass(frozen=True, slots=True)
class JointTraining(HeadsTraining):
    """Options of `ssbench train medusa2`."""

    owner: ClassVar[str] = "medusa2"
    lora_rank: Annotated[int, Ge(0), Le(1 << 14)] = option(
        32, "Rank of the backbone's LoRA. 0: train all weights of the backbone."
    )
    coefficient: Annotated[float, Gt(0)] = option(0.2, "Weight of the heads' loss relative to the next token's loss.")
    ramp: Annotated[int, Ge(0)] = option(100, "Number of warm-up steps of that weight from 0.")
    head_lr: Annotated[float, Gt(0)] = option(4.0, "Learning rate of the heads relative to the backbone's.")


class Medusa2Trainer(DrafterTrainer):
    """Trainer of heads with LoRA in every linear layer of the backbone, or with the whole backbone (lora_rank 0).

    It runs its own copy of the base and reads no states of the frozen one.
    """

    name = "medusa2"
    summary = "Medusa-2: heads and backbone together, which changes the model"
    method = "medusa2"
    ranked = True
    Options = JointTraining
    needs_base = False
    adapts_base = True

    def __init__(self, target: Target, options: Any = None, lr: float | None = None) -> None:
        super().__init__(target, options, lr)
        o = self.options
        self.tuned = with_lora(target, o.lora_rank) if o.lora_rank else trainable_copy(target)
        model = self.tuned.model
        self.backbone = lora_parameters(model) if o.lora_rank else list(model.parameters())
        self.heads = new_heads(target, o.heads, o.own_unembed)
        self.config, self.ahead = config_of(self.heads), o.heads
        self.ramp = LossWarmup(o.ramp)
        self.module = nn.ModuleList([self.heads, nn.ParameterList(self.backbone), self.ramp])

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of the backbone and the heads."""
        heads = {"params": list(self.heads.parameters()), "lr": self.lr * self.options.head_lr}
        return [{"params": self.backbone, "lr": self.lr}, heads]

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return L_LM over all tokens of answers plus lambda times the heads' loss at the anchors (sec. 2.2.2)."""
        target, documents = self.tuned, batch.documents
        if documents is None and any(target.windows):  # documents build the masks of sliding windows
            documents = Documents(torch.zeros_like(batch.ids), torch.arange(batch.ids.shape[1]).expand_as(batch.ids))
            documents = documents.to(batch.ids.device)
        x, _ = run_rows(target, batch.ids, target.n_layers, None, documents, ())
        final = target.family.norm(x)  # [B, T, h]
        following = batch.labels[..., 0]
        labelled = following != -100
        logits = target.logits(final[labelled]).float()
        count = (batch.global_batch.labels[..., 0] != -100).sum()
        language = F.cross_entropy(logits, following[labelled], reduction="sum") / count.clamp_min(1)
        heads, accuracy = heads_loss(self.heads, states.at(final, batch.anchors), target.logits, batch)
        return language + self.options.coefficient * self.ramp() * heads, accuracy

    @torch.no_grad()
    def accuracies(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (hits [n, top], positions [n]) on states of the current backbone."""
        current = base_states(self.tuned, batch.ids, (), self.tuned.n_layers, batch.documents)
        return heads_accuracies(self.heads, current, batch, self.tuned.logits)

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """Write the heads with the backbone's LoRA, or with the whole backbone and its config."""
        config = {**about, **self.config}
        if not self.options.lora_rank:
            copy.deepcopy(self.tuned.model).to("cpu", self.target.dtype).save_pretrained(folder)
            config = {**json.loads((folder / "config.json").read_text()), **config}
        write_checkpoint(folder, self.heads, config, HEADS_FILES[0])
        if self.options.lora_rank:
            save_lora(folder, self.tuned)


def trainable_copy(target: Target) -> Target:
    """Return a trainable float32 copy of the target. Raise UserError for a quantised one."""
    if any(not p.is_floating_point() for p in target.model.parameters()):
        raise UserError("medusa2: a base in 4 bits cannot be trained as a whole; use --lora-rank")
    trainable = Target(copy.deepcopy(target.model).float(), target.tokenizer, target.name, target.folder)
    trainable.model.requires_grad_(True)
    return trainable

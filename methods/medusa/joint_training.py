"""Training Medusa-2: L_LM + lambda sum_i 0.8^i L_i, heads and backbone together (Medusa eq. 3, sec. 2.2.2).

At first the heads' loss is large and would distort the backbone: lambda rises from nothing, and heads learn faster.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.lora import lora_parameters, save_lora, with_lora
from specbench_ss.methods.medusa.files import HEADS_FILES
from specbench_ss.methods.medusa.training import config_of, heads_accuracies, heads_loss, new_heads
from specbench_ss.models.checkpoint import write_checkpoint
from specbench_ss.training.batches import Batch, Documents
from specbench_ss.training.ramp import Ramp
from specbench_ss.training.trainee import BaseStates, Trainee, base_states, run_rows


class Medusa2Trainee(Trainee):
    """Heads, and LoRA in every linear layer of the backbone, or (lora_rank 0) the whole of it.

    coefficient: lambda once it has risen, which takes `ramp` updates; head_lr: the heads' learning rate, in those of
    the backbone. Runs its own copy of the base, so it wants nothing of the frozen one.
    """

    name = "medusa2"
    needs_base = False
    adapts_base = True

    def __init__(
        self,
        target: Target,
        heads: int = 4,
        lora_rank: int = 32,
        own_unembed: bool = True,
        lr: float = 5e-4,
        head_lr: float = 4.0,
        coefficient: float = 0.2,
        ramp: int = 100,
    ) -> None:
        self.lora_rank, self.lr, self.head_lr, self.coefficient = lora_rank, lr, head_lr, coefficient
        self.dtype = target.dtype
        self.tuned = with_lora(target, lora_rank) if lora_rank else trainable_copy(target)
        model = self.tuned.model
        self.backbone = lora_parameters(model) if lora_rank else list(model.parameters())
        self.heads = new_heads(target, heads, own_unembed)
        self.ramp = Ramp(ramp)
        self.module = nn.ModuleList([self.heads, nn.ParameterList(self.backbone), self.ramp])

    def about(self) -> dict[str, Any]:
        """The weight of the heads' loss, and what of the backbone learns."""
        return {"coefficient": self.coefficient, "ramp": self.ramp.steps, "lora_rank": self.lora_rank}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The backbone; the heads."""
        groups = (self.backbone, self.lr), (list(self.heads.parameters()), self.lr * self.head_lr)
        return [{"params": params, "lr": lr} for params, lr in groups]

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """L_LM over all tokens of answers; the heads' at the anchors."""
        target, documents = self.tuned, batch.documents
        if documents is None and any(target.windows):  # masks of windows come with documents
            documents = Documents(torch.zeros_like(batch.ids), torch.arange(batch.ids.shape[1]).expand_as(batch.ids))
            documents = documents.to(batch.ids.device)
        x = run_rows(target, batch.ids, target.n_layers, None, documents, (), {})
        final = target.family.norm(x)  # [B, T, h]
        following = batch.labels[..., 0]
        answered = following != -100
        logits = target.logits(final[answered]).float()
        known = (batch.whole.labels[..., 0] != -100).sum()
        language = F.cross_entropy(logits, following[answered], reduction="sum") / known.clamp_min(1)
        drafted, right = heads_loss(self.heads, states.at(final, batch.anchors), target.logits, batch)
        return language + self.coefficient * self.ramp() * drafted, right

    @torch.no_grad()
    def accuracies(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """On states of the backbone as it is now, whatever those of the base are: (hits [n, top], positions [n])."""
        own = base_states(self.tuned, batch.ids, (), self.tuned.n_layers, batch.documents)
        return heads_accuracies(self.heads, own, batch.anchors, self.tuned.logits)


def trainable_copy(target: Target) -> Target:
    """The target again in float32, all of which learns. Raises UserError for a quantised one."""
    if any(not p.is_floating_point() for p in target.model.parameters()):
        raise UserError("medusa2: a base in 4 bits cannot be trained as a whole: give --lora-rank")
    own = Target(copy.deepcopy(target.model).float(), target.tokenizer, target.name, target.folder)
    own.model.requires_grad_(True)
    return own


def save_joint(folder: Path, trainee: Medusa2Trainee, about: dict[str, Any]) -> None:
    """The heads with `about` as their config; beside them the backbone's LoRA, or the whole backbone with its own."""
    about = {**about, **config_of(trainee.heads)}
    if trainee.lora_rank:
        write_checkpoint(folder, trainee.heads, about, HEADS_FILES[0])
        save_lora(folder, trainee.tuned)
        return
    copy.deepcopy(trainee.tuned.model).to("cpu", trainee.dtype).save_pretrained(folder)
    own = json.loads((folder / "config.json").read_text())
    write_checkpoint(folder, trainee.heads, {**own, **about}, HEADS_FILES[0])

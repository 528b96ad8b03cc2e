"""`ssbench train medusa` and `medusa2`: heads alone, or heads and backbone together (Medusa sec. 2.2).

At first the heads' loss is large and would distort the backbone: lambda rises from nothing, and heads learn faster.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt
from torch import Tensor, nn

from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.fine_tuned import lora_parameters, save_lora, with_lora
from specbench_ss.methods.medusa.heads import HEADS_FILES, MedusaHeads
from specbench_ss.models.checkpoint import write_checkpoint
from specbench_ss.training.losses import Ramp, Targets, head_loss, targets_option, told_targets
from specbench_ss.training.session import (
    TOP,
    HeadsTrainer,
    HeadsTraining,
    MeasurableHeads,
    MeasurableHeadsTrainer,
    ranked,
)
from specbench_ss.training.trainee import Anchors, BaseStates, Batch, Documents, Trainee, base_states, run_rows

if TYPE_CHECKING:
    from specbench_ss.training.distributed import Trained


DECAY = 0.8


def new_heads(target: Target, heads: int, own_unembed: bool = True) -> MedusaHeads:
    """Heads that start as the base's LM head behind an identity block."""
    made = MedusaHeads(heads, 1, target.hidden_size, target.vocab_size, own_unembed)
    if made.unembed is not None:
        made.unembed.data.copy_(target.unembed.expand_as(made.unembed))
    return made


def config_of(heads: MedusaHeads) -> dict[str, Any]:
    """As published configs have it."""
    return {"medusa_num_heads": heads.count, "medusa_num_layers": heads.weight.shape[1]}


def heads_loss(
    heads: MedusaHeads,
    x: Tensor,
    shared: Callable[[Tensor], Tensor],
    batch: Batch,
    teacher: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Eq. 1-2 of Medusa on states x [B, A, h] at the anchors. shared: the LM head of the model itself.

    teacher: logits [B*A, n, V] of the base, whose distributions are learnt instead of the text.
    """
    logits = heads(x.flatten(0, 1), shared).transpose(0, 1)  # [B*A, n, V]
    n = heads.count
    labels, whole = (b.anchors.labels[..., 1 : n + 1].flatten(0, 1) for b in (batch, batch.whole))
    return head_loss(logits, labels, [DECAY**i for i in range(n)], whole, teacher)


class MedusaTrainee(Trainee):
    """Heads on the frozen base. heads: how many new ones, or those that there are. targets: published is the text."""

    name = "medusa"

    def __init__(
        self,
        target: Target,
        heads: int | MedusaHeads = 4,
        lr: float = 1e-3,
        own_unembed: bool = True,
        targets: Targets = "tokens",
    ) -> None:
        self.module: MedusaHeads = new_heads(target, heads, own_unembed) if isinstance(heads, int) else heads
        self.config = config_of(self.module)
        self.shared = target.logits
        self.lr, self.targets = lr, targets

    def about(self) -> dict[str, Any]:
        """What the heads learn."""
        return told_targets(self.targets, "tokens")

    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of all heads."""
        teacher = None
        if self.targets == "distribution":
            with torch.no_grad():
                teacher = self.shared(states.ahead(batch.anchors.at, self.module.count).flatten(0, 1))
        return heads_loss(self.module, states.at(states.final, batch.anchors), self.shared, batch, teacher)

    @torch.no_grad()
    def accuracies(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """(hits [n, top], positions [n])."""
        return heads_accuracies(self.module, states, batch.anchors, self.shared)


def heads_accuracies(
    heads: MedusaHeads, states: BaseStates, anchors: Anchors, shared: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """How often the r-th guess of head i is right: (hits [n, top], positions [n])."""
    logits: Tensor = heads(states.at(states.final, anchors).flatten(0, 1), shared)  # [n, B*A, V]
    return ranked(logits.topk(min(TOP, logits.shape[-1])).indices, anchors)


@dataclass(frozen=True, slots=True)
class MedusaTraining(MeasurableHeads):
    """Options of `ssbench train medusa`. Raises UserError for values beyond their bounds."""

    owner: ClassVar[str] = "medusa"
    own_unembed: bool = field(
        default=True, metadata={"help": "Give every head an LM head of its own, or let all use the base's."}
    )
    targets: Targets = targets_option("tokens")


class MedusaTrainer(MeasurableHeadsTrainer):
    """Heads, and their accuracies, of which `medusa` builds its tree."""

    name = "medusa"
    summary = "Medusa-1 heads on the frozen base"
    method = "medusa"
    lr = 1e-3
    weights_file = "medusa_lm_head.safetensors"
    Options = MedusaTraining

    def build(self, target: Target, lr: float) -> MedusaTrainee:
        """Heads that begin as the base's LM head behind an identity block."""

        o = self.options
        return MedusaTrainee(target, o.heads, lr, o.own_unembed, o.targets)

    def loaded(self, target: Target, weights: str) -> MedusaTrainee:
        """As `medusa` loads them."""
        from specbench_ss.methods.medusa.decode import Medusa, MedusaOptions

        return MedusaTrainee(target, Medusa.load(target, MedusaOptions(weights, tree="published")).heads)


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


@dataclass(frozen=True, slots=True)
class JointTraining(HeadsTraining):
    """Options of `ssbench train medusa2`. Raises UserError for values beyond their bounds."""

    owner: ClassVar[str] = "medusa2"
    lora_rank: Annotated[int, Ge(0)] = field(
        default=32, metadata={"help": "Rank of the backbone's LoRA. 0: all weights of the backbone are trained."}
    )
    own_unembed: bool = field(
        default=True, metadata={"help": "Give every head an LM head of its own, or let all use the model's."}
    )
    coefficient: Annotated[float, Gt(0)] = field(
        default=0.2, metadata={"help": "Weight of the heads' loss, where the loss of the next token has 1."}
    )
    ramp: Annotated[int, Ge(0)] = field(
        default=100, metadata={"help": "Number of steps in which that weight rises from 0."}
    )
    head_lr: Annotated[float, Gt(0)] = field(
        default=4.0, metadata={"help": "Learning rate of the heads, as a multiple of the backbone's."}
    )


class Medusa2Trainer(HeadsTrainer):
    """Backbone, heads, and accuracies, of which `medusa2` builds its tree."""

    name = "medusa2"
    summary = "Medusa-2: heads and backbone together, which changes the model"
    method = "medusa2"
    Options = JointTraining

    def build(self, target: Target, lr: float) -> Medusa2Trainee:
        """Copies of the base's LM head behind an identity block, on the base as it is."""

        o = self.options
        return Medusa2Trainee(target, o.heads, o.lora_rank, o.own_unembed, lr, o.head_lr, o.coefficient, o.ramp)

    def save(self, training: Trained, folder: Path, about: dict[str, Any]) -> None:
        """As `medusa2` reads it."""

        trainee = training.trainee
        assert isinstance(trainee, Medusa2Trainee)
        save_joint(folder, trainee, about)

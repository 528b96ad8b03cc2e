"""Trainer interface of `ssbench train`: module, loss and checkpoint of a drafter."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from annotated_types import Ge, Gt, Lt

from specbench_ss.options import NoOptions, check_bounds, option, option_values

if TYPE_CHECKING:  # `ssbench train --help` imports this module without torch
    from torch import Tensor, nn

    from specbench_ss.engine.target import Target
    from specbench_ss.training.batch import BaseStates, Batch


def checkpointing_option() -> Any:
    """Return the field of the option `gradient_checkpointing`."""
    return option(False, "Save memory by recomputing activations in the backward pass.", "--gradient-checkpointing")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Options of every training; trainings with the same text and budget are comparable.

    data: files, folders or one hub id. length: tokens per row. batch_size: rows per step, of all processes together.
    anchors: positions per row to draft from. steps: None = `epochs` passes over the rows. lr: None = the trainer's
    default. warmup: steps; None = a tenth of all steps, at most 50, or 50 with a cooldown. cooldown: share of the
    steps, at the end, in which the learning rate falls; None = cosine decay from the start. regenerate_responses: the
    target's answers replace the data's, with at most answer_limit tokens. save_every, eval_every: steps. Raises
    UserError for values out of range.
    """

    out: Path
    data: tuple[str, ...]
    model: str = "lab"
    steps: int | None = None
    epochs: Annotated[float, Gt(0), Lt(math.inf)] = 1.0
    batch_size: int = 8
    length: Annotated[int, Ge(2)] = 512
    anchors: int = 128
    lr: Annotated[float, Gt(0), Lt(math.inf)] | None = None
    warmup: int | None = None
    cooldown: Annotated[float, Gt(0), Lt(1)] | None = None
    seed: int = 0
    eval_fraction: Annotated[float, Ge(0), Lt(1)] = 0.02
    columns: tuple[tuple[str, str], ...] = ()
    regenerate_responses: bool = False
    answer_limit: int = 256
    answer_temperature: float = 0.0
    dtype: str = "auto"
    device: str = "auto"
    load_in_4bit: bool = False
    save_every: int = 100
    eval_every: int = 100
    push_to_hub: str | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None

    def __post_init__(self) -> None:
        check_bounds(type(self), option_values(self), flag="--")

    def as_dict(self) -> dict[str, Any]:
        """Return everything that determines the result, JSON-ready, except text and model, which have hashes.

        Without the length of a training with a cooldown, which can be extended.
        """
        left_out = {"out", "data", "model", "device", "push_to_hub", "save_every", "trust_remote_code", "cooldown"}
        left_out |= {"steps", "epochs"} if self.cooldown else set()
        return {name: value for name, value in asdict(self).items() if name not in left_out}


class Trainer(ABC):
    """A training of `ssbench train`, from an entry point of the group `specbench_ss.trainers`.

    Options: a frozen dataclass, as a method's; its fields are options of the command.
    """

    name: str  # as in its entry point
    summary: ClassVar[str]
    Options: ClassVar[type[Any]] = NoOptions

    @classmethod
    @abstractmethod
    def jobs(cls, options: Any, config: TrainConfig) -> list[TrainJob]:
        """Return the drafters to train, all on the same batches. Raises UserError."""


@dataclass(frozen=True, slots=True)
class TrainJob:
    """A drafter to train. folder: for its weights. label: its name among several, else ''."""

    kind: type[DrafterTrainer]
    options: Any
    folder: Path
    lr: float
    label: str = ""

    def build(self, target: Target, seed: int) -> DrafterTrainer:
        """Return the trainer, with the same initial weights as if it were alone."""
        import torch

        torch.manual_seed(seed)
        trainer = self.kind.build(target, self.options, self.lr)
        trainer.name, trainer.options = self.label or trainer.name, self.options
        return trainer


class DrafterTrainer(Trainer):
    """One drafter in training: module, loss, required base states and checkpoint.

    Attributes:
        method: the method that loads the folder.
        weights_file: name of the file with the weights.
        ranked: measure accuracies by rank at the end, for the method's static tree; needs `accuracies`.
        module: the trained module.
        config: config.json entries of the drafter's shape.
        ahead: number of tokens drafted after the next one, which are the further labels of a position.
        lr: peak learning rate.
        aux_hidden_state_layers: layers of the base whose inputs the loss reads.
        kv_from: the loss reads keys and values from this layer up.
        needs_base: the loss reads states of the frozen base.
        adapts_base: weights inside the base's layers are trained.
    """

    method: ClassVar[str]
    weights_file: ClassVar[str] = "model.safetensors"
    ranked: ClassVar[bool] = False
    module: nn.Module
    config: dict[str, Any]
    ahead: int
    lr: float = 5e-4
    aux_hidden_state_layers: tuple[int, ...] = ()
    kv_from: int | None = None
    needs_base: bool = True
    adapts_base: bool = False

    def __init__(self, target: Target, options: Any = None, lr: float | None = None) -> None:
        self.target, self.options = target, self.Options() if options is None else options
        if lr is not None:
            self.lr = lr

    @classmethod
    def jobs(cls, options: Any, config: TrainConfig) -> list[TrainJob]:
        """Return this drafter alone."""
        return [TrainJob(cls, options, config.out, config.lr or cls.lr)]

    @classmethod
    def build(cls, target: Target, options: Any, lr: float) -> DrafterTrainer:
        """Return a trainer with initial weights. Raises UserError if the drafter does not fit the target."""
        return cls(target, options, lr)

    @classmethod
    def loaded(cls, target: Target, weights: str) -> Self:
        """Return a trainer with existing weights, to measure their accuracies. Raises UserError."""
        raise NotImplementedError

    @property
    def n_learning(self) -> int:
        """Return the number of trainable parameters."""
        return sum(p.numel() for p in self.module.parameters() if p.requires_grad)

    def settings(self) -> dict[str, Any]:
        """Return options, shape and other plain attributes, which must equal those of a checkpoint."""
        shapes = [option_values(value) for value in vars(self).values()]  # of options and other dataclasses
        values = {name: value for part in (*shapes, vars(self)) for name, value in part.items()}
        return {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the parameters with their peak learning rates, for torch.optim."""
        return [{"params": [p for p in self.module.parameters() if p.requires_grad], "lr": self.lr}]

    def scan(self, batches: Iterable[Batch]) -> None:
        """Read batches of the text on the CPU before the first step, for example to count tokens."""

    def prepare(self, states: BaseStates, batch: Batch) -> None:
        """Read the base's states on the first row before the first step, for example to start at their scale."""

    def labels(self, batch: Batch) -> Tensor:
        """Return the drafted tokens x_{t+2+k}, int64 [B, A, ahead]; -100 where the answer has ended by then."""
        return batch.anchors.labels[..., 1 : 1 + self.ahead]

    def count_positions(self, batch: Batch) -> int:
        """Return the number of positions of a batch whose drafts have a loss: anchors with a token to draft."""
        return int((batch.anchors.labels[..., 1] != -100).sum())

    @abstractmethod
    def loss(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (loss, top-1 accuracy per draft position [ahead]), both over `batch.global_batch`."""

    def accuracies(self, states: BaseStates, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (hits [levels, top], positions [levels]): how often the r-th prediction of a level is correct.

        Earlier tokens are those of the text.
        """
        raise NotImplementedError

    def save(self, folder: Path, about: dict[str, Any]) -> None:
        """Write weights and config.json for the method. about: facts of the base and the training."""
        from specbench_ss.models.checkpoint import write_checkpoint

        write_checkpoint(folder, self.module, {**self.config, **about}, self.weights_file)

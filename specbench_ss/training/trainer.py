"""Trainer interface of `ssbench train`, and the recipe of a drafter that the common loop trains.

A trainer is found by an entry point of the group `specbench_ss.trainers`. Its options are a frozen dataclass, as a
method's are, and become options of the command.
"""

from __future__ import annotations

import math
import shlex
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Gt, Lt

from specbench_ss.options import NoOptions, check_bounds

if TYPE_CHECKING:
    from specbench_ss.engine.target import Target
    from specbench_ss.training.distributed import Trained
    from specbench_ss.training.trainee import Trainee


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """What a training is asked for, whatever it trains. Trainings compare fairly if text and budget are the same.

    data: files, folders or one hub id. length: tokens per row. batch_size: rows per step, of all processes together.
    anchors: positions of a row that are drafted from. steps: None takes as many as `epochs` passes over the rows need.
    lr: None takes the trainer's own. warmup: steps; None takes a tenth of all steps, at most 50, or 50 with a cooldown.
    cooldown: share of the steps, at the end, in which the learning rate falls; None lets it fall along a cosine from
    the start. own_answers: the target answers in place of the data, with at most answer_limit tokens. save_every,
    eval_every: steps. Raises UserError for values out of range.
    """

    out: Path
    data: tuple[str, ...]
    model: str = "lab"
    steps: int | None = None
    epochs: Annotated[float, Gt(0), Lt(math.inf)] = 1.0
    batch_size: int = 8
    length: int = 512
    anchors: int = 128
    lr: Annotated[float, Gt(0), Lt(math.inf)] | None = None
    warmup: int | None = None
    cooldown: Annotated[float, Gt(0), Lt(1)] | None = None
    seed: int = 0
    eval_fraction: float = 0.02
    columns: tuple[tuple[str, str], ...] = ()
    own_answers: bool = False
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
        check_bounds(type(self), {"epochs": self.epochs, "lr": self.lr, "cooldown": self.cooldown}, flag="--")

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-ready data of all that decides what is learnt, except text and model, which hashes identify.

        How long a training with a cooldown is to be is left out, since it can be made longer.
        """
        kept = asdict(self)
        for name in ("cooldown",) if self.cooldown is None else ("cooldown", "steps", "epochs"):
            del kept[name]
        for name in ("out", "data", "model", "device", "push_to_hub", "save_every", "trust_remote_code"):
            del kept[name]
        return kept


class Trainer(ABC):
    """A kind of drafter that can be trained for a target.

    name: as in its entry point. summary: one line. Options(**given) raises UserError or ValueError for impossible
    values, before anything is loaded.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    Options: ClassVar[type[Any]] = NoOptions

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def train(self, config: TrainConfig) -> None:
        """Train and write the folder `config.out`, going on from what is there. Raises UserError."""


class DrafterRecipe(Trainer):
    """What differs between drafters: what is trained, how far ahead it looks, and how its folder is written.

    method: the method that reads the folder, unless options change it (`decoded_by`). lr: peak learning rate where the
    user gives none.
    """

    method: ClassVar[str]
    lr: ClassVar[float] = 5e-4

    @property
    @abstractmethod
    def ahead(self) -> int:
        """Number of tokens that are drafted after the next one: how many further labels a position has."""

    @property
    def decoded_by(self) -> str:
        """Name of the method that reads the folder, as `ssbench run --methods` takes it."""
        return self.method

    @abstractmethod
    def build(self, target: Target, lr: float) -> Trainee:
        """Return what is trained, with its initial weights. Raises UserError where it does not fit the target."""

    def measured(self, training: Trained) -> dict[str, Any]:
        """Return what the folder's config says of the drafter's accuracy.

        All processes measure it together at the end.
        """
        return {}

    @abstractmethod
    def save(self, training: Trained, folder: Path, about: dict[str, Any]) -> None:
        """Write weights and config so that the method loads them.

        about: the base's hash and facts about the training.
        """

    def usage(self, folder: Path, model: str) -> str:
        """Return the shell command that decodes with the folder."""
        weights = f"{self.decoded_by}.weights={folder}"
        return shlex.join(["ssbench", "run", "--model", model, "--methods", self.decoded_by, "--set", weights])

"""What `ssbench train` asks of a kind of drafter. This module knows none by name and imports nothing heavy.

A trainer is found by an entry point of the group `specbench_ss.trainers`. Its options are a frozen dataclass, as a
method's are, and become options of the command.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Gt, Lt

from specbench_ss.options import NoOptions, check_bounds


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

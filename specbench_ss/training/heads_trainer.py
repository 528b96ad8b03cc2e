"""What the trainers of heads share: they measure accuracies at the end, from which the method builds its tree."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from specbench_ss.errors import UserError
from specbench_ss.training.drafter_trainer import DrafterTrainer, measured_accuracies
from specbench_ss.training.trainer import TrainConfig

if TYPE_CHECKING:
    from specbench_ss.decoding.target import Target
    from specbench_ss.training.drafter_training import DrafterTraining
    from specbench_ss.training.guess_accuracy import Guesser


@dataclass(frozen=True, slots=True)
class HeadsTraining:
    """Options of every trainer of heads."""

    heads: int = field(default=4, metadata={"help": "number of heads; each drafts one token after the next one"})


@dataclass(frozen=True, slots=True)
class MeasurableHeads(HeadsTraining):
    """Options of trainers that leave the base unchanged. Existing heads can be measured with them, too."""

    measure: str = field(
        default="",
        metadata={"help": "do not train; measure how often these existing heads guess right, to build their tree"},
    )


class HeadsTrainer(DrafterTrainer):
    """Trains a drafter that consists of heads."""

    weights_file: ClassVar[str]
    Options: ClassVar[type[Any]] = HeadsTraining

    def __init__(self, options: Any) -> None:
        if options.heads < 1:
            raise UserError(f"{self.name}: heads must be at least 1, not {options.heads}")
        super().__init__(options)

    @property
    def ahead(self) -> int:
        """Number of heads, since each head drafts one token."""
        return int(self.options.heads)

    def measured(self, training: DrafterTraining) -> dict[str, Any]:
        """Return the accuracies that the tree is built from."""
        trainee: Any = training.trainee
        return measured_accuracies(training, trainee)

    def save(self, training: DrafterTraining, folder: Path, about: dict[str, Any]) -> None:
        """Write the heads and their accuracies."""
        from specbench_ss.models.drafter_folder import write_checkpoint

        trainee: Any = training.trainee
        config = {**about, **trainee.config}
        write_checkpoint(folder, trainee.module, config, self.weights_file)


class MeasurableHeadsTrainer(HeadsTrainer):
    """Trains heads, or measures the accuracies of existing heads without training."""

    Options: ClassVar[type[Any]] = MeasurableHeads

    @abstractmethod
    def loaded(self, target: Target, weights: str) -> Guesser:
        """Return existing heads. Raises UserError where they cannot be loaded."""

    def train(self, config: TrainConfig) -> None:
        """Train heads, or measure existing ones where the option `measure` names them."""
        if not self.options.measure:
            super().train(config)
            return
        from specbench_ss.training.heads_measuring import measure

        measure(self.method, self.options.measure, self.loaded, config)

"""What the trainers of heads share: they measure accuracies at the end, from which the method builds its tree."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge

from specbench_ss.options import Bounded
from specbench_ss.training.drafter_trainer import DrafterTrainer, measured_accuracies
from specbench_ss.training.trainer import TrainConfig

if TYPE_CHECKING:
    from specbench_ss.engine.target import Target
    from specbench_ss.training.drafter_training import Trained
    from specbench_ss.training.guess_accuracy import Guesser


@dataclass(frozen=True, slots=True)
class HeadsTraining(Bounded):
    """Options of every trainer of heads."""

    heads: Annotated[int, Ge(1)] = field(
        default=4, metadata={"help": "Number of heads: how many tokens are drafted after the next one."}
    )


@dataclass(frozen=True, slots=True)
class MeasurableHeads(HeadsTraining):
    """Options of trainers that leave the base unchanged. Existing heads can be measured with them, too."""

    measure: str = field(
        default="",
        metadata={
            "help": "Folder or file with heads. Nothing is trained then: how often these heads guess the text is "
            "measured, and a draft tree can be built from that."
        },
    )


class HeadsTrainer(DrafterTrainer):
    """Trains a drafter that consists of heads."""

    weights_file: ClassVar[str]
    Options: ClassVar[type[Any]] = HeadsTraining

    @property
    def ahead(self) -> int:
        """Number of heads, since each head drafts one token."""
        return int(self.options.heads)

    def measured(self, training: Trained) -> dict[str, Any]:
        """Return the accuracies that the tree is built from."""
        trainee: Any = training.trainee
        return measured_accuracies(training, trainee)

    def save(self, training: Trained, folder: Path, about: dict[str, Any]) -> None:
        """Write the heads and their accuracies."""
        from specbench_ss.models.checkpoint import write_checkpoint

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

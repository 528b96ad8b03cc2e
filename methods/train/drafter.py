"""Trainers that learn from packed conversations by the one loop: the same text, batches and budget for all of them."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from specbench_ss.trainer import TrainConfig, Trainer

if TYPE_CHECKING:
    from specbench_ss.methods.accuracies import Guesser
    from specbench_ss.methods.train.training import DrafterTraining
    from specbench_ss.methods.training import Trainee
    from specbench_ss.target import Target

JUDGED_STEPS = 8  # batches of text on which accuracies are measured


class DrafterTrainer(Trainer):
    """What differs between drafters: what is trained, how far ahead it looks, how its folder is written.

    method: as `ssbench run --set` calls what reads the folder; lr: peak learning rate where the user gives none.
    """

    method: ClassVar[str]
    lr: ClassVar[float] = 5e-4

    @property
    @abstractmethod
    def ahead(self) -> int:
        """Tokens after the next one that are drafted: how many labels a position has."""

    @abstractmethod
    def build(self, target: Target, lr: float) -> Trainee:
        """What is trained, with its first weights. Raises UserError where it does not fit the target."""

    def measured(self, training: DrafterTraining) -> dict[str, Any]:
        """What the folder's config says of how the drafter does, found at the end by all processes together."""
        return {}

    @abstractmethod
    def save(self, training: DrafterTraining, folder: Path, about: dict[str, Any]) -> None:
        """Write weights and config, so that the method loads them. about: the base's hash, what the training was."""

    def usage(self, folder: Path, model: str) -> str:
        """The command that uses the folder."""
        return f"ssbench run --model {model} --methods {self.method} --set {self.method}.weights={folder}"

    def train(self, config: TrainConfig) -> None:
        """By the one loop."""
        from specbench_ss.methods.train import session

        session.run(self, config)


def measured_accuracies(training: DrafterTraining, trainee: Guesser) -> dict[str, Any]:
    """Top-k accuracies for a folder's config: of held-out text, or of the training text where there is none."""
    from specbench_ss.methods.accuracies import mean_accuracies

    text = training.held_out if len(training.held_out.rows) else training.text
    measured = mean_accuracies(training.target, trainee, text, training.budget, JUDGED_STEPS, training.processes)
    return {"accuracies": measured, "accuracies_of": "held-out text" if text is training.held_out else "training text"}

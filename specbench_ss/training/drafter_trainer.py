"""Trainers that learn from packed conversations by the common loop: the same text, batches and budget for all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specbench_ss.training.drafter_recipe import DrafterRecipe
from specbench_ss.training.trainer import TrainConfig

if TYPE_CHECKING:
    from specbench_ss.training.drafter_training import Trained
    from specbench_ss.training.guess_accuracy import Guesser

JUDGED_STEPS = 8  # batches of text on which accuracies are measured


class DrafterTrainer(DrafterRecipe):
    """A recipe that `ssbench train` carries out with the common loop."""

    def train(self, config: TrainConfig) -> None:
        """Train the drafter with the common loop."""
        from specbench_ss.training import session

        session.run(self, config)


def measured_accuracies(training: Trained, trainee: Guesser) -> dict[str, Any]:
    """Return top-k accuracies for a folder's config, on held-out text, or on the training text where there is none."""
    from specbench_ss.training.guess_accuracy import mean_accuracies

    text = training.held_out if len(training.held_out.rows) else training.text
    measured = mean_accuracies(training.target, trainee, text, training.budget, JUDGED_STEPS, training.processes)
    return {"accuracies": measured, "accuracies_of": "held-out text" if text is training.held_out else "training text"}

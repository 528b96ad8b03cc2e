"""`ssbench train medusa`: Medusa-1 heads on the frozen base."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench_ss.errors import UserError
from specbench_ss.methods.train.drafter import DrafterTrainer

if TYPE_CHECKING:
    from specbench_ss.methods.train.training import DrafterTraining
    from specbench_ss.methods.training import Trainee
    from specbench_ss.target import Target

WEIGHTS = "medusa_lm_head.safetensors"
JUDGED_STEPS = 8  # batches of text on which the heads' accuracies are measured


@dataclass(frozen=True, slots=True)
class HeadsOptions:
    """Options of `ssbench train medusa`."""

    heads: int = field(default=4, metadata={"help": "heads: tokens drafted after the next one"})

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise UserError(f"medusa: heads must be at least 1, not {self.heads}")


class MedusaTrainer(DrafterTrainer):
    """Heads, and their accuracies, of which `medusa` builds its tree."""

    name = "medusa"
    summary = "Medusa-1 heads on the frozen base"
    method = "medusa"
    lr = 1e-3
    Options = HeadsOptions

    @property
    def ahead(self) -> int:
        """A token a head."""
        return int(self.options.heads)

    def build(self, target: Target, lr: float) -> Trainee:
        """Copies of the base's LM head behind an identity block."""
        from specbench_ss.methods.medusa.training import MedusaTrainee

        return MedusaTrainee(target, self.options.heads, lr)

    def save(self, training: DrafterTraining, folder: Path, about: dict[str, Any]) -> None:
        """Heads and accuracies; these are of held-out text, or of the training text where there is none."""
        from specbench_ss.methods.checkpoint import write_checkpoint
        from specbench_ss.methods.medusa.training import MedusaTrainee, mean_accuracies

        trainee = training.trainee
        assert isinstance(trainee, MedusaTrainee)
        text = training.held_out if len(training.held_out.rows) else training.text
        measured = mean_accuracies(training.target, trainee, text, training.budget, JUDGED_STEPS, training.processes)
        config = {
            **about, "medusa_num_heads": self.options.heads, "medusa_num_layers": 1, "accuracies": measured,
            "accuracies_of": "held-out text" if text is training.held_out else "training text",
        }  # fmt: skip
        write_checkpoint(folder, trainee.module, config, WEIGHTS)

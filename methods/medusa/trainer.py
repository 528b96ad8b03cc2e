"""`ssbench train medusa`: Medusa-1 heads on the frozen base."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from specbench_ss.training.heads_trainer import MeasurableHeads, MeasurableHeadsTrainer
from specbench_ss.training.targets import Targets, targets_option

if TYPE_CHECKING:
    from specbench_ss.engine.target import Target
    from specbench_ss.methods.medusa.training import MedusaTrainee


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
        from specbench_ss.methods.medusa.training import MedusaTrainee

        o = self.options
        return MedusaTrainee(target, o.heads, lr, o.own_unembed, o.targets)

    def loaded(self, target: Target, weights: str) -> MedusaTrainee:
        """As `medusa` loads them."""
        from specbench_ss.methods.medusa.decoding import Medusa
        from specbench_ss.methods.medusa.options import MedusaOptions
        from specbench_ss.methods.medusa.training import MedusaTrainee

        return MedusaTrainee(target, Medusa.load(target, MedusaOptions(weights, tree="published")).heads)

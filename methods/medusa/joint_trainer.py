"""`ssbench train medusa2`: heads and backbone together, the backbone by LoRA or as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt

from specbench_ss.training.heads_trainer import HeadsTrainer, HeadsTraining

if TYPE_CHECKING:
    from specbench_ss.engine.target import Target
    from specbench_ss.methods.medusa.joint_training import Medusa2Trainee
    from specbench_ss.training.drafter_training import Trained


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
        from specbench_ss.methods.medusa.joint_training import Medusa2Trainee

        o = self.options
        return Medusa2Trainee(target, o.heads, o.lora_rank, o.own_unembed, lr, o.head_lr, o.coefficient, o.ramp)

    def save(self, training: Trained, folder: Path, about: dict[str, Any]) -> None:
        """As `medusa2` reads it."""
        from specbench_ss.methods.medusa.joint_training import Medusa2Trainee, save_joint

        trainee = training.trainee
        assert isinstance(trainee, Medusa2Trainee)
        save_joint(folder, trainee, about)

"""`ssbench train medusa2`: heads and backbone together, the backbone by LoRA or as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench_ss.errors import UserError
from specbench_ss.training.heads_trainer import HeadsTrainer, HeadsTraining

if TYPE_CHECKING:
    from specbench_ss.decoding.target import Target
    from specbench_ss.methods.medusa.joint_training import Medusa2Trainee
    from specbench_ss.training.drafter_training import DrafterTraining


@dataclass(frozen=True, slots=True)
class JointTraining(HeadsTraining):
    """Options of `ssbench train medusa2`."""

    lora_rank: int = field(default=32, metadata={"help": "LoRA of the backbone; 0: all its weights learn"})
    own_unembed: bool = field(default=True, metadata={"help": "an LM head for every head, or the model's for all"})
    coefficient: float = field(default=0.2, metadata={"help": "weight of the heads' loss beside the next token's"})
    ramp: int = field(default=100, metadata={"help": "steps in which that weight rises from 0"})
    head_lr: float = field(default=4.0, metadata={"help": "learning rate of the heads, times the backbone's"})


class Medusa2Trainer(HeadsTrainer):
    """Backbone, heads, and accuracies, of which `medusa2` builds its tree."""

    name = "medusa2"
    summary = "Medusa-2: heads and backbone together, which changes the model"
    method = "medusa2"
    Options = JointTraining

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        for name, least in {"lora_rank": 0, "ramp": 0}.items():
            if getattr(options, name) < least:
                raise UserError(f"medusa2: {name} must be at least {least}, not {getattr(options, name)}")
        for name in ("coefficient", "head_lr"):
            if not getattr(options, name) > 0:
                raise UserError(f"medusa2: {name} must be above 0, not {getattr(options, name)}")

    def build(self, target: Target, lr: float) -> Medusa2Trainee:
        """Copies of the base's LM head behind an identity block, on the base as it is."""
        from specbench_ss.methods.medusa.joint_training import Medusa2Trainee

        o = self.options
        return Medusa2Trainee(target, o.heads, o.lora_rank, o.own_unembed, lr, o.head_lr, o.coefficient, o.ramp)

    def save(self, training: DrafterTraining, folder: Path, about: dict[str, Any]) -> None:
        """As `medusa2` reads it."""
        from specbench_ss.methods.medusa.joint_training import Medusa2Trainee, save_joint

        trainee = training.trainee
        assert isinstance(trainee, Medusa2Trainee)
        save_joint(folder, trainee, about)

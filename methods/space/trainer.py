"""`ssbench train space`: LoRA and a mask token; the model itself changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench_ss.errors import UserError
from specbench_ss.training.drafter_trainer import DrafterTrainer

if TYPE_CHECKING:
    from specbench_ss.decoding.target import Target
    from specbench_ss.training.drafter_training import DrafterTraining
    from specbench_ss.training.trainee import Trainee


@dataclass(frozen=True, slots=True)
class MaskOptions:
    """Options of `ssbench train space`."""

    masks: int = field(default=5, metadata={"help": "masks: tokens drafted after the next one"})
    lora_rank: int = field(default=32, metadata={"help": "LoRA in every linear layer but the LM head"})
    mask_share: float = field(default=0.5, metadata={"help": "of the loss, beside next tokens"})
    mask_lr: float = field(default=5e-3, metadata={"help": "peak learning rate of the mask's embedding"})

    def __post_init__(self) -> None:
        for name in ("masks", "lora_rank"):
            if getattr(self, name) < 1:
                raise UserError(f"space: {name} must be at least 1, not {getattr(self, name)}")
        if not 0 < self.mask_share < 1:
            raise UserError(f"space: mask_share must be above 0 and below 1, not {self.mask_share}")
        if self.mask_lr <= 0:
            raise UserError(f"space: mask_lr must be above 0, not {self.mask_lr}")


class SPACETrainer(DrafterTrainer):
    """LoRA and the mask together."""

    name = "space"
    summary = "LoRA and a mask token that predicts how the text goes on; the model itself changes"
    method = "space"
    Options = MaskOptions

    @property
    def ahead(self) -> int:
        """A token a mask."""
        return int(self.options.masks)

    def build(self, target: Target, lr: float) -> Trainee:
        """Untrained LoRA; the mask is the padding token at first."""
        from specbench_ss.methods.space.training import SPACETrainee

        o = self.options
        return SPACETrainee(target, o.masks, o.lora_rank, lr, o.mask_lr, o.mask_share, target.config.pad_token_id or 0)

    def save(self, training: DrafterTraining, folder: Path, about: dict[str, Any]) -> None:
        """As `space` reads it."""
        from specbench_ss.methods.space.model import save
        from specbench_ss.methods.space.training import SPACETrainee

        trainee = training.trainee
        assert isinstance(trainee, SPACETrainee)
        save(folder, trainee.mask, trainee.tuned, about)

"""`ssbench train space`: LoRA and a mask token; the model itself changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Lt

from specbench_ss.options import Bounded
from specbench_ss.training.drafter_trainer import DrafterTrainer

if TYPE_CHECKING:
    from specbench_ss.engine.target import Target
    from specbench_ss.training.drafter_training import Trained
    from specbench_ss.training.trainee import Trainee


@dataclass(frozen=True, slots=True)
class MaskOptions(Bounded):
    """Options of `ssbench train space`. Raises UserError for values beyond their bounds."""

    owner: ClassVar[str] = "space"
    masks: Annotated[int, Ge(1)] = field(
        default=5, metadata={"help": "Number of masks: how many tokens are drafted after the next one."}
    )
    lora_rank: Annotated[int, Ge(1)] = field(
        default=32, metadata={"help": "Rank of the LoRA in every linear layer but the LM head."}
    )
    mask_share: Annotated[float, Gt(0), Lt(1)] = field(
        default=0.5, metadata={"help": "Share of the loss that the masks have; next tokens have the rest."}
    )
    mask_lr: Annotated[float, Gt(0)] = field(
        default=5e-3, metadata={"help": "Peak learning rate of the mask's embedding."}
    )


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

    def save(self, training: Trained, folder: Path, about: dict[str, Any]) -> None:
        """As `space` reads it."""
        from specbench_ss.methods.space.model import save
        from specbench_ss.methods.space.training import SPACETrainee

        trainee = training.trainee
        assert isinstance(trainee, SPACETrainee)
        save(folder, trainee.mask, trainee.tuned, about)

"""`ssbench train dflash`: a drafter of whole blocks on the frozen base's features."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from specbench_ss.errors import UserError
from specbench_ss.methods.dflash.options import MOST_BLOCK
from specbench_ss.options import Bounded
from specbench_ss.training.drafter_trainer import DrafterTrainer
from specbench_ss.training.targets import Targets, targets_option

if TYPE_CHECKING:
    from specbench_ss.engine.target import Target
    from specbench_ss.training.drafter_training import Trained
    from specbench_ss.training.trainee import Trainee


@dataclass(frozen=True, slots=True)
class DFlashTraining(Bounded):
    """Options of `ssbench train dflash`. Raises UserError for values beyond their bounds."""

    owner: ClassVar[str] = "dflash"
    layers: Annotated[int, Ge(1)] = field(default=5, metadata={"help": "Number of decoder layers of the drafter."})
    block_size: Annotated[int, Ge(2), Le(MOST_BLOCK)] = field(
        default=8, metadata={"help": "Places of a block: the root's, and one for each token that is drafted."}
    )
    decay: Annotated[float, Gt(0)] = field(
        default=4.0, metadata={"help": "The k-th drafted token's loss has the weight exp(-(k - 1) / decay)."}
    )
    targets: Targets = targets_option("distribution", later=False)
    draft_vocab: Annotated[int, Ge(0)] = field(
        default=0, metadata={"help": "How many words it can draft: the most frequent ones of the text. 0: all."}
    )
    mask_token_id: Annotated[int, Ge(-1)] = field(
        default=-1,
        metadata={
            "help": "Token that stands at drafted places. -1: the tokenizer's mask token, or else the last token whose "
            "embedding is not zero."
        },
    )
    sample_from_anchor: bool = field(
        default=False,
        metadata={"help": "Whether the root's place drafts a token, too. vLLM does not serve such a drafter."},
    )
    format: Literal["z-lab", "speculators"] = field(
        default="z-lab",
        metadata={"help": "Layout of the folder: as z-lab publishes drafters, or as speculators does, for vLLM."},
    )


class DFlashTrainer(DrafterTrainer):
    """The drafter of `dflash`."""

    name = "dflash"
    summary = "DFlash's drafter of whole blocks on the frozen base"
    method = "dflash"
    lr = 6e-4
    Options = DFlashTraining

    @property
    def ahead(self) -> int:
        """A token a place."""
        return int(self.options.block_size) - (not self.options.sample_from_anchor)

    def build(self, target: Target, lr: float) -> Trainee:
        """Fresh layers."""
        from specbench_ss.methods.dflash.new_weights import new_drafter
        from specbench_ss.methods.dflash.training import DFlashTrainee

        target.check_square(self.name)
        o = self.options
        if o.mask_token_id >= target.vocab_size:
            raise UserError(
                f"dflash: mask_token_id is {o.mask_token_id}, the model has tokens 0 to {target.vocab_size - 1}"
            )
        mask = None if o.mask_token_id < 0 else o.mask_token_id
        drafter = new_drafter(target, o.layers, o.block_size, o.draft_vocab, mask, o.sample_from_anchor)
        return DFlashTrainee(target, drafter, lr, o.decay, o.targets == "distribution")

    def save(self, training: Trained, folder: Path, about: dict[str, Any]) -> None:
        """In one of the published layouts."""
        from specbench_ss.methods.dflash.published_files import config_of, speculators_config_of
        from specbench_ss.methods.dflash.training import DFlashTrainee
        from specbench_ss.models.checkpoint import write_checkpoint

        trainee = training.trainee
        assert isinstance(trainee, DFlashTrainee)
        config = speculators_config_of if self.options.format == "speculators" else config_of
        write_checkpoint(folder, trainee.module, {**config(trainee.module, training.target), **about})

"""`ssbench train peagle`: a drafter of all depths at once on the frozen base's features."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from specbench_ss.errors import UserError
from specbench_ss.methods.peagle.options import DEPTHS, MOST_DEPTHS
from specbench_ss.options import Bounded
from specbench_ss.training.drafter_trainer import DrafterTrainer
from specbench_ss.training.targets import Targets, targets_option

if TYPE_CHECKING:
    from specbench_ss.engine.target import Target
    from specbench_ss.training.drafter_training import Trained
    from specbench_ss.training.trainee import Trainee


@dataclass(frozen=True, slots=True)
class PEagleTraining(Bounded):
    """Options of `ssbench train peagle`. Raises UserError for values beyond their bounds."""

    owner: ClassVar[str] = "peagle"
    layers: Annotated[int, Ge(1)] = field(default=1, metadata={"help": "Number of decoder layers of the drafter."})
    depths: Annotated[int, Ge(1), Le(MOST_DEPTHS)] = field(
        default=DEPTHS, metadata={"help": "How many tokens it drafts in one pass."}
    )
    keep: Annotated[float, Gt(0), Le(1)] = field(
        default=0.7, metadata={"help": "Depth d is trained at max(keep^d, keep_least) of the anchors."}
    )
    keep_least: Annotated[float, Gt(0), Le(1)] = field(
        default=0.2, metadata={"help": "The smallest share of the anchors that a depth keeps."}
    )
    targets: Targets = targets_option("distribution", later=False)
    draft_vocab: Annotated[int, Ge(0)] = field(
        default=32000, metadata={"help": "How many words it can draft: the most frequent ones of the text. 0: all."}
    )
    embedding: Literal["own", "target"] = field(
        default="own",
        metadata={"help": "own: an embedding that is trained and saved, as published. target: the base's, unchanged."},
    )
    mask_token_id: Annotated[int, Ge(-1)] = field(
        default=-1,
        metadata={
            "help": "Token that stands at drafted places. -1: the tokenizer's mask token, or else the last token whose "
            "embedding is not zero."
        },
    )
    format: Literal["eagle3", "speculators"] = field(
        default="eagle3",
        metadata={"help": "Layout of the folder: as EAGLE-3's drafters have it, or as speculators does, for vLLM."},
    )


class PEagleTrainer(DrafterTrainer):
    """The drafter of `peagle`."""

    name = "peagle"
    summary = "P-EAGLE's drafter of all depths at once on the frozen base"
    method = "peagle"
    lr = 3e-4
    Options = PEagleTraining

    @property
    def ahead(self) -> int:
        """A token a depth."""
        return int(self.options.depths)

    def build(self, target: Target, lr: float) -> Trainee:
        """Fresh layers."""
        from specbench_ss.methods._shared.mask_token import check_mask_token
        from specbench_ss.methods.peagle.new_weights import new_drafter
        from specbench_ss.methods.peagle.training import PEagleTrainee

        target.check_square(self.name)
        o = self.options
        mask = None if o.mask_token_id < 0 else o.mask_token_id
        if mask is not None:
            try:
                check_mask_token(mask, target)
            except UserError as error:
                raise UserError(f"{self.name}: {error}") from None
        drafter = new_drafter(target, o.depths, o.layers, o.draft_vocab, mask, o.embedding == "own")
        return PEagleTrainee(target, drafter, lr, o.keep, o.keep_least, o.targets == "distribution")

    def save(self, training: Trained, folder: Path, about: dict[str, Any]) -> None:
        """In one of the published layouts."""
        from specbench_ss.methods.peagle.published_files import config_of, speculators_config_of
        from specbench_ss.methods.peagle.training import PEagleTrainee
        from specbench_ss.models.checkpoint import write_checkpoint

        trainee = training.trainee
        assert isinstance(trainee, PEagleTrainee)
        config = speculators_config_of if self.options.format == "speculators" else config_of
        write_checkpoint(folder, trainee.module, {**config(trainee.module, training.target), **about})

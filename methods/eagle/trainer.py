"""`ssbench train eagle` and `ssbench train eagle3`: one decoder layer over the frozen base's features."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from specbench_ss.errors import UserError
from specbench_ss.options import Bounded
from specbench_ss.training.drafter_trainer import DrafterTrainer, measured_accuracies
from specbench_ss.training.targets import Targets, targets_option

if TYPE_CHECKING:
    from specbench_ss.engine.target import Target
    from specbench_ss.training.drafter_training import Trained
    from specbench_ss.training.trainee import Trainee

PUBLISHED_DEPTH = 5  # of the static tree: levels for which accuracies are measured


@dataclass(frozen=True, slots=True)
class EagleTrainOptions(Bounded):
    """Options of `ssbench train eagle`. Raises UserError for values beyond their bounds."""

    owner: ClassVar[str] = "eagle"
    feature_weight: Annotated[float, Ge(0)] = field(
        default=1.0, metadata={"help": "Weight of the smooth L1 loss between features."}
    )
    token_weight: Annotated[float, Ge(0)] = field(
        default=0.1, metadata={"help": "Weight of the cross-entropy of the token."}
    )
    noise: Annotated[float, Ge(0)] = field(
        default=0.2, metadata={"help": "Width of the uniform noise on features, for rows of 512 tokens."}
    )
    targets: Targets = targets_option("distribution")

    def check_together(self) -> None:
        """Something to learn."""
        if not self.feature_weight + self.token_weight:
            raise UserError("eagle: with feature_weight and token_weight 0 there is nothing to learn")


class EagleTrainer(DrafterTrainer):
    """The drafter of `eagle` and `eagle2`, and the accuracies of which `eagle` builds its tree."""

    name = "eagle"
    summary = "EAGLE's drafter on the frozen base, for eagle and eagle2"
    method = "eagle"
    lr = 3e-4
    Options = EagleTrainOptions

    @property
    def ahead(self) -> int:
        """Levels that are looked at; one is learnt."""
        return PUBLISHED_DEPTH

    def build(self, target: Target, lr: float) -> Trainee:
        """A fresh layer."""
        from specbench_ss.methods.eagle.training import EagleTrainee

        o = self.options
        return EagleTrainee(target, lr, self.ahead, o.feature_weight, o.token_weight, o.noise, o.targets)

    def measured(self, training: Trained) -> dict[str, Any]:
        """Accuracies, of which the static tree is built."""
        trainee: Any = training.trainee
        return measured_accuracies(training, trainee)

    def save(self, training: Trained, folder: Path, about: dict[str, Any]) -> None:
        """In the published layout."""
        from specbench_ss.methods.eagle.training import EagleTrainee
        from specbench_ss.models.checkpoint import write_checkpoint

        trainee = training.trainee
        assert isinstance(trainee, EagleTrainee)
        write_checkpoint(folder, trainee.module, {**trainee.config, **about})


@dataclass(frozen=True, slots=True)
class Eagle3TrainOptions(Bounded):
    """Options of `ssbench train eagle3`. Raises UserError for values beyond their bounds."""

    owner: ClassVar[str] = "eagle3"
    levels: Annotated[int, Ge(1)] = field(
        default=7, metadata={"help": "Number of passes in which the drafter learns from its own outputs."}
    )
    draft_vocab: Annotated[int, Ge(1)] = field(
        default=32000, metadata={"help": "How many words it can draft: the most frequent ones of the text."}
    )
    decay: Annotated[float, Gt(0)] = field(
        default=0.8, metadata={"help": "Weight of a level's loss as a multiple of the weight of the one before it."}
    )
    targets: Targets = targets_option("distribution")
    format: Literal["published", "speculators"] = field(
        default="published",
        metadata={
            "help": "Layout of the folder: as EAGLE-3 was published, or as speculators writes it, for vLLM.",
            "later": True,
        },
    )


class Eagle3Trainer(DrafterTrainer):
    """The drafter of `eagle3`, by training-time test."""

    name = "eagle3"
    summary = "EAGLE-3's drafter on the frozen base: features of three levels, training-time test"
    method = "eagle3"
    lr = 3e-4
    Options = Eagle3TrainOptions

    @property
    def ahead(self) -> int:
        """A token a level."""
        return int(self.options.levels)

    def build(self, target: Target, lr: float) -> Trainee:
        """A fresh layer."""
        from specbench_ss.methods.eagle.feature_layers import input_levels
        from specbench_ss.methods.eagle.training import Eagle3Trainee

        o = self.options
        layers = input_levels(target.n_layers) if o.format == "speculators" else ()
        return Eagle3Trainee(target, lr, o.levels, o.draft_vocab, o.decay, layers, o.targets)

    def save(self, training: Trained, folder: Path, about: dict[str, Any]) -> None:
        """In one of the published layouts, and the layers that it reads."""
        from specbench_ss.methods.eagle.speculators_files import config_of, published_name
        from specbench_ss.methods.eagle.training import Eagle3Trainee
        from specbench_ss.models.checkpoint import write_checkpoint

        trainee, levels = training.trainee, self.options.levels
        assert isinstance(trainee, Eagle3Trainee)
        if self.options.format == "speculators":
            config = config_of(trainee.module, trainee.config, trainee.layers, levels, training.target)
            write_checkpoint(folder, trainee.module, {**config, **about}, called=published_name)
        else:
            write_checkpoint(folder, trainee.module, {**trainee.config, **about})

"""`ssbench train draft`: a small model of the target's tokenizer, an ordinary Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le

from specbench_ss.options import Bounded
from specbench_ss.storage import ordinary_mode
from specbench_ss.training.drafter_trainer import DrafterTrainer

if TYPE_CHECKING:
    from specbench_ss.engine.target import Target
    from specbench_ss.training.drafter_training import Trained
    from specbench_ss.training.trainee import Trainee


@dataclass(frozen=True, slots=True)
class DraftOptions(Bounded):
    """Options of `ssbench train draft`. Raises UserError for values beyond their bounds."""

    owner: ClassVar[str] = "draft"
    layers: Annotated[int, Ge(1)] = field(default=2, metadata={"help": "Number of decoder layers."})
    hidden: Annotated[int, Ge(1)] = field(default=256, metadata={"help": "Hidden size."})
    n_heads: Annotated[int, Ge(0)] = field(
        default=0, metadata={"help": "Number of attention heads. 0: as many as have 64 dimensions each."}
    )
    ffn: Annotated[int, Ge(0)] = field(default=0, metadata={"help": "Width of the MLP. 0: 8/3 of the hidden size."})
    gamma: Annotated[int, Ge(1)] = field(
        default=4, metadata={"help": "Length of a draft for which tau is estimated while training."}
    )
    distill: bool = field(
        default=False,
        metadata={
            "help": "Learn the target's distributions beside the text, or the text alone.",
            "flag": "--distill/--from-scratch",
        },
    )
    distill_share: Annotated[float, Gt(0), Le(1)] = field(
        default=0.9, metadata={"help": "With --distill: share of the loss that the target's distributions have."}
    )
    prompt_weight: Annotated[float, Ge(0), Le(1)] = field(
        default=0.2, metadata={"help": "Weight of a prompt's tokens in the loss, where an answer's tokens have 1."}
    )
    gradient_checkpointing: bool = field(
        default=False,
        metadata={
            "help": "Save memory by computing activations a second time in the backward pass.",
            "flag": "--gradient-checkpointing",
        },
    )


class DraftTrainer(DrafterTrainer):
    """A small Llama."""

    name = "draft"
    summary = "a small model for two-model speculative decoding, from scratch or distilled from the target"
    method = "sd"
    lr = 1e-3
    Options = DraftOptions

    @property
    def ahead(self) -> int:
        """Tokens of a draft."""
        return int(self.options.gamma)

    def build(self, target: Target, lr: float) -> Trainee:
        """A fresh one."""
        from specbench_ss.methods.sd.training import DraftSize, DraftTrainee

        o = self.options
        size = DraftSize(o.layers, o.hidden, o.n_heads, o.ffn)
        trainee = DraftTrainee(target, size, lr, o.gamma, o.distill_share if o.distill else 0.0, o.prompt_weight)
        if o.gradient_checkpointing:
            model: Any = trainee.module
            model.gradient_checkpointing_enable()
        return trainee

    def save(self, training: Trained, folder: Path, about: dict[str, Any]) -> None:
        """Model and tokenizer, as any model has them; what it was trained for is in the model's config."""
        import copy

        import torch

        model: Any = copy.deepcopy(training.trainee.module).to("cpu", torch.float16)
        model.config.ssbench = about
        model.save_pretrained(folder)
        ordinary_mode(folder)
        training.target.tokenizer.save_pretrained(folder)

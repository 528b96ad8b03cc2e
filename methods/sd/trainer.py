"""`ssbench train draft`: a small model of the target's tokenizer, an ordinary Hugging Face folder."""

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
class DraftOptions:
    """Options of `ssbench train draft`."""

    layers: int = field(default=2, metadata={"help": "decoder layers"})
    hidden: int = field(default=256, metadata={"help": "hidden size"})
    n_heads: int = field(default=0, metadata={"help": "attention heads; 0: of 64 each"})
    ffn: int = field(default=0, metadata={"help": "width of the MLP; 0: 8/3 of hidden"})
    gamma: int = field(default=4, metadata={"help": "tokens a draft has in the estimated tau"})
    distill: bool = field(
        default=False,
        metadata={"help": "learn the target's distributions, or the text alone", "flag": "--distill/--from-scratch"},
    )
    distill_share: float = field(default=0.9, metadata={"help": "of the loss, where distilled"})
    prompt_weight: float = field(default=0.2, metadata={"help": "of a prompt's tokens, beside an answer's"})
    gradient_checkpointing: bool = field(
        default=False,
        metadata={"help": "compute activations twice to save memory", "flag": "--gradient-checkpointing"},
    )

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise UserError(f"draft: gamma must be at least 1, not {self.gamma}")
        if not 0 < self.distill_share <= 1:
            raise UserError(f"draft: distill_share must be above 0 and at most 1, not {self.distill_share}")
        if not 0 <= self.prompt_weight <= 1:
            raise UserError(f"draft: prompt_weight must be 0 to 1, not {self.prompt_weight}")


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

    def save(self, training: DrafterTraining, folder: Path, about: dict[str, Any]) -> None:
        """Model and tokenizer, as any model has them; what it was trained for is in the model's config."""
        import copy

        import torch

        model: Any = copy.deepcopy(training.trainee.module).to("cpu", torch.float16)
        model.config.ssbench = about
        model.save_pretrained(folder)
        training.target.tokenizer.save_pretrained(folder)

"""Medusa-2: heads and backbone trained together (Medusa sec. 2.2.2). Another model than the base: its own reference.

A folder holds the backbone's LoRA beside the heads (ours), or is a whole model with the heads inside (as published) or
beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbench_ss.engine.architectures import Outline
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.fine_tuned import (
    OwnAutoregressive,
    OwnModel,
    fine_tuned,
    holds_model,
    outline_beside,
    target_beside,
)
from specbench_ss.methods._shared.lora import ADAPTER, check_lora, merged_target
from specbench_ss.methods.medusa.decoding import Medusa
from specbench_ss.models.checkpoint import drafter_folder, drafter_here

NAME = "medusa2"


@dataclass(frozen=True, slots=True)
class Medusa2AROptions:
    """Options of `medusa2-ar`: which model it is."""

    weights: str = field(
        default="", metadata={"help": "Folder as for `medusa2`. Empty: the one that came with the model."}
    )


class Medusa2(OwnModel, Medusa):
    """Medusa in the backbone that was trained with the heads."""

    name = NAME
    summary = "Medusa-2: heads and backbone trained together; the model itself changes"
    own_reference = "medusa2-ar"
    model_options = Medusa2AROptions

    @classmethod
    def accepts_whole(cls, path: Path, base: Outline) -> bool:
        """It decodes with that model."""
        return True

    @classmethod
    def outline_of(cls, base: Outline, path: Path) -> Outline:
        """Of the backbone."""
        return backbone_outline(base, path)

    @classmethod
    def model_of(cls, target: Target, path: Path) -> Target:
        """The backbone."""
        return backbone(target, path)

    @classmethod
    def examples(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """As `medusa`, on a changed copy of the target."""
        return super().examples(fine_tuned(target))


class Medusa2Autoregressive(OwnAutoregressive):
    """The backbone of a Medusa-2 checkpoint, one token a step."""

    name = "medusa2-ar"
    summary = "plain decoding of the backbone of medusa2: its reference"
    Options = Medusa2AROptions

    @classmethod
    def check(cls, options: Any, base: Outline) -> None:
        """The backbone's files."""
        path = drafter_here(options.weights, NAME, base)
        if path is not None:
            backbone_outline(base, path)

    @classmethod
    def model_of(cls, target: Target, options: Any) -> Target:
        """The backbone."""
        return backbone(target, drafter_folder(options.weights, NAME, target))

    @classmethod
    def examples(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """On a changed copy of the target."""
        return {"default": lambda: cls(fine_tuned(target), Medusa2AROptions())}


def backbone_outline(base: Outline, path: Path) -> Outline:
    """The backbone by its configuration. Raises UserError where a folder holds none, or one of other words."""
    if (path / ADAPTER).is_file():
        check_lora(path, NAME)
        return base
    if not holds_model(path):
        raise UserError(f"{NAME}: {path} holds no backbone: neither {ADAPTER} nor the weights of a whole model")
    own = outline_beside(path, base)
    if own.vocab_size != base.vocab_size:
        raise UserError(f"{NAME}: the model in {path} has {own.vocab_size} words, {base.name!r} has {base.vocab_size}")
    return own


def backbone(target: Target, path: Path) -> Target:
    """The backbone as a target; what does not fit raises UserError as in `backbone_outline`."""
    backbone_outline(target, path)
    lora = (path / ADAPTER).is_file()
    return merged_target(target, path, NAME) if lora else target_beside(target, path)

"""Models of SPACE: the mask token, rows of a step, and the folders they come from."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from specbench_ss import user_files
from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import TreeTopology, topology_of
from specbench_ss.errors import UserError
from specbench_ss.methods._shared import fine_tuned
from specbench_ss.models import checkpoint

MASKS = 5  # as published


@lru_cache(maxsize=64)
def rows_of(nodes: int, masks: int) -> TreeTopology:
    """A chain of `nodes` tokens, then the group of each: node 0's masks, node 1's, ..."""
    chain = range(-1, nodes - 1)
    first = (nodes + g * masks for g in range(nodes))
    groups = ((g, *range(start, start + masks - 1)) for g, start in enumerate(first))
    return topology_of((*chain, *(parent for group in groups for parent in group)))


class MaskToken(nn.Module):
    """The learnt embedding of the mask, as an offset [h] from that of the token `mask_id`.

    A model with a mask of its own in its vocabulary has no offset: zero.
    """

    def __init__(self, hidden: int, masks: int = MASKS, mask_id: int = 0) -> None:
        super().__init__()
        if masks < 1:
            raise UserError(f"space: masks must be at least 1, not {masks}")
        self.offset = nn.Parameter(torch.zeros(hidden))
        self.masks, self.mask_id = masks, mask_id

    def embed(self, target: Target, ids: Tensor, positions: Tensor, masks: int) -> Tensor:
        """Rows ids [B, q] and behind them `masks` mask rows, at positions [B, q + masks] -> [B, q + masks, h]."""
        tokens = torch.cat((ids, ids.new_full((ids.shape[0], masks), self.mask_id)), 1)
        x = target.embed(tokens, positions)
        return torch.cat((x[:, : ids.shape[1]], x[:, ids.shape[1] :] + self.offset.to(x.dtype)), 1)


WEIGHTS = "model.safetensors"


class _Mask(msgspec.Struct):
    masks: int
    mask_id: int


class _Config(msgspec.Struct):
    """What config.json says of the mask."""

    space: _Mask


def is_target(options: Any) -> bool:
    """Return True if the target is the fine-tuned model already: no weights and a mask_id."""
    return not options.weights and options.mask_id != 0


def check_model(options: Any, base: ModelInfo) -> MaskToken | None:
    """The mask without its numbers; None for a hub id. Raises UserError for what is missing or does not fit.

    options: `weights` names the folder, `mask_id` the mask in a whole model's vocabulary, 0 = none was given.
    """
    if is_target(options):
        return _of_whole(options, base)
    folder = checkpoint.drafter_here(options.weights, "space", base)
    if folder is None:
        return None
    if _is_whole(folder, options):
        return _of_whole(options, fine_tuned.outline_beside(folder, base), base)
    fine_tuned.check_lora(folder, "space")
    with torch.device("meta"):
        return _read(folder, base, checkpoint.read_shapes)[0]


def load_model(options: Any, target: Target) -> tuple[Target, MaskToken, dict[str, Any]]:
    """The fine-tuned model, its mask, and what is known of their training; of the target itself nothing."""
    if is_target(options):
        return target, _of_whole(options, target), {}
    folder = checkpoint.drafter_folder(options.weights, "space", target)
    trained = checkpoint.read_training_info(checkpoint.read_config(folder))
    if _is_whole(folder, options):
        own = fine_tuned.target_beside(target, folder)
        return own, _of_whole(options, own, target), trained
    mask, config = _read(folder, target, checkpoint.read_tensors)
    checkpoint.check_base(config, target, "space")
    return fine_tuned.merged_target(target, folder, "space"), mask, trained


def save(folder: Path, mask: MaskToken, tuned: Target, about: dict[str, Any]) -> None:
    """model.safetensors and config.json (mask), and the LoRA of `tuned` as peft saves it."""
    checkpoint.write_checkpoint(folder, mask, {**about, "space": {"masks": mask.masks, "mask_id": mask.mask_id}})
    fine_tuned.save_lora(folder, tuned)


def _is_whole(folder: Path, options: Any) -> bool:
    """Whether the folder holds a model rather than what is put into one."""
    whole = fine_tuned.holds_model(folder) and "model_type" in checkpoint.read_config(folder)
    if whole and not options.mask_id:
        raise UserError(f"space: {folder} is a whole model: say which token is its mask with space.mask_id")
    if options.mask_id and not whole:
        raise UserError(f"space: mask_id is for a whole model, and {folder} holds none")
    return whole


def _of_whole(options: Any, own: ModelInfo, base: ModelInfo | None = None) -> MaskToken:
    """The mask of a whole model. Raises UserError where its vocabulary has no such token, or not all of the base's."""

    if not 0 < options.mask_id < own.vocab_size:
        raise UserError(f"space: mask_id must be 1 to {own.vocab_size - 1}, not {options.mask_id}")
    if base is not None and own.vocab_size < base.vocab_size:
        raise UserError(
            f"space: the model in {options.weights} has {own.vocab_size} tokens, {base.name!r} has {base.vocab_size}"
        )
    return MaskToken(own.hidden_size, MASKS, options.mask_id)


def _read(folder: Path, base: ModelInfo, read: Callable[[Path], dict[str, Tensor]]) -> tuple[MaskToken, dict[str, Any]]:
    """The mask of a folder, and its config."""
    config, file = checkpoint.read_config(folder), folder / WEIGHTS
    try:
        metadata = user_files.convert(config, _Config).space
    except ValueError as problem:
        raise UserError(f"space: {folder / 'config.json'} describes no mask: {problem}") from None
    mask = MaskToken(base.hidden_size, metadata.masks, metadata.mask_id)
    if not 0 <= mask.mask_id < base.vocab_size:
        raise UserError(f"space: mask_id {mask.mask_id} is beyond the vocabulary of {base.name!r}")
    checkpoint.load_into(mask, {k: v.float() for k, v in read(file).items()}, f"space: {file}")
    return mask, config

"""Models of SPACE: mask token, token layout of a step, and checkpoints."""

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
    """Return the topology of a step: a chain of `nodes` tokens, then the masks of node 0, of node 1, ..."""
    chain = range(-1, nodes - 1)
    first = (nodes + g * masks for g in range(nodes))
    groups = ((g, *range(start, start + masks - 1)) for g, start in enumerate(first))
    return topology_of((*chain, *(parent for group in groups for parent in group)))


class MaskToken(nn.Module):
    """The learnt embedding of the mask, as an offset [h] from that of the token `mask_id`.

    The offset is zero for a model with a mask in its vocabulary.
    """

    def __init__(self, hidden: int, masks: int = MASKS, mask_id: int = 0) -> None:
        super().__init__()
        if masks < 1:
            raise UserError(f"space: masks must be at least 1, not {masks}")
        self.offset = nn.Parameter(torch.zeros(hidden))
        self.masks, self.mask_id = masks, mask_id

    def embed(self, target: Target, ids: Tensor, positions: Tensor, masks: int) -> Tensor:
        """Return embeddings [B, q + masks, h] of ids [B, q] and then `masks` masks, at positions [B, q + masks]."""
        tokens = torch.cat((ids, ids.new_full((ids.shape[0], masks), self.mask_id)), 1)
        x = target.embed(tokens, positions)
        return torch.cat((x[:, : ids.shape[1]], x[:, ids.shape[1] :] + self.offset.to(x.dtype)), 1)


WEIGHTS = "model.safetensors"


class _Mask(msgspec.Struct):
    masks: int
    mask_id: int


class _Config(msgspec.Struct):
    """Fields of config.json about the mask."""

    space: _Mask


def is_target(options: Any) -> bool:
    """Return True if the target is the fine-tuned model already: no weights and a mask_id."""
    return not options.weights and options.mask_id != 0


def check_model(options: Any, base: ModelInfo) -> MaskToken | None:
    """Return the mask without values; None for a hub id. Raise UserError for missing or unfit files.

    options: `weights` names the folder, `mask_id` the mask in a whole model's vocabulary, 0 = none.
    """
    if is_target(options):
        return _mask_of_model(options, base)
    folder = checkpoint.find_drafter(options.weights, "space", base)
    if folder is None:
        return None
    if _has_model(folder, options):
        return _mask_of_model(options, fine_tuned.read_model_info(folder, base), base)
    fine_tuned.check_lora(folder, "space")
    with torch.device("meta"):
        return _read(folder, base, checkpoint.read_shapes)[0]


def load_model(options: Any, target: Target) -> tuple[Target, MaskToken, dict[str, Any]]:
    """Return the fine-tuned model, its mask, and their training info (empty for the target itself)."""
    if is_target(options):
        return target, _mask_of_model(options, target), {}
    folder = checkpoint.drafter_folder(options.weights, "space", target)
    training_info = checkpoint.read_training_info(checkpoint.read_config(folder))
    if _has_model(folder, options):
        model = fine_tuned.load_target_like(target, folder)
        return model, _mask_of_model(options, model, target), training_info
    mask, config = _read(folder, target, checkpoint.read_tensors)
    checkpoint.check_base(config, target, "space")
    return fine_tuned.merged_target(target, folder, "space"), mask, training_info


def save(folder: Path, mask: MaskToken, tuned: Target, about: dict[str, Any]) -> None:
    """Write model.safetensors and config.json (mask), and the LoRA of `tuned` in peft's format."""
    checkpoint.write_checkpoint(folder, mask, {**about, "space": {"masks": mask.masks, "mask_id": mask.mask_id}})
    fine_tuned.save_lora(folder, tuned)


def _has_model(folder: Path, options: Any) -> bool:
    """Return True if the folder has a whole model rather than a LoRA and a mask. Raise UserError by `mask_id`."""
    is_model = fine_tuned.has_model_files(folder) and "model_type" in checkpoint.read_config(folder)
    if is_model and not options.mask_id:
        raise UserError(f"space: {folder} is a whole model; give its mask token with space.mask_id")
    if options.mask_id and not is_model:
        raise UserError(f"space: mask_id is for a whole model, and {folder} has none")
    return is_model


def _mask_of_model(options: Any, model: ModelInfo, base: ModelInfo | None = None) -> MaskToken:
    """Return the mask of a whole model. Raise UserError if its vocabulary lacks it, or is smaller than the base's."""
    if not 0 < options.mask_id < model.vocab_size:
        raise UserError(f"space: mask_id must be 1 to {model.vocab_size - 1}, not {options.mask_id}")
    if base is not None and model.vocab_size < base.vocab_size:
        raise UserError(
            f"space: the model in {options.weights} has {model.vocab_size} tokens, {base.name!r} has {base.vocab_size}"
        )
    return MaskToken(model.hidden_size, MASKS, options.mask_id)


def _read(folder: Path, base: ModelInfo, read: Callable[[Path], dict[str, Tensor]]) -> tuple[MaskToken, dict[str, Any]]:
    """Return the mask of a folder and its config."""
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

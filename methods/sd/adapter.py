"""A LoRA for a draft model, as peft writes it: what `sd` reads in place of a whole model."""

from __future__ import annotations

from pathlib import Path

from specbench_ss.engine.architectures import Outline
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.lora import (
    ADAPTER,
    ADAPTER_CONFIG,
    check_fits,
    check_lora,
    is_plain_lora,
    merged_target,
    without_weights,
)
from specbench_ss.models.checkpoint import check_base, read_config
from specbench_ss.models.load import adapted_model, config_of
from specbench_ss.user_files import read_json


def holds_lora(path: Path) -> bool:
    """Whether a folder has a LoRA that names no model of its own: it is for the draft that came with the base."""
    config = path / ADAPTER_CONFIG
    if not config.is_file() and (path / ADAPTER).is_file():
        raise UserError(f"sd: {path} holds a LoRA's {ADAPTER} without the {ADAPTER_CONFIG} that it needs")
    return config.is_file() and not read_json(config).get("base_model_name_or_path")


def checked_lora(draft: Outline, folder: Path) -> Outline:
    """The draft. Raises UserError where the folder's files are no LoRA, or one of a model of another shape."""
    read_config(folder)
    check_lora(folder, "sd")
    check_fits(folder, without_weights(draft.config), "sd")
    return draft


def check_named(folder: Path) -> None:
    """Raises UserError for a folder with an adapter that names a model, which is missing or does not fit it."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return
    named = read_json(folder / ADAPTER_CONFIG)["base_model_name_or_path"]
    try:
        config = config_of(adapted_model(folder / ADAPTER_CONFIG))
        if is_plain_lora(folder):
            check_fits(folder, without_weights(config), "sd")
    except UserError as error:
        raise UserError(
            f"sd: the adapter in {folder} is for the model {named!r}, as its {ADAPTER_CONFIG} says (one that names "
            f"none is for the draft that came with the target): {str(error).removeprefix('sd: ')}"
        ) from error


def merged_lora(draft: Target, folder: Path) -> Target:
    """The draft with the LoRA merged in. Raises UserError where that was trained for another draft."""
    check_base(read_config(folder), draft, f"sd: the LoRA in {folder}", "draft")
    return merged_target(draft, folder, "sd")

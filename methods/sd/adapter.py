"""A LoRA for a draft model, as peft writes it: what `sd` reads in place of a whole model."""

from __future__ import annotations

from pathlib import Path

from specbench_ss.decoding.outline import Outline
from specbench_ss.decoding.target import Target
from specbench_ss.files.user_files import read_json
from specbench_ss.methods._shared.lora import ADAPTER_CONFIG, check_lora, merged_target
from specbench_ss.models.drafter_folder import check_base, read_config


def holds_lora(path: Path) -> bool:
    """Whether a folder has a LoRA that names no model of its own: it is for the draft that came with the base."""
    config = path / ADAPTER_CONFIG
    return config.is_file() and not read_json(config).get("base_model_name_or_path")


def checked_lora(draft: Outline, folder: Path) -> Outline:
    """The draft. Raises UserError where the folder's files are no LoRA."""
    read_config(folder)
    check_lora(folder, "sd")
    return draft


def merged_lora(draft: Target, folder: Path) -> Target:
    """The draft with the LoRA merged in. Raises UserError where that was trained for another draft."""
    check_base(read_config(folder), draft, f"sd: the LoRA in {folder}")
    return merged_target(draft, folder, "sd")

"""Find a model: an embedded one, a folder, or a hub id that is not downloaded yet. This module loads nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specbench_ss.errors import UserError, did_you_mean
from specbench_ss.models.weight_files import check_folder

LAB = Path(__file__).parents[1] / "lab"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that needs no download."""

    name: str
    summary: str
    folder: Path


def available() -> list[ModelInfo]:
    """Return the embedded models."""
    base = LAB / "base"
    return [ModelInfo("lab", "embedded Llama, 8 layers, trained on generated text; runs on a CPU", base)]


def find_folder(model: str) -> Path | None:
    """Return the folder of an embedded or local model; None for what can only be a hub id.

    Raises UserError, without loading anything, for what can be none of these.
    """
    embedded = {m.name: m.folder for m in available()}
    folder = embedded.get(model, Path(model))
    if folder.is_dir():
        return folder
    if model in embedded:
        raise UserError(f"the embedded model {model!r} is not part of this installation")
    if "/" not in model or Path(model).is_absolute() or model.startswith("."):
        hint = did_you_mean(model, embedded)
        raise UserError(f"no model {model!r}: neither an embedded model, a folder nor a hub id{hint}")
    return None


def is_lab(model: str) -> bool:
    """Say, without loading it, whether the model is one of the project's own family."""
    folder = find_folder(model)
    return folder is not None and (folder.parent / "lab.json").exists()


def check_model(model: str) -> None:
    """Raise UserError, without loading anything, for a missing model or a folder that holds none."""
    folder = find_folder(model)
    if folder is not None:
        check_folder(folder)

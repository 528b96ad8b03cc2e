"""Where a model is: one of the embedded ones, a folder, or nowhere yet, as a hub id. Loads nothing."""

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
    """The embedded models."""
    base = LAB / "base"
    return [ModelInfo("lab", "embedded Llama, 8 layers, trained on generated text; runs on a CPU", base)]


def find_folder(model: str) -> Path | None:
    """The folder of an embedded or local model; None for what can only be a hub id.

    Raises UserError, without loading anything, for what can be neither.
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
    """Whether the model is one of the project's own family, told without loading it."""
    folder = find_folder(model)
    return folder is not None and (folder.parent / "lab.json").exists()


def check_model(model: str) -> None:
    """Raises UserError, without loading anything, for a model that is not there or a folder that holds none."""
    folder = find_folder(model)
    if folder is not None:
        check_folder(folder)

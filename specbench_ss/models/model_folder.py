"""Find a model: an embedded or fetched one, a folder, a GGUF file, or a hub id that is not downloaded yet.

This module loads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench_ss.errors import UserError, did_you_mean
from specbench_ss.files.user_files import read_json
from specbench_ss.models.gguf_files import check_gguf, gguf_file, gguf_origin
from specbench_ss.models.packages import fetched_folder, packaged
from specbench_ss.models.weight_files import check_folder

LAB = Path(__file__).parents[1] / "lab"
DRAFTERS = Path(__file__).parents[1] / "drafters"  # a folder for each fetched model that drafters were trained for
ORIGIN = "origin.json"  # in a model's folder: where its weights come from, and what was done to them


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
    """Return the folder of an embedded, fetched or local model; None for a GGUF file and what can only be a hub id.

    Raises UserError, without loading anything, for what can be none of these.
    """
    embedded, fetched = {m.name: m.folder for m in available()}, packaged()
    if model in fetched:
        return fetched_folder(fetched[model])
    folder = embedded.get(model, Path(model))
    if folder.is_dir():
        return folder
    if model in embedded:
        raise UserError(f"the embedded model {model!r} is not part of this installation")
    if gguf_file(model) is None and ("/" not in model or Path(model).is_absolute() or model.startswith(".")):
        hint = did_you_mean(model, (*embedded, *fetched))
        raise UserError(f"no model {model!r}: neither an embedded model, a folder, a GGUF file nor a hub id{hint}")
    return None


def is_lab(model: str) -> bool:
    """Say, without loading it, whether the model is one of the project's own family."""
    folder = find_folder(model)
    return folder is not None and (folder.parent / "lab.json").exists()


def companions(model: str) -> Path | None:
    """Return the folder with the weights of methods that came with this model; None where none did.

    A fetched model is known by its `origin.json`, wherever its folder lies.
    """
    folder = find_folder(model)
    if folder is None or is_lab(model):
        return folder and folder.parent
    name = model_origin(model).get("name")
    return DRAFTERS / name if isinstance(name, str) and name in packaged() else None


def check_model(model: str) -> None:
    """Raise UserError, without loading anything, for a missing model, and a folder or GGUF file that holds none."""
    folder = find_folder(model)
    file = gguf_file(model) if folder is None else None
    if folder is not None:
        check_folder(folder)
    elif file is not None:
        check_gguf(file)


def model_origin(model: str) -> dict[str, Any]:
    """Return what is known of how the model's weights were made before they came here; {} where nothing is.

    It is what a fetched folder's `origin.json` says, or the types of a GGUF file's tensors.
    """
    folder = find_folder(model)
    if folder is not None:
        return read_json(folder / ORIGIN) if (folder / ORIGIN).is_file() else {}
    file = gguf_file(model)
    return {} if file is None else gguf_origin(file)

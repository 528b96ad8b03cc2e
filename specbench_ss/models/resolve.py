"""Model names: bundled and fetched models, folders, GGUF files and hub ids; weight files of a folder."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from safetensors import safe_open

from specbench_ss.errors import UserError, did_you_mean, first_line, os_reason
from specbench_ss.models.catalog import fetchable
from specbench_ss.models.gguf import gguf_facts, gguf_file, gguf_origin
from specbench_ss.user_files import read_json

HUB_TIMEOUT_S = 5.0


def check_reachable(repo: str) -> None:
    """Raise UserError for an invalid repository name, or an uncached one while the hub is unreachable.

    Any response of the hub counts. If it is unreachable and the repository is cached, the hub is set offline.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise UserError(f"{repo!r} is neither a local folder nor a valid hub id") from None
    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # network errors of several classes
        if not isinstance(try_to_load_from_cache(repo, "config.json"), str):
            raise UserError(
                f"{repo!r} is not a local folder, and the hub {constants.ENDPOINT} cannot be reached: "
                f"{first_line(error)}"
            ) from error
        constants.HF_HUB_OFFLINE = True


def is_offline(repo: str) -> bool:
    """Return True if repositories are read from the hub's cache alone. Raises UserError as `check_reachable`."""
    check_reachable(repo)
    return constants.HF_HUB_OFFLINE


INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WHOLE = ("model.safetensors", "pytorch_model.bin")


def check_folder(folder: Path) -> None:
    """Raise UserError for a folder without a model: no config.json, or weights missing or damaged."""
    if (folder / "adapter_config.json").is_file():  # the loader finds the base model
        return
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a model folder: it has no config.json")
    read_json(folder / "config.json")
    if not weight_files(folder):
        raise UserError(f"{folder} is not a model folder: it has no weights ({', '.join((*WHOLE, *INDEXES))})")
    check_files(folder)


def check_files(folder: Path) -> None:
    """Raise UserError if a weight file of the folder is missing or damaged; reads only headers."""
    for file in weight_files(folder):
        if not file.is_file():
            raise UserError(f"no weight file {file}")
        try:
            _check_header(file)
        except Exception as error:  # errors of the reader and the operating system
            raise UserError(f"cannot read weight file {file}: {first_line(error)}") from error


def _check_header(file: Path) -> None:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt"):
            return
    with file.open("rb") as content:
        pickled = content.read(1) == b"\x80"  # torch's format until 2020
    if not pickled and not zipfile.is_zipfile(file):
        raise ValueError("neither a zip file nor a pickle")


def weight_files(folder: Path, keep: Callable[[str], bool] = lambda name: True) -> list[Path]:
    """Return the weight files of a folder, safetensors before pickles; [] without weights.

    keep: accepts the names of tensors; parts without such a tensor are left out. Raises UserError for an unreadable
    index, and for one that names files outside the folder.
    """
    for whole, index in zip(WHOLE, INDEXES, strict=True):
        if (folder / whole).is_file():
            return [folder / whole]
        if (folder / index).is_file():
            stated = read_json(folder / index).get("weight_map")
            parts: dict[str, Any] = stated if isinstance(stated, dict) else {}
            if not (names := list(parts.values())) or not all(
                isinstance(name, str) and len(name) < 256 for name in names
            ):
                raise UserError(f"{folder / index} is damaged: it has no weight_map of file names")
            if outside := [name for name in names if Path(name).name != name]:
                raise UserError(f"{folder / index} names {outside[0]!r}, which is no file name in its folder")
            return [folder / part for part in dict.fromkeys(part for name, part in parts.items() if keep(name))]
    return []


LAB = Path(__file__).parents[1] / "lab"
ORIGIN = "origin.json"  # in a model's folder: source and conversion of its weights


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that needs no download."""

    name: str
    summary: str
    folder: Path


def available() -> list[ModelEntry]:
    """Return the bundled models."""
    base = LAB / "base"
    return [ModelEntry("lab", "embedded Llama, 8 layers, trained on generated text; runs on a CPU", base)]


def find_folder(model: str) -> Path | None:
    """Return the folder of an embedded, fetched or local model; None for a GGUF file or a possible hub id.

    Raises UserError, without loading anything, for any other name.
    """
    _check_readable(model)
    embedded, fetched = {m.name: m.folder for m in available()}, fetchable()
    if model in fetched:
        if not fetched[model].fetched:
            here = f" (or use ./{model} for the local folder)" if Path(model).is_dir() else ""
            raise UserError(f"model {model!r} is not fetched yet; run ssbench models fetch {model}{here}")
        return fetched[model].folder
    folder = embedded.get(model, Path(model))
    if folder.is_dir():
        return folder
    if model in embedded:
        raise UserError(f"the bundled model {model!r} is not part of this installation")
    if gguf_file(model) is None and ("/" not in model or Path(model).is_absolute() or model.startswith(".")):
        hint = did_you_mean(model, (*embedded, *fetched))
        raise UserError(f"no model {model!r}: neither a bundled model, a folder, a GGUF file nor a hub id{hint}")
    return None


def _check_readable(model: str) -> None:
    """Raise UserError for a path that the system rejects (5,000 letters) or does not let this user read."""
    try:
        Path(model).stat()
        if os.access(Path(model), os.R_OK):
            return
        problem = "permission denied"
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:  # ValueError: a NUL byte
        problem = os_reason(error) if isinstance(error, OSError) else str(error)
    raise UserError(f"cannot read model {model[:80]!r}: {problem}")


def is_lab(model: str) -> bool:
    """Return True, without loading it, for a model of the project's own family."""
    folder = find_folder(model)
    return folder is not None and (folder.parent / "lab.json").exists()


def check_model(model: str) -> None:
    """Raise UserError, without loading anything, for a missing model or an invalid folder or GGUF file."""
    folder = find_folder(model)
    file = gguf_file(model) if folder is None else None
    if folder is not None:
        check_folder(folder)
    elif file is not None:
        gguf_facts(file)


def model_origin(model: str) -> dict[str, Any]:
    """Return the recorded origin of the model's weights, or {}.

    It is the content of a fetched folder's `origin.json`, or the tensor types of a GGUF file.
    """
    folder = find_folder(model)
    if folder is not None:
        return read_json(folder / ORIGIN) if (folder / ORIGIN).is_file() else {}
    file = gguf_file(model)
    return {} if file is None else gguf_origin(file)

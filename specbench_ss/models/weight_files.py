"""Look at the weight files of a model's folder without loading them. This module knows files, but no model."""

from __future__ import annotations

import zipfile
from pathlib import Path

from safetensors import safe_open

from specbench_ss.errors import UserError, first_line
from specbench_ss.files.user_files import read_json

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WHOLE = ("model.safetensors", "pytorch_model.bin")
WEIGHT = ".weight"  # other tensors, such as masks and positions, may be whole numbers
INTEGERS = ("I", "U", "BOOL")  # types as safetensors calls them: I64, U8


def check_folder(folder: Path) -> None:
    """Raise UserError where the folder cannot hold a model: no config.json, or weights missing or damaged."""
    if (folder / "adapter_config.json").is_file():  # the loader knows where the rest is
        return
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no model: it has no config.json")
    read_json(folder / "config.json")
    if not weight_files(folder):
        raise UserError(f"{folder} holds no model: it has no weights ({', '.join((*WHOLE, *INDEXES))})")
    check_files(folder)


def check_files(folder: Path) -> None:
    """Raise UserError where a weight file of the folder is missing or damaged, or where weights are whole numbers.

    Only the headers are read. Quantised weights, which the config names, may be whole numbers.
    """
    quantised = "quantization_config" in read_json(folder / "config.json")
    for file in weight_files(folder):
        whole = _whole_numbers(file)
        if whole and not quantised:
            raise UserError(f"{file} holds no weights of a model: {whole[0]} are whole numbers; give float weights")


def weight_files(folder: Path) -> list[Path]:
    """Return the files that the weights are loaded from, safetensors before pickles; an empty list without weights.

    Raises UserError for an index that cannot be read.
    """
    for whole, index in zip(WHOLE, INDEXES, strict=True):
        if (folder / whole).is_file():
            return [folder / whole]
        if (folder / index).is_file():
            parts = read_json(folder / index).get("weight_map")
            if not isinstance(parts, dict) or not parts:
                raise UserError(f"{folder / index} is damaged: it has no weight_map")
            return [folder / str(name) for name in dict.fromkeys(parts.values())]
    return []


def _whole_numbers(file: Path) -> list[str]:
    """Return the names of weights that are whole numbers, each with its type; of a pickle none is looked at.

    Raises UserError for a file that is missing or damaged.
    """
    if not file.is_file():
        raise UserError(f"no weight file {file}")
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as held:
                names = [name for name in held.keys() if name.endswith(WEIGHT)]  # noqa: SIM118 - it is no mapping
                types = {name: str(held.get_slice(name).get_dtype()) for name in names}
            return [f"{name} ({kind})" for name, kind in types.items() if kind.startswith(INTEGERS)]
        if not _is_pickle(file) and not zipfile.is_zipfile(file):
            raise ValueError("neither a zip file nor a pickle")
    except Exception as error:  # the reader's own kinds, and the operating system's
        raise UserError(f"cannot read weight file {file}: {first_line(error)}") from error
    return []


def _is_pickle(file: Path) -> bool:
    """Say whether the file begins as torch wrote its files until 2020."""
    with file.open("rb") as f:
        return f.read(1) == b"\x80"

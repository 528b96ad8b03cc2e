"""Where Medusa heads are found: a heads' file, a folder of one, or inside a whole Medusa-2 model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench_ss.engine.architectures import Outline
from specbench_ss.errors import UserError
from specbench_ss.models.checkpoint import read_config, read_shapes
from specbench_ss.models.resolve import weight_files

if TYPE_CHECKING:
    from torch import Tensor

    from specbench_ss.methods._shared.heads_decoder import Read
    from specbench_ss.methods.medusa.heads import MedusaHeads

HEADS_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
INSIDE = "medusa_head."  # what the names of heads begin with in a whole model


def read_heads(path: Path, base: Outline, read: Read, method: str) -> tuple[MedusaHeads, dict[str, Any], bool]:
    """(heads, their config, whether they came inside a whole model).

    Raises UserError, naming the file, where there are none or they do not fit the base.
    """
    from specbench_ss.methods.medusa.heads import heads_from_tensors

    files = heads_files(path, method)
    config = read_config(path) if path.is_dir() else {}
    names = [name for file in files for name in read_shapes(file)]
    inside = [name for name in names if name.startswith(INSIDE)]
    whole = bool(inside) and len(inside) < len(names)
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= read(file, lambda name: name.startswith(INSIDE)) if whole else read(file)
    try:
        return heads_from_tensors(tensors, base.hidden_size, base.vocab_size), config, whole
    except UserError as error:
        raise UserError(f"{error} ({files[0] if len(files) == 1 else path})") from error


def heads_files(path: Path, method: str) -> list[Path]:
    """A file stands for itself; of a folder the heads' own file, or else its model's weight files."""
    if not path.is_dir():
        return [path]
    file = next((path / name for name in HEADS_FILES if (path / name).is_file()), None)
    found = weight_files(path) if file is None else [file]
    if not found:
        raise UserError(f"{method}: no weights in {path}; looked for {', '.join(HEADS_FILES)} and a model's weights")
    return found

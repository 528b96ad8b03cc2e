"""Lists of frequent token ids: in drafter folders, and token maps of other programs (SGLang, FR-Spec)."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from specbench_ss import user_files
from specbench_ss.errors import UserError, first_line
from specbench_ss.models.checkpoint import read_shapes, read_tensors
from specbench_ss.storage import ordinary_mode

FILE = "draft_vocab.safetensors"  # in a drafter's folder: TENSOR, int32 [n], the most frequent token first
TENSOR = "token_ids"


def write_frequent_tokens(folder: Path, counts: NDArray[np.int64]) -> None:
    """Write the tokens with a count above 0 to a drafter's folder. counts: [V]; of equal ones the lower id is first."""
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    save_file({TENSOR: torch.from_numpy(order.astype(np.int32))}, folder / FILE)
    ordinary_mode(folder)


def read_frequent_tokens(path: Path, vocab: int) -> Tensor | None:
    """Return all token ids, int64 [vocab]: those of a folder's file, then the others in order; None without a file.

    path: a drafter's folder, or a weight file in it. The ids have no values if the file is a header only. Raises
    UserError for a damaged file.
    """
    file = (path.parent if path.is_file() else path) / FILE
    if not file.is_file():
        return None
    stored = read_shapes(file, valued=lambda name: True).get(TENSOR)
    if stored is not None and stored.is_meta:
        return torch.empty(vocab, dtype=torch.long, device="meta")
    ids = _checked(stored, file, vocab)
    unlisted = torch.ones(vocab, dtype=torch.bool)
    unlisted[ids] = False
    return torch.cat((ids, unlisted.nonzero()[:, 0]))


def read_token_ids(path: Path, vocab: int) -> Tensor:
    """Return the token ids of a file, int64 [n], in its order.

    The file is a JSON list (.json), a safetensors file of one tensor, or a tensor or list that torch.save wrote. Raises
    UserError for anything else, and for ids that are outside the vocabulary, or not distinct.
    """
    if not path.is_file():
        raise UserError(f"no file of token ids {path}")
    if path.suffix == ".json":
        try:
            return _checked(user_files.parse(user_files.read_bytes(path)), path, vocab)
        except ValueError as error:
            raise UserError(f"cannot read token ids {path}: {error}") from None
    if path.suffix == ".safetensors":
        tensors = read_tensors(path)
        return _checked(next(iter(tensors.values())) if len(tensors) == 1 else None, path, vocab)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(f"{path} has more than token ids and may run code; convert it to a JSON list") from None
    except Exception as error:  # truncated, or another format: many classes
        raise UserError(f"cannot read token ids {path}: {first_line(error)}") from None
    return _checked(content, path, vocab)


def _checked(content: Any, path: Path, vocab: int) -> Tensor:
    """Return a list or tensor of distinct token ids as int64 [n]. Raise UserError, with the file, for anything else."""
    if isinstance(content, list) and not all(type(entry) is int for entry in content):
        raise UserError(f"{path} has entries that are not integers; it must be a list of token ids")
    if isinstance(content, list):
        content = torch.tensor([min(max(entry, -1), vocab) for entry in content], dtype=torch.long)
    if not isinstance(content, Tensor) or content.ndim != 1 or not len(content):
        raise UserError(f"{path} has no list of token ids")
    if content.is_floating_point() or content.is_complex() or content.dtype == torch.bool:
        raise UserError(f"{path} has entries that are not integers; it must be a list of token ids")
    ids: Tensor = content.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise UserError(f"{path} has token ids outside the vocabulary of {vocab} tokens")
    unique, counts = ids.unique(return_counts=True)
    if len(unique) < len(ids):
        raise UserError(f"{path} has token id {int(unique[counts > 1][0])} more than once")
    return ids

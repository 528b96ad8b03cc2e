"""Copies of the target's embedding and LM head in drafter folders, compared with the target's."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.models.checkpoint import read_shapes, weights_in

Part = Literal["embedding", "LM head"]
Copies = Mapping[str, Part]  # pattern of tensor names -> the target's part that such a tensor copies

EMBEDDING: Copies = {r"(.*\.)?embed_tokens\.weight": "embedding"}
EMBEDDING_AND_HEAD: Copies = {**EMBEDDING, r"(.*\.)?lm_head\.weight": "LM head"}
STORED: Mapping[Part, str] = {  # names in the folders of models
    "embedding": r".*\b(embed_tokens|wte|embed_in|word_embeddings)\.weight",
    "LM head": r".*\b(lm_head|embed_out)\.weight",
}
ALIKE = 0.05  # relative difference, far above that of rounding to half precision
ROWS = 1 << 13  # of a matrix that are converted to float32 at a time


def warn_of_differences(
    method: str, path: Path, config: Mapping[str, Any], copies: Copies, names: Sequence[str], base: ModelInfo
) -> tuple[str, ...]:
    """Warn of tensors that should be copies of the target's and are not; return the warnings.

    names: files of the drafter alone, in a folder that may have more.
    """
    if not copies:
        return ()
    trained = "config.json states that it was trained"
    cause = "a drafter of another model, or a tensor without its values; if it is removed, the model's is used"
    why = trained if config.get("embed_requires_grad") else cause
    found = differences(weights_in(path, method, names), copies, base)
    texts = tuple(f"{method}: {text}: {why} ({path})" for text in found)
    for text in texts:
        warnings.warn(text, stacklevel=1)  # this line: one warning for check and load
    return texts


def differences(source: Path, copies: Copies, base: ModelInfo) -> Iterator[str]:
    """Describe the copies in a drafter's file or folder that differ from the target's part.

    Nothing is compared where a file has no values (metadata of the hub), where the base has neither weights nor a
    folder, and where the widths differ, since such a drafter needs tables of its own.
    """

    def keep(name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in copies)

    for name, copy in read_shapes(source, keep, valued=keep).items():
        part = next(part for pattern, part in copies.items() if re.fullmatch(pattern, name))
        own = None if copy.is_meta else weight_of(base, part)
        if own is not None and own.shape == copy.shape and (difference := relative(copy, own)) > ALIKE:
            scale = f"{difference:.2f} of its norm (0: a copy, 1 or more: unrelated)"
            yield f"{name} differs from the {part} of {base.name!r} by {scale}"


def relative(copy: Tensor, own: Tensor) -> float:
    """Return the norm of the difference of two matrices over the norm of the second."""
    off = norm = 0.0
    for a, b in zip(copy.split(ROWS), own.detach().split(ROWS), strict=True):
        rows = b.to("cpu").float()
        off, norm = off + float((a.float() - rows).square().sum()), norm + float(rows.square().sum())
    return float((off / norm) ** 0.5) if norm else float("inf")


def weight_of(base: ModelInfo, part: Part) -> Tensor | None:
    """Return the target's embedding or LM head, read from its folder if it is not loaded; None if it is unknown."""
    if isinstance(base, Target):
        weight: Tensor = base.model.get_input_embeddings().weight if part == "embedding" else base.unembed
        return weight
    if base.folder is None:
        return None
    try:
        stored = read_shapes(base.folder, lambda name: bool(re.fullmatch(STORED[part], name)), valued=lambda _: True)
    except UserError:  # quantized
        return None
    if not stored and part == "LM head":  # tied
        return weight_of(base, "embedding")
    return stored[min(stored, key=len)] if stored else None

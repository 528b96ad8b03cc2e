"""Making a datastore: documents are laid end to end, and their suffixes sorted by libdivsufsort (pydivsufsort)."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbench_ss import __version__
from specbench_ss.engine.architectures import Outline
from specbench_ss.errors import UserError, os_reason
from specbench_ss.methods.rest.datastore import (
    FORMAT,
    HEADER,
    SEPARATOR,
    SHORT_SEPARATOR,
    Datastore,
    hash_tokens,
    sorted_chunk,
    vocabulary_hash,
)

CHUNK = 1 << 26  # tokens of a chunk: sorting takes some twenty bytes of memory for each
SMALL = 1 << 20  # tokens of a datastore whose suffixes are sorted again whenever it is opened: a sixth of a second

Documents = Iterable[NDArray[np.int32]]


def build(
    documents: Documents, base: Outline, made_of: str, out: Path, chunk: int = CHUNK, draft: int = 0, small: int = SMALL
) -> dict[str, Any]:
    """Write the datastore of these documents' ids into the folder, whole or not at all; returns its header.

    draft: size of tree that it advises. small: of up to so many tokens the suffixes are not stored. The same documents
    give the same bytes. Raises UserError where there is no token, or one that the base's vocabulary does not have.
    """
    out = out.resolve()  # '.' has no name
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    try:
        part.mkdir(parents=True)
        header = _write(documents, base, made_of, part, chunk)
        header["stored_suffixes"] = sum(header["chunks"]) > small
        if not header["stored_suffixes"]:
            _leave_out_suffixes(part, base.vocab_size)
        if draft:
            header["advice"] = {"draft": draft}
        (part / HEADER).write_text(json.dumps(header, indent=1) + "\n")
        part.rename(out)
    except OSError as error:
        raise UserError(f"cannot write the datastore {out}: {os_reason(error)}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return header


def _write(documents: Documents, base: Outline, made_of: str, folder: Path, chunk: int) -> dict[str, Any]:
    whole, sizes, count = hashlib.sha256(), list[int](), 0
    for held in _gathered(documents, chunk):
        made = sorted_chunk(_laid_out(held))
        largest = int(made.tokens[made.suffixes[-1]])
        if largest >= base.vocab_size:
            raise UserError(f"datastore: token id {largest} is beyond the vocabulary of {base.name!r}")
        np.save(folder / f"tokens-{len(sizes)}.npy", made.tokens)
        np.save(folder / f"suffixes-{len(sizes)}.npy", made.suffixes)
        whole.update(made.tokens.tobytes())
        sizes.append(len(made.tokens))
        count += len(held)
    if not sizes:
        raise UserError("datastore: the text holds no token")
    return {
        "format": FORMAT, "version": __version__, "made_of": made_of, "documents": count, "tokens": sum(sizes) - count,
        "chunks": sizes, "vocabulary": vocabulary_hash(base.tokenizer), "vocab_size": base.vocab_size,
        "hash": whole.hexdigest()[:16],
    }  # fmt: skip


def _gathered(documents: Documents, chunk: int) -> Iterator[list[NDArray[np.int32]]]:
    """Documents in groups of at most `chunk` ids, separators counted; a longer one stands alone, in pieces."""
    held: list[NDArray[np.int32]] = []
    size = 0
    for document in documents:
        for start in range(0, len(document), chunk - 1):
            piece = document[start : start + chunk - 1]
            if size + len(piece) + 1 > chunk:
                yield held
                held, size = [], 0
            held.append(piece)
            size += len(piece) + 1
    if held:
        yield held


def _leave_out_suffixes(folder: Path, vocab_size: int) -> None:
    """Keep the tokens alone, in 16 bits where the vocabulary has no id that a separator takes there."""
    for file in folder.glob("suffixes-*.npy"):
        file.unlink()
    for file in folder.glob("tokens-*.npy") if vocab_size <= SHORT_SEPARATOR else ():
        np.save(file, np.load(file).astype(np.uint16))  # SEPARATOR wraps around to SHORT_SEPARATOR


def _laid_out(documents: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Documents end to end, a separator behind each."""
    end = np.array([SEPARATOR], np.int32)
    return np.concatenate([part for document in documents for part in (document.astype(np.int32), end)])


def in_memory(documents: list[NDArray[np.int32]]) -> Datastore:
    """A datastore that is on no disk: for tests and trials."""
    chunk = sorted_chunk(_laid_out(documents))
    tokens = sum(map(len, documents))
    return Datastore((chunk,), {"hash": hash_tokens((chunk,)), "tokens": tokens, "made_of": "documents in memory"})

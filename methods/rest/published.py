"""REST's own datastore file (`*.idx`), memory-mapped. Knows its bytes only.

Little endian, chunk after chunk: u32 number of bytes, the ids; u32 number of bytes, the suffix array. An entry of the
suffix array is an int32 and counts tokens, not bytes. Ids are u16, or int32 in files of later versions: an entry for
every token tells which.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench_ss.errors import UserError, os_reason

if TYPE_CHECKING:
    from numpy.typing import NDArray

ENTRY, ENTRY_BYTES = "<i4", 4
IDS = {2: "<u2", 4: "<i4"}  # bytes of an id -> its type
SAMPLED = 1 << 16  # bytes in each of SAMPLES places: whole files have tens of gigabytes
SAMPLES = 64


def read_idx(path: Path) -> tuple[list[tuple[NDArray[Any], NDArray[Any]]], dict[str, Any]]:
    """(ids, suffix array) of every chunk, mapped, and what results say of the file. Raises UserError."""
    try:
        size = path.stat().st_size
        if not size:
            raise UserError(f"rest: datastore {path} is empty")
        raw = np.asarray(np.memmap(path, np.uint8, "r"))
    except OSError as error:
        raise UserError(f"rest: cannot read datastore {path}: {os_reason(error)}") from None
    chunks: list[tuple[NDArray[Any], NDArray[Any]]] = []
    at = 0
    while at < size:
        parts = []
        for _ in range(2):
            length = int.from_bytes(raw[at : at + 4].tobytes(), "little")
            parts.append(raw[at + 4 : at + 4 + length])
            at += 4 + length
            if at > size:
                where = f"chunk {len(chunks)} needs {at} bytes, not {size}"
                raise UserError(f"rest: datastore {path} is truncated: {where}")
        chunks.append(_chunk(path, len(chunks), *parts))
    tokens = sum(len(ids) for ids, _ in chunks)
    return chunks, {"hash": _hash(raw), "tokens": tokens, "made_of": "a file of REST"}


def _chunk(path: Path, number: int, ids: NDArray[Any], suffixes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    count, rest = divmod(len(suffixes), ENTRY_BYTES)
    width = len(ids) // count if count else 0
    if rest or width not in IDS or width * count != len(ids):
        raise UserError(
            f"rest: {path} is no datastore of REST: chunk {number} has {len(ids)} bytes of ids and {len(suffixes)} of "
            "suffixes"
        )
    return ids.view(IDS[width]), suffixes.view(ENTRY)


def _hash(raw: NDArray[np.uint8]) -> str:
    """A short sha256 of the size and of bytes from all over the file."""
    whole = hashlib.sha256(str(len(raw)).encode())
    for start in np.linspace(0, max(0, len(raw) - SAMPLED), SAMPLES).astype(np.int64).tolist():
        whole.update(raw[start : start + SAMPLED].tobytes())
    return whole.hexdigest()[:16]

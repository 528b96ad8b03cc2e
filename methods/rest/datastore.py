"""A datastore: token ids of many documents with their suffix array. Knows files, no decoding.

A folder: `datastore.json` and, for every chunk, `tokens-N.npy` (int32 [n], -1 behind every document) and
`suffixes-N.npy` (int32 [n], the places of all suffixes in lexicographic order). A small one has tokens alone, in uint16
with 65535 behind a document where the vocabulary has no such id; its suffixes are sorted when it is opened. A file
`*.idx` is REST's own (published.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from specbench_ss import user_files
from specbench_ss.engine.architectures import Outline
from specbench_ss.errors import UserError, first_line, os_reason
from specbench_ss.methods.rest.published import read_idx
from specbench_ss.user_files import read_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.signedinteger[Any]] | NDArray[np.unsignedinteger[Any]]

HEADER, FORMAT = "datastore.json", 1
SEPARATOR = -1  # no token: what is matched never holds it, and a continuation ends at it
SHORT_SEPARATOR = 0xFFFF  # the same in 16 bits
PROBES, PROBED = 64, 32  # suffixes of a chunk that are looked at when it is opened, and tokens of each


class _Header(msgspec.Struct):
    """What a datastore's header says. chunks: tokens of each. hash: of all tokens as int32."""

    format: int
    vocabulary: str
    vocab_size: int
    chunks: list[int]
    documents: int
    tokens: int
    hash: str
    made_of: str
    stored_suffixes: bool = True
    advice: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """tokens [n], suffixes int32 [n]: places in tokens, ordered by what follows there."""

    tokens: Ids
    suffixes: Ids


@dataclass(frozen=True, slots=True)
class Datastore:
    """Chunks, each with a suffix array of its own, and what is known of them.

    about: what results say of it, JSON-ready. vocabulary: hash of the tokenizer's, "" where the file does not say.
    advice: of its header, as `models.drafter_advice` reads it. place: the header's file.
    """

    chunks: tuple[Chunk, ...]
    about: dict[str, Any]
    vocabulary: str = ""
    advice: Mapping[str, Any] | None = None
    place: str = HEADER

    def check_fits(self, base: Outline, place: Path | str) -> None:
        """Raises UserError where these are not ids of the base's tokenizer."""
        if self.vocabulary and base.tokenizer is not None and self.vocabulary != vocabulary_hash(base.tokenizer):
            raise UserError(f"rest: datastore {place} was made with another tokenizer than that of {base.name!r}")
        largest = max(int(c.tokens[c.suffixes[-1]]) for c in self.chunks)  # suffixes are in order of their tokens
        if largest >= base.vocab_size:
            raise UserError(
                f"rest: datastore {place} has token id {largest}, the vocabulary of {base.name!r} ends at "
                f"{base.vocab_size - 1}"
            )
        if base.vocab_size > 1 << 16 and any(c.tokens.dtype.itemsize == 2 for c in self.chunks):
            raise UserError(
                f"rest: datastore {place} has 16-bit ids, which cannot hold the {base.vocab_size} tokens of "
                f"{base.name!r}"
            )


def open_datastore(path: Path) -> Datastore:
    """A datastore's folder, or REST's own file. Raises UserError where it is missing, damaged or empty."""
    if path.is_file():
        if path.suffix != ".idx":
            raise UserError(f"rest: {path} is neither a datastore's folder nor an .idx file: `ssbench datastore build`")
        chunks, about = read_idx(path)
        store = Datastore(tuple(Chunk(*pair) for pair in chunks), about)
    elif path.is_dir():
        store = _open_folder(path)
    else:
        raise UserError(f"rest: no datastore {path}")
    if not sum(len(c.tokens) for c in store.chunks):
        raise UserError(f"rest: datastore {path} is empty")
    for number, chunk in enumerate(store.chunks):
        if not _in_order(chunk):
            raise _damaged(path, f"is damaged: chunk {number} is not in order")
    return store


def _open_folder(folder: Path) -> Datastore:
    if not (folder / HEADER).is_file():
        raise UserError(f"rest: {folder} holds no datastore: it has no {HEADER}")
    try:
        said = read_json(folder / HEADER)
    except UserError:
        raise _damaged(folder / HEADER, "cannot be read as a JSON object") from None
    try:
        header = user_files.convert(said, _Header)
    except ValueError as problem:
        raise _damaged(folder / HEADER, f"does not describe a datastore: {problem}") from None
    if header.format != FORMAT:
        raise UserError(f"rest: datastore {folder} has format {header.format}, this version reads {FORMAT}")
    read = _mapped if header.stored_suffixes else _sorted
    chunks = tuple(read(folder, i, n) for i, n in enumerate(header.chunks))
    if not header.stored_suffixes and hash_tokens(chunks) != header.hash:
        raise _damaged(folder, f"is damaged: its tokens are not those that {HEADER} tells of")
    about = {name: getattr(header, name) for name in ("hash", "tokens", "documents", "made_of")}
    return Datastore(chunks, about, header.vocabulary, header.advice, str(folder / HEADER))


def _damaged(file: Path, how: str) -> UserError:
    """A UserError that says how a datastore can be had again."""
    return UserError(f"rest: {file} {how}; make the datastore again: `ssbench datastore build`")


def _mapped(folder: Path, number: int, count: int) -> Chunk:
    names = (f"tokens-{number}.npy", f"suffixes-{number}.npy")
    tokens, suffixes = (_read(folder / name, count, (np.int32,)) for name in names)
    return Chunk(tokens, suffixes)


def _sorted(folder: Path, number: int, count: int) -> Chunk:
    stored = _read(folder / f"tokens-{number}.npy", count, (np.int32, np.uint16))
    tokens = stored.astype(np.int32)
    if stored.dtype == np.uint16:
        tokens[stored == SHORT_SEPARATOR] = SEPARATOR
    return sorted_chunk(tokens)


def sorted_chunk(tokens: NDArray[np.int32]) -> Chunk:
    """Tokens int32 [n] with their suffix array, made by libdivsufsort. Raises UserError where that cannot be loaded."""
    try:
        from pydivsufsort import divsufsort
    except ImportError as error:
        raise UserError(
            f"rest: suffixes are sorted by pydivsufsort, which does not load: {first_line(error)}"
        ) from None
    return Chunk(tokens, divsufsort(tokens).astype(np.int32) if len(tokens) else tokens)


def hash_tokens(chunks: Iterable[Chunk]) -> str:
    """A short sha256 of all tokens."""
    whole = hashlib.sha256()
    for chunk in chunks:
        whole.update(chunk.tokens.tobytes())
    return whole.hexdigest()[:16]


def _read(file: Path, count: int, kinds: Sequence[type[np.integer[Any]]]) -> Ids:
    """[count] of one of these kinds, mapped."""
    try:
        numbers: Any = np.lib.format.open_memmap(file, mode="r")
    except OSError as error:
        raise _damaged(file, f"cannot be read: {os_reason(error)}") from None
    except Exception:  # whatever numpy's reader stumbles over: its words are of its own insides
        raise _damaged(file, "is damaged: it is cut short, or not a file of numbers (.npy)") from None
    if numbers.dtype not in kinds or numbers.shape != (count,):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise _damaged(file, f"is damaged: {numbers.dtype} {numbers.shape}, not {wanted} ({count},)")
    return np.asarray(numbers)  # the same mapped memory, without the cost of a memmap's own indexing


def _in_order(chunk: Chunk) -> bool:
    """Whether a sample of the suffixes, first and last included, is in range and in order."""
    n = len(chunk.tokens)
    if not n or len(chunk.suffixes) != n:
        return False
    starts = chunk.suffixes[np.linspace(0, n - 1, min(n, PROBES)).astype(np.int64)].tolist()
    if min(starts) < 0 or max(starts) >= n:
        return False
    read = [chunk.tokens[start : start + PROBED].tolist() for start in starts]
    return read == sorted(read)


def vocabulary_hash(tokenizer: Any) -> str:
    """A short sha256 of which id stands for which token: all that a datastore depends on."""
    words = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(words.encode()).hexdigest()[:16]

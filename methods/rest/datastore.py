"""Datastores of REST: token ids of documents with their suffix array; building, search, the published format.

A folder: `datastore.json` and, for every chunk, `tokens-N.npy` (int32 [n], -1 after every document) and
`suffixes-N.npy` (int32 [n], positions of all suffixes in lexicographic order). A small one has only tokens, compressed
(`tokens-N.npy.xz`), in uint16 with 65535 after a document if the vocabulary has no such id; its suffixes are sorted
when it is opened.

A file `*.idx` is REST's own, little endian, chunk after chunk: u32 number of bytes, the ids; u32 number of bytes, the
suffix array. An entry of the suffix array is an int32 that counts tokens, not bytes. Ids are u16, or int32 in files of
later versions; the number of entries determines which.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from specbench_ss import __version__, user_files
from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.errors import UserError, first_line, os_errors, os_reason
from specbench_ss.storage import replacing_folder, write_json
from specbench_ss.user_files import read_json

ENTRY, ENTRY_BYTES = "<i4", 4
IDS = {2: "<u2", 4: "<i4"}  # bytes of an id -> its type
SAMPLED = 1 << 16  # bytes hashed at each of SAMPLES offsets: whole files have tens of gigabytes
SAMPLES = 64


def read_idx(path: Path) -> tuple[list[tuple[NDArray[Any], NDArray[Any]]], dict[str, Any]]:
    """Return memory-mapped (ids, suffix array) of every chunk, and the file's description. Raise UserError."""
    with os_errors(f"rest: cannot read datastore {path}"):
        size = path.stat().st_size
        if not size:
            raise UserError(f"rest: datastore {path} is empty")
        raw = np.asarray(np.memmap(path, np.uint8, "r"))
    chunks: list[tuple[NDArray[Any], NDArray[Any]]] = []
    at = 0
    while at < size:
        parts = []
        for _ in range(2):
            length = int.from_bytes(raw[at : at + 4].tobytes(), "little")
            parts.append(raw[at + 4 : at + 4 + length])
            at += 4 + length
            if at > size:
                problem = f"chunk {len(chunks)} needs {at} bytes, not {size}"
                raise UserError(f"rest: datastore {path} is truncated: {problem}")
        chunks.append(_chunk(path, len(chunks), *parts))
    tokens = sum(len(ids) for ids, _ in chunks)
    starts = np.linspace(0, max(0, size - SAMPLED), SAMPLES).astype(np.int64).tolist()
    digest = _digest([str(size).encode(), *(raw[start : start + SAMPLED].tobytes() for start in starts)])
    return chunks, {"hash": digest, "tokens": tokens, "made_of": "a file of REST"}


def _chunk(path: Path, number: int, ids: NDArray[Any], suffixes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    count, rest = divmod(len(suffixes), ENTRY_BYTES)
    width = len(ids) // count if count else 0
    if rest or width not in IDS or width * count != len(ids):
        raise UserError(
            f"rest: {path} is no datastore of REST: chunk {number} has {len(ids)} bytes of ids and {len(suffixes)} of "
            "suffixes"
        )
    return ids.view(IDS[width]), suffixes.view(ENTRY)


def _digest(parts: Iterable[bytes]) -> str:
    """Return a short sha256."""
    sha256 = hashlib.sha256()
    for part in parts:
        sha256.update(part)
    return sha256.hexdigest()[:16]


Ids = NDArray[np.signedinteger[Any]] | NDArray[np.unsignedinteger[Any]]

HEADER, FORMAT, PACKED = "datastore.json", 1, ".npy.xz"
SEPARATOR = -1  # no token id: never part of a match, and the end of a continuation
SHORT_SEPARATOR = 0xFFFF  # the same in 16 bits
PROBES, PROBED = 64, 32  # suffixes of a chunk that are checked when it is opened, and tokens of each


class _Header(msgspec.Struct):
    """Header of a datastore. chunks: number of tokens of each. hash: of all tokens as int32."""

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
    """tokens [n], suffixes int32 [n]: positions in tokens, in lexicographic order of the suffixes."""

    tokens: Ids
    suffixes: Ids


@dataclass(frozen=True, slots=True)
class Datastore:
    """Chunks, each with its own suffix array, and their description."""

    chunks: tuple[Chunk, ...]
    about: dict[str, Any]  # description for results, JSON-ready
    vocabulary: str = ""  # hash of the tokenizer's vocabulary, "" if the file does not state it
    advice: Mapping[str, Any] | None = None  # of its header, for `models.checkpoint.read_advice`
    file: str = HEADER  # the header's file

    def check_fits(self, base: ModelInfo, path: Path | str) -> None:
        """Raise UserError if these are not ids of the base's tokenizer."""
        if self.vocabulary and base.tokenizer is not None and self.vocabulary != vocabulary_hash(base.tokenizer):
            raise UserError(f"rest: datastore {path} was built with another tokenizer than that of {base.name!r}")
        largest = max(int(c.tokens[c.suffixes[-1]]) for c in self.chunks)  # suffixes are sorted by their tokens
        if largest >= base.vocab_size:
            raise UserError(
                f"rest: datastore {path} has token id {largest}, the vocabulary of {base.name!r} ends at "
                f"{base.vocab_size - 1}"
            )
        if base.vocab_size > 1 << 16 and any(c.tokens.dtype.itemsize == 2 for c in self.chunks):
            raise UserError(
                f"rest: datastore {path} has 16-bit ids, too few for the {base.vocab_size} tokens of {base.name!r}"
            )


def open_datastore(path: Path) -> Datastore:
    """Open a datastore's folder, or REST's own file. Raise UserError if it is missing, damaged or empty."""
    if path.is_file():
        if path.suffix != ".idx":
            raise UserError(f"rest: {path} is no datastore folder or .idx file; run `ssbench datastore build`")
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
        raise UserError(f"rest: {folder} is no datastore: it has no {HEADER}")
    try:
        content = read_json(folder / HEADER)
    except UserError:
        raise _damaged(folder / HEADER, "cannot be read as a JSON object") from None
    try:
        header = user_files.convert(content, _Header)
    except ValueError as problem:
        raise _damaged(folder / HEADER, f"does not describe a datastore: {problem}") from None
    if header.format != FORMAT:
        raise UserError(f"rest: datastore {folder} has format {header.format}, this version reads {FORMAT}")
    chunks = tuple(_read_chunk(folder, i, n, header.stored_suffixes) for i, n in enumerate(header.chunks))
    if not header.stored_suffixes and hash_tokens(chunks) != header.hash:
        raise _damaged(folder, f"is damaged: its tokens do not match the hash in {HEADER}")
    about = {name: getattr(header, name) for name in ("hash", "tokens", "documents", "made_of")}
    return Datastore(chunks, about, header.vocabulary, header.advice, str(folder / HEADER))


def _damaged(file: Path, problem: str) -> UserError:
    """Return a UserError that advises to build the datastore again."""
    return UserError(f"rest: {file} {problem}; rebuild the datastore: `ssbench datastore build`")


def _read_chunk(folder: Path, number: int, count: int, stored_suffixes: bool) -> Chunk:
    """Return a memory-mapped chunk, or sort its suffixes if they are not stored."""
    file = folder / f"tokens-{number}.npy"
    if stored_suffixes:
        return Chunk(_read(file, count, (np.int32,)), _read(folder / f"suffixes-{number}.npy", count, (np.int32,)))
    stored = _read(file if file.exists() else file.with_suffix(PACKED), count, (np.int32, np.uint16))
    tokens = stored.astype(np.int32)
    if stored.dtype == np.uint16:
        tokens[stored == SHORT_SEPARATOR] = SEPARATOR
    return sorted_chunk(tokens)


def sorted_chunk(tokens: NDArray[np.int32]) -> Chunk:
    """Return tokens int32 [n] with their suffix array by libdivsufsort. Raise UserError if that does not load."""
    try:
        from pydivsufsort import divsufsort
    except ImportError as error:
        raise UserError(f"rest: cannot load pydivsufsort, which sorts suffixes: {first_line(error)}") from None
    return Chunk(tokens, divsufsort(tokens).astype(np.int32) if len(tokens) else tokens)


def hash_tokens(chunks: Iterable[Chunk]) -> str:
    """Return a short sha256 of all tokens."""
    return _digest(chunk.tokens.tobytes() for chunk in chunks)


def _read(file: Path, count: int, kinds: Sequence[type[np.integer[Any]]]) -> Ids:
    """Return an array [count] of one of these dtypes, memory-mapped unless it is compressed."""
    try:
        if file.suffix == ".xz":
            with lzma.open(file) as stream:
                numbers: Any = np.load(stream)
        else:
            numbers = np.lib.format.open_memmap(file, mode="r")
    except OSError as error:
        raise _damaged(file, f"cannot be read: {os_reason(error)}") from None
    except Exception:  # numpy's reader raises many types with messages about internals
        raise _damaged(file, "is damaged: it is truncated, or not a .npy file") from None
    if numbers.dtype not in kinds or numbers.shape != (count,):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise _damaged(file, f"is damaged: {numbers.dtype} {numbers.shape}, not {expected} ({count},)")
    return np.asarray(numbers)  # the same memory, without the overhead of memmap indexing


def _in_order(chunk: Chunk) -> bool:
    """Return True if a sample of the suffixes, first and last included, is in range and in order."""
    n = len(chunk.tokens)
    if not n or len(chunk.suffixes) != n:
        return False
    starts = chunk.suffixes[np.linspace(0, n - 1, min(n, PROBES)).astype(np.int64)].tolist()
    if min(starts) < 0 or max(starts) >= n:
        return False
    read = [chunk.tokens[start : start + PROBED].tolist() for start in starts]
    return read == sorted(read)


def vocabulary_hash(tokenizer: Any) -> str:
    """Return a short sha256 of the tokenizer's vocabulary, all that a datastore depends on."""
    return _digest([json.dumps(sorted(tokenizer.get_vocab().items())).encode()])


CHUNK = 1 << 26  # tokens of a chunk: sorting takes about 20 bytes of memory per token
SMALL = 1 << 21  # tokens of a datastore without stored suffixes: sorting them at opening takes 1/3 s

Documents = Iterable[NDArray[np.int32]]


def build(
    documents: Documents,
    base: ModelInfo,
    made_of: str,
    out: Path,
    chunk: int = CHUNK,
    draft: int = 0,
    small: int = SMALL,
) -> dict[str, Any]:
    """Write the datastore of these documents' ids into the folder, atomically; return its header.

    draft: tree size that it advises. small: up to this number of tokens the suffixes are not stored. The same documents
    give the same bytes. Raise UserError if there is no token, or one outside the base's vocabulary.
    """
    out = out.resolve()  # '.' has no parent and name
    with os_errors(f"cannot write the datastore {out}"), replacing_folder(out) as part:
        header = _write(documents, base, made_of, part, chunk)
        header["stored_suffixes"] = sum(header["chunks"]) > small
        if not header["stored_suffixes"]:
            _compress(part, base.vocab_size)
        if draft:
            header["advice"] = {"draft": draft}
        write_json(part / HEADER, header)
    return header


def _write(documents: Documents, base: ModelInfo, made_of: str, folder: Path, chunk: int) -> dict[str, Any]:
    sha256, sizes, count = hashlib.sha256(), list[int](), 0
    for group in _groups(documents, chunk):
        sorted_group = sorted_chunk(_concatenate(group))
        largest = int(sorted_group.tokens[sorted_group.suffixes[-1]])
        if largest >= base.vocab_size:
            raise UserError(f"datastore: token id {largest} is beyond the vocabulary of {base.name!r}")
        np.save(folder / f"tokens-{len(sizes)}.npy", sorted_group.tokens)
        np.save(folder / f"suffixes-{len(sizes)}.npy", sorted_group.suffixes)
        sha256.update(sorted_group.tokens.tobytes())
        sizes.append(len(sorted_group.tokens))
        count += len(group)
    if not sizes:
        raise UserError("datastore: the text has no token")
    return {
        "format": FORMAT, "version": __version__, "made_of": made_of, "documents": count, "tokens": sum(sizes) - count,
        "chunks": sizes, "vocabulary": vocabulary_hash(base.tokenizer), "vocab_size": base.vocab_size,
        "hash": sha256.hexdigest()[:16],
    }  # fmt: skip


def _groups(documents: Documents, chunk: int) -> Iterator[list[NDArray[np.int32]]]:
    """Yield groups of documents with at most `chunk` ids, separators included; longer documents are split."""
    group: list[NDArray[np.int32]] = []
    size = 0
    for document in documents:
        for start in range(0, len(document), chunk - 1):
            piece = document[start : start + chunk - 1]
            if size + len(piece) + 1 > chunk:
                yield group
                group, size = [], 0
            group.append(piece)
            size += len(piece) + 1
    if group:
        yield group


def _compress(folder: Path, vocab_size: int) -> None:
    """Keep only the tokens, compressed, in 16 bits if the vocabulary has no id equal to the separator."""
    for file in folder.glob("suffixes-*.npy"):
        file.unlink()
    for file in folder.glob("tokens-*.npy"):
        tokens = np.load(file)
        with lzma.open(file.with_suffix(PACKED), "wb", preset=9) as stream:
            # SEPARATOR wraps around to SHORT_SEPARATOR
            np.save(stream, tokens.astype(np.uint16) if vocab_size <= SHORT_SEPARATOR else tokens)
        file.unlink()


def _concatenate(documents: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Return the concatenated documents, each followed by a separator."""
    end = np.array([SEPARATOR], np.int32)
    return np.concatenate([part for document in documents for part in (document.astype(np.int32), end)])


def in_memory(documents: list[NDArray[np.int32]]) -> Datastore:
    """Return a datastore without files, for tests."""
    chunk = sorted_chunk(_concatenate(documents))
    tokens = sum(map(len, documents))
    return Datastore((chunk,), {"hash": hash_tokens((chunk,)), "tokens": tokens, "made_of": "documents in memory"})


Rows = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Continuations of the longest suffix that occurs, of `matched` tokens: rows [m, length] in lexicographic order.

    Short continuations are padded with SEPARATOR.
    """

    rows: Rows
    matched: int


def retrieve(
    store: Datastore, ids: Sequence[int], span: int, shortest: int, most: int, length: int
) -> Retrieved | None:
    """Return up to `most` continuations per chunk of the longest suffix of ids that occurs; None if there is none.

    The suffix has `shortest` to `span` tokens. Of more occurrences, evenly spaced ones of the suffix array are taken:
    the first ones would all begin alike.
    """
    matched, hits = 0, list[Chunk]()
    for chunk in store.chunks:
        n = longest_match(chunk, ids, min(span, len(ids)), max(shortest, matched))
        if n > matched:
            matched, hits = n, []
        if n:
            hits.append(chunk)
    if not matched:
        return None
    rows = np.concatenate([_continuations(chunk, list(ids[-matched:]), most, length) for chunk in hits])
    if len(hits) > 1:
        rows = rows[np.lexsort(rows.T[::-1])]
    return Retrieved(rows, matched)


def longest_match(chunk: Chunk, ids: Sequence[int], longest: int, shortest: int) -> int:
    """Return the length of the longest suffix of ids that occurs in the chunk, within these bounds; 0 for none.

    Suffixes of a match occur too, so the length is found by bisection.
    """
    lo, hi = shortest - 1, longest
    while lo < hi:
        n = shortest if lo < shortest else (lo + hi + 1) // 2
        if _occurs(chunk, list(ids[-n:])):
            lo = n
        else:
            hi = n - 1
    return lo if lo >= shortest else 0


def _key(chunk: Chunk, n: int) -> Callable[[int], list[int]]:
    """Return a function that gives the first n tokens of a suffix."""
    tokens = chunk.tokens

    def key(start: int) -> list[int]:
        prefix: list[int] = tokens[start : start + n].tolist()
        return prefix

    return key


def _occurs(chunk: Chunk, pattern: list[int]) -> bool:
    key = _key(chunk, len(pattern))
    at = bisect_left(chunk.suffixes, pattern, key=key)
    return at < len(chunk.suffixes) and key(chunk.suffixes[at]) == pattern


def _continuations(chunk: Chunk, pattern: list[int], most: int, length: int) -> Rows:
    """Return continuations of the pattern's occurrences, int32 [m, length]."""
    key = _key(chunk, len(pattern))
    lo = bisect_left(chunk.suffixes, pattern, key=key)
    hi = bisect_right(chunk.suffixes, pattern, lo=lo, key=key)
    m = min(most, hi - lo)
    starts = chunk.suffixes[lo + np.arange(m) * (hi - lo) // m].astype(np.int64) + len(pattern)
    at = starts[:, None] + np.arange(length)  # [m, length]
    rows: Rows = chunk.tokens[np.minimum(at, len(chunk.tokens) - 1)].astype(np.int32)
    rows[at >= len(chunk.tokens)] = SEPARATOR
    rows[np.logical_or.accumulate(rows == SEPARATOR, axis=1)] = SEPARATOR
    return rows


@dataclass(frozen=True, slots=True)
class Prefixes:
    """A tree of k prefixes under a root: tokens [k], parents [k] (0 = the root, i + 1 = prefix i), depths [k] from 1.

    visible bool [k, k]: prefix j is prefix i or a prefix of it. Shallow ones come first, then the order of tokens.
    """

    tokens: Rows
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    visible: NDArray[np.bool_]


def best_prefixes(rows: Rows, most: int) -> Prefixes:
    """Return the `most` most frequent prefixes of the rows [m, length]; ties: the shorter, then the smaller.

    A prefix is at least as frequent as its extensions and comes first, so the result is a tree. Rows are in
    lexicographic order, so the rows of a prefix are adjacent; its length and first row identify it.
    """
    m, length = rows.shape
    new = np.ones((m, length), bool)  # row r is the first with its prefix of d + 1 tokens
    np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1, out=new[1:])
    first = np.maximum.accumulate(np.where(new, np.arange(m)[:, None], 0), axis=0)  # [m, length]
    index = np.flatnonzero(new.T)  # d * m + r of every prefix
    counts = np.diff(index, append=m * length)
    real = rows.T.reshape(-1)[index] != SEPARATOR
    index, counts = index[real], counts[real]
    chosen = np.sort(index[np.argsort(-counts, kind="stable")[:most]])
    d, r = np.divmod(chosen, m)
    parent = (d - 1) * m + first[r, d - 1]  # meaningless at depth 0
    parents = np.where(d > 0, np.searchsorted(chosen, parent) + 1, 0)
    visible = (first[r[:, None], d] == r) & (d <= d[:, None])
    return Prefixes(rows[r, d], parents, d + 1, visible)

"""Datastores of REST: token ids of many documents with their suffix array; building, search, the published form.

A folder: `datastore.json` and, for every chunk, `tokens-N.npy` (int32 [n], -1 behind every document) and
`suffixes-N.npy` (int32 [n], the places of all suffixes in lexicographic order). A small one has tokens alone, in uint16
with 65535 behind a document where the vocabulary has no such id; its suffixes are sorted when it is opened.

A file `*.idx` is REST's own, little endian, chunk after chunk: u32 number of bytes, the ids; u32 number of bytes, the
suffix array. An entry of the suffix array is an int32 and counts tokens, not bytes. Ids are u16, or int32 in files of
later versions: an entry for every token tells which.
"""

from __future__ import annotations

import hashlib
import json
import shutil
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
from specbench_ss.errors import UserError, first_line, os_reason
from specbench_ss.user_files import read_json

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
    """A short sha256."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.hexdigest()[:16]


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
    advice: of its header, as `models.checkpoint.read_advice` reads it. place: the header's file.
    """

    chunks: tuple[Chunk, ...]
    about: dict[str, Any]
    vocabulary: str = ""
    advice: Mapping[str, Any] | None = None
    place: str = HEADER

    def check_fits(self, base: ModelInfo, place: Path | str) -> None:
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
    chunks = tuple(_read_chunk(folder, i, n, header.stored_suffixes) for i, n in enumerate(header.chunks))
    if not header.stored_suffixes and hash_tokens(chunks) != header.hash:
        raise _damaged(folder, f"is damaged: its tokens are not those that {HEADER} tells of")
    about = {name: getattr(header, name) for name in ("hash", "tokens", "documents", "made_of")}
    return Datastore(chunks, about, header.vocabulary, header.advice, str(folder / HEADER))


def _damaged(file: Path, how: str) -> UserError:
    """A UserError that says how a datastore can be had again."""
    return UserError(f"rest: {file} {how}; make the datastore again: `ssbench datastore build`")


def _read_chunk(folder: Path, number: int, count: int, stored_suffixes: bool) -> Chunk:
    """A chunk as it is mapped, or with suffixes that are sorted now."""
    kinds = (np.int32,) if stored_suffixes else (np.int32, np.uint16)
    stored = _read(folder / f"tokens-{number}.npy", count, kinds)
    if stored_suffixes:
        return Chunk(stored, _read(folder / f"suffixes-{number}.npy", count, (np.int32,)))
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
    return _digest(chunk.tokens.tobytes() for chunk in chunks)


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
    return _digest([json.dumps(sorted(tokenizer.get_vocab().items())).encode()])


CHUNK = 1 << 26  # tokens of a chunk: sorting takes some twenty bytes of memory for each
SMALL = 1 << 20  # tokens of a datastore whose suffixes are sorted again whenever it is opened: a sixth of a second

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


def _write(documents: Documents, base: ModelInfo, made_of: str, folder: Path, chunk: int) -> dict[str, Any]:
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


Rows = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Found:
    """Continuations of the longest suffix that occurs: rows [m, length] in lexicographic order; matched: its tokens.

    A continuation that ends early goes on with SEPARATOR.
    """

    rows: Rows
    matched: int


def retrieve(store: Datastore, ids: Sequence[int], span: int, shortest: int, most: int, length: int) -> Found | None:
    """At most `most` continuations a chunk of the longest suffix of ids, `span` to `shortest` tokens; None: no hit.

    Of more occurrences, evenly spaced ones of the suffix array: the first ones would all begin alike.
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
    return Found(rows, matched)


def longest_match(chunk: Chunk, ids: Sequence[int], longest: int, shortest: int) -> int:
    """How many of the last ids occur in the chunk, between these bounds; 0 where not even the shortest does.

    What occurs, its endings occur too: so the length is found by bisection.
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
    """The first n tokens of a suffix."""
    tokens = chunk.tokens

    def key(start: int) -> list[int]:
        found: list[int] = tokens[start : start + n].tolist()
        return found

    return key


def _occurs(chunk: Chunk, pattern: list[int]) -> bool:
    key = _key(chunk, len(pattern))
    at = bisect_left(chunk.suffixes, pattern, key=key)
    return at < len(chunk.suffixes) and key(chunk.suffixes[at]) == pattern


def _continuations(chunk: Chunk, pattern: list[int], most: int, length: int) -> Rows:
    """int32 [m, length], what follows the pattern where it occurs."""
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

    visible bool [k, k]: prefix j is prefix i or a beginning of it. Shallow ones first, then in order of their tokens.
    """

    tokens: Rows
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    visible: NDArray[np.bool_]


def best_prefixes(rows: Rows, most: int) -> Prefixes:
    """The `most` prefixes that begin most of the rows [m, length]; of equally frequent ones the shorter, then smaller.

    A prefix begins at least as many rows as any that goes on from it, and comes first: the choice is a tree. Rows are
    in lexicographic order, so the rows of a prefix are neighbours: it is known by its length and the first of them.
    """
    m, length = rows.shape
    new = np.ones((m, length), bool)  # row r is the first with its prefix of d + 1 tokens
    np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1, out=new[1:])
    first = np.maximum.accumulate(np.where(new, np.arange(m)[:, None], 0), axis=0)  # [m, length]
    places = np.flatnonzero(new.T)  # d * m + r of every prefix
    counts = np.diff(places, append=m * length)
    real = rows.T.reshape(-1)[places] != SEPARATOR
    places, counts = places[real], counts[real]
    chosen = np.sort(places[np.argsort(-counts, kind="stable")[:most]])
    d, r = np.divmod(chosen, m)
    before = (d - 1) * m + first[r, d - 1]  # of depth 0: nothing
    parents = np.where(d > 0, np.searchsorted(chosen, before) + 1, 0)
    visible = (first[r[:, None], d] == r) & (d <= d[:, None])
    return Prefixes(rows[r, d], parents, d + 1, visible)

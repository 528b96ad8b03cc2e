"""Rows of prompt and training files: JSON lines, JSON documents, Parquet, CSV, and data sets of the hub.

`hub:OWNER/NAME[:CONFIG[:SPLIT]][@REVISION]` names a data set of the hub. Only such names and, in training, bare ids
cause requests to the hub.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO, TypeVar

from specbench_ss.conversations import FORMS
from specbench_ss.errors import UserError, first_line, printable
from specbench_ss.user_files import open_text, read_bytes

Row = dict[str, Any]
T = TypeVar("T")
R = TypeVar("R")

MOST_LEFT_OUT = 0.1  # of the rows; one row is always allowed
MOST_NAMED = 3  # rows that a note names


def usable(
    rows: Iterable[tuple[str, T]], use: Callable[[str, T], R], note: Callable[[str], None], what: str = "rows"
) -> Iterator[R]:
    """Yield the result of `use` for each (place, row), without the rows for which it raises UserError.

    note: gets a line on these. Raise UserError at the end if they are all, or more than MOST_LEFT_OUT.
    """
    reasons, left_out, total = list[str](), 0, 0
    for place, row in rows:
        total += 1
        try:
            result = use(place, row)
        except UserError as error:
            left_out += 1
            reasons += [printable(str(error))] if left_out <= MOST_NAMED else []
        else:
            yield result
    if left_out and (left_out == total or left_out > max(1, MOST_LEFT_OUT * total)):
        most = f"; {left_out} of {total} {what} cannot be used, more than {MOST_LEFT_OUT:.0%}: use other data"
        raise UserError(f"{reasons[0]}{most if total > 1 else ''}")
    if left_out:
        more = f"; and {left_out - MOST_NAMED} more" if left_out > MOST_NAMED else ""
        note(f"{left_out} of {total} {what} left out: {'; '.join(reasons)}{more}")


MOST_CHARS = 1 << 26  # of one JSON value or cell
CHUNK = 1 << 20  # characters
GAP = {False: re.compile(r"\s*"), True: re.compile(r"[\s,]*")}  # between values; in a list: True
DECODE = json.JSONDecoder().raw_decode
ADVICE = "give JSON lines, a JSON list, Parquet or CSV (docs/suites.md)"
REASONS = {RecursionError: "nested too deeply", ValueError: "a number has too many digits"}
NO_ROWS = {"choices", "tools", "functions"}  # lists of objects that belong to a row


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield every row of a file with its place; one JSON value in memory at a time. Raise UserError.

    The place is FILE:LINE, with the number of the entry in a JSON list, and 'FILE, row N' in Parquet.
    """
    with open_text(path) as file:
        buffer: Any = file.buffer
        if path.suffix == ".parquet" or buffer.peek(4)[:4] == b"PAR1":
            rows = _parquet_rows(path)
        else:
            rows = _csv_rows(path, file) if {".csv", ".tsv"} & set(path.suffixes[-2:]) else _json_rows(path, file)
        first = list(islice(rows, 2))
        entries = _only_list(first[0][1]) if len(first) == 1 else []
        if entries:
            first = [(f"{path}, entry {number}", entry) for number, entry in enumerate(entries, start=1)]
        for place, row in chain(first, rows):
            if not isinstance(row, dict):
                raise UserError(f"{place}: expected a JSON object; {ADVICE}")
            body = row.get("body")  # of a line in OpenAI's batch format
            yield place, {**row, **body} if isinstance(body, dict) else row


def _json_rows(path: Path, file: TextIO) -> Iterator[tuple[str, Any]]:
    """Yield the values of JSON lines, or the entries of one list."""
    text, at, line, number, in_list = "", 0, 1, 0, False
    while True:
        begin = at
        at = GAP[in_list].match(text, at).end()  # type: ignore[union-attr]  # also matches nothing
        line += text.count("\n", begin, at)
        if at == len(text):
            text, at = file.read(CHUNK), 0
            if not text and in_list:
                raise UserError(f"{path}:{line}: not valid JSON: the list does not end; {ADVICE}")
            if not text:
                return
        elif text[at] == "[" and not number and not in_list:
            in_list, at = True, at + 1
        elif text[at] == "]" and in_list:
            if (text[at + 1 :] + file.read(CHUNK)).strip():
                raise UserError(f"{path}:{line}: not valid JSON: text after the list; {ADVICE}")
            return
        else:
            try:
                value, end = DECODE(text, at)
            except (ValueError, RecursionError) as error:
                incomplete, size = isinstance(error, json.JSONDecodeError), len(text) - at
                more = file.read(max(CHUNK, size)) if incomplete and size <= MOST_CHARS else ""
                if not more:
                    reason = REASONS.get(type(error)) or getattr(error, "msg", "")
                    reason = f"a row of over {MOST_CHARS:,} characters" if size > MOST_CHARS else reason
                    raise UserError(f"{path}:{line}: not valid JSON: {reason}; {ADVICE}") from None
                text, at = text[at:] + more, 0
                continue
            number += 1
            yield f"{path}:{line}" + (f", entry {number}" if in_list else ""), value
            line, at = line + text.count("\n", at, end), end


def _only_list(row: Any) -> list[Any]:
    """Return the rows in {"data": [...]}: the only list in an object, of objects that are not messages."""
    lists = [key for key in row if isinstance(row[key], list)] if isinstance(row, dict) else []
    is_row = NO_ROWS.intersection(lists) or (lists and FORMS.keys() & row.keys() - set(lists))
    entries = row[lists[0]] if len(lists) == 1 and not is_row else []
    rows = all(isinstance(entry, dict) and not {"role", "from", "content"} & set(entry) for entry in entries)
    return entries if rows else []


def _csv_rows(path: Path, file: TextIO) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(MOST_CHARS)
    reader = csv.reader(file, delimiter="\t" if ".tsv" in path.suffixes else ",")
    names, line = list[str](), 1
    try:
        for cells in reader:
            place, line = f"{path}:{line}", reader.line_num + 1
            if names and cells and len(cells) != len(names):
                raise UserError(f"{place}: {len(cells)} cells, but the header has {len(names)} columns")
            if names and cells:
                yield place, dict(zip(names, cells, strict=True))
            names = names or [name.strip() for name in cells]
    except csv.Error as error:
        raise UserError(f"{path}:{line}: not valid CSV: {error}") from None


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(256) for row in batch.to_pylist())
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))
    except (ArrowException, OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from None


HUB = "hub:"
HUB_FORM = re.compile(r"hub:(?P<name>[^:@]+)(:(?P<config>[^:@]*))?(:(?P<split>[^:@]+))?(@(?P<revision>.+))?")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".csv", ".tsv")


def open_source(given: str | Path | Sequence[str | Path], split: str = "train") -> FileSource | HubSource:
    """Open files, folders (files with SUFFIXES, recursively), or one data set of the hub. Raise UserError.

    A bare id is one text (no Path) that names no file. split: of a data set that does not name one.
    """
    names = [given] if isinstance(given, str | Path) else list(given)
    if not names:
        raise UserError("no training data given")
    first, single = str(names[0]), len(names) == 1
    if first.startswith(HUB) and single:
        form = HUB_FORM.fullmatch(first)
        if form is None:
            raise UserError(f"cannot read {first!r}: expected hub:OWNER/NAME[:CONFIG[:SPLIT]] or ...@REVISION")
        return HubSource(form["name"], form["config"] or None, form["split"] or split, form["revision"])
    may_be_hub = single and isinstance(names[0], str) and HUB_ID.fullmatch(first) and not first.endswith(SUFFIXES)
    if may_be_hub and not Path(first).exists():
        return HubSource(first, split=split)
    return FileSource(tuple(file for name in names for file in _files(Path(name))))


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise UserError(f"cannot read {str(path)!r}: neither a file, a folder nor a hub id (owner/name)")
    if not path.is_dir():
        return [path]
    found = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    if not found:
        raise UserError(f"{path} has no file that ends in {', '.join(SUFFIXES)}")
    return found


@dataclass(frozen=True, slots=True)
class FileSource:
    """Files that `read_rows` reads."""

    paths: tuple[Path, ...]

    @property
    def name(self) -> str:
        """Return the first file, and the number of others."""
        others = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"{self.paths[0]}{others}"

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield rows with their places, in the order of the files, whose names are the categories of several files."""
        for path in self.paths:
            for place, row in read_rows(path):
                yield place, row if len(self.paths) == 1 or row.get("category") else {**row, "category": path.stem}

    def digest(self) -> str:
        """Return a sha256 of the files' bytes in order, without their names."""
        sha256 = hashlib.sha256()
        for path in self.paths:
            sha256.update(hashlib.sha256(read_bytes(path)).digest())
        return sha256.hexdigest()


@dataclass(frozen=True, slots=True)
class HubSource:
    """One split of a data set of the Hugging Face hub, read through the package `datasets`.

    config, revision: its configuration and commit; None = the data set's default.
    """

    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None

    def _load(self) -> Any:
        try:
            datasets: Any = import_module("datasets")  # optional dependency
        except ImportError:
            raise UserError(
                f"no file or folder {self.name!r}; to read a data set of the Hugging Face hub: pip install datasets"
            ) from None
        try:
            options = {"name": self.config, "revision": self.revision}
            set_options = {key: value for key, value in options.items() if value is not None}
            return datasets.load_dataset(self.name, split=self.split, **set_options)
        except Exception as error:  # many classes, about the name or the network
            raise UserError(f"cannot load data set {self.name!r}: {first_line(error)}") from error

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield rows in the data set's order. The place is 'NAME, row N'."""
        for number, row in enumerate(self._load(), start=1):
            yield f"{self.name}, row {number}", row

    def digest(self) -> str:
        """Return a sha256 of all rows as JSON."""
        sha256 = hashlib.sha256()
        for _, row in self.rows():
            sha256.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        return sha256.hexdigest()

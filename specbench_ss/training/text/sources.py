"""Where conversation data is: in files, folders, or a data set of the Hugging Face hub.

This module knows rows, but not their forms.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from specbench_ss.errors import UserError, os_reason
from specbench_ss.models.checkpoint import HUB_ID
from specbench_ss.user_files import Row, read_rows, read_text

SUFFIXES = (".jsonl", ".json")


class Source(Protocol):
    """Rows with their places, and a digest that changes when any of them does."""

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield every row with its place. Raises UserError for what cannot be read."""

    def digest(self) -> str:
        """Return a sha256 of the content, as hex digits."""


def open_source(given: str | Path | Sequence[str | Path]) -> Source:
    """Open files, folders (their .jsonl and .json files, sub-folders too), or the id of one hub data set.

    The hub is asked for an id only where no file or folder has that name. Raises UserError for what is neither.
    """
    names = [given] if isinstance(given, str | Path) else list(given)
    if not names:
        raise UserError("no training data given")
    if len(names) == 1 and isinstance(names[0], str) and _is_hub_id(names[0]):
        return HubSource(names[0])
    return FileSource(tuple(file for name in names for file in _files(Path(name))))


def _is_hub_id(name: str) -> bool:
    return not Path(name).exists() and HUB_ID.fullmatch(name) is not None and not name.endswith((*SUFFIXES, ".csv"))


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise UserError(f"no training data {str(path)!r}: neither a file, a folder nor a hub id (owner/name)")
    if path.is_file():
        return [path]
    found = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    if not found:
        raise UserError(f"{path} holds no {' or '.join(SUFFIXES)} file")
    return found


@dataclass(frozen=True, slots=True)
class FileSource:
    """JSONL files, and .json files that hold a list of objects (or lines of them)."""

    paths: tuple[Path, ...]

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield rows in the order of the files. The place is FILE:LINE, or in a list 'FILE, entry N'."""
        for path in self.paths:
            yield from _entries(path) if _is_list(path) else read_rows(path)

    def digest(self) -> str:
        """Return a sha256 of the files' bytes, in their order; their names do not matter."""
        whole = hashlib.sha256()
        for path in self.paths:
            try:
                with path.open("rb") as file:
                    whole.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise UserError(f"cannot read {path}: {os_reason(error)}") from None
        return whole.hexdigest()


def _is_list(path: Path) -> bool:
    if path.suffix != ".json":
        return False
    try:
        with path.open("rb") as file:
            return file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    except OSError as error:
        raise UserError(f"cannot read {path}: {os_reason(error)}") from None


def _entries(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        entries = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        where = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(f"{path}{where}: not valid JSON") from None
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict):
            raise UserError(f"{path}, entry {number}: expected a JSON object")
        yield f"{path}, entry {number}", entry


@dataclass(frozen=True, slots=True)
class HubSource:
    """One split of a data set of the Hugging Face hub, read through the package `datasets`.

    config, revision: which of its configurations and which commit; None takes the data set's own default.
    """

    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None

    def _load(self) -> Any:
        try:
            datasets: Any = import_module("datasets")  # needed by those alone who name a data set of the hub
        except ImportError:
            raise UserError(
                f"no file or folder {self.name!r}; to read a data set of the Hugging Face hub: pip install datasets"
            ) from None
        try:
            chosen = {"name": self.config, "revision": self.revision}
            given = {key: value for key, value in chosen.items() if value is not None}
            return datasets.load_dataset(self.name, split=self.split, **given)
        except Exception as error:  # a dozen kinds, all of them about what the user named or about the network
            first = next(iter(str(error).strip().splitlines()), "")
            raise UserError(f"cannot load data set {self.name!r}: {type(error).__name__}: {first}") from error

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield rows in the data set's order. The place is 'NAME, row N'."""
        for number, row in enumerate(self._load(), start=1):
            yield f"{self.name}, row {number}", row

    def digest(self) -> str:
        """Return a sha256 of all rows as JSON."""
        whole = hashlib.sha256()
        for _, row in self.rows():
            whole.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        return whole.hexdigest()

